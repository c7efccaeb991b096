"""Events over HTTP are admitted as the live path admits them."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline
from streams.serving.event_admission import AdmittedEvent, EventAdmission, Refusal, make_admissions
from tests.support.events import T0_MS, make_source, make_views

NOW_US = T0_MS * 1_000


def event(**fields: Any) -> bytes:
    return json.dumps({"key": "a", "shop": 7, "at": T0_MS, "n": 1} | fields).encode()


VALUES = [
    event(),
    b"{",
    b"[]",
    b'"text"',
    b"",
    b"\xff",
    event(n=-1),
    event(n="1"),
    event(n=2**64),
    event(key=None),
    event(shop=None),
    event(key=None, shop=None),
    event(at=None),
    event(at=None, key=None),
    event(at=T0_MS // 1_000),
    event(at=7),
    event(at=T0_MS + 60_000),
    event(at=T0_MS + 60_001),
    event(key=""),
    event(key="ä" * 100),
    json.dumps({"n": 1}, indent=2).encode(),
    json.dumps({"key": "a", "at": T0_MS, "n": 1.0}, indent=2).encode(),
    b"{" + b'"a":{' * 600 + b"}" * 601,
    event(pad="x" * 2_000_000),
]


def live(source: EventSource, views: list[FeatureView], values: list[bytes]) -> list[str]:
    """What the live path says of each value, had it come alone; "" where a view takes it."""
    said = []
    for value in values:
        batch = RawBatch(
            topic=source.topic,
            partition=0,
            offsets=np.array([0]),
            broker_time_us=np.array([NOW_US]),
            keys=[None],
            values=[value],
            headers=[None],
            next_offset=1,
        )
        pipeline = PartitionPipeline(source, views, partition=0)
        processed = pipeline.process(batch, processing_time_us=NOW_US, computed_time_us=NOW_US, epoch=1)
        reasons = processed.dead_letters.column("reason").to_pylist()
        is_taken = any(rows.num_rows for rows in processed.rows.values())
        said.append("" if is_taken else reasons[0])
    return said


@pytest.mark.parametrize("keys", [("key",), ("key", "shop")])
def test_what_every_view_of_the_live_path_refuses_is_refused_for_the_same_reason(keys: tuple[str, ...]) -> None:
    source = make_source()
    direct = make_source(key=None)  # both views read the topic itself, which a pipeline of one partition wants
    views = make_views(direct, *keys)
    found = EventAdmission(source, make_views(source, *keys)).admit(VALUES, now_us=NOW_US)
    reasons = ["" if isinstance(outcome, AdmittedEvent) else outcome.reason for outcome in found]
    assert reasons == live(direct, views, VALUES)
    assert {Reason(reason) for reason in reasons if reason} == {
        Reason.DECODE_ERROR,
        Reason.SCHEMA_VIOLATION,
        Reason.MISSING_KEY,
        Reason.MISSING_EVENT_TIME,
        Reason.TIMESTAMP_UNIT,
        Reason.IMPLAUSIBLE_TIME,
        Reason.FUTURE_TIMESTAMP,
    }


def test_what_is_said_of_an_event_hangs_on_no_other_one() -> None:
    source = make_source()
    admission = EventAdmission(source, make_views(source))
    alone = [admission.admit([value], now_us=NOW_US)[0] for value in VALUES]
    for order in itertools.islice(itertools.permutations(range(len(VALUES))), 0, 20_000, 2_000):
        assert admission.admit([VALUES[at] for at in order], now_us=NOW_US) == [alone[at] for at in order]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("key", b"a"), ("shop", b"7"), ("", None), (None, b"a")],
)
def test_events_are_keyed_as_the_source_says_else_by_the_entity(key: str | None, expected: bytes | None) -> None:
    source = make_source(key=key)
    (admitted,) = EventAdmission(source, make_views(source)).admit([event()], now_us=NOW_US)
    assert admitted == AdmittedEvent(expected, event())


def test_an_event_that_lacks_the_key_of_one_view_is_for_the_others() -> None:
    source = make_source()
    (admitted,) = EventAdmission(source, make_views(source, "key", "shop")).admit([event(key=None)], now_us=NOW_US)
    assert admitted == AdmittedEvent(None, event(key=None))


def test_refusals_say_what_to_do() -> None:
    source = make_source()
    (refusal,) = EventAdmission(source, make_views(source)).admit([event(at=T0_MS // 1_000)], now_us=NOW_US)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "timestamp_unit"
    assert "where it would lie in s" in refusal.detail
    assert refusal.remedy == "convert it to the unit of the contract"


def test_sources_that_cannot_be_written_say_why() -> None:
    unclear = make_source("test.unclear", key=None)
    framed = make_source("test.framed", **{"x-framing": "confluent"})
    views = [*make_views(unclear, "key", "shop"), *make_views(framed)]
    with pytest.raises(ConfigError, match="expected `key` in its EventSource"):
        EventAdmission(unclear, views[:2])
    admissions, without = make_admissions(views)
    assert not admissions
    assert "expected plain JSON" in without["test.framed"]
    assert "expected `key`" in without["test.unclear"]
