"""Kinds of view that the job of the benchmark has none of: sessions, sketches and quantiles.

Each is measured on the job's events in the rounds of ``headrace bench engine``, and the last rows of some users are
computed anew by polars. Users have too few events in a run for a sketch to be anything but exact.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, START_MS, EventStream, make_view
from schemas.aggregation import approx_distinct, count, max_, mean, quantile, sum_
from schemas.errors import WindowingError
from schemas.row import Pane
from schemas.view import FeatureView
from streams.windowing.engine import WindowEngine

_BATCH_ROWS: Final = 20_000
_WITNESSED: Final = 40
_GAP_MS: Final = 1_000
_INTO_MS: Final = 10_000
"""Far enough into a minute that all events of a run fall into it, those out of order too."""
_QUANTILE_ERROR: Final = 1 / 512
_SUM_ERROR: Final = 1e-9


def _views() -> Mapping[str, FeatureView]:
    base = make_view("latest")
    session = {"n": count(), "total": sum_("amount"), "average": mean("amount"), "largest": max_("amount")}
    return {
        "sessions": replace(base, slide=None, gap=f"{_GAP_MS}ms", features=session),
        "approx_distinct": replace(base, features={"ids": approx_distinct("event_id").over("5m")}),
        "quantile": replace(base, features={"median": quantile("amount", q=0.5).over("5m")}),
    }


_BARS: Final = {"sessions": 333_333.0}


@dataclass
class KindRig:
    """An engine of one kind of view, with its stream of events and the times it took."""

    name: str
    view: FeatureView
    events_per_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream = EventStream(KEYS, time_ms=START_MS + _INTO_MS)
        self._engine = WindowEngine(self.view)
        self._users = self._stream.users.take(pa.array(range(0, KEYS, max(1, KEYS // _WITNESSED))))
        self._events: list[pa.Table] = []
        self._made = self.view.engine_schema.empty_table()

    def round(self) -> None:
        """Time a batch of events; one before it does not count, so that keys are known."""
        for _ in range(2):
            batch = self._stream.batch(_BATCH_ROWS)
            started_s = time.process_time()
            rows = self._engine.step(batch, processing_time_us=0).rows
            taken_s = time.process_time() - started_s
            self._events.append(self._of_users(batch))
            self._made = self._of_users(rows)
        self.events_per_s.append(_BATCH_ROWS / taken_s)

    def _of_users(self, rows: pa.Table) -> pa.Table:
        return rows.filter(pc.is_in(rows["user_id"], value_set=self._users))

    def check(self) -> int:
        """Compare the as-of rows of some users in the last batch with what polars makes of all their events.

        Returns:
            How many there are.

        Raises:
            WindowingError: One differs.
        """
        made = _frame(self._made).filter(pl.col("pane") == str(Pane.EARLY)).with_row_index("row")
        pairs = made.select("row", "user_id", maker="source_offset").join(
            _frame(pa.concat_tables(self._events)), on="user_id"
        )
        pairs = pairs.filter(pl.col("_offset") <= pl.col("maker")).sort("row", "event_time", "_offset")
        features = list(self.view.definitions)
        expected = _EXPECTED[self.name](pairs)
        compared = made.select("row", *features).join(expected, on="row", suffix="_expected")
        for name in features:
            got, wanted = compared[name], compared[f"{name}_expected"]
            error = _QUANTILE_ERROR if self.name == "quantile" else _SUM_ERROR
            if len(compared) != len(made) or not ((got - wanted).abs() <= error * wanted.abs()).all():
                msg = f"engine.{self.name}: {name} is not what polars computes, its times count for nothing: {compared}"
                raise WindowingError(msg)
        return len(made)

    def figure(self, ceiling: float) -> Figure:
        """Events a second, and that by the ceiling."""
        speed = statistics.median(self.events_per_s)
        return Figure(
            name=f"engine.{self.name}",
            value=speed,
            unit="events/s",
            bar=_BARS.get(self.name),
            compared_with="engine.ceiling",
            ratio=speed / ceiling,
        )


def make_rigs() -> Sequence[KindRig]:
    """A rig for each kind."""
    return [KindRig(name, view) for name, view in _views().items()]


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    if not isinstance(frame, pl.DataFrame):
        msg = f"expected a table, got {type(table).__name__}"
        raise TypeError(msg)
    return frame


def _sessions(pairs: pl.DataFrame) -> pl.DataFrame:
    begins = (pl.col("event_time").diff() >= _GAP_MS).fill_null(value=False).cum_sum().over("row")
    sessions = pairs.with_columns(session=begins)
    own = sessions.filter(pl.col("_offset") == pl.col("maker")).select("row", "session")
    amount = pl.col("amount")
    inside = sessions.join(own, on=["row", "session"]).group_by("row")
    return inside.agg(n=pl.len(), total=amount.sum(), average=amount.mean(), largest=amount.max())


_EXPECTED: Final[Mapping[str, Callable[[pl.DataFrame], pl.DataFrame]]] = {
    "sessions": _sessions,
    "approx_distinct": lambda pairs: pairs.group_by("row").agg(ids=pl.col("event_id").n_unique()),
    "quantile": lambda pairs: pairs.group_by("row").agg(median=pl.col("amount").quantile(0.5, interpolation="lower")),
}
