"""The transcripts on the live path: their rows on a real Kafka, computed by one worker, read back from its topics.

What a topic has not is seen in the engine alone: a processing time, an end, gaps between offsets, values that JSON has
not, and the batches that ``latest`` depends on. A transcript that closes its windows at its end runs up to there.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from infra.local.process import spawn, wait_until
from jobs.consumer_group import is_caught_up
from jobs.topic_reader import read_topic
from jobs.topics import ensure_topics, plan_topics
from schemas.view import FeatureView
from tests.support.builders import Row
from tests.support.kafka import TIMEOUT_S
from tests.support.transcript import Output, Transcript, TranscriptError, load_transcripts, to_us

SEMANTICS = Path(__file__).parent.parent / "semantics"
GROUP = "headrace.transcripts.features"
APPLICATION = """
from tests.integration.test_live_transcripts import LIVE

NAME = "transcripts"
VIEWS = [live.view for live in LIVE]
"""


@dataclass(frozen=True)
class Live:
    """A transcript with a view and a topic of its own."""

    transcript: Transcript
    view: FeatureView
    is_right: bool

    def records(self) -> list[Row]:
        """All rows of its steps."""
        return [self.transcript.event(row) for step in self.transcript.text["steps"] for row in step.get("rows", ())]


class LiveExecutor:
    """What the worker made, told step by step."""

    def __init__(self, rows: list[Row], letters: list[Row]) -> None:
        self.made, self.letters = rows, letters

    def rows(self, rows: list[Row], *, processing_time_us: int) -> Output:
        del processing_time_us
        offsets = {row["_offset"] for row in rows}
        return Output(
            [row for row in self.made if row["source_offset"] in offsets],
            [letter for letter in self.letters if letter["offset"] in offsets],
        )

    def idle(self, *, processing_time_us: int, is_caught_up: bool) -> Output:
        raise AssertionError((processing_time_us, is_caught_up))

    def close(self) -> Output:
        raise AssertionError

    def restart(self) -> Output:
        return Output([], [])


def until_it_closes(transcript: Transcript) -> Transcript:
    steps: list[dict[str, Any]] = transcript.text["steps"]
    end = next((number for number, step in enumerate(steps) if "close" in step), len(steps))
    return replace(transcript, text=transcript.text | {"steps": steps[:end]})


def fits_a_topic(transcript: Transcript) -> bool:
    rows = [row for step in transcript.text["steps"] for row in step.get("rows", ())]
    expected = [row for step in transcript.text["steps"] for row in step.get("expect", ())]
    return (
        transcript.fits_a_file
        and transcript.view.emit != "latest"
        and not any("offset" in row for row in rows)
        and not any("request_id" in row or row.get("broker_time", "") is None for row in expected)
        and bool(expected)
    )


def load() -> Iterator[Live]:
    for name in ("transcripts", "must_fail"):
        for whole in load_transcripts(SEMANTICS / name):
            transcript = until_it_closes(whole)
            # Only what an executor is asked for can fail in it: the watermark is none of that.
            if fits_a_topic(transcript) and (name == "transcripts" or not whole.has_step_with("watermark", "close")):
                yield Live(transcript, transcript.view, is_right=name == "transcripts")


def on_topics_of_their_own(found: list[Live]) -> list[Live]:
    return [
        replace(
            live,
            view=replace(
                live.view, name=f"transcript_{number}", source=replace(live.view.source, topic=f"transcript.{number}")
            ),
        )
        for number, live in enumerate(found)
    ]


LIVE = on_topics_of_their_own(list(load()))
RIGHT = [live for live in LIVE if live.is_right]
WRONG = [live for live in LIVE if not live.is_right]


@pytest.fixture(scope="module")
def run(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Have a worker compute all views; returns the brokers to read from."""
    directory = tmp_path_factory.mktemp("live_transcripts")
    (directory / "transcripts_app.py").write_text(APPLICATION)
    ensure_topics(kafka, plan_topics([live.view for live in LIVE], []), partitions=1)
    producer = Producer({"bootstrap.servers": kafka})
    for live in LIVE:
        for row in live.records():
            value = {name: row[name] for name in live.view.source.schema.fields if name in row}
            broker_us = row["_broker_time"]
            timestamp = {} if broker_us is None else {"timestamp": broker_us // 1_000}
            producer.produce(live.view.source.topic, json.dumps(value).encode(), partition=0, **timestamp)
    assert producer.flush(TIMEOUT_S) == 0
    settings = {
        "HEADRACE_HOME": str(directory / "home"),
        "HEADRACE_KAFKA": kafka,
        "HEADRACE_REDIS": "redis://127.0.0.1:1",
        "HEADRACE_APP": str(directory / "transcripts_app.py"),
    }
    log = directory / "worker.log"
    argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", "features", "--metrics-port", "0"]
    worker = spawn(argv, environment={**os.environ, **settings}, cwd=Path.cwd(), log=log)
    try:
        for live in LIVE:
            topic = live.view.source.topic
            assert wait_until(lambda topic=topic: is_caught_up(kafka, GROUP, topic), timeout_s=2 * TIMEOUT_S), (
                log.read_text()[-3_000:]
            )
    finally:
        worker.end(grace_s=TIMEOUT_S)
    return kafka


def executor(brokers: str, live: Live) -> LiveExecutor:
    rows = [to_us(json.loads(value or b"")) for batch in read_topic(brokers, live.view.topic) for value in batch.values]
    letters = []
    for batch in read_topic(brokers, live.view.source.dead_letter_topic):
        for headers in batch.headers:
            told = {name.removeprefix("headrace."): value.decode() for name, value in headers or ()}
            late_by_us = told.get("late_by_us")
            numbers = {"offset": int(told["offset"]), "late_by_us": None if late_by_us is None else int(late_by_us)}
            letters.append(told | numbers)
    return LiveExecutor(rows, letters)


@pytest.mark.parametrize("live", RIGHT, ids=lambda live: live.transcript.name)
def test_it_holds_on_the_live_path(run: str, live: Live) -> None:
    live.transcript.run(executor(run, live))


@pytest.mark.parametrize("live", WRONG, ids=lambda live: live.transcript.name)
def test_a_wrong_transcript_is_told_apart_on_the_live_path(run: str, live: Live) -> None:
    with pytest.raises(TranscriptError):
        live.transcript.run(executor(run, live))


def test_there_are_transcripts() -> None:
    assert len(RIGHT) > 25
    assert len(WRONG) > 3
