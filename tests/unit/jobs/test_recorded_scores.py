"""Records of a topic of scores, as what they say that they read."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jobs.recorded_scores import _recorded
from schemas.errors import DecodeError
from streams.batch import RawBatch
from tests.support.scoring import TRIPS, make_spec

SPEC = make_spec()
READ = {"version": 1, "hash": "h", "event_time": "1970-01-01T00:00:00.000003Z", "status": "present"}
SCORE = {
    "request_id": "r",
    "entity": "f1",
    "event_time": "1970-01-01T00:00:00.000005Z",
    "watermark": None,
    "features": {TRIPS.name: READ},
}


def recorded(*values: bytes | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    def read_topic(_: str, topic: str) -> Iterator[RawBatch]:
        nothing = [None] * len(values)
        yield RawBatch(
            topic=topic,
            partition=2,
            offsets=np.arange(7, 7 + len(values)),
            broker_time_us=np.zeros(len(values), np.int64),
            keys=nothing,
            values=values,
            headers=nothing,
            next_offset=7 + len(values),
        )

    monkeypatch.setattr("jobs.recorded_scores.read_topic", read_topic)
    return list(_recorded("kafka:1", SPEC, TRIPS))


def test_a_score_says_which_row_it_read_or_that_it_read_none(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [json.dumps(score).encode() for score in (SCORE, {**SCORE, "features": {}})]
    assert recorded(*values, monkeypatch=monkeypatch) == [("r", "f1", 5, None, 1, "h", 3, "present")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "a tombstone"),
        (b"\xff", r"b'\\xff'"),
        (b"[]", r"b'\[\]'"),
        (b'{"features": []}', "b'{"),
        (b'{"other": 1}', "b'{"),
        (json.dumps({**SCORE, "event_time": 5}).encode(), "b'{"),
    ],
)
def test_a_record_that_is_no_score_is_named_with_what_it_is(
    value: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.dumps(SCORE).encode()
    with pytest.raises(DecodeError, match=rf"record 8 of {SPEC.topic}:2 is {said}.*expected a score"):
        recorded(good, value, monkeypatch=monkeypatch)
