"""The ceiling: what any Python pipeline that reads JSON and groups by key and tile must spend at least."""

import io

import polars as pl

from jobs.bench.job import SLIDE_MS

_SCHEMA = {
    "event_id": pl.String,
    "user_id": pl.String,
    "event_time": pl.Int64,
    "event_type": pl.String,
    "category": pl.String,
    "amount": pl.Float64,
}


def decode(payload: bytes) -> pl.DataFrame:
    """Read a batch of newline-joined events into columns."""
    return pl.read_ndjson(io.BytesIO(payload), schema=_SCHEMA)


def group(events: pl.DataFrame) -> pl.DataFrame:
    """Aggregate each key's events by tile."""
    amount = pl.col("amount")
    tile = (pl.col("event_time") // SLIDE_MS).alias("tile")
    return events.group_by("user_id", tile).agg(pl.len(), amount.sum(), amount.max().alias("max"))
