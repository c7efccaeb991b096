"""A compacted topic on a real Kafka as a reference table."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from schemas.reference import Reference
from tests.support.kafka import TIMEOUT_S, make_topic

Run = Callable[..., "subprocess.CompletedProcess[str]"]
CONTRACT = {
    "type": "object",
    "properties": {
        "airport": {"type": "string"},
        "hour": {"type": "integer", "x-unit": "s"},
        "temp": {"type": ["number", "null"]},
    },
    "required": ["airport", "hour"],
}


@pytest.fixture
def run(kafka: str, tmp_path: Path) -> Run:
    """Run ``headrace snapshot`` in a directory with a contract of the weather."""
    contracts = tmp_path / "schemas" / "events"
    contracts.mkdir(parents=True)
    (contracts / "weather@1.json").write_text(json.dumps(CONTRACT))

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {"PYTHONPATH": str(Path.cwd()), "HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_KAFKA": kafka}
        return subprocess.run(
            [sys.executable, "-m", "jobs.cli", "snapshot", *arguments],
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def send(kafka: str, topic: str, *records: tuple[str, object]) -> None:
    producer = Producer({"bootstrap.servers": kafka})
    for key, content in records:
        value = None if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
        producer.produce(topic, value, key=key)
    assert producer.flush(TIMEOUT_S) == 0


def weather(airport: str, hour: int, temp: float) -> tuple[str, object]:
    return f"{airport}/{hour}", {"airport": airport, "hour": hour, "temp": temp}


def test_the_newest_record_of_each_key_is_a_row_and_a_tombstone_is_none(
    kafka: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(kafka, "weather", partitions=3, config={"cleanup.policy": "compact"})
    send(kafka, topic, weather("JFK", 3_600, 1.0), weather("JFK", 7_200, 2.0), weather("LGA", 3_600, 5.0))
    send(kafka, topic, weather("JFK", 3_600, 1.5), ("LGA/3600", None), weather("EWR", 0, -1.0))
    options = ("--topic", topic, "--contract", "weather@1", "--key", "airport", "--valid-from", "hour")
    made = run("weather@1", *options)
    assert made.returncode == 0, made.stderr
    assert "3 rows" in made.stdout

    monkeypatch.chdir(tmp_path)
    table = Reference("weather", version=1, key="airport", valid_from="hour").table
    rows = sorted((row["airport"], row["hour"], row["temp"]) for row in table.to_pylist())
    assert rows == [("EWR", 0, -1.0), ("JFK", 3_600_000_000, 1.5), ("JFK", 7_200_000_000, 2.0)]

    again = run("weather@1", *options)
    assert again.returncode == 2
    assert "a version never changes; take the next" in again.stderr


def test_a_record_that_does_not_pass_the_contract_is_named_and_nothing_is_written(
    kafka: str, run: Run, tmp_path: Path
) -> None:
    topic = make_topic(kafka, "weather")
    send(kafka, topic, weather("JFK", 0, 1.0), ("LGA/0", {"airport": "LGA"}))
    made = run("weather@1", "--topic", topic, "--contract", "weather@1", "--key", "airport", "--valid-from", "hour")

    assert made.returncode == 1
    assert f"record at {topic}-0@1" in made.stderr
    assert not (tmp_path / "schemas" / "references").exists()


def test_what_could_not_be_looked_up_is_not_written(kafka: str, run: Run, tmp_path: Path) -> None:
    topic = make_topic(kafka, "weather")
    send(kafka, topic, weather("JFK", 0, 1.0), weather("JFK", 3_600, 1.0))
    made = run("weather@1", "--topic", topic, "--contract", "weather@1", "--key", "airport")

    assert made.returncode == 2
    assert "two rows for" in made.stderr
    assert not list((tmp_path / "schemas" / "references").iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("weather", "--key", "airport"), "no name@version"),
        (("weather@1", "--key", "absent"), "columns ['absent'] are no fields of weather@1"),
    ],
)
def test_a_wrong_call_is_refused(run: Run, arguments: tuple[str, ...], says: str) -> None:
    made = run(*arguments, "--topic", "t", "--contract", "weather@1")

    assert made.returncode == 2
    assert says in made.stderr
