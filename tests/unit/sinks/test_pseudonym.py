"""Pseudonyms: what is personal cannot be read from the online store, and can still be compared and looked up."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.aggregation import count, derived, distinct, first, from_event, last_n, max_, top_k
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.serving import Serving
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.sinks.packing import packing_of
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms
from tests.support.feature_rows import make_rows

FIELDS = {
    "user": {"type": "integer", "x-pii": True},
    "email": {"type": ["string", "null"], "x-pii": True},
    "shop": {"type": "string"},
    "pin": {"type": "integer", "x-pii": True},
    "event_time": {"type": "string"},
}
ONE, OTHER = Pseudonyms(b"k" * 16), Pseudonyms(b"o" * 16)


@pytest.fixture(autouse=True)
def _contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    path = tmp_path / "schemas" / "events" / "visit_hashed@1.json"
    path.write_text(json.dumps({"type": "object", "properties": FIELDS}))
    monkeypatch.chdir(tmp_path)


def make_view(*, key: str = "user", personal: str = "hash", name: str = "visits", **features: Any) -> FeatureView:
    return FeatureView(
        name,
        version=1,
        entity=Entity("e", key=key),
        source=EventSource("visits", contract="visit_hashed@1"),
        slide="1m",
        features=features or {"contact": from_event("email"), "n_5m": count().over("5m")},
        serving=Serving(personal=personal),
        emit="every_event" if not features or "contact" in features else "latest",
    )


def test_personal_text_is_hashed_and_all_else_stays() -> None:
    view = make_view(
        contact=from_event("email"),
        shop=from_event("shop"),
        mails_5m=last_n("email").over(last=3),
        common_5m=top_k("email", k=2).over("5m"),
        mails_n=distinct("email").over("5m"),
        ratio=derived("mails_n * 2"),
        first_5m=first("email").over("5m"),
    )
    mail = {"user": 7, "shop": "s", "mails_n": 2, "ratio": 4, "first_5m": "a@b", "common_5m": []}
    rows = make_rows(
        view, [{**mail, "contact": "a@b", "mails_5m": ["a@b", "c@d"]}, {**mail, "contact": None, "mails_5m": None}]
    )
    hashed = ONE.rows(view, rows)

    assert hashed.schema == rows.schema
    a, b = hashed["first_5m"][0].as_py(), hashed["mails_5m"][0][1].as_py()
    assert a != b
    assert len(a) == len(b) == 32
    assert hashed["contact"].to_pylist() == [a, None]
    assert hashed["mails_5m"].to_pylist() == [[a, b], None]
    assert hashed["common_5m"].to_pylist() == [[], []]
    plain = ["user", "shop", "mails_n", "ratio", "event_time", "request_id"]
    assert hashed.select(plain) == rows.select(plain)
    names = list(view.definitions)
    for row, before in zip(hashed.to_pylist(), rows.to_pylist(), strict=True):
        assert ONE.features(view, {name: before[name] for name in names}) == {name: row[name] for name in names}


def test_a_hash_is_the_same_in_all_views_and_another_with_another_key() -> None:
    by_user, by_mail = make_view(), make_view(key="email", name="mails", n_5m=count().over("5m"))
    (hashed,) = ONE.entities(by_mail, ["a@b"])
    assert ONE.features(by_user, {"contact": "a@b"}) == {"contact": hashed}
    assert OTHER.entities(by_mail, ["a@b"]) != [hashed]
    assert ONE.entities(by_user, [7]) == ONE.entities(by_user, ["7"]) != [7]
    # HMAC-SHA256, the first 128 bits, as RFC 2104 has it.
    assert hashed == "5c4eb3a77444df969631e935035b6320"


def test_a_view_that_does_not_ask_has_none() -> None:
    view = make_view(personal="plain")
    rows = make_rows(view, [{"user": 7, "contact": "a@b"}])
    assert ONE.rows(view, rows) is rows
    assert ONE.entities(view, [7]) == [7]
    assert ONE.features(view, {"contact": "a@b"}) == {"contact": "a@b"}
    NO_PSEUDONYMS.check([view])


def test_an_empty_batch_stays_one() -> None:
    view = make_view()
    assert ONE.rows(view, view.row_schema.empty_table()) == view.row_schema.empty_table()


def test_plain_values_and_hashes_are_never_read_as_one_another() -> None:
    assert packing_of(make_view()).tag != packing_of(make_view(personal="plain")).tag
    assert make_view().definition_hash == make_view(personal="plain").definition_hash


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 3 bytes, expected 16 or more"):
        Pseudonyms(b"abc")
    with pytest.raises(ConfigError, match=r"view visits keeps hashes of \['contact', 'user'\] online, expected their"):
        NO_PSEUDONYMS.check([make_view()])
    with pytest.raises(ConfigError, match="expected a key"):
        NO_PSEUDONYMS.entities(make_view(), [7])
    with pytest.raises(ConfigError, match=r"`personal` 'no', expected one of \['plain', 'hash'\]"):
        Serving(personal="no")
    for name, feature in {
        "pin": from_event("pin"),
        "top": top_k("pin").over("5m"),
        "most": max_("pin").over("5m"),
    }.items():
        with pytest.raises(ConfigError, match=rf"feature '{name}' is a personal .*int64.*, expected text"):
            make_view(**{name: feature})
    assert pa.types.is_int64(make_view(pins=distinct("pin").over("5m")).feature_schema.field("pins").type)
