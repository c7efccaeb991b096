"""Checks what the engine made of some users against polars, before a time counts.

Nothing here is taken from the engine: each row of output is computed anew from all events of its user, by the rules of
the job (size 5 minutes, slide 1 minute, no allowed lateness).
"""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from jobs.bench.job import SIZE_MS, SLIDE_MS
from schemas.errors import WindowingError
from schemas.row import Pane

_TOLERANCE: Final = 1e-9
_FEATURES: Final = ("count_5m", "sum_5m", "mean_5m", "max_5m", "entropy_3")


class Witness:
    """Sees all events and all output of an engine, and remembers those of some users.

    Args:
        users: Keys of the users.
        out_of_orderness_us: By how much the watermark trails the newest event.
        as_of: Which events get an as-of row: all, of each user the last in each batch, or, where the batches are not
            known, some and of each user the very last.
    """

    def __init__(
        self, users: Sequence[str], *, out_of_orderness_us: int, as_of: Literal["all", "last_in_batch", "some"]
    ) -> None:
        self._users = pa.array(users, pa.string())
        self._out_of_orderness_us = out_of_orderness_us
        self._as_of = as_of
        self._watermark_us = -(2**62)
        self._events: list[pl.DataFrame] = []
        self._made: list[pl.DataFrame] = []

    def see(self, batch: pa.Table, rows: pa.Table) -> None:
        """Take note of a batch and of what the engine made of it."""
        alone_us = batch["event_time"].to_numpy() * 1_000 - self._out_of_orderness_us
        after_us = np.maximum(np.maximum.accumulate(alone_us), self._watermark_us)
        before_us = np.concatenate([[self._watermark_us], after_us[:-1]])
        self._watermark_us = int(after_us[-1])
        columns = [batch["user_id"], batch["_offset"], batch["event_time"], batch["amount"], batch["category"]]
        events = pa.table([*columns, before_us], names=["user", "offset", "at_ms", "amount", "category", "before_us"])
        self._events.append(_some(events, "user", self._users).with_columns(batch=pl.lit(len(self._events))))
        self.see_rows(rows)

    def reach(self, watermark_us: int) -> None:
        """Take note of how far the watermark has come by events that were not shown."""
        self._watermark_us = max(self._watermark_us, watermark_us)

    def see_rows(self, rows: pa.Table) -> None:
        """Take note of rows that the engine made."""
        self._made.append(_some(rows.rename_columns({"user_id": "user"}), "user", self._users))

    def check(self) -> int:
        """Compare all that was seen.

        Returns:
            Rows of output that were checked.

        Raises:
            WindowingError: One differs, or is absent, or should not be there.
        """
        events = pl.concat(self._events)
        made = pl.concat(self._made).select(
            "user", *_FEATURES, "pane", maker="source_offset", end_ms=pl.col("window_end").dt.epoch("ms")
        )
        self._check_presence(events, made)
        made = made.filter(pl.col("pane") != str(Pane.EMPTY)).with_row_index("row")
        pairs = made.select("row", "user", "maker", "end_ms").join(events, on="user")
        pairs = pairs.filter(pl.col("offset") <= pl.col("maker"))
        expected = _windows(pairs).join(_entropies(pairs), on="row")
        compared = made.join(expected, on="row", suffix="_expected")
        _refuse_if(len(compared) != len(made), "some rows have no events in their window")
        for name in _FEATURES:
            difference = (compared[name] - compared[f"{name}_expected"]).abs()
            allowed = _TOLERANCE * (1 + compared[f"{name}_expected"].abs())
            wrong = compared.filter(~(difference <= allowed).fill_null(value=False))
            _refuse_if(bool(len(wrong)), f"{name}: {wrong.head(3).to_dicts()}")
        return len(made)

    def _check_presence(self, events: pl.DataFrame, made: pl.DataFrame) -> None:
        end = pl.col("at_ms") // SLIDE_MS * SLIDE_MS + SLIDE_MS
        as_of = events.with_columns(end_ms=end).filter(pl.col("end_ms") * 1_000 > pl.col("before_us"))
        last = pl.col("offset", "end_ms").sort_by("offset").last()
        if self._as_of == "last_in_batch":
            as_of = as_of.group_by("user", "batch").agg(last)
        as_of = as_of.select("user", "offset", "end_ms")
        got = made.filter(pl.col("pane") == str(Pane.EARLY)).select("user", offset="maker", end_ms="end_ms")
        if self._as_of == "some":
            very_last = as_of.group_by("user").agg(last)
            as_of = pl.concat([as_of.join(got, on=got.columns, how="semi"), very_last]).unique()
        _refuse_unless_same(as_of, got, "as-of rows")
        ends = [events.with_columns(end_ms=end + number * SLIDE_MS) for number in range(SIZE_MS // SLIDE_MS)]
        counted = pl.concat(ends).filter(pl.col("end_ms") * 1_000 > pl.col("before_us"))
        due = counted.filter(pl.col("end_ms") * 1_000 <= self._watermark_us).select("user", "end_ms").unique()
        fired = made.filter(pl.col("pane") == str(Pane.ON_TIME)).select("user", "end_ms")
        _refuse_unless_same(due, fired, "closing panes")


def _some(table: pa.Table, column: str, users: pa.Array) -> pl.DataFrame:
    frame = pl.from_arrow(table.filter(pc.is_in(table[column], value_set=users)))
    if not isinstance(frame, pl.DataFrame):
        msg = f"expected a table, got {type(table).__name__}"
        raise TypeError(msg)
    return frame


def _windows(pairs: pl.DataFrame) -> pl.DataFrame:
    at, end = pl.col("at_ms"), pl.col("end_ms")
    inside = (at >= end - SIZE_MS) & (at < end) & (end * 1_000 > pl.col("before_us"))
    amount = pl.col("amount")
    return (
        pairs.filter(inside)
        .group_by("row")
        .agg(count_5m=pl.len(), sum_5m=amount.sum(), mean_5m=amount.mean(), max_5m=amount.max())
    )


def _entropies(pairs: pl.DataFrame) -> pl.DataFrame:
    last = pairs.sort("row", "at_ms", "offset").group_by("row", maintain_order=True).tail(3)
    shares = last.group_by("row", "category").len().with_columns(share=pl.col("len") / pl.col("len").sum().over("row"))
    return shares.group_by("row").agg(entropy_3=-(pl.col("share") * pl.col("share").log(2)).sum())


def _refuse_unless_same(expected: pl.DataFrame, got: pl.DataFrame, what: str) -> None:
    absent, spare = expected.join(got, on=got.columns, how="anti"), got.join(expected, on=got.columns, how="anti")
    is_same = len(absent) == len(spare) == 0 and len(got) == len(expected)
    first = f"absent {absent.head(3).to_dicts()}, spare {spare.head(3).to_dicts()}"
    _refuse_if(not is_same, f"{len(got)} {what}, expected {len(expected)}; {first}")


def _refuse_if(is_wrong: bool, detail: str) -> None:
    if is_wrong:
        msg = f"the engine's rows are not what polars computes: {detail}; its times count for nothing"
        raise WindowingError(msg)
