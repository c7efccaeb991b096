import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from infra.local.state import ServiceRecord, claimed, locked, read_state, state_path, write_state
from schemas.errors import ConfigError, ServiceError

REDIS = ServiceRecord(
    pid=42,
    started_at_s=1234.56,
    address="redis://127.0.0.1:6379/0",
    ports={"redis": 6379},
    version="Valkey 9.1.2",
    log="/logs/redis.log",
    is_ready=True,
)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_state(tmp_path / "home", {"redis": REDIS})

    assert read_state(tmp_path / "home") == {"redis": REDIS}
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["services.json"]


def test_without_records_there_is_no_file(tmp_path: Path) -> None:
    write_state(tmp_path, {"redis": REDIS})
    write_state(tmp_path, {})

    assert not state_path(tmp_path).exists()
    assert read_state(tmp_path) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": "42"},
        {"pid": 0},
        {"pid": None},
        {"started_at_s": "now"},
        {"address": 1},
        {"ports": [6379]},
        {"ports": {"redis": "6379"}},
        {"version": None},
        {"log": []},
        {"fingerprint": 1},
        {"is_ready": "yes"},
        {"started_by": None},
    ],
)
def test_a_record_with_a_wrong_value_is_an_error_that_says_what_to_do(tmp_path: Path, wrong: dict[str, object]) -> None:
    content = {"format": 1, "services": {"redis": {**asdict(REDIS), **wrong}}}
    state_path(tmp_path).write_text(json.dumps(content), encoding="utf-8")

    with pytest.raises(ServiceError, match=r"services.json cannot be read .* then delete it"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "services": {"redis": {"pid": 1}}}']
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path, content: str) -> None:
    state_path(tmp_path).write_text(content, encoding="utf-8")

    with pytest.raises(ServiceError, match=r"services.json cannot be read .* then delete it"):
        read_state(tmp_path)


@pytest.mark.parametrize("place", ["file", "file/below", "occupied"])
def test_a_home_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    state_path(tmp_path / "occupied").mkdir(parents=True)

    with pytest.raises(ServiceError, match=rf"{place} cannot be used as home .* set HEADRACE_HOME to one"):
        read_state(tmp_path / place)


def test_what_may_still_run_is_named_when_the_file_is_damaged(tmp_path: Path) -> None:
    state_path(tmp_path).write_text("{", encoding="utf-8")
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(
            ServiceError, match=rf"end what runs from {tmp_path}: process {child.pid} \(.*, then delete"
        ):
            read_state(tmp_path)
        child.communicate()

    with pytest.raises(ServiceError, match=r"no process of it was found running, then delete it"):
        read_state(tmp_path)


def test_a_home_is_claimed_by_one_run_at_a_time_and_the_claim_goes_with_it(tmp_path: Path) -> None:
    with claimed(tmp_path, by="up"):
        with pytest.raises(ConfigError) as refused, claimed(tmp_path, by="demo"):
            pytest.fail("the home was claimed twice")
        assert str(refused.value).startswith(f"`headrace up` already runs here (pid {os.getpid()}), expected no other")

    with claimed(tmp_path, by="demo"):
        pass


def test_a_file_of_another_version_is_left_to_that_version(tmp_path: Path) -> None:
    state_path(tmp_path).write_text(json.dumps({"format": 7, "services": {}}), encoding="utf-8")

    with pytest.raises(ServiceError, match="has format 7, expected 1; end its services with the version"):
        read_state(tmp_path)


def test_a_home_is_held_by_one_command_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ServiceError, match="held by another command"), locked(tmp_path, timeout_s=0):
        pytest.fail("the lock was given twice")

    with locked(tmp_path, timeout_s=0):
        pass
