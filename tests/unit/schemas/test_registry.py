import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.flights.views import VIEWS, airport_departures
from schemas.aggregation import count, mean
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.registry import check_recorded, find_record, record_definitions
from schemas.source import EventSource
from schemas.view import FeatureView

SHOP = EventSource("shop.events", contract="shop_event@1", max_out_of_orderness="5s")


def make_view(**settings: Any) -> FeatureView:
    defaults: dict[str, Any] = {
        "version": 1,
        "entity": Entity("user", key="user_id"),
        "source": SHOP,
        "slide": "1m",
        "owner": "growth",
        "features": {"n_5m": count().over("5m"), "mean_1h": mean("amount", where="amount > 0").over("1h")},
    }
    return FeatureView("activity", **defaults | settings)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(view: FeatureView) -> str:
    with pytest.raises(ConfigError) as caught:
        check_recorded([view])
    return str(caught.value)


def test_a_view_without_a_record_may_be_anything() -> None:
    assert check_recorded([make_view()]) == {"activity": None}


def test_a_record_is_the_definition_and_its_hash(directory: Path) -> None:
    view = make_view()

    (path,) = record_definitions([view])

    assert path == directory / "schemas" / "definitions" / "activity@1.json"
    document = json.loads(path.read_text())
    assert list(document) == ["view", "version", "definition_hash", "definition"]
    assert document["definition_hash"] == view.definition_hash
    assert document["definition"]["features"]["n_5m"]["size_us"] == 300_000_000
    record = check_recorded([view])["activity"]
    assert record is not None
    assert record.path == path


def test_the_owner_and_the_read_time_ttl_may_change_under_a_version() -> None:
    record_definitions([make_view()])

    check_recorded([make_view(owner="search", ttl="1h")])


def test_a_changed_definition_under_an_old_version_is_refused(directory: Path) -> None:
    record_definitions([make_view()])
    changed = make_view(
        features={"n_5m": count().over("10m"), "total": count().over("5m")},
        source=replace(SHOP, max_out_of_orderness="2s"),
    )

    message = refusal(changed)

    assert f"view activity version 1 has the definition {changed.definition_hash}" in message
    assert f"expected {make_view().definition_hash} as recorded in {directory}" in message
    assert "source.max_out_of_orderness_us from 5000000 to 2000000" in message
    assert "features.n_5m.size_us from 300000000 to 600000000" in message
    assert "features.mean_1h is gone" in message
    assert "features.total is new" in message
    assert message.endswith("Raise the version to 2, or restore the definition")


def test_a_raised_version_may_change(directory: Path) -> None:
    record_definitions([make_view()])
    raised = make_view(version=2, slide="30s")

    check_recorded([raised])
    (path,) = record_definitions([raised])

    assert path.name == "activity@2.json"
    assert len(list((directory / "schemas" / "definitions").iterdir())) == 2


def test_recording_again_writes_nothing() -> None:
    record_definitions([make_view()])

    assert record_definitions([make_view()]) == []


def test_nothing_is_recorded_when_one_of_the_views_has_changed(directory: Path) -> None:
    record_definitions([make_view()])
    other = FeatureView(
        "other", version=1, entity=Entity("user", key="user_id"), source=SHOP, gap="5m", features={"n": count()}
    )

    with pytest.raises(ConfigError, match="Raise the version"):
        record_definitions([other, make_view(slide="30s")])

    assert [path.name for path in (directory / "schemas" / "definitions").iterdir()] == ["activity@1.json"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"view": "activity", "version": 1, "definition_hash": "x"}', "\xff"],
)
def test_a_file_that_is_no_record_is_refused(content: str) -> None:
    (path,) = record_definitions([make_view()])
    path.write_bytes(content.encode("latin-1"))

    message = refusal(make_view())

    assert "activity@1.json is no record of a definition" in message
    assert "delete it and run `headrace views --record`" in message


@pytest.mark.parametrize(
    "edit", [{"definition_hash": "0123456789abcdef"}, {"version": 2}, {"view": "x"}, {"definition": {"emit": "latest"}}]
)
def test_a_record_that_was_edited_is_refused(edit: dict[str, Any]) -> None:
    (path,) = record_definitions([make_view()])
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))

    assert "it was edited; restore it" in refusal(make_view())


def test_a_directory_that_cannot_be_written_is_an_error_of_the_user(directory: Path) -> None:
    (directory / "schemas").write_text("a file")

    with pytest.raises(ConfigError, match=r"activity@1\.json cannot be written"):
        record_definitions([make_view()])


def test_the_views_that_ship_with_headrace_are_recorded_and_unchanged() -> None:
    records = check_recorded(VIEWS)

    assert all(record is not None for record in records.values())


def test_what_stands_in_the_working_directory_goes_before_what_ships_with_headrace(directory: Path) -> None:
    changed = replace(airport_departures, slide="10m")
    assert "as recorded in" in refusal(changed)
    own = directory / "schemas" / "definitions" / "airport_departures@1.json"
    document = {"view": changed.name, "version": 1, "definition_hash": changed.definition_hash}
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps(document | {"definition": changed.definition}))

    check_recorded([changed])
    record = find_record(changed)

    assert record is not None
    assert record.path == own
