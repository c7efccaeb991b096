"""Headrace: event-time features from Kafka to the online store, the offline store and the model."""

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
from schemas.source import EventSource
from schemas.view import FeatureView

__all__ = [
    "Entity",
    "EventSource",
    "FeatureView",
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
