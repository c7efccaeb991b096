"""What each command says when a service that it needs does not answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import reach

NOBODY = {
    "HEADRACE_KAFKA": "127.0.0.1:1",
    "HEADRACE_REDIS": "redis://127.0.0.1:1/0",
    "HEADRACE_TRITON": "127.0.0.1:1",
}
NEEDS_KAFKA = [
    ["topics", "plan"],
    ["topics", "apply"],
    ["consume", "scores.late_arrival"],
    ["produce", "flights"],
    ["audit"],
    ["up"],
    ["demo"],
    ["worker", "--role", "features", "--metrics-port", "0"],
]


def run(arguments: list[str], home: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **NOBODY, "HEADRACE_HOME": str(home), **variables}
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", NEEDS_KAFKA, ids=" ".join)
def test_without_kafka_a_command_fails_with_one_error_and_nothing_of_a_client_library(
    arguments: list[str], tmp_path: Path
) -> None:
    done = run(arguments, tmp_path)

    assert done.returncode == 1
    assert done.stdout == ""
    first, *more = done.stderr.splitlines()
    assert first.startswith(("headrace: no Kafka answers at 127.0.0.1:1: Nothing accepts", "headrace: Kafka is given"))
    assert all("is given as" in line for line in more)  # up and demo ask all three services


def test_without_redis_a_command_fails_with_one_error(kafka: str, tmp_path: Path) -> None:
    for arguments in (["get", "airport_departures", "JFK"], ["audit"]):
        done = run(arguments, tmp_path, HEADRACE_KAFKA=kafka)

        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert "127.0.0.1:1" in done.stderr


def test_a_worker_waits_a_while_for_a_kafka_that_is_just_starting(monkeypatch: pytest.MonkeyPatch, kafka: str) -> None:
    tries = iter([False, False, True])
    monkeypatch.setattr(reach, "accepts_connections", lambda *_, **__: next(tries))
    reach.reach_kafka(kafka, patience_s=60.0)
    assert next(tries, None) is None
