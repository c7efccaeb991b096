from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from offline.point_in_time import AsOf, read_as_of
from schemas.row import TIMESTAMP
from schemas.view import FeatureView
from tests.support.feature_rows import T0_US, make_rows
from tests.support.scoring import CARRIERS, MINUTE_US, make_carrier_view

SLIDE_US = 5 * MINUTE_US
OUT_OF_ORDERNESS_US = 2 * MINUTE_US


def row(
    at_minute: float, delay: float | None, *, offset: int = 0, front: float | None = None, **changes: Any
) -> dict[str, Any]:
    """A row whose partition's newest event was at minute ``front`` when it was made (by default its own)."""
    time_us = T0_US + round(at_minute * MINUTE_US)
    front_us = time_us if front is None else T0_US + round(front * MINUTE_US)
    return {
        "carrier": "AA",
        "trips_1h": 1,
        "last_delay": delay,
        "event_time": time_us,
        "window_end": (time_us // SLIDE_US + 1) * SLIDE_US,
        "watermark": front_us - OUT_OF_ORDERNESS_US,
        "source_offset": offset,
    } | changes


def read(
    rows: list[dict[str, Any]],
    *asked: tuple[str | None, float],
    view: FeatureView = CARRIERS,
    max_age_us: int | None = None,
) -> AsOf:
    keys = pa.chunked_array([pa.array([key for key, _ in asked], pa.string())])
    times = pa.chunked_array([pa.array([T0_US + round(minute * MINUTE_US) for _, minute in asked], TIMESTAMP)])
    return read_as_of(keys, times, make_rows(view, rows), view=view, max_age_us=max_age_us)


def delays(found: AsOf) -> list[float | None]:
    return found.features["last_delay"].to_pylist()


def test_a_read_finds_the_newest_row_up_to_its_moment_and_never_one_from_after():
    rows = [row(0, 1.0), row(10, 2.0, offset=1), row(20, 3.0, offset=2)]

    found = read(rows, ("AA", 9.999), ("AA", 10), ("AA", 19), ("AA", 99), ("AA", -1))

    assert delays(found) == [1.0, 2.0, 2.0, 3.0, None]
    assert found.status.to_pylist() == ["present"] * 4 + ["missing"]
    assert found.event_time.cast(pa.int64()).to_pylist() == [
        None if minute is None else T0_US + minute * MINUTE_US for minute in (0, 10, 10, 20, None)
    ]


def test_answers_come_in_the_order_asked_for():
    rows = [row(0, 1.0), row(10, 2.0, offset=1), row(0, 7.0, carrier="UA")]

    assert delays(read(rows, ("AA", 30), ("UA", 5), ("AA", 5), (None, 30), ("ZZ", 30))) == [2.0, 7.0, 1.0, None, None]


def test_of_rows_of_one_moment_the_one_with_the_greater_offset_counts():
    assert delays(read([row(0, 2.0, offset=8), row(0, 1.0, offset=7)], ("AA", 0))) == [2.0]


def test_the_row_of_an_event_that_came_out_of_order_is_not_known_before_it_came():
    # The event of minute 1 came when the partition was at minute 5; no newer window of the key is stored yet.
    rows = [row(1, 1.0, offset=3, front=5)]

    assert delays(read(rows, ("AA", 4.999), ("AA", 5))) == [None, 1.0]


def test_an_older_row_that_comes_later_does_not_replace_the_newer_one():
    # As in the online store: the newest is the one with the later window end, not the one that came last.
    rows = [row(6, 2.0, offset=1), row(1, 1.0, offset=2, front=6)]

    assert delays(read(rows, ("AA", 7))) == [2.0]


def test_a_closing_pane_is_known_when_the_watermark_has_reached_its_window_end():
    window_end_us = (T0_US // SLIDE_US + 1) * SLIDE_US
    closing_minute = (window_end_us - T0_US) / MINUTE_US
    fired_minute = closing_minute + OUT_OF_ORDERNESS_US / MINUTE_US
    closing = row(closing_minute, 9.0, offset=5, front=fired_minute, pane="ON_TIME", window_end=window_end_us)
    rows = [row(0, 1.0, offset=4), closing]

    assert delays(read(rows, ("AA", closing_minute), ("AA", fired_minute - 0.001), ("AA", fired_minute))) == [
        1.0,
        1.0,
        9.0,
    ]


def test_a_row_older_than_the_limit_is_stale_and_leaves_its_features_missing():
    found = read([row(0, 1.0)], ("AA", 10), ("AA", 10.001), max_age_us=10 * MINUTE_US)

    assert found.status.to_pylist() == ["present", "stale"]
    assert delays(found) == [1.0, None]
    assert found.event_time.null_count == 0


def test_the_time_to_live_of_the_view_goes_before_a_longer_limit():
    view = make_carrier_view(ttl="5m")

    assert read([row(0, 1.0)], ("AA", 6), view=view).status.to_pylist() == ["stale"]
    assert read([row(0, 1.0)], ("AA", 6), view=view, max_age_us=9 * MINUTE_US).status.to_pylist() == ["stale"]
    assert read([row(0, 1.0)], ("AA", 4), view=view, max_age_us=3 * MINUTE_US).status.to_pylist() == ["stale"]


def test_an_empty_row_does_not_go_stale():
    found = read([row(0, None, pane="EMPTY", trips_1h=0)], ("AA", 500), max_age_us=MINUTE_US)

    assert found.status.to_pylist() == ["empty"]
    assert found.features["trips_1h"].to_pylist() == [0]


def test_features_keep_the_types_of_the_view_also_where_nothing_is_found():
    assert read([], ("AA", 0)).features.schema == pa.schema(
        [CARRIERS.feature_schema.field(name) for name in CARRIERS.definitions]
    )


@dataclass(frozen=True)
class Event:
    key: str
    minute: int
    closes: int | None
    """Window end, in slides before the watermark's, of a closing pane that the event fires; None for no pane."""


EVENTS = st.lists(
    st.builds(Event, key=st.sampled_from("AB"), minute=st.integers(0, 60), closes=st.none() | st.integers(0, 3)),
    max_size=25,
)


def log_of(events: list[Event]) -> list[dict[str, Any]]:
    """Feature rows as an engine makes them of one partition's events, in the order in which it makes them."""
    rows, front_us = [], 0
    for offset, event in enumerate(events):
        time_us = T0_US + event.minute * MINUTE_US
        front_us = max(front_us, time_us)
        watermark_us = front_us - OUT_OF_ORDERNESS_US
        common = {"carrier": event.key, "trips_1h": 1, "source_offset": offset, "watermark": watermark_us}
        if event.closes is not None:
            end_us = (watermark_us // SLIDE_US - event.closes) * SLIDE_US
            rows.append(
                {
                    "event_time": end_us,
                    "window_end": end_us,
                    "pane": "LATE",
                    "pane_index": 1,
                    "last_delay": offset + 0.5,
                }
                | common
            )
        end_us = (time_us // SLIDE_US + 1) * SLIDE_US
        rows.append(
            {"event_time": time_us, "window_end": end_us, "pane": "EARLY", "pane_index": 0, "last_delay": float(offset)}
            | common
        )
    return rows


def order(made: dict[str, Any]) -> tuple[int, int, int]:
    return made["window_end"], made["pane_index"], made["source_offset"]


def replay(events: list[Event], rows: list[dict[str, Any]], key: str, at_us: int) -> float | None:
    """The oracle: run the pipeline until the partition has passed ``at_us``, row by row into a guarded store."""
    stored: dict[str, Any] | None = None
    front_us = 0
    for offset, event in enumerate(events):
        front_us = max(front_us, T0_US + event.minute * MINUTE_US)
        if front_us > at_us:
            break
        for made in rows:
            is_written = made["source_offset"] == offset and made["carrier"] == key
            if is_written and (stored is None or order(made) > order(stored)):
                stored = made
    return None if stored is None else stored["last_delay"]


@settings(max_examples=200, deadline=None)
@given(
    events=EVENTS,
    asked=st.lists(st.tuples(st.sampled_from("AB"), st.integers(-1, 62)), min_size=1, max_size=8),
    shuffled=st.randoms(use_true_random=False),
)
def test_reads_equal_a_pipeline_that_was_stopped_at_their_moment(
    events: list[Event], asked: list[tuple[str, int]], shuffled: Any
):
    rows = log_of(events)
    expected = [replay(events, rows, key, T0_US + minute * MINUTE_US) for key, minute in asked]
    shuffled.shuffle(rows)

    assert delays(read(rows, *asked)) == expected


@settings(max_examples=100, deadline=None)
@given(events=EVENTS, future=EVENTS, minute=st.integers(0, 60))
def test_rows_from_the_future_change_nothing(events: list[Event], future: list[Event], minute: int):
    rows = log_of(events)
    # A day on, since a closing pane's event time may lie hours before the event that fires it.
    planted = [
        made | {"event_time": made["event_time"] + 24 * 60 * MINUTE_US, "source_offset": made["source_offset"] + 100}
        for made in log_of(future)
    ]

    before, after = (read(log, ("A", minute), ("B", minute)) for log in (rows, planted + rows))
    assert delays(before) == delays(after)
    assert before.status.to_pylist() == after.status.to_pylist()
