import dataclasses
import math
import random
from typing import Any

import pyarrow as pa
import pytest

from schemas.aggregation import (
    approx_distinct,
    count,
    decayed_sum,
    derived,
    distinct,
    entropy,
    first,
    from_event,
    last,
    last_n,
    max_,
    mean,
    quantile,
    sum_,
    time_since_last,
    top_k,
    variance,
)
from schemas.entity import Entity
from schemas.errors import SchemaMismatchError, StateVersionError, WindowingError
from schemas.row import REJECTED_COLUMNS
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US
from schemas.view import FeatureView
from streams.windowing import WatermarkMarker, WindowEngine
from streams.windowing.snapshot import read_part
from tests.support.builders import Row, make_batch, make_source, run_engine, to_rows
from tests.support.oracle import Oracle

SECOND_US = 1_000_000


def make_view(**settings: Any) -> FeatureView:
    source = make_source(**settings.pop("source", {}))
    defaults: dict[str, Any] = {
        "slide": "10s",
        "allowed_lateness": "20s",
        "emit": "every_event",
        "features": {"n": count().over("20s"), "s": sum_("x").over("10s"), "newest": last("kind").over(last=2)},
    }
    return FeatureView("view", version=1, entity=Entity("thing", key="key"), source=source, **defaults | settings)


def event(offset: int, at: int, key: str | None = "a", **columns: Any) -> Row:
    return {"key": key, "at": at, "_offset": offset, "_broker_time": None, "_request_id": None} | columns


def random_log(n_rows: int, *, seed: int, n_keys: int = 5, n_values: int = 4) -> list[Row]:
    generator = random.Random(seed)
    names = ("id", "kind", "n", "x", "flag", "tags")
    rows = []
    for offset in range(n_rows):
        columns: dict[str, Any] = dict.fromkeys(names)
        columns["kind"] = f"k{generator.randrange(n_values)}"
        columns["n"] = generator.randrange(-n_values, n_values)
        columns["x"] = generator.choice([None, 0.1, 0.7, 1e9])
        at = offset // 3 - generator.choice([0, 0, 1, 4, 30])
        rows.append(event(offset, at, f"key-{generator.randrange(n_keys) + offset // 40}", **columns))
    return rows


def test_a_new_engine_knows_nothing() -> None:
    engine = WindowEngine(make_view())

    assert (engine.watermark_us, engine.last_offset, engine.is_idle) == (MINUS_INFINITY_US, None, False)
    assert engine.close().rows.num_rows == 0
    assert engine.watermark_us == END_OF_TIME_US


def test_no_rows_give_no_rows_with_all_columns() -> None:
    view = make_view()
    result = WindowEngine(view).step(make_batch(view, []), processing_time_us=0)

    assert result.rows.schema == view.engine_schema
    assert result.dead_letters.schema == REJECTED_COLUMNS
    assert (result.rows.num_rows, result.counts.admitted) == (0, 0)


def test_counts_add_up() -> None:
    view = make_view(allowed_lateness="0s")
    rows = [event(0, 5), event(1, 25), event(2, 12), event(3, 3), event(4, 40, None)]
    result = WindowEngine(view).step(make_batch(view, rows), processing_time_us=0)
    counts = result.counts

    assert counts.admitted + counts.rejected == len(rows)
    assert counts.early + counts.without_as_of == counts.admitted
    assert (counts.rejected, counts.partially_late, counts.without_as_of) == (2, 1, 1)
    assert counts.on_time + counts.late + counts.empty + counts.early == result.rows.num_rows
    assert result.watermark_us == 25 * SECOND_US


def test_offsets_that_do_not_rise_are_refused_and_change_nothing() -> None:
    view = make_view()
    engine = WindowEngine(view)
    engine.step(make_batch(view, [event(5, 1), event(7, 2)]), processing_time_us=0)

    with pytest.raises(WindowingError, match="offset 7 came after 7, expected rising offsets"):
        engine.step(make_batch(view, [event(7, 2)]), processing_time_us=0)
    with pytest.raises(WindowingError, match="offset 8 came after 9"):
        engine.step(make_batch(view, [event(9, 2), event(8, 2)]), processing_time_us=0)
    assert engine.step(make_batch(view, [event(8, 3)]), processing_time_us=0).rows.column("n").to_pylist() == [3]


def test_columns_are_checked_and_cast() -> None:
    view = make_view()
    batch = make_batch(view, [event(0, 1, kind="x")])
    wide = batch.set_column(batch.column_names.index("kind"), "kind", batch.column("kind").cast(pa.large_string()))
    assert WindowEngine(view).step(wide.to_batches()[0], processing_time_us=0).rows.num_rows == 1

    with pytest.raises(SchemaMismatchError, match="column `kind` is not in the batch"):
        WindowEngine(view).step(batch.drop_columns(["kind"]), processing_time_us=0)
    text = batch.set_column(batch.column_names.index("x"), "x", pa.array(["much"]))
    with pytest.raises(SchemaMismatchError, match="column `x` of the batch is string, expected double"):
        WindowEngine(view).step(text, processing_time_us=0)
    no_offset = batch.set_column(batch.column_names.index("_offset"), "_offset", pa.array([None], pa.int64()))
    with pytest.raises(SchemaMismatchError, match="column `_offset` of the batch has nulls"):
        WindowEngine(view).step(no_offset, processing_time_us=0)


def test_the_end_of_time_is_shown_as_the_last_date_time() -> None:
    view = make_view()
    table, _, _ = run_engine(view, [event(0, 1)], close=True)

    assert str(table.column("watermark").to_pylist()[-1]) == "9999-12-31 23:59:59.999999+00:00"
    assert table.column("source_offset").to_pylist() == [0, 0, 0, 0]
    assert set(table.column("request_id").to_pylist()) == {"test.events-0-0"}


def test_after_close_every_row_is_late() -> None:
    view = make_view()
    engine = WindowEngine(view)
    engine.close()
    result = engine.step(make_batch(view, [event(0, -5)]), processing_time_us=0)

    assert result.dead_letters.select(["reason", "late_by_us"]).to_pylist() == [
        {"reason": "late", "late_by_us": END_OF_TIME_US}
    ]


def test_a_derived_feature_may_stand_alone() -> None:
    view = make_view(features={"one": derived("1"), "is_one": derived("one == 1")})
    table, _, _ = run_engine(view, [event(0, 1), event(1, 2)])

    assert table.select(["one", "is_one"]).to_pylist() == [{"one": 1.0, "is_one": True}] * 2


# Snapshots


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"allowed_lateness": "1s"}, "has definition_hash '.*', expected '.*'; rebuild the state from the log"),
        ({"name": "other"}, "has view 'view', expected 'other'"),
    ],
)
def test_a_snapshot_of_another_definition_is_refused(change: dict[str, Any], says: str) -> None:
    view = make_view()
    blob = WindowEngine(view).snapshot()

    with pytest.raises(StateVersionError, match=says):
        WindowEngine.restore(dataclasses.replace(view, **change), blob)
    with pytest.raises(StateVersionError, match="has partition '0', expected '3'"):
        WindowEngine.restore(view, blob, source_partition=3)


def test_a_snapshot_of_another_format_or_none_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view()
    monkeypatch.setattr("streams.windowing.snapshot.FORMAT_VERSION", 99)
    blob = WindowEngine(view).snapshot()
    monkeypatch.undo()

    with pytest.raises(StateVersionError, match="has format_version '99', expected '3'"):
        WindowEngine.restore(view, blob)
    for junk in (b"", b"junk", blob[: len(blob) // 2]):
        with pytest.raises(StateVersionError, match=r"is damaged, .* rebuild the state from the log"):
            WindowEngine.restore(view, junk)


def test_no_damaged_bit_of_a_snapshot_is_overlooked() -> None:
    view = make_view()
    engine = WindowEngine(view)
    engine.step(make_batch(view, random_log(50, seed=7)), processing_time_us=0)
    blob = engine.snapshot()

    for at in random.Random(5).sample(range(8 * len(blob)), 400):
        damaged = bytearray(blob)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(StateVersionError, match="is damaged"):
            WindowEngine.restore(view, bytes(damaged))


def test_owner_version_and_read_time_ttl_may_change_under_a_snapshot() -> None:
    view = make_view()
    blob = WindowEngine(view).snapshot()
    WindowEngine.restore(dataclasses.replace(view, version=2, owner="other", ttl="1h"), blob)


def test_a_snapshot_does_not_change_the_engine() -> None:
    view = make_view()
    engine = WindowEngine(view)
    engine.step(make_batch(view, random_log(50, seed=1)), processing_time_us=0)

    assert engine.snapshot() == engine.snapshot()


def n_keys(engine: WindowEngine) -> int:
    tables = read_part(engine.snapshot(), identity={}).tables
    return int(tables["keys" if "keys" in tables else "sessions"].num_rows)


@pytest.mark.parametrize("windows", [{"slide": "10s"}, {"slide": None, "gap": "10s"}])
def test_state_expires_after_recovery(windows: dict[str, Any]) -> None:
    features = {"n": count().over("20s")} if windows["slide"] else {"n": count()}
    view = make_view(features=features, **windows)
    engine = WindowEngine(view)
    engine.step(make_batch(view, [event(offset, 0, f"key-{offset}") for offset in range(2_000)]), processing_time_us=0)
    engine = WindowEngine.restore(view, engine.snapshot())
    assert n_keys(engine) == 2_000
    later = [event(offset, offset, "other") for offset in range(2_000, 5_000)]
    engine.step(make_batch(view, later), processing_time_us=0)

    assert n_keys(engine) == 1


def test_a_quiet_key_costs_nothing_after_its_windows_end() -> None:
    view = make_view(features={"n": count().over("20s"), "kinds": distinct("kind").over("20s")}, emit="latest")
    engine = WindowEngine(view)
    for turn in range(200):
        rows = [event(turn * 10 + i, turn * 30, f"key-{turn}-{i}", kind=f"{turn}-{i}") for i in range(10)]
        engine.step(make_batch(view, rows), processing_time_us=0)
    state = engine._intake._state  # type: ignore[attr-defined]  # the memory that must not grow

    assert state.keys.capacity <= 40
    assert len(state.keys) <= 30
    assert state.windows.tiles.is_live.sum() <= 30


# Rare paths made common

RARE = {
    "streams.windowing.value_pool._COMPACT_FROM": 2,
    "streams.windowing.window_column._VALUES_AT_ONCE": 3,
    "streams.windowing.newest_order.LONG": 1,
    "streams.windowing.newest.LONG": 1,
    "streams.windowing.segment._LONG": 1,
}


@pytest.mark.parametrize("seed", range(6))
def test_rare_paths_change_nothing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    view = make_view(
        allowed_lateness=["0s", "7s", "60s"][seed % 3],
        state_ttl=["15s", "30d"][seed % 2],
        features={
            "n": count().over("20s"),
            "s": sum_("x").over("40s"),
            "m": mean("n").over("20s"),
            "v": max_("kind").over("20s"),
            "kinds": distinct("kind").over("40s"),
            "h": entropy("n").over("20s"),
            "first": first("kind").over("20s"),
            "three": last_n("kind").over(last=3),
            "two": sum_("x").over(last=2),
            "all": last("kind").over(lifetime=True),
            "kinds_ever": distinct("kind").over(lifetime=True),
            "top": top_k("kind").over("40s"),
            "top_two": top_k("kind", k=1).over(last=2),
            "decayed": decayed_sum("x", half_life="5s").over("40s"),
            "decayed_ever": decayed_sum("n", half_life="5s").over(lifetime=True),
            "median": quantile("x", q=0.5).over("40s"),
            "about": approx_distinct("kind").over("40s"),
            "age": time_since_last(where="kind == 'k1'").over("40s"),
            "own": from_event("kind"),
        },
    )
    rows = random_log(300, seed=seed, n_values=40)
    expected, dead, _ = run_engine(view, rows, close=True)
    oracle = Oracle(view, predicates={"kind == 'k1'": lambda row: row["kind"] == "k1"}).run(rows, close=True)
    for name, value in RARE.items():
        monkeypatch.setattr(name, value)
    got, dead_too, _ = run_engine(view, rows, splits=range(0, 300, 7), restore=True, close=True)

    assert got.equals(expected)
    assert dead_too.equals(dead)
    assert expected.drop_columns(["h"]).num_rows == len(oracle.rows)
    for mine, theirs in zip(to_rows(expected), oracle.rows, strict=True):
        assert mine == theirs | {n: pytest.approx(theirs[n]) for n in ("h", "decayed", "decayed_ever")}


def test_batches_of_more_rows_than_16_bits_count() -> None:
    view = make_view(features={"n": count().over("20s"), "two": last_n("n").over(last=2)}, emit="latest")
    rows = [event(offset, offset // 5_000, f"key-{offset * 7_919 % 66_000}", n=offset) for offset in range(70_000)]
    whole, _, _ = run_engine(view, rows)
    parts, _, _ = run_engine(view, rows, splits=range(0, 70_000, 20_000))
    last_whole = {row["key"]: (row["n"], row["two"]) for row in to_rows(whole)}
    last_parts = {row["key"]: (row["n"], row["two"]) for row in to_rows(parts)}

    assert last_whole == last_parts


def test_spread_keeps_small_differences_of_large_values() -> None:
    view = make_view(features={"v": variance("x").over("20s")})
    rows = [event(i, 5 * i, x=1e9 + i) for i in range(4)]
    table, _, _ = run_engine(view, rows)

    assert [row["v"] for row in to_rows(table) if row["pane"] == "EARLY"] == pytest.approx([0, 0.25, 2 / 3, 1.25])


def test_one_huge_value_does_not_slow_later_batches_down() -> None:
    view = make_view(features={"s": sum_("n").over("20s"), "all": sum_("n").over(lifetime=True)})
    rows = [event(0, 0, "huge", n=2**62), event(1, 0, "huge", n=2**62)]
    rows += [event(offset, 1, f"key-{offset % 7}", n=offset) for offset in range(2, 3_000)]
    table, dead, _ = run_engine(view, rows, splits=[100, 1_000])

    assert dead.select(["_offset", "reason"]).to_pylist() == [{"_offset": 1, "reason": "overflow"}]
    assert table.num_rows == 2_999


# Idleness and markers


def test_a_replay_takes_the_same_decisions_from_markers() -> None:
    view = make_view(source={"idle_timeout": "30s", "idle_advance": True})
    live = WindowEngine(view)
    live.step(make_batch(view, [event(0, 5)]), processing_time_us=0)
    moved = live.poll_idle(processing_time_us=60 * SECOND_US, is_caught_up=True)
    after = live.step(make_batch(view, [event(1, 6), event(2, 70)]), processing_time_us=61 * SECOND_US)

    assert moved is not None
    assert moved.marker == WatermarkMarker(after_offset=0, watermark_us=35 * SECOND_US)
    replay = WindowEngine(view)
    replay.step(make_batch(view, [event(0, 5)]), processing_time_us=0)
    assert replay.advance(moved.marker).rows.equals(moved.rows)
    again = replay.step(make_batch(view, [event(1, 6), event(2, 70)]), processing_time_us=0)
    assert again.rows.equals(after.rows)
    assert again.dead_letters.equals(after.dead_letters)


def test_a_marker_out_of_place_is_refused() -> None:
    engine = WindowEngine(make_view())

    with pytest.raises(WindowingError, match="marker follows offset 3, but the last row given is None"):
        engine.advance(WatermarkMarker(after_offset=3, watermark_us=0))


def test_without_idle_timeout_nothing_is_idle() -> None:
    view = make_view()
    engine = WindowEngine(view)
    engine.step(make_batch(view, [event(0, 5)]), processing_time_us=0)

    assert engine.poll_idle(processing_time_us=10**15, is_caught_up=True) is None
    assert not engine.is_idle


# Duplicates


def test_the_memory_of_event_ids_is_bounded() -> None:
    view = make_view(source={"event_id": "id", "dedup_window": "10s"}, features={"n": count().over("10s")})
    engine = WindowEngine(view)
    for turn in range(100):
        rows = [event(turn * 5 + i, turn * 10, id=f"{turn}-{i}") for i in range(5)]
        engine.step(make_batch(view, rows), processing_time_us=0)
    content = read_part(engine.snapshot(), identity={})

    assert content.tables["duplicates"].num_rows <= 5 * 7


def test_an_item_of_a_list_that_is_no_finite_number_is_null() -> None:
    view = make_view(features={"newest": last_n("x").over(last=3), "x": from_event("x")})
    rows, _, _ = run_engine(view, [event(0, 1, x=0.5), event(1, 2, x=math.inf), event(2, 3), event(3, 4, x=-math.inf)])

    assert rows["newest"].to_pylist() == [[0.5], [0.5, None], [0.5, None], [None, None]]
    assert rows["x"].to_pylist() == [0.5, None, None, None]
