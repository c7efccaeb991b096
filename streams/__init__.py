"""Headrace: event-time features from Kafka to the online store, the offline store and the model."""

from typing import TYPE_CHECKING, Any

from schemas.aggregation import (
    approx_distinct,
    count,
    decayed_sum,
    derived,
    distinct,
    entropy,
    first,
    from_event,
    last,
    last_n,
    max_,
    mean,
    min_,
    quantile,
    rate,
    stddev,
    sum_,
    time_since_last,
    top_k,
    variance,
)
from schemas.entity import Entity
from schemas.reference import Reference
from schemas.serving import Serving
from schemas.source import EventSource
from schemas.topic import TopicSettings
from schemas.use_case import Lookup, UseCase
from schemas.view import FeatureView

if TYPE_CHECKING:
    from streams.serving.store import AsyncOnlineStore, FeatureQuery, OnlineStore

__all__ = [
    "AsyncOnlineStore",
    "Entity",
    "EventSource",
    "FeatureQuery",
    "FeatureView",
    "Lookup",
    "OnlineStore",
    "Reference",
    "Serving",
    "TopicSettings",
    "UseCase",
    "approx_distinct",
    "count",
    "decayed_sum",
    "derived",
    "distinct",
    "entropy",
    "first",
    "from_event",
    "last",
    "last_n",
    "max_",
    "mean",
    "min_",
    "quantile",
    "rate",
    "stddev",
    "sum_",
    "time_since_last",
    "top_k",
    "variance",
]


def __getattr__(name: str) -> Any:
    """Load readers of the online store when they are asked for: who defines features needs no client of Redis."""
    if name in ("AsyncOnlineStore", "FeatureQuery", "OnlineStore"):
        from streams.serving import store  # noqa: PLC0415

        return getattr(store, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
