from collections.abc import Callable
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jobs import cli
from jobs import worker as worker_module
from jobs.role import Role
from schemas.errors import ConfigError, HeadraceError, ServiceError, SinkUnavailableError

COMMANDS = ["audit", "consume", "demo", "get", "produce", "services", "topics", "train", "up", "views", "worker"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the ``headrace`` command as the process would, and tell its exit code."""

    def run_command(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0

    return run_command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("`slide` is 0s, expected more"), 2),
        (ServiceError("no Kafka answers"), 1),
        (SinkUnavailableError("no Redis answers"), 1),
        (HeadraceError("something else"), 1),
    ],
)
def test_an_error_of_ours_is_one_line_and_an_exit_code(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: HeadraceError,
    code: int,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(worker_module, "load_recorded_application", fail)
    assert run("worker", "--role", "features") == code
    captured = capsys.readouterr()
    assert captured.err == f"headrace: {error}\n"
    assert captured.out == ""


def test_an_error_that_is_none_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        msg = "a bug"
        raise RuntimeError(msg)

    monkeypatch.setattr(worker_module, "load_recorded_application", fail)
    monkeypatch.setattr("sys.argv", ["headrace", "worker", "--role", "features"])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


@pytest.mark.parametrize("arguments", [["worker"], ["worker", "--role", "cook"], ["nonsense"]])
def test_a_wrong_command_line_is_exit_code_2(run: Callable[..., int], arguments: list[str]) -> None:
    assert run(*arguments) == 2


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_APP", "no.such.module", "cannot be imported"),
        ("HEADRACE_KAFKA", "nonsense", "HEADRACE_KAFKA is 'nonsense', expected host:port"),
        ("HEADRACE_METRICS_PORT", "high", "HEADRACE_METRICS_PORT is 'high', expected port"),
        ("HEADRACE_KAFAK", "a:1", "there is no such setting"),
    ],
)
def test_a_worker_with_wrong_settings_ends_before_it_touches_anything(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert run("worker", "--role", "features") == 2
    assert message in capsys.readouterr().err


def test_a_worker_without_kafka_says_how_to_get_it(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.delenv("HEADRACE_KAFKA", raising=False)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert run("worker", "--role", "features") == 2
    assert "Run `headrace services up`, or set HEADRACE_KAFKA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "port"), [([], 9_500 + list(Role).index(Role.ONLINE)), (["--metrics-port", "0"], 0)]
)
def test_a_workers_metrics_port_is_that_of_its_role_unless_given(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, arguments: list[str], port: int
) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "9500")
    monkeypatch.setattr("jobs.composition.run_worker", lambda role, *_, **options: called.update(options, role=role))
    assert run("worker", "--role", "online", "--worker-id", "7", *arguments) == 0
    assert called["role"] is Role.ONLINE
    assert called["worker_id"] == "7"
    assert called["metrics_port"] == port


def test_a_workers_name_is_that_of_its_host_unless_given(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setattr("socket.gethostname", lambda: "box-3")
    monkeypatch.setattr("jobs.composition.run_worker", lambda *_, **options: called.update(options))
    assert run("worker", "--role", "online") == 0
    assert called["worker_id"] == "box-3"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_does(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 4


def test_the_help_names_every_command() -> None:
    output = CliRunner().invoke(cli.app, ["--help"]).output
    for command in get_command(cli.app).commands:  # type: ignore[attr-defined]  # it is a group
        assert command in output
