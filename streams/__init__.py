"""Headrace: event-time features from Kafka to the online store, the offline store and the model."""

from schemas.aggregation import (
    count,
    distinct,
    entropy,
    first,
    from_event,
    last,
    last_n,
    max_,
    mean,
    min_,
    stddev,
    sum_,
    variance,
)
from schemas.entity import Entity
from schemas.source import EventSource
from schemas.view import FeatureView

__all__ = [
    "Entity",
    "EventSource",
    "FeatureView",
    "count",
    "distinct",
    "entropy",
    "first",
    "from_event",
    "last",
    "last_n",
    "max_",
    "mean",
    "min_",
    "stddev",
    "sum_",
    "variance",
]
