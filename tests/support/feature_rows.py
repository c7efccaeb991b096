"""Builders of feature views and feature rows for tests of the stores."""

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.aggregation import Aggregation, Feature, count, last, last_n, mean
from schemas.contract import load_contract
from schemas.entity import Entity
from schemas.serving import Serving
from schemas.source import EventSource
from schemas.view import FeatureView

CONTRACT = "store_event@1"
_DOCUMENT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "user_id": {"type": "string"},
        "account": {"type": "integer"},
        "event_time": {"type": "integer", "x-unit": "ms"},
        "category": {"type": ["string", "null"]},
        "amount": {"type": ["number", "null"]},
        "clicked": {"type": ["boolean", "null"]},
        "prices": {"type": ["array", "null"], "items": {"type": "number"}},
    },
    "required": ["user_id", "event_time"],
}

T0_US = 1_700_000_000_000_000
"""A time to count from, in microseconds."""


def _load() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "schemas" / "events"
        folder.mkdir(parents=True)
        (folder / f"{CONTRACT}.json").write_text(json.dumps(_DOCUMENT))
        with contextlib.chdir(directory):
            load_contract(CONTRACT)  # from here on it comes from the cache


def make_view(
    name: str = "user_activity",
    *,
    version: int = 1,
    key: str = "user_id",
    ttl: str | None = None,
    serving: Serving | None = None,
    features: Mapping[str, Feature | Aggregation] | None = None,
    max_out_of_orderness: str = "0s",
) -> FeatureView:
    """Make a sliding view with a feature of each kind of type, unless told which."""
    _load()
    return FeatureView(
        name,
        version=version,
        entity=Entity("user", key=key),
        source=EventSource("store.events", contract=CONTRACT, max_out_of_orderness=max_out_of_orderness),
        slide="1m",
        ttl=ttl,
        serving=serving or Serving(),
        features=features
        or {
            "clicks_5m": count().over("5m"),
            "amount_mean_1h": mean("amount").over("1h"),
            "category_last": last("category").over(last=1),
            "clicked_last": last("clicked").over(last=1),
            "amounts": last_n("amount").over(last=3),
            "categories": last_n("category").over(last=3),
            "prices": last_n("prices").over(last=2),
        },
    )


def make_rows(view: FeatureView, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Make feature rows of ``view.row_schema``; what a row leaves out takes a plain default.

    Times are integers in microseconds.
    """
    defaults = {
        view.entity.key: "u1" if view.entity.key == "user_id" else 1,
        "event_time": T0_US,
        "window_end": T0_US,
        "pane": "EARLY",
        "pane_index": 0,
        "is_final": False,
        "watermark": T0_US - 5_000_000,
        "source_offset": 0,
        "broker_time": T0_US + 1_000,
        "request_id": "r",
        "view": view.name,
        "view_version": view.version,
        "definition_hash": view.definition_hash,
        "source_topic": view.source.topic,
        "source_partition": 0,
        "computed_time": T0_US + 2_000,
        "epoch": 1,
    }
    complete = [{**dict.fromkeys(view.row_schema.names), **defaults, **row} for row in rows]
    return pa.Table.from_pylist(complete, schema=view.row_schema)
