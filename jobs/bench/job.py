"""The job that benchmarks run: shop events of many users, four aggregates over sliding windows, one over the last rows.

Event times advance at :data:`EVENTS_PER_S` unless told otherwise, the rate that the pipeline has to keep up with. One
event in five is up to two seconds out of order; none is late.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from schemas.aggregation import count, entropy, max_, mean, sum_
from schemas.contract import load_contract
from schemas.entity import Entity
from schemas.row import INPUT_COLUMNS
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.wire import encode_lines

EVENTS_PER_S: Final = 250_000
KEYS: Final = 20_000
SIZE_MS: Final = 300_000
SLIDE_MS: Final = 60_000
OUT_OF_ORDERNESS_MS: Final = 5_000
START_MS: Final = 1_700_000_040_000
"""A whole minute."""
CATEGORIES: Final = ("books", "games", "music", "shoes", "tools", "wines", "bikes", "clock")
_TYPES: Final = ("click", "order")
_DISORDER_MS: Final = 2_000
_SHARE_DISORDERED: Final = 0.2
_CONTRACT: Final = "shop_event@1"


def make_view(emit: str) -> FeatureView:
    """The view of the job: count, sum, mean and max over 5 minutes by the minute, entropy over the last 3 rows."""
    return FeatureView(
        "bench_activity",
        version=1,
        entity=Entity("user", key="user_id"),
        source=EventSource("bench.events", contract=_CONTRACT, max_out_of_orderness=f"{OUT_OF_ORDERNESS_MS}ms"),
        slide="1m",
        emit=emit,
        features={
            "count_5m": count().over("5m"),
            "sum_5m": sum_("amount").over("5m"),
            "mean_5m": mean("amount").over("5m"),
            "max_5m": max_("amount").over("5m"),
            "entropy_3": entropy("category").over(last=3),
        },
    )


@dataclass
class EventStream:
    """Makes the events of the job, batch after batch, as the engine takes them.

    Attributes:
        n_keys: Number of users.
        time_ms: Event time that the stream has come to.
        n_rows: Rows made so far; the offset of the next.
        events_per_s: Rate at which event times advance.
    """

    n_keys: int
    time_ms: int = START_MS
    n_rows: int = 0
    events_per_s: int = EVENTS_PER_S

    def __post_init__(self) -> None:
        self._chance = np.random.default_rng(self.n_keys)
        self.users = _numbered("u{}", 0, self.n_keys)

    def batch(self, n_rows: int) -> pa.Table:
        """Events of random users, at the rate of the job."""
        step_ms = n_rows * 1_000 / self.events_per_s
        return self._events(self._chance.integers(0, self.n_keys, n_rows), step_ms, disorder_ms=_DISORDER_MS)

    def fill(self, n_rows: int) -> Iterator[pa.Table]:
        """One event of each user for each minute that a window reaches back, in batches; then on to the next minute.

        The newest minute comes first. The older events count in the windows that are still open, which leaves the state
        that a stream in order would leave, without closing each window on the way.
        """
        last_ms = self.time_ms // SLIDE_MS * SLIDE_MS + SIZE_MS
        for minute_ms in range(last_ms - SLIDE_MS, last_ms - SIZE_MS - SLIDE_MS, -SLIDE_MS):
            self.time_ms = minute_ms
            yield from self.sweep(n_rows)
        self.time_ms = last_ms

    def sweep(self, n_rows: int) -> Iterator[pa.Table]:
        """One event of each user within the minute, in batches; then on to the start of the next."""
        users = self._chance.permutation(self.n_keys)
        minute_ms, n_batches = self.time_ms // SLIDE_MS * SLIDE_MS, -(-self.n_keys // n_rows)
        for number in range(n_batches):
            self.time_ms = minute_ms + number * SLIDE_MS // n_batches
            part = users[number * n_rows : (number + 1) * n_rows]
            yield self._events(part, SLIDE_MS / n_batches, disorder_ms=0)
        self.time_ms = minute_ms + SLIDE_MS

    def _events(self, users: NDArray[np.int64], step_ms: float, *, disorder_ms: int) -> pa.Table:
        n_rows = len(users)
        advance = np.linspace(0, step_ms, n_rows, endpoint=False).astype(np.int64)
        lag = self._chance.integers(0, disorder_ms + 1, n_rows) * (self._chance.random(n_rows) < _SHARE_DISORDERED)
        times = self.time_ms + advance - lag.astype(np.int64)
        offsets = np.arange(self.n_rows, self.n_rows + n_rows)
        amounts = (self._chance.integers(100, 1_000, n_rows) * 10 + self._chance.integers(1, 10, n_rows)) / 100
        columns = {
            "event_id": _numbered("event{}", self.n_rows, n_rows),
            "user_id": self.users.take(pa.array(users)),
            "event_time": times,
            "event_type": _pick(_TYPES, self._chance.integers(0, len(_TYPES), n_rows)),
            "category": _pick(CATEGORIES, self._chance.integers(0, len(CATEGORIES), n_rows)),
            "amount": amounts,
            "_offset": offsets,
            "_broker_time": pa.nulls(n_rows, pa.int64()),
            "_request_id": pa.nulls(n_rows, pa.string()),
        }
        self.time_ms += round(step_ms)
        self.n_rows += n_rows
        return pa.table(columns, schema=pa.schema([*load_contract(_CONTRACT).arrow_schema, *INPUT_COLUMNS]))


def _numbered(pattern: str, first: int, n_names: int) -> pa.Array:
    numbers = pl.int_range(10_000_000 + first, 10_000_000 + first + n_names)
    return pl.select(pl.format(pattern, numbers)).to_series().to_arrow().cast(pa.string())


def _pick(values: tuple[str, ...], at: NDArray[np.int64]) -> pa.Array:
    return pa.array(values).take(pa.array(at))


def to_json(batch: pa.Table) -> bytes:
    """The events as they are on the wire, one a line."""
    return encode_lines(batch.drop_columns(INPUT_COLUMNS.names))
