"""Changes and buckets of the state: what they hold, what they cost, and what is refused."""

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest

from schemas.aggregation import approx_distinct, count, distinct, entropy, last, quantile, sum_, variance
from schemas.entity import Entity
from schemas.errors import StateVersionError, WindowingError
from schemas.view import FeatureView
from streams.windowing import N_BUCKETS, PartKind, WindowEngine, read_header
from streams.windowing.bucket import bucket_of, buckets_of_numbers
from streams.windowing.snapshot import Content, PartHeader, newest_first, read_part
from tests.support.builders import Row, make_batch, make_source


def make_view(**settings: Any) -> FeatureView:
    defaults: dict[str, Any] = {
        "slide": "10s",
        "features": {
            "n": count().over("60s"),
            "kinds": distinct("kind").over("60s"),
            "entropy_3": entropy("kind").over(last=3),
            "newest": last("kind").over(lifetime=True),
        },
        "emit": "latest",
    }
    source = make_source(**settings.pop("source", {"max_out_of_orderness": "100s"}))
    return FeatureView("v", version=1, entity=Entity("thing", key="key"), source=source, **defaults | settings)


def event(offset: int, at: int, key: str = "a", **fields: Any) -> Row:
    return {"key": key, "at": at, "kind": "x", "n": 1, "_offset": offset} | fields


def feed(engine: WindowEngine, rows: list[Row]) -> None:
    engine.step(make_batch(engine.view, rows), processing_time_us=0)


def content_of(blob: bytes) -> Content:
    return read_part(blob, identity={})


def keys_in(blob: bytes) -> list[Any]:
    content = content_of(blob)
    section = "keys" if "keys" in content.tables else "sessions"
    return content.tables[section].column("key").to_pylist() if section in content.tables else []


def rows_in(blob: bytes, section: str) -> int:
    table = content_of(blob).tables.get(section)
    return 0 if table is None else table.num_rows


def fill(engine: WindowEngine, n_keys: int) -> None:
    """Give each key a row in each of five tiles."""
    places = [(minute, key) for minute in range(5) for key in range(n_keys)]
    feed(engine, [event(i, 10 * minute, f"key-{key}") for i, (minute, key) in enumerate(places)])


def test_changes_hold_the_changed_tiles_of_the_changed_keys_and_no_others() -> None:
    engine = WindowEngine(make_view())
    fill(engine, 100)
    first = engine.changes()
    feed(engine, [event(1_000, 41, "key-7"), event(1_001, 42, "key-7"), event(1_002, 11, "key-3", kind="new")])
    blob = engine.changes()

    assert (rows_in(first, "keys"), rows_in(first, "tiles")) == (100, 500)
    assert sorted(keys_in(blob)) == ["key-3", "key-7"]
    tiles = content_of(blob).tables["tiles"]
    assert sorted(tiles.column("tile").to_pylist()) == [1, 4]
    assert rows_in(blob, "windowless") == 2
    assert sorted(content_of(blob).tables["pool.kind"].column("value").to_pylist()) == ["new", "x"]
    assert len(blob) < len(first) / 2


def test_nothing_changed_is_told_in_few_bytes() -> None:
    engine = WindowEngine(make_view())
    fill(engine, 2_000)
    first = engine.changes()
    blob = engine.changes()

    assert keys_in(blob) == []
    assert len(blob) < 3_000 < len(first)


@pytest.mark.parametrize("windows", [{}, {"slide": None, "gap": "10s", "features": {"n": count()}}])
def test_buckets_divide_the_keys(windows: dict[str, Any]) -> None:
    engine = WindowEngine(make_view(**windows))
    fill(engine, 300)
    engine.changes()
    blobs = [engine.bucket(number) for number in range(N_BUCKETS)]

    assert sorted(key for blob in blobs for key in keys_in(blob)) == sorted(f"key-{k}" for k in range(300))
    for number, blob in enumerate(blobs):
        assert read_header(blob) == PartHeader(kind=PartKind.BUCKET, number=1, bucket=number)
        assert {bucket_of(key) for key in keys_in(blob)} <= {number}


def test_a_bucket_hangs_on_the_key_alone() -> None:
    assert [bucket_of(key) for key in ("", "a", "user-1", "日本", 0, 1, -1, 2**63 - 1)] == [0, 2, 27, 0, 49, 25, 37, 54]
    assert set(buckets_of_numbers(np.arange(10_000)).tolist()) == set(range(N_BUCKETS))


def test_removed_keys_stay_removed_though_older_parts_hold_them() -> None:
    view = make_view(features={"n": count().over("60s"), "kinds": distinct("kind").over("60s")}, source={})
    engine = WindowEngine(view)
    fill(engine, 50)
    parts = [engine.changes(), *(engine.bucket(number) for number in range(0, N_BUCKETS, 2))]
    feed(engine, [event(1_000, 1_000, "other")])
    parts.append(engine.changes())
    restored = WindowEngine.restore_parts(view, parts)

    assert keys_in(restored.snapshot()) == ["other"]
    assert rows_in(restored.snapshot(), "tiles") == 1
    # To say so costs nothing, however many they are.
    assert keys_in(parts[-1]) == ["other"]


def test_a_key_that_came_back_has_nothing_of_its_old_state() -> None:
    view = make_view(state_ttl="60s", source={})
    engine = WindowEngine(view)
    feed(engine, [event(0, 0, kind="old"), event(1, 1, kind="old")])
    parts = [engine.changes(), *map(engine.bucket, range(N_BUCKETS))]
    feed(engine, [event(2, 1_000, "b")])
    feed(engine, [event(3, 1_001, "a", kind=None), event(4, 1_002, "b")])
    parts.append(engine.changes())
    restored = WindowEngine.restore_parts(view, parts)
    after = make_batch(view, [event(5, 1_003, "a", kind=None), event(6, 1_004, "b")])

    expected = engine.step(after, processing_time_us=0).rows
    assert restored.step(after, processing_time_us=0).rows.equals(expected)
    assert expected.column("newest").to_pylist() == [None, "x"]


def test_of_two_parts_that_hold_a_key_the_newer_is_right() -> None:
    view = make_view()
    engine = WindowEngine(view)
    parts = []
    for offset, kind in enumerate("pqr"):
        feed(engine, [event(offset, 0, kind=kind)])
        parts.append(engine.changes())
    restored = WindowEngine.restore_parts(view, parts)
    after = make_batch(view, [event(5, 1, kind="r")])

    expected = engine.step(after, processing_time_us=0).rows
    assert restored.step(after, processing_time_us=0).rows.equals(expected)
    assert [expected.column(name).to_pylist() for name in ("n", "kinds", "newest")] == [[4], [3], ["r"]]


def test_what_fired_at_a_tick_since_is_not_pending_in_older_changes() -> None:
    view = make_view(allowed_lateness="60s", emit="on_close", source={})
    engine = WindowEngine(view)
    parts = []
    batches = [[event(0, 5), event(1, 15)], [event(2, 6)], [event(3, 25)], [event(4, 26, "b")]]
    for rows in batches:
        feed(engine, rows)
        parts.append(engine.changes())
    restored = WindowEngine.restore_parts(view, parts)
    after = make_batch(view, [event(5, 35, "b")])

    expected = engine.step(after, processing_time_us=0).rows
    assert restored.step(after, processing_time_us=0).rows.equals(expected)
    assert expected.column("pane").to_pylist() == ["ON_TIME", "ON_TIME"]


def check_every_cut(view: FeatureView, batches: list[list[Row]]) -> list[Row]:
    """Restore after each batch, from changes and from buckets, and go on; gives the rows of the last batch."""
    engine = WindowEngine(view)
    parts, results, buckets = [], [], []
    for rows in batches:
        results.append(engine.step(make_batch(view, rows), processing_time_us=0).rows)
        parts.append(engine.changes())
        buckets.append([engine.bucket(number) for number in range(N_BUCKETS)])
    for cut in range(1, len(batches)):
        for kept in (parts[:cut], buckets[cut - 1]):
            restored = WindowEngine.restore_parts(view, kept)
            for rows, result in zip(batches[cut:], results[cut:], strict=True):
                assert restored.step(make_batch(view, rows), processing_time_us=0).rows.equals(result)
    fired: list[Row] = results[-1].select(["key", "pane", "pane_index", "n"]).to_pylist()
    return fired


def test_a_pane_goes_on_counting_its_firings_and_a_frozen_one_keeps_its_values() -> None:
    view = make_view(features={"n": count().over("20s")}, allowed_lateness="7s", emit="on_close", source={})
    # The window that ends at 10 changes after it fired, expires at 17, and tells of the change at the tick at 20.
    batches = [[event(0, 5), event(1, 11)], [event(2, 6)], [event(3, 18, "b")], [event(4, 7)], [event(5, 21, "b")]]

    assert {"key": "a", "pane": "LATE", "pane_index": 1, "n": 2} in check_every_cut(view, batches)


def test_an_end_that_a_late_row_empties_is_told_of_at_the_tick() -> None:
    view = make_view(features={"n": count().over("10s")}, allowed_lateness="60s", emit="on_close", source={})
    batches = [[event(0, 5), event(1, 35, "b")], [event(2, 16)], [event(3, 36, "b")], [event(4, 45, "b")]]

    fired = [row for row in check_every_cut(view, batches) if row["key"] == "a"]
    assert fired == [
        {"key": "a", "pane": "LATE", "pane_index": 1, "n": 1},
        {"key": "a", "pane": "EMPTY", "pane_index": 0, "n": 0},
    ]


def test_remembered_ids_are_told_once_and_divided_into_buckets() -> None:
    view = make_view(source={"event_id": "id", "dedup_window": "1h", "max_out_of_orderness": "100s"})
    engine = WindowEngine(view)
    feed(engine, [event(i, i % 50, id=f"id-{i}") for i in range(200)])
    engine.changes()
    feed(engine, [event(300, 5, id="id-300"), event(301, 5, id="id-7"), event(302, 5, id=None)])
    blob = engine.changes()
    buckets = [engine.bucket(number) for number in range(N_BUCKETS)]

    assert content_of(blob).tables["duplicates"].column("id").to_pylist() == ["id-300"]
    assert sum(rows_in(b, "duplicates") for b in buckets) == 201
    restored = WindowEngine.restore_parts(view, [blob, *buckets])
    repeats = make_batch(view, [event(400 + i, i % 50, id=f"id-{i}") for i in range(200)])
    assert restored.step(repeats, processing_time_us=0).counts.rejected == 200


def test_a_bucket_is_taken_right_after_changes() -> None:
    engine = WindowEngine(make_view())
    feed(engine, [event(0, 0)])

    with pytest.raises(WindowingError, match=r"bucket 3 was asked for after a step, .* call that first"):
        engine.bucket(3)
    engine.changes()
    engine.bucket(3)
    engine.close()
    with pytest.raises(WindowingError, match="after a step"):
        engine.bucket(3)
    with pytest.raises(WindowingError, match="bucket 64 was asked for, expected 0 to 63"):
        engine.bucket(N_BUCKETS)


def test_missing_changes_are_refused() -> None:
    view = make_view()
    engine = WindowEngine(view)
    changes = []
    for turn in range(4):
        feed(engine, [event(turn, turn)])
        changes.append(engine.changes())

    with pytest.raises(StateVersionError, match=r"changes 2 of the state are missing \(1 of 4 .* rebuild the state"):
        WindowEngine.restore_parts(view, [changes[0], *changes[2:]])
    with pytest.raises(StateVersionError, match=r"changes 1 of the state are missing \(4 of 4"):
        WindowEngine.restore_parts(view, [engine.bucket(1)])
    assert WindowEngine.restore_parts(view, []).last_offset is None


def test_numbers_go_on_after_a_restart() -> None:
    view = make_view()
    engine = WindowEngine(view)
    feed(engine, [event(0, 0)])
    parts = [engine.changes()]
    engine = WindowEngine.restore_parts(view, parts)
    assert engine.last_offset == 0
    feed(engine, [event(1, 1, "b")])
    parts.append(engine.changes())

    assert [read_header(blob).number for blob in parts] == [1, 2]
    assert keys_in(parts[1]) == ["b"]
    assert sorted(keys_in(WindowEngine.restore_parts(view, parts).snapshot())) == ["a", "b"]


def test_parts_of_another_definition_or_partition_are_refused() -> None:
    view = make_view()
    engine = WindowEngine(view)
    blob = engine.changes()
    other = make_view(features={"total": sum_("n").over("60s")})

    with pytest.raises(StateVersionError, match="definition_hash"):
        WindowEngine.restore_parts(other, [blob])
    with pytest.raises(StateVersionError, match="has partition '0', expected '3'"):
        WindowEngine.restore_parts(view, [blob], source_partition=3)


def test_the_newest_of_each_bucket_and_the_changes_after_the_oldest_of_them_are_chosen() -> None:
    def changes(number: int) -> PartHeader:
        return PartHeader(kind=PartKind.CHANGES, number=number)

    def bucket(number: int, which: int) -> PartHeader:
        return PartHeader(kind=PartKind.BUCKET, number=number, bucket=which)

    whole = PartHeader(kind=PartKind.WHOLE, number=2)
    headers = [changes(1), changes(2), whole, bucket(3, 0), changes(3), changes(4), bucket(1, 0), bucket(4, 1)]

    assert newest_first(headers) == ([7, 5, 3, 4, 2], 4)
    assert newest_first([]) == ([], 0)


@pytest.mark.parametrize("windows", [{"slide": "10s"}, {"slide": None, "gap": "20s"}])
def test_keys_that_have_gone_quiet_take_no_memory(windows: dict[str, Any]) -> None:
    """Wave after wave of other keys, ids and texts; what one needs, the next one uses again."""

    def over(aggregation: Any) -> Any:
        return aggregation.over("60s") if windows["slide"] else aggregation

    features = {
        **{"n": over(count()), "kinds": over(distinct("kind")), "spread": over(variance("x"))},
        **{"sketch": over(approx_distinct("kind")), "median": over(quantile("x", q=0.5))},
        **{"entropy_3": entropy("kind").over(last=3), "newest": last("kind").over(lifetime=True)},
    }
    source = {"event_id": "id", "dedup_window": "60s"}
    view = make_view(features=features, state_ttl="60s", allowed_lateness="10s", source=source, **windows)
    engine = WindowEngine(view)
    sizes = []
    tracemalloc.start()
    try:
        for wave in range(9):
            for turn in range(3):
                names = [f"{wave}-{number}" for number in range(1_100)]
                rows = [
                    event(3 * 1_100 * wave + 1_100 * turn + i, 600 * wave + 10 * turn, f"key-{name}")
                    | {"kind": f"kind-{name}", "x": float(i), "id": f"id-{turn}-{name}"}
                    for i, name in enumerate(names)
                ]
                feed(engine, rows)
            engine.changes()
            del rows, names
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    assert max(sizes[6:]) < 1.05 * max(sizes[2:5])
