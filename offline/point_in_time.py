"""Point-in-time join: what an online read at a past moment would have returned, from the offline rows.

A row counts from the moment it was known, which can be later than its event time: the row of an event that came out of
order did not exist before, and a closing pane fires after its window's end. How far a partition had got when it made
a row stands in the row: its watermark trails the newest event time by the source's bounded out-of-orderness. So

    known = max(event_time, watermark + max_out_of_orderness)

and a read at event time *t* sees the rows with ``known <= t``, of which the online store holds the newest by
(window_end, pane_index, source_offset). Processing time is left out: the join is that of a pipeline without delay,
the same for a replay as for the live run, and no row from after *t* can get into it.
"""

from dataclasses import dataclass
from typing import cast

import polars as pl
import pyarrow as pa

from schemas.row import TIMESTAMP, Pane
from schemas.score import InputStatus
from schemas.view import FeatureView
from streams.sinks.rows import ORDER_COLUMNS


@dataclass(frozen=True, kw_only=True)
class AsOf:
    """What a view's reads returned, as columns in the order asked for.

    Attributes:
        status: :class:`~schemas.score.InputStatus` of each read.
        event_time: Event time of the row found; null where missing.
        features: The view's features; null where missing or stale.
    """

    status: pa.ChunkedArray
    event_time: pa.ChunkedArray
    features: pa.Table


def read_as_of(
    keys: pa.ChunkedArray, times: pa.ChunkedArray, rows: pa.Table, *, view: FeatureView, max_age_us: int | None = None
) -> AsOf:
    """Read a view as of many moments.

    Args:
        keys: ``(n,)`` entity keys to read, null for none.
        times: ``(n,)`` event times to read at, ``timestamp("us", "UTC")``, in any order.
        rows: All rows of the view (``view.row_schema``), in any order; later ones do no harm.
        view: The view.
        max_age_us: Age above which a row is stale; the view's ``ttl`` where that is shorter or this is None.
    """
    features = list(view.definitions)
    history = _history(rows, view=view)
    asked = cast(
        pl.DataFrame, pl.from_arrow(pa.table({"_key": keys, "_at": times.cast(TIMESTAMP).cast(pa.int64())}))
    ).with_row_index("_row")
    found = asked.sort("_at").join_asof(
        history, left_on="_at", right_on="_known", by="_key", strategy="backward", check_sortedness=False
    )
    limits = [limit for limit in (max_age_us, view.ttl_us) if limit is not None]
    is_stale = pl.col("_at") - pl.col("event_time") > min(limits) if limits else pl.lit(value=False)
    status = (
        pl.when(pl.col("event_time").is_null())
        .then(pl.lit(str(InputStatus.MISSING)))
        .when(pl.col("pane") == str(Pane.EMPTY))
        .then(pl.lit(str(InputStatus.EMPTY)))
        .when(is_stale)
        .then(pl.lit(str(InputStatus.STALE)))
        .otherwise(pl.lit(str(InputStatus.PRESENT)))
    )
    is_usable = pl.col("_status").is_in([str(InputStatus.PRESENT), str(InputStatus.EMPTY)])
    found = found.sort("_row").with_columns(status.alias("_status"))
    values = found.select(pl.when(is_usable).then(pl.col(name)).alias(name) for name in features)
    return AsOf(
        status=found.select("_status").to_arrow()["_status"].cast(pa.string()),
        event_time=found.select("event_time").to_arrow()["event_time"].cast(TIMESTAMP),
        features=values.to_arrow().cast(pa.schema([view.feature_schema.field(name) for name in features])),
    )


def _history(rows: pa.Table, *, view: FeatureView) -> pl.DataFrame:
    """What the online store held of each key, and from when on: one row a change, sorted by ``_known``."""
    columns = {name: rows[name] for name in view.definitions}
    columns |= {"_key": rows[view.entity.key], "pane": rows["pane"]}
    columns |= {name: rows[name].cast(pa.int64()) for name in ("event_time", "watermark", *ORDER_COLUMNS)}
    history = cast(pl.DataFrame, pl.from_arrow(pa.table(columns)))
    front = pl.col("watermark") + view.input.max_out_of_orderness_us
    return (
        history.with_columns(_known=pl.max_horizontal("event_time", front))
        .sort(*ORDER_COLUMNS)
        .with_row_index("_order")
        .sort("_known", "source_offset", "_order")
        # The store refuses a row that is not newer than the one it holds.
        .filter(pl.col("_order") == pl.col("_order").cum_max().over("_key"))
        .unique(["_key", "_known"], keep="last", maintain_order=True)
        .drop("watermark", "_order", *ORDER_COLUMNS)
    )
