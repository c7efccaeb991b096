import builtins
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs import cli, commands
from jobs import worker as worker_module
from jobs.role import Role
from schemas.errors import ConfigError, HeadraceError, ServiceError, SinkUnavailableError

HEAVY = {"aiokafka", "confluent_kafka", "deltalake", "faust", "grpc", "pandas", "polars", "redis", "tritonclient"}


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker"],
        ["worker", "--role", "cook"],
        ["worker", "--role", "online", "--metrics-port", "99999"],
        ["worker", "--role", "online", "--log-level", "nope"],
        ["up", "--log-level", "nope"],
        ["demo", "--log-level", "nope"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(run: Callable[..., int], arguments: list[str]) -> None:
    assert run(*arguments) == 2


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_APP", "no.such.module", "cannot be imported"),
        ("HEADRACE_KAFKA", "nonsense", "HEADRACE_KAFKA is 'nonsense', expected host:port"),
        ("HEADRACE_METRICS_PORT", "high", "HEADRACE_METRICS_PORT is 'high', expected port"),
        ("HEADRACE_KAFAK", "a:1", "there is no such setting"),
        ("HEADRACE_DELTA", __file__, "which cannot be written to"),
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
    assert run("worker", "--role", "offline") == 2
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


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_says_what_it_does_and_is_listed_by_its_first_sentence(name: str) -> None:
    result = CliRunner().invoke(commands.app, [name, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 4
    assert commands.load_command(name).help.split("\n\n")[0] == commands.COMMANDS[name].summary


def test_the_help_names_every_command() -> None:
    output = CliRunner().invoke(commands.app, ["--help"]).output
    for name in commands.COMMANDS:
        assert f" {name} " in output


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_is_wrapped_to_the_width_of_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = commands.load_command(name)
    for each in (command, *getattr(command, "commands", {}).values()):
        for line in each.help.splitlines():
            # A paragraph is one line, which the terminal's width then breaks; examples keep their own.
            assert line == "" or line.startswith(" ") or line.rstrip().endswith((".", ":", "."))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["views"], ["views", "--help"]])
def test_looking_loads_none_of_the_heavy_libraries(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['headrace', *{arguments!r}]\n"
        "from jobs.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        f"print('loaded:', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.endswith("loaded: []\n")


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(commands.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"headrace {metadata.version('headrace')}\n")


def test_a_misspelt_command_is_told_what_it_may_have_been(run: Callable[..., int], capsys: Any) -> None:
    assert run("topcis") == 2
    assert "topics" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130_while_the_commands_load(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = builtins.__import__

    def interrupted(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "jobs.commands":
            raise KeyboardInterrupt
        return load(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert run("views") == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_exit_code_130_while_a_command_loads(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load_command", interrupted)
    assert run("views") == 130
    assert capsys.readouterr().err == ""


def test_a_worker_ends_with_the_process_that_started_it_even_if_that_went_first(tmp_path: Any) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    environment = {**os.environ, "HEADRACE_HOME": str(tmp_path), "HEADRACE_KAFKA": "127.0.0.1:1"}
    arguments = ["worker", "--role", "features", "--parent", gone.stdout.strip()]
    ended = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments], env=environment, capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--late-share", "1.5"),
        ("--invalid-share", "-0.1"),
        ("--partitions", "0"),
        *(("--speed", value) for value in ("0", "-1", "inf", "nan", "fast")),
        ("--from", "yesterday"),
    ],
)
def test_options_of_produce_are_judged_before_kafka_is_looked_for(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", "/nothing/runs/here")
    monkeypatch.delenv("HEADRACE_KAFKA", raising=False)
    assert run("produce", "flights", option, value) == 2
    assert option in capsys.readouterr().err


def test_to_end_services_where_there_are_none_leaves_no_home(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    assert run("services", "down") == 0
    assert not (tmp_path / "home").exists()
