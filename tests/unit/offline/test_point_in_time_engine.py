"""The point-in-time join over rows of the real engine, against engines that were stopped at the moment asked for."""

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from offline.point_in_time import read_as_of
from schemas.row import INPUT_COLUMNS, TIMESTAMP
from schemas.time import format_rfc3339
from streams.windowing.engine import WindowEngine
from tests.support.feature_rows import T0_US
from tests.support.scoring import MINUTE_US, make_carrier_view

VIEW = make_carrier_view(allowed_lateness="10m", emit="every_event")
ORDER = ("window_end", "pane_index", "source_offset")
Log = list[tuple[str, int, float]]


def run(log: Log) -> pa.Table:
    """Feature rows that the engine makes of events (carrier, minute, departure delay)."""
    schema = pa.schema([*VIEW.source.schema.arrow_schema, *INPUT_COLUMNS])
    events = [
        dict.fromkeys(schema.names)
        | {
            "carrier": carrier,
            "event_time": format_rfc3339(T0_US + minute * MINUTE_US),
            "departure_delay": delay,
            "_offset": offset,
        }
        for offset, (carrier, minute, delay) in enumerate(log)
    ]
    result = WindowEngine(VIEW).step(pa.Table.from_pylist(events, schema=schema), processing_time_us=T0_US)
    context = [
        pa.nulls(result.rows.num_rows, field.type)
        for field in VIEW.row_schema
        if field.name not in result.rows.column_names
    ]
    names = [field.name for field in VIEW.row_schema if field.name not in result.rows.column_names]
    rows = result.rows
    for name, values in zip(names, context, strict=True):
        rows = rows.append_column(name, values)
    return rows


def stored(log: Log, carrier: str, at_us: int) -> dict[str, Any] | None:
    """The row that a guarded store holds once the partition has passed ``at_us``."""
    newest_minutes = [max(minute for _, minute, _ in log[: n + 1]) for n in range(len(log))]
    prefix = log[: sum(T0_US + minute * MINUTE_US <= at_us for minute in newest_minutes)]
    newest: dict[str, Any] | None = None
    for row in run(prefix).to_pylist():
        is_newer = newest is None or [row[name] for name in ORDER] > [newest[name] for name in ORDER]
        if row["carrier"] == carrier and is_newer:
            newest = row
    return newest


@settings(max_examples=60, deadline=None)
@given(
    log=st.lists(
        st.tuples(st.sampled_from(["AA", "UA"]), st.integers(0, 150), st.integers(-9, 9).map(float)), max_size=18
    ),
    asked=st.lists(st.tuples(st.sampled_from(["AA", "UA"]), st.integers(-1, 152)), min_size=1, max_size=5),
    disorder=st.integers(0, 12),
)
def test_reads_equal_those_from_an_engine_that_was_stopped_then(log: Log, asked: list[tuple[str, int]], disorder: int):
    # Roughly in order, as far out of it as the disorder allows: late rows, late panes and empty ones come of it.
    log.sort(key=lambda event: event[1] + (event[1] * 7) % (disorder + 1))
    times = [T0_US + minute * MINUTE_US for _, minute in asked]

    found = read_as_of(
        pa.chunked_array([pa.array([carrier for carrier, _ in asked])]),
        pa.chunked_array([pa.array(times, TIMESTAMP)]),
        run(log),
        view=VIEW,
    )

    expected = [stored(log, carrier, at_us) for (carrier, _), at_us in zip(asked, times, strict=True)]
    assert found.event_time.to_pylist() == [None if row is None else row["event_time"] for row in expected]
    for name in VIEW.definitions:
        assert found.features[name].to_pylist() == [None if row is None else row[name] for row in expected]
    statuses = ["missing" if row is None else "empty" if row["pane"] == "EMPTY" else "present" for row in expected]
    assert found.status.to_pylist() == statuses
