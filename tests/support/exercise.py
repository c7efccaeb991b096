"""Every metric of every role, reported once with plausible values."""

from types import SimpleNamespace
from typing import Final

import numpy as np
import pyarrow as pa

from schemas.row import TIMESTAMP
from schemas.score import LATENCY_STAGES
from schemas.serving import Serving
from streams.observability.freshness import FreshnessObjectives
from streams.observability.metrics import Metrics
from streams.observability.serving import ServingMetrics
from tests.support.feature_rows import make_view

_OBJECTIVES: Final[dict[Metrics, FreshnessObjectives]] = {}
"""Made once for each: metrics are registered when they are made."""


def report_everything(metrics: Metrics, *, now_us: int) -> None:
    """Call each method of ``metrics`` once, for view ``flights``, source ``flights.departed`` and model ``late``."""
    for role in ("features", "online", "offline", "scoring"):
        metrics.batch_processed(role, rows=100, seconds=0.002)
        metrics.epoch_committed(role, seconds=0.01)
        metrics.consumer_lag(role, topic="features.flights", partition=0, records=7)
        metrics.store_retried(role, store="redis")
        metrics.paused(role, {"memory": 0.5, "rebalance": 2.0})
        metrics.offsets_lost(role, topic="features.flights", partition=0, offsets=5)
    metrics.restoring("flights", partition=0, remaining=3)
    metrics.rows_counted("features", "flights", {"admitted": 98, "rejected": 2, "on_time": 40})
    metrics.dead_letters("flights.departed", {"late": 2})
    metrics.rows_routed("shop.events", topic="repartition.shop.events.category", rows=9)
    for partition, behind_us in enumerate((5_000_000, 9_000_000)):
        metrics.watermark(
            "flights",
            partition=partition,
            watermark_us=now_us - behind_us,
            computed_time_us=now_us,
            event_time_us=now_us - 1_000_000,
        )
    ages_us = [30_000] * 99 + [400_000]
    broker_time = pa.array([now_us - age_us for age_us in ages_us], TIMESTAMP)
    metrics.freshness("flights", broker_time=broker_time, readable_time_us=now_us)
    _report_objectives(metrics, broker_time, now_us=now_us)
    metrics.online_written("flights", written=90, superseded=10)
    metrics.offline_committed("flights", rows=100, skipped=3, seconds=0.2)
    metrics.scored("late", arm="champion", served_by="model", complete=9, incomplete=1)
    metrics.fell_back("late", cause="timeout", served_by="cache", rows=2)
    metrics.model_probe_failed("failed", model="late", version="1")
    metrics.model_healed(model="late", version="1")
    for stage in LATENCY_STAGES:
        metrics.score_latency("late", stage=stage, seconds=np.array([0.05, 0.1]))
    # All within the bound: a share of just 99 % is below or above it by the last bit of a rate.
    metrics.score_committed("late", broker_time=broker_time[:99], committed_time_us=now_us)
    if isinstance(metrics, ServingMetrics):
        value = SimpleNamespace(status="present", source="online", broker_time_us=now_us - 2_000_000)
        metrics.values_read("flights", [value], now_us=now_us)
        metrics.store_unavailable("redis")
        metrics.events_taken("shop.events", {"accepted": 1})
        metrics.request_done("/v1/features", status=200, seconds=0.002)
    metrics.lineage_sent()
    metrics.lineage_failed("rejected")


def _report_objectives(metrics: Metrics, broker_time: pa.Array, *, now_us: int) -> None:
    if metrics not in _OBJECTIVES:
        view = make_view("flights", serving=Serving(freshness="30m"))
        _OBJECTIVES[metrics] = FreshnessObjectives([view], metrics=metrics)
    objectives = _OBJECTIVES[metrics]
    objectives.written("flights", broker_time=pa.chunked_array([broker_time]), readable_time_us=now_us)
    objectives.read_back("flights", broker_time_us=now_us - 50_000, read_time_us=now_us, is_there=True)
