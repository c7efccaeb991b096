"""The commands `headrace services up|down|status` against a real Redis."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from jobs.services import app
from schemas.errors import ConfigError, ServiceError

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run `headrace services …` with its home in ``tmp_path/home`` and no other settings than those given."""
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)

    def call(*arguments: str, **variables: str) -> Result:
        return CliRunner().invoke(app, arguments, env={"HEADRACE_HOME": str(tmp_path / "home"), **variables})

    yield call
    assert call("down").exit_code == 0


def test_a_service_lives_from_up_to_down_across_commands(run: Run, tmp_path: Path) -> None:
    up = run("up", "redis")
    assert (up.exit_code, up.stderr) == (0, "")
    name, address, *rest = up.stdout.split()
    assert name == "redis"
    assert redis.Redis.from_url(address).ping()
    assert "Valkey" in rest
    assert "up in" in up.stdout
    assert up.stdout.splitlines()[1] == f"Logs are in {tmp_path}/home/logs"

    again = run("up", "redis")
    assert "already up" in again.stdout
    assert address in again.stdout

    status = run("status", "redis")
    assert status.exit_code == 0
    assert status.stdout.splitlines()[0].split() == ["SERVICE", "STATE", "ADDRESS", "PID", "VERSION"]
    assert status.stdout.splitlines()[1].split()[:3] == ["redis", "running", address]

    down = run("down")
    assert (down.exit_code, down.stdout) == (0, "Ended redis.\n")
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(address).ping()
    assert run("down").stdout == f"Nothing of {tmp_path}/home was running.\n"


def test_status_fails_when_one_service_is_not_healthy(run: Run) -> None:
    run("up", "redis")

    status = run("status", "--json")

    states = {entry["name"]: entry["state"] for entry in json.loads(status.stdout)}
    assert states == {"kafka": "stopped", "redis": "running", "triton": "stopped"}
    assert status.exit_code == 1


def test_a_given_service_is_shown_as_given(run: Run) -> None:
    address = json.loads(run("up", "--json", "redis").stdout)[0]["address"]

    up = run("up", "redis", HEADRACE_REDIS=address)
    status = run("status", "redis", "--json", HEADRACE_REDIS=address)

    assert "given, healthy" in up.stdout
    (entry,) = json.loads(status.stdout)
    assert (entry["state"], entry["pid"], entry["log"]) == ("given", None, None)


def test_what_is_wrong_with_a_service_is_told(run: Run) -> None:
    status = run("status", "kafka", HEADRACE_KAFKA="127.0.0.1:1")

    assert status.exit_code == 1
    assert "unhealthy" in status.stdout
    assert "kafka: Kafka is given as 127.0.0.1:1 (HEADRACE_KAFKA), but is not healthy" in status.stderr


def test_a_wrong_setting_and_a_failure_are_raised_for_the_command_line_to_tell(run: Run) -> None:
    assert isinstance(run("up", HEADRACE_KAFKA="nonsense").exception, ConfigError)
    assert isinstance(run("up", "kafak").exception, ConfigError)
    assert isinstance(run("up", "redis", HEADRACE_REDIS="redis://127.0.0.1:1/0").exception, ServiceError)


def test_the_headrace_command_has_the_services(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.cli", "services", "up"]
    environment = {**os.environ, "HEADRACE_HOME": str(tmp_path), "HEADRACE_KAFKA": "nonsense"}

    wrong = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("headrace: HEADRACE_KAFKA is 'nonsense', expected host:port")


def test_a_running_service_that_ended_by_itself_is_told(run: Run) -> None:
    (entry,) = json.loads(run("up", "--json", "redis").stdout)
    redis.Redis.from_url(entry["address"]).shutdown(nosave=True)

    status = run("status", "redis")

    assert status.exit_code == 1
    assert f"redis: process {entry['pid']} has ended by itself; `headrace services up` starts it again" in status.stderr


def test_help_tells_what_each_command_does(run: Run) -> None:
    text = run("--help").stdout

    assert all(word in text for word in ("up", "down", "status", "without Docker"))
    assert "HEADRACE_KAFKA" in run("up", "--help").stdout
