"""What of a dead letter is shown where its contract marks fields as personal."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.application import Application
from jobs.dead_letters import letter_sources
from jobs.letter_mask import LetterMask, masked
from schemas.aggregation import count, derived, from_event, last
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.dead_letter import DeadLetter
from streams.pipeline import PartitionPipeline
from tests.support.transport import make_batch

FIELDS = {
    "email": {"type": "string", "x-pii": True},
    "shop": {"type": "string"},
    "event_time": {"type": "string"},
    "pin": {"type": ["integer", "null"], "x-pii": True},
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    path = tmp_path / "schemas" / "events" / "visit_masked@1.json"
    path.write_text(json.dumps({"type": "object", "properties": FIELDS}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_mask(*, entity: str, key: str | None = None) -> LetterMask:
    source = EventSource("visits", contract="visit_masked@1", key=key)
    features = {"n_1m": count().over("1m")}
    view = FeatureView("v", version=1, entity=Entity("e", key=entity), source=source, slide="1m", features=features)
    application = Application(name="a", module="a", views={"v": view}, models={})
    return LetterMask(application, letter_sources(application)["visits"])


def letter(value: Any, *, detail: str = "why", reason: str = "schema_violation") -> DeadLetter:
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    facts = {"reason": reason, "detail": detail, "topic": "visits", "partition": "0", "offset": "1"}
    return DeadLetter(
        topic="dlq.visits", partition=0, offset=0, time_us=0, key=b"k", value=payload, headers=[], facts=facts
    )


def test_marked_fields_are_masked_and_others_are_not(directory: Path) -> None:
    shown = masked(letter({"email": "a@b", "shop": "s", "pin": 12}), make_mask(entity="shop"))
    assert json.loads(shown.value or b"") == {"email": "***", "shop": "s", "pin": "***"}
    assert (shown.key, shown.facts["detail"]) == (b"k", "why")


@pytest.mark.parametrize("payload", [b'{"email": "a@b"', b'["a@b"]', b"a@b", b"\xff\xfe a@b"])
def test_of_a_payload_whose_fields_cannot_be_told_nothing_is_shown(directory: Path, payload: bytes) -> None:
    shown = masked(letter(payload, detail="$: 'a@b' is not of type 'object'"), make_mask(entity="shop"))
    assert (shown.value or b"").startswith(f"*** ({len(payload)} bytes".encode())
    assert shown.facts["detail"] == "***"


@pytest.mark.parametrize(
    ("entity", "key", "is_hidden"),
    [("shop", None, False), ("email", None, True), ("shop", "email", True), ("shop", "", True)],
)
def test_the_key_is_masked_where_it_is_personal_or_may_be(
    directory: Path, entity: str, key: str | None, is_hidden: bool
) -> None:
    assert masked(letter({}), make_mask(entity=entity, key=key)).key == (b"***" if is_hidden else b"k")


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("`event_id` 'a@b' was admitted before", "`event_id` *** was admitted before"),
        ("$.email: 'a@" + 600 * "x", "$.email: ***"),
        ("$.pin: 12 is greater than the maximum of 5", "$.pin: ***"),
    ],
)
def test_a_detail_of_before_the_field_was_marked_is_masked_too(directory: Path, detail: str, shown: str) -> None:
    found = masked(letter({"email": "a@b", "pin": 12}, detail=detail), make_mask(entity="shop"))
    assert found.facts["detail"] == shown


def test_columns_that_are_made_of_personal_fields_are_personal(directory: Path) -> None:
    source = EventSource("visits", contract="visit_masked@1")
    features = {
        "n_1m": count().over("1m"),
        "contact": from_event("email"),
        "last_pin": last("pin").over(last=1),
        "twice": derived("last_pin * 2"),
        "half": derived("n_1m / 2"),
    }
    entity = Entity("shop", key="shop")
    view = FeatureView("v", version=1, entity=entity, source=source, slide="1m", features=features)
    assert view.personal == {"contact", "last_pin", "twice"}


def test_a_personal_event_id_is_in_no_detail(directory: Path) -> None:
    source = EventSource("visits", contract="visit_masked@1", event_id="email", dedup_window="1h")
    features = {"n_1m": count().over("1m")}
    entity = Entity("shop", key="shop")
    view = FeatureView("v", version=1, entity=entity, source=source, slide="1m", features=features)
    event = json.dumps({"email": "a@b", "shop": "s", "event_time": "2026-01-01T00:00:00Z"}).encode()
    batch = make_batch([event, event], topic="visits", broker_time_us=2_000_000_000_000_000)
    pipeline = PartitionPipeline(source, [view], partition=0)
    letters = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=0).dead_letters
    assert letters["detail"].to_pylist() == ["`email` *** was admitted before, less than 1h apart"]


def test_an_event_time_cannot_be_personal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    fields = {"user": {"type": "string"}, "event_time": {"type": "string", "x-pii": True}}
    (tmp_path / "schemas" / "events" / "born@1.json").write_text(json.dumps({"type": "object", "properties": fields}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="event time `event_time` of born@1 is marked x-pii, expected another field"):
        EventSource("births", contract="born@1")
