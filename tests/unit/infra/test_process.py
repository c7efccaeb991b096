import os
import sys
from pathlib import Path

import pytest

from infra.local.process import (
    ProcessIdentity,
    project_path,
    read_lines,
    spawn,
    start_time_s,
    telling_line,
    telling_lines,
)
from schemas.errors import ServiceError


def test_this_process_is_known_by_id_and_start_time() -> None:
    assert ProcessIdentity(os.getpid(), start_time_s(os.getpid())).is_alive()


def test_a_process_that_was_given_a_stale_id_is_another_one() -> None:
    stale = ProcessIdentity(os.getpid(), start_time_s(os.getpid()) - 60)

    assert not stale.is_alive()
    assert stale.members() == []


def test_ending_a_stale_id_ends_nothing() -> None:
    assert not ProcessIdentity(os.getpid(), start_time_s(os.getpid()) - 60).end(grace_s=0)


def test_a_program_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"/nowhere/server could not be run .*, expected a program"):
        spawn(["/nowhere/server"], environment={}, cwd=tmp_path, log=tmp_path / "server.log")


def test_only_the_lines_since_the_start_are_read(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("of an earlier run\n", encoding="utf-8")
    start = log.stat().st_size
    with log.open("a", encoding="utf-8") as lines:
        lines.write("of this one\n\n")

    assert read_lines(log, since_bytes=start) == ["of this one"]


def test_a_log_that_was_rotated_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("of this run\n", encoding="utf-8")

    assert read_lines(log, since_bytes=1_000_000) == ["of this run"]


def test_a_missing_log_is_said_to_be_unreadable(tmp_path: Path) -> None:
    (line,) = read_lines(tmp_path / "no.log", since_bytes=0)

    assert line.startswith("(the log cannot be read: ")


def test_errors_are_quoted_before_a_chatty_shutdown() -> None:
    lines = ["INFO starting", "ERROR the disk is full", *(f"INFO closing {number}" for number in range(50))]

    quoted = telling_lines(lines, count=3).splitlines()

    assert [line.strip() for line in quoted] == [
        "ERROR the disk is full",
        "...",
        "INFO closing 47",
        "INFO closing 48",
        "INFO closing 49",
    ]


def test_what_was_raised_is_quoted_and_not_what_mentions_an_exception_in_passing() -> None:
    raised = "org.apache.kafka.common.KafkaException: Failed to acquire lock on file .lock in /data"
    passing = "INFO writeNoOpRecord: unable to start because of RejectedExecutionException. Exception message: closed"
    lines = ["FATAL Exiting", raised, "\tat kafka.log.LogManager", *[passing] * 20]

    quoted = [line.strip() for line in telling_lines(lines, count=2).splitlines()]

    assert quoted == ["FATAL Exiting", raised, "...", passing, passing]
    assert telling_line(lines) == raised


def test_an_empty_log_is_said_to_be_empty() -> None:
    assert telling_lines([]).strip() == "(the log is empty)"


def test_children_find_this_project_and_its_packages() -> None:
    path = project_path({"PYTHONPATH": "/mine"}).split(os.pathsep)

    assert (Path(path[0]) / "infra" / "local").is_dir()
    assert any(Path(entry) in Path(pytest.__file__).parents for entry in path[1:-1])
    assert path[-1] == "/mine"


def test_a_long_log_is_moved_aside_before_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.local.process._LOG_ROTATE_BYTES", 10)
    log = tmp_path / "server.log"
    log.write_text("long enough to be moved\n", encoding="utf-8")

    identity = spawn([sys.executable, "-c", "print('new')"], environment={}, cwd=tmp_path, log=log)
    identity.end(grace_s=10)

    assert (tmp_path / "server.log.1").read_text(encoding="utf-8") == "long enough to be moved\n"
