"""Reads which rows the scores of an application say that they were made of."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from jobs.application import Application
from jobs.reach import reach_kafka
from jobs.settings import Settings
from jobs.topic_reader import read_topic
from offline.recorded import RECORDED, LookedUpRows, RecordedReads, ScoredRows
from schemas.errors import DecodeError
from schemas.model import ModelSpec
from schemas.row import Pane
from schemas.time import parse_rfc3339_us
from schemas.view import FeatureView
from streams.sinks.delta import mapped_errors
from streams.sinks.offline import scan_features, table_uri

_SHOWN_BYTES: Final = 80


def read_scores(application: Application, view: FeatureView, settings: Settings) -> list[RecordedReads]:
    """Read what the scores of each model record of a view; nothing where no model reads it.

    Raises:
        ServiceError: Kafka cannot be read.
        DecodeError: A record of a model's topic is no score.
        SinkError: The rows that were scored, which tell what was looked up, are not in the offline store.
    """
    found: list[RecordedReads] = []
    for spec in application.models.values():
        if view.name not in {reference.name for reference in spec.views}:
            continue
        brokers = settings.address("kafka")
        reach_kafka(brokers)
        recorded = pl.DataFrame(list(_recorded(brokers, spec, view)), schema=RECORDED, orient="row")
        if spec.trigger.name == view.name:
            found.append(ScoredRows(view, spec, recorded))
            continue
        (column,) = (key for reference, key in spec.lookups.items() if reference.name == view.name)
        keys = _keys(application.view(spec.trigger.name), column, settings)
        found.append(LookedUpRows(view, spec, recorded.join(keys, on="request_id", how="inner")))
        found[-1].comparison.not_judged += recorded.join(keys, on="request_id", how="anti").height
    return found


def _recorded(brokers: str, spec: ModelSpec, view: FeatureView) -> Iterator[tuple[Any, ...]]:
    for batch in read_topic(brokers, spec.topic):
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
            try:
                read = _read_of(value, view)
            except (ValueError, TypeError, KeyError, AttributeError) as exc:
                got = "a tombstone" if value is None else f"{value[:_SHOWN_BYTES]!r}"
                msg = (
                    f"record {offset} of {batch.topic}:{batch.partition} is {got}, expected a score as Headrace writes "
                    f"it ({type(exc).__name__}: {exc}); see who else writes to the topic, or leave `--scores` out"
                )
                raise DecodeError(msg) from exc
            if read is not None:
                yield read


def _read_of(value: bytes | None, view: FeatureView) -> tuple[Any, ...] | None:
    """Tell what a score says that it read of a view; None where it read nothing of it."""
    score: Mapping[str, Any] = json.loads(value or b"null")
    read = score["features"].get(view.name)
    if read is None:
        return None
    times = (score["event_time"], score["watermark"], read["event_time"])
    event_us, watermark_us, read_us = (None if t is None else parse_rfc3339_us(t) for t in times)
    about = (score["request_id"], score["entity"], event_us, watermark_us)
    return (*about, read["version"], read["hash"], read_us, read["status"])


def _keys(trigger: FeatureView, column: str, settings: Settings) -> pl.DataFrame:
    """Read the key that each scored row looked up, by request id; left out where several rows have the same id."""
    rows = scan_features(settings.delta, trigger, storage_options=settings.delta_options)
    with mapped_errors(table_uri(settings.delta, trigger)):
        found = rows.to_table(columns=["request_id", column], filter=pc.field("pane") == str(Pane.EARLY))
    frame = pl.from_arrow(pa.table({"request_id": found["request_id"], "key": found[column]}))
    assert isinstance(frame, pl.DataFrame)  # noqa: S101 - a table gives a frame
    return frame.unique().unique("request_id", keep="none")
