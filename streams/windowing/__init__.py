"""The event-time engine, pure and columnar: admission, watermark, windows, aggregations, panes.

It has no I/O, no clock and no Kafka. :class:`WindowEngine` computes one view over one topic partition.
"""

from streams.windowing.engine import WindowEngine
from streams.windowing.result import StepCounts, StepResult, WatermarkMarker

__all__ = ["StepCounts", "StepResult", "WatermarkMarker", "WindowEngine"]
