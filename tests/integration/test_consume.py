"""``headrace consume`` on a real Kafka."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.support.kafka import TIMEOUT_S, make_topic, produce


def command(kafka: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "HEADRACE_KAFKA": kafka}
    return [sys.executable, "-m", "jobs.cli", "consume", *arguments], environment


def consume(kafka: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv, environment = command(kafka, *arguments)
    return subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=Path.cwd()
    )


@contextmanager
def consuming(kafka: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    argv, environment = command(kafka, *arguments)
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def topic(kafka: str) -> str:
    made = make_topic(kafka, partitions=2)
    produce(kafka, made, [b'{"n": %d}' % number for number in range(5)])
    return made


def test_each_record_is_a_line_and_the_end_is_the_end(kafka: str, topic: str) -> None:
    done = consume(kafka, topic, "--from-beginning", "--no-follow")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f'{{"n": {number}}}' for number in range(5)]


def test_a_limit_ends_it(kafka: str, topic: str) -> None:
    assert consume(kafka, topic, "--from-beginning", "--limit", "2").stdout.splitlines() == ['{"n": 0}', '{"n": 1}']


def test_headers_show_all_of_a_record_whatever_it_holds(kafka: str) -> None:
    topic = make_topic(kafka)
    producer = Producer({"bootstrap.servers": kafka})
    producer.produce(topic, key=b"k", value=b'{"n": 1}', headers=[("h", b"x"), ("none", None)], timestamp=1_000)
    producer.produce(topic, key=None, value=b"\xffno json", timestamp=2_000)
    producer.produce(topic, key=b"\xff", value=None, timestamp=3_000)
    producer.flush(TIMEOUT_S)
    done = consume(kafka, topic, "--from-beginning", "--no-follow", "--headers")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {
            "partition": 0,
            "offset": 0,
            "timestamp_ms": 1_000,
            "key": "k",
            "headers": {"h": "x", "none": ""},
            "value": {"n": 1},
        },
        {"partition": 0, "offset": 1, "timestamp_ms": 2_000, "key": None, "headers": {}, "value": "�no json"},
        {"partition": 0, "offset": 2, "timestamp_ms": 3_000, "key": "�", "headers": {}, "value": None},
    ]


def test_records_of_an_aborted_transaction_are_not_shown(kafka: str) -> None:
    topic = make_topic(kafka)
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": topic})
    producer.init_transactions(TIMEOUT_S)
    for value, finish in ((b"aborted", producer.abort_transaction), (b"kept", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(TIMEOUT_S)
        finish(TIMEOUT_S)
    assert consume(kafka, topic, "--from-beginning", "--limit", "1").stdout == "kept\n"


def test_it_ends_at_a_topic_whose_last_offsets_are_markers(kafka: str) -> None:
    topic = make_topic(kafka)
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": topic})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"row")
    producer.commit_transaction(TIMEOUT_S)
    assert consume(kafka, topic, "--from-beginning", "--no-follow").stdout == "row\n"


def test_it_follows_until_its_reader_has_enough(kafka: str, topic: str) -> None:
    with consuming(kafka, topic, "--from-beginning") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == '{"n": 0}\n'
        produce(kafka, topic, [b"later"], partition=1)
        lines = iter(process.stdout.readline, "")
        assert "later\n" in lines
        process.stdout.close()
        produce(kafka, topic, [b"nobody reads this"])
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_topic_that_is_not_there_is_named_beside_those_that_are(kafka: str, topic: str) -> None:
    done = consume(kafka, "scores.none")
    assert done.returncode == 2
    assert "there is no topic 'scores.none'" in done.stderr
    assert topic in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_that_cannot_be_reached_is_one_line_and_exit_code_1() -> None:
    done = consume("127.0.0.1:9", "t")
    assert done.returncode == 1
    assert "no Kafka answers at 127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
