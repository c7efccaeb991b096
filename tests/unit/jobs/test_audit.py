import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from jobs import audit as audit_module
from jobs.application import Application
from jobs.audit import Check, run_audit
from schemas.row import Pane
from schemas.time import format_rfc3339
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.sinks.online import OnlineValue, Status
from streams.sinks.pseudonym import Pseudonyms
from streams.wire import encode_rows
from tests.support.feature_rows import T0_US
from tests.support.scoring import MINUTE_US, TRIPS, make_spec, make_trigger_view, make_triggers
from tests.support.transport import make_batch

SPEC = make_spec()
APPLICATION = Application(name="m", module="m", views={TRIPS.name: TRIPS}, models={SPEC.name: SPEC})
OPTIONS = {"AWS_REGION": "eu-central-1"}


def departure(number: int, event_time: str) -> bytes:
    return json.dumps(
        {
            "flight_id": f"f{number}",
            "event_time": event_time,
            "carrier": "AA",
            "flight_number": 1,
            "origin": "JFK",
            "destination": "LAX",
            "scheduled_departure": "2023-11-14T22:00:00Z",
            "scheduled_arrival": "2023-11-14T23:00:00Z",
            "scheduled_duration_minutes": 60,
            "scheduled_hour_local": 17,
            "day_of_week": 2,
            "departure_delay": 3,
            "distance": 100,
        }
    ).encode()


@dataclass
class World:
    """Flights that departed a minute apart, one a row, all scored; a test takes some of it away."""

    rows: pa.Table = field(
        default_factory=lambda: make_triggers(
            *(
                {"request_id": f"r{n}", "origin": f"A{n:02}", "computed_time": T0_US + n * MINUTE_US, "watermark": None}
                for n in range(6)
            )
        )
    )
    raw: list[bytes] = field(
        default_factory=lambda: [departure(n, format_rfc3339(T0_US + n * MINUTE_US)) for n in range(6)]
    )
    scored: list[str] = field(default_factory=lambda: [f"r{n}" for n in range(6)])
    reads: list[int] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    has_table: bool = True
    archived: int | None = None
    """Records in the archive; None for all."""

    def read_topic(self, _: str, topic: str) -> Iterator[RawBatch]:
        values: Mapping[str, Sequence[bytes]] = {
            TRIPS.source.topic: self.raw,
            TRIPS.topic: encode_rows(self.rows),
            SPEC.topic: [json.dumps({"request_id": request}).encode() for request in self.scored],
        }
        if records := values.get(topic):
            yield make_batch(records, topic=topic)

    def online_value(self, view: FeatureView, row: Mapping[str, Any]) -> OnlineValue:
        return OnlineValue(
            view=view.name,
            version=view.version,
            definition_hash=view.definition_hash,
            entity=row[view.entity.key],
            status=Status.PRESENT,
            features={name: row[name] for name in view.definitions},
            pane=Pane(row["pane"]),
            source_offset=row["source_offset"],
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    class FakeReader:
        def __init__(self, _: str, *, pseudonyms: Pseudonyms) -> None:
            pass

        async def __aenter__(self) -> "FakeReader":
            return self

        async def __aexit__(self, *_: Any) -> None:
            pass

        async def read(self, view: FeatureView, keys: Sequence[Any], *, now_us: int) -> list[OnlineValue]:
            made.reads.append(len(keys))
            stored = {row[view.entity.key]: row for row in made.rows.to_pylist()}
            return [made.online_value(view, stored[key]) for key in keys if key not in made.gone] + [
                OnlineValue(
                    view=view.name,
                    version=view.version,
                    definition_hash=view.definition_hash,
                    entity=key,
                    status=Status.MISSING,
                    features={},
                )
                for key in keys
                if key in made.gone
            ]

    class FakeArchive:
        def __init__(self, _: str, topic: str, options: Mapping[str, str] | None) -> None:
            assert options == OPTIONS
            self.topic = topic

        @property
        def is_there(self) -> bool:
            return made.archived != 0

        def count(self, first_offsets: Mapping[int, int]) -> int:
            n_records = sum(len(batch) for batch in made.read_topic("b", self.topic))
            assert set(first_offsets) == ({0} if n_records else set())
            return n_records if made.archived is None else made.archived

    monkeypatch.setattr(audit_module, "Archive", FakeArchive)
    monkeypatch.setattr(audit_module, "read_topic", made.read_topic)

    def open_table(_: str, view: FeatureView, *, storage_options: Mapping[str, str] | None) -> pa.Table | None:
        assert storage_options == OPTIONS
        return made.rows if made.has_table else None

    def read_features(_: str, view: FeatureView, *, storage_options: Mapping[str, str] | None) -> pa.Table:
        assert storage_options == OPTIONS
        return made.rows

    monkeypatch.setattr(audit_module, "open_table", open_table)
    monkeypatch.setattr(audit_module, "_SETTLE_S", 0.0)
    monkeypatch.setattr(audit_module, "read_features", read_features)
    monkeypatch.setattr(audit_module, "OnlineReader", FakeReader)
    return made


def audit(scored_from: Mapping[str, Mapping[int, int]] | None = None) -> list[Check]:
    return run_audit(APPLICATION, brokers="b", redis_url="r", delta="d", delta_options=OPTIONS, scored_from=scored_from)


def differing(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.is_met]


ALL_SCORED = f"{SPEC.topic}: as-of rows = scores + dead letters"
ONCE_SCORED = f"{SPEC.topic}: requests answered other than once"


def test_what_adds_up_is_found_to(world: World) -> None:
    assert differing(audit()) == []
    assert differing(audit({SPEC.name: {}})) == []


def test_a_view_without_rows_needs_no_table(world: World) -> None:
    world.rows, world.raw, world.scored, world.has_table = world.rows.slice(0, 0), [], [], False
    assert differing(audit()) == []


def test_rows_that_no_table_holds_are_missing_from_it(world: World) -> None:
    world.has_table = False
    checks = audit()
    assert differing(checks) == [f"{TRIPS.name}: rows on the topic = rows in Delta"]
    (check,) = (check for check in checks if not check.is_met)
    assert (check.expected, check.actual, check.detail) == (6, 0, f"there is no table d/{TRIPS.name}/v{TRIPS.version}")


def test_where_nothing_was_scored_the_role_that_does_is_asked_after(world: World) -> None:
    world.scored = []
    checks = audit()
    assert differing(checks) == [ALL_SCORED, ONCE_SCORED]
    (check,) = (check for check in checks if check.name == ALL_SCORED)
    assert check.detail.endswith("no row has been answered yet: does the scoring role run?")


def test_each_topic_and_store_is_told_before_it_is_read(world: World) -> None:
    told: list[str] = []
    run_audit(APPLICATION, brokers="b", redis_url="r", delta="d", delta_options=OPTIONS, tell=told.append)
    assert world.reads
    assert [line.removeprefix(f"{TRIPS.name}: ") for line in told] == [
        f"reading {TRIPS.topic}",
        f"reading {TRIPS.source.topic} and its dead letters",
        "reading Delta and Redis",
        f"reading {SPEC.topic}",
        f"{TRIPS.source.topic}: reading its archive",
    ]


@pytest.mark.parametrize(("archived", "detail"), [(0, "there is no archive: does the offline role run?"), (5, "")])
def test_records_that_are_not_archived_are_found(world: World, archived: int, detail: str) -> None:
    world.archived = archived
    checks = audit()
    assert differing(checks) == [f"{TRIPS.source.topic}: records on the topic = records archived"]
    (check,) = (check for check in checks if not check.is_met)
    assert (check.expected, check.actual, check.detail) == (6, archived, detail)


def test_scoring_that_began_later_is_asked_for_no_more_than_what_came_since(world: World) -> None:
    world.scored = ["r3", "r2", "r4", "r5"]
    checks = audit()
    assert differing(checks) == []
    (check,) = (check for check in checks if check.name == ALL_SCORED)
    assert "of the rows since 2023-11-14 22:15:20 UTC" in check.detail
    assert differing(audit({SPEC.name: {0: 2}})) == []
    assert differing(audit({SPEC.name: {}})) == [ALL_SCORED, ONCE_SCORED]


@pytest.mark.parametrize("scored", [["r2", "r4", "r5"], []])
def test_a_row_without_a_score_is_found(world: World, scored: list[str]) -> None:
    world.scored = scored
    assert differing(audit()) == [ALL_SCORED, ONCE_SCORED]


def test_a_row_that_was_scored_twice_is_found(world: World) -> None:
    world.scored = [*world.scored, "r3"]
    assert differing(audit()) == [ALL_SCORED, ONCE_SCORED]


def test_records_in_late_panes_alone_are_told_by_their_event_time_however_it_is_written(world: World) -> None:
    times = ["2023-11-14T20:00:00Z", "2023-11-14 21:00:00.25+01:00", "2023-11-14t15:00:00.123456789-05:00"]
    watermark = {"watermark": T0_US}
    world.rows = make_triggers(*({"request_id": f"r{n}", "origin": f"A{n:02}"} | watermark for n in range(6)))
    world.raw += [departure(6 + n, time) for n, time in enumerate(times)]
    checks = audit()
    assert differing(checks) == []
    assert "3 in LATE panes alone" in checks[0].detail
    world.raw.append(departure(9, format_rfc3339(T0_US + 10 * MINUTE_US)))  # it is in no row, and was not late
    assert differing(audit()) == [checks[0].name]


def test_the_online_store_is_read_in_portions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "_KEYS_PER_READ", 4)
    assert differing(audit()) == []
    assert world.reads == [4, 2]


@pytest.mark.parametrize(("ttl", "found"), [(None, False), ("1h", True), ("36500d", False)])
def test_a_value_that_has_expired_is_not_asked_for_and_one_that_cannot_have_is(
    world: World, ttl: str | None, *, found: bool
) -> None:
    world.gone = {"A05"}  # the last one, so that the order of the answers stays
    view = make_trigger_view(ttl=ttl)
    application = Application(name="m", module="m", views={view.name: view}, models={})
    checks = run_audit(application, brokers="b", redis_url="r", delta="d", delta_options=OPTIONS)
    online = f"{view.name}: entities = entities with their newest row online"
    assert (online not in differing(checks)) is found
