"""The definition hash changes with all that decides admission or values, and with nothing else."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from schemas.aggregation import count, decayed_sum, sum_
from schemas.calendar import _segments
from schemas.entity import Entity
from schemas.source import EventSource
from schemas.view import FeatureView
from tests.support.builders import make_contract

FIELDS: Mapping[str, Any] = {
    "key": {"type": "string"},
    "at": {"type": "integer", "x-unit": "s"},
    "id": {"type": ["string", "null"], "maxLength": 8},
    "kind": {"type": "string", "enum": ["a", "b"]},
    "x": {"type": "number", "minimum": 0},
    "tags": {"type": "array", "items": {"type": "string", "minLength": 1}},
}
SOURCE: Mapping[str, Any] = {
    "event_time": "at",
    "max_out_of_orderness": "60s",
    "idle_timeout": "30s",
    "max_future_skew": "1m",
    "event_id": "id",
    "dedup_window": "1h",
}
FEATURES: Mapping[str, Any] = {"n": count().over("5m"), "s": sum_("x").over("10m")}
LOCAL: Mapping[str, Any] = {
    "slide": "1d",
    "time_zone": "America/New_York",
    "features": {"n": count().over("7d")},
}
"""Settings of a view in a time zone."""
VIEW: Mapping[str, Any] = {"slide": "60s", "allowed_lateness": "30s", "features": FEATURES}


def make_view(
    *,
    fields: Mapping[str, Any] = FIELDS,
    document: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    **settings: Any,
) -> FeatureView:
    contract = make_contract(fields, **{"required": ["key", "at"], **(document or {})})
    from_topic = EventSource(**{"topic": "events", "contract": contract, **SOURCE, **(source or {})})
    return FeatureView(
        **{"name": "view", "version": 1, "entity": Entity("thing", key="key"), "source": from_topic, **VIEW, **settings}
    )


def with_field(name: str, **keywords: Any) -> dict[str, Any]:
    """Change one field of the contract; None takes a keyword out."""
    field = {keyword: value for keyword, value in ({**FIELDS[name], **keywords}).items() if value is not None}
    return {**FIELDS, name: field}


SAME: dict[str, dict[str, Any]] = {
    "descriptions of a field": {"fields": with_field("x", description="How much", title="X", examples=[1.5])},
    "a comment of a field": {"fields": with_field("x", **{"$comment": "checked by hand"})},
    "a description of an item": {"fields": with_field("tags", items={**FIELDS["tags"]["items"], "description": "Tag"})},
    "texts of the contract": {
        "document": {"title": "Events", "description": "All", "$comment": "x", "$id": "urn:x", "examples": [{}]}
    },
    "the usual largest payload": {"document": {"x-max-bytes": 2**20}},
    "order of the fields": {"fields": dict(reversed(FIELDS.items()))},
    "order of keywords": {"fields": {**FIELDS, "x": dict(reversed(FIELDS["x"].items()))}},
    "order of required": {"document": {"required": ["at", "key"]}},
    "order of types": {"fields": with_field("id", type=["null", "string"])},
    "a type in a list": {"fields": with_field("x", type=["number"])},
    "order of an enum": {"fields": with_field("kind", enum=["b", "a"])},
    "spelling of a number": {"fields": with_field("x", minimum=0.0)},
    "spelling of source durations": {
        "source": {"max_out_of_orderness": "1m", "idle_timeout": "30000ms", "dedup_window": "60m"}
    },
    "spelling of source times": {"source": {"plausible_from": "1990-01-01T01:00:00+01:00"}},
    "spelling of view durations": {"slide": "1m", "allowed_lateness": "30000ms", "state_ttl": "720h"},
    "spelling of a window": {"features": {**FEATURES, "n": count().over("300s")}},
    "order of features": {"features": dict(reversed(FEATURES.items()))},
    "a whole slide of alignment": {"align_to": "2013-01-01T00:00:00Z"},
    "name of the entity": {"entity": Entity("object", key="key")},
    "version, owner and read-time TTL": {"version": 2, "owner": "growth", "ttl": "5m"},
    "name of the view": {"name": "other"},
}

OTHER: dict[str, dict[str, Any]] = {
    "a field is required": {"document": {"required": ["key", "at", "x"]}},
    "a field may be null": {"fields": with_field("x", type=["number", "null"])},
    "type": {"fields": with_field("x", type="integer")},
    "minimum": {"fields": with_field("x", minimum=1)},
    "maximum": {"fields": with_field("x", maximum=1)},
    "exclusiveMinimum": {"fields": with_field("x", minimum=None, exclusiveMinimum=0)},
    "exclusiveMaximum": {"fields": with_field("x", exclusiveMaximum=9)},
    "enum": {"fields": with_field("kind", enum=["a", "b", "c"])},
    "pattern": {"fields": with_field("kind", pattern="^a")},
    "minLength": {"fields": with_field("kind", minLength=1)},
    "maxLength": {"fields": with_field("id", maxLength=9)},
    "a rule of items": {"fields": with_field("tags", items={"type": "string", "minLength": 2})},
    "unit of the event time": {"fields": with_field("at", **{"x-unit": "ms"})},
    "largest payload": {"document": {"x-max-bytes": 1_000}},
    "a further field": {"fields": {**FIELDS, "y": {"type": "string"}}},
    "topic": {"source": {"topic": "others"}},
    "max_out_of_orderness": {"source": {"max_out_of_orderness": "61s"}},
    "idle_timeout": {"source": {"idle_timeout": "31s"}},
    "idle_timeout off": {"source": {"idle_timeout": None}},
    "idle_advance": {"source": {"idle_advance": True}},
    "max_future_skew": {"source": {"max_future_skew": None}},
    "plausible_from": {"source": {"plausible_from": "1991-01-01T00:00:00Z"}},
    "plausible_until": {"source": {"plausible_until": "2099-01-01T00:00:00Z"}},
    "event_id": {"source": {"event_id": "key"}},
    "dedup_window": {"source": {"dedup_window": "2h"}},
    "event_time": {"fields": {**FIELDS, "then": FIELDS["at"]}, "source": {"event_time": "then"}},
    "entity key": {"entity": Entity("thing", key="kind")},
    "slide": {"slide": "30s"},
    "gap": {"slide": None, "gap": "60s", "features": {"n": count()}},
    "allowed_lateness": {"allowed_lateness": "31s"},
    "align_to": {"align_to": "1970-01-01T00:00:30Z"},
    "state_ttl": {"state_ttl": "31d"},
    "windows of a day": {**LOCAL, "time_zone": None},
    "time_zone": LOCAL,
    "another time_zone": {**LOCAL, "time_zone": "America/Chicago"},
    "align_to in a time zone": {**LOCAL, "align_to": "2024-01-01T04:00:00-05:00"},
    "emit": {"emit": "every_event"},
    "name of a feature": {"features": {"m": FEATURES["n"], "s": FEATURES["s"]}},
    "window of a feature": {"features": {**FEATURES, "n": count().over("6m")}},
    "column of a feature": {"features": {**FEATURES, "s": sum_("at").over("10m")}},
    "filter of a feature": {"features": {**FEATURES, "n": count(where="x > 1").over("5m")}},
    "parameter of a feature": {"features": {**FEATURES, "s": decayed_sum("x", half_life="1m").over("10m")}},
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_row_changes_no_hash(change: str) -> None:
    assert make_view(**SAME[change]).definition_hash == make_view().definition_hash


@pytest.mark.parametrize("change", OTHER)
def test_what_may_change_a_row_changes_the_hash(change: str) -> None:
    assert make_view(**OTHER[change]).definition_hash != make_view().definition_hash


def test_no_two_changes_share_a_hash() -> None:
    assert len({make_view(**change).definition_hash for change in OTHER.values()}) == len(OTHER)


def test_another_contract_that_says_the_same_does_not_change_the_hash() -> None:
    described = make_view(**SAME["descriptions of a field"])

    assert described.source.contract != make_view().source.contract
    assert described.definition == make_view().definition


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        (EventSource, {"contract", "key"}),
        # Lookups are part of a definition that has some.
        (FeatureView, {"name", "version", "owner", "ttl", "serving", "lookups"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_setting_there_is_has_its_place(kind: Any, without: set[str]) -> None:
    settings = {field.name for field in dataclasses.fields(kind)} - without
    part = make_view().source.definition if kind is EventSource else make_view(**LOCAL).definition
    names = {*part, *part.get("windows", {})}

    assert all(any(name in (setting, f"{setting}_us", f"{setting}_key") for name in names) for setting in settings)


def test_a_release_of_the_tz_database_that_moves_a_day_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_view(**LOCAL)
    assert len(before.definition_hash) == 16
    utc = ZoneInfo("UTC")
    monkeypatch.setattr("schemas.calendar._load_zone", lambda _: utc)
    _segments.cache_clear()
    after = make_view(**LOCAL)
    _segments.cache_clear()

    assert before.definition["windows"]["time_zone"]["name"] == after.definition["windows"]["time_zone"]["name"]
    assert before.definition_hash != after.definition_hash


def test_the_same_day_of_alignment_does_not_change_the_hash_of_a_view_in_a_time_zone() -> None:
    winter = make_view(**LOCAL, align_to="2024-01-01T04:00:00-05:00")
    summer = make_view(**LOCAL, align_to="2024-07-01T04:00:00-04:00")

    assert winter.definition_hash == summer.definition_hash
