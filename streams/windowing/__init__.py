"""The event-time engine, pure and columnar: admission, watermark, windows, aggregations, panes.

It has no I/O, no clock and no Kafka. :class:`WindowEngine` computes one view over one topic partition.
"""

from streams.windowing.bucket import N_BUCKETS
from streams.windowing.engine import WindowEngine
from streams.windowing.result import StepCounts, StepResult, WatermarkMarker
from streams.windowing.snapshot import PartHeader, PartKind, read_header

__all__ = [
    "N_BUCKETS",
    "PartHeader",
    "PartKind",
    "StepCounts",
    "StepResult",
    "WatermarkMarker",
    "WindowEngine",
    "read_header",
]
