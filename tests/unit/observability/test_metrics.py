import re

import numpy as np
import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry

from schemas.row import TIMESTAMP, Reason
from schemas.time import MINUS_INFINITY_US
from streams.observability import metrics as module
from streams.observability.metrics import FRESHNESS_BUCKETS_S, Metrics

T0_US = 1_700_000_000_000_000


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def test_names_say_whose_they_are_and_carry_their_unit(metrics: Metrics, registry: CollectorRegistry) -> None:
    families = {family.name: family.type for family in registry.collect()}
    assert len(families) > 15
    for name, kind in families.items():
        assert re.fullmatch(r"headrace_[a-z_]+", name)
        if kind == "counter":
            assert not name.endswith("_total"), "the client adds it"
        else:
            assert name.endswith(("_seconds", "_records", "_rows", "_bytes"))


def test_each_role_of_a_process_may_have_metrics_of_its_own() -> None:
    assert Metrics().registry is not Metrics().registry


def test_the_process_is_measured_unless_a_registry_is_given() -> None:
    assert "process_cpu_seconds" in {family.name for family in Metrics().registry.collect()}


def test_freshness_counts_rows_within_the_promised_bound_exactly(metrics: Metrics, registry: CollectorRegistry) -> None:
    assert {0.15, 0.25} <= set(FRESHNESS_BUCKETS_S)
    ages_us = [10_000, 150_000, 150_001, 90_000_000_000, None, -5_000]
    broker_time = pa.chunked_array([pa.array([None if a is None else T0_US - a for a in ages_us], TIMESTAMP)])
    metrics.freshness("v", broker_time=broker_time, readable_time_us=T0_US)
    assert registry.get_sample_value("headrace_freshness_seconds_bucket", {"view": "v", "le": "0.15"}) == 3
    assert registry.get_sample_value("headrace_freshness_seconds_count", {"view": "v"}) == 5
    assert registry.get_sample_value("headrace_freshness_seconds_bucket", {"view": "v", "le": "300.0"}) == 4


def test_rows_are_counted_by_outcome_and_reason(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.rows_counted("features", "v", {"admitted": 5, "emitted": 7})
    metrics.rows_counted("features", "v", {"admitted": 1, "rejected": 0}, reason="late")
    at = {"role": "features", "view": "v"}
    assert registry.get_sample_value("headrace_rows_total", {**at, "outcome": "admitted", "reason": ""}) == 5
    assert registry.get_sample_value("headrace_rows_total", {**at, "outcome": "admitted", "reason": "late"}) == 1
    assert registry.get_sample_value("headrace_rows_total", {**at, "outcome": "rejected", "reason": "late"}) == 0


@pytest.mark.parametrize("reasons", [{"late": 2, "decode_error": 1}, pa.array([Reason.LATE, "decode_error", "late"])])
def test_dead_letters_are_counted_by_reason(
    metrics: Metrics, registry: CollectorRegistry, reasons: dict[str, int] | pa.Array
) -> None:
    metrics.dead_letters("shop.events", reasons)
    at = {"source": "shop.events"}
    assert registry.get_sample_value("headrace_dead_letters_total", {**at, "reason": "late"}) == 2
    assert registry.get_sample_value("headrace_dead_letters_total", {**at, "reason": "decode_error"}) == 1


def test_a_watermark_is_reported_once_there_is_one(metrics: Metrics, registry: CollectorRegistry) -> None:
    at = {"view": "v", "partition": "3"}
    metrics.watermark("v", partition=3, watermark_us=MINUS_INFINITY_US, computed_time_us=T0_US)
    assert registry.get_sample_value("headrace_watermark_lag_seconds", at) is None
    metrics.watermark(
        "v", partition=3, watermark_us=T0_US - 5_000_000, computed_time_us=T0_US, event_time_us=T0_US - 250_000
    )
    assert registry.get_sample_value("headrace_watermark_lag_seconds", at) == 5.0
    assert registry.get_sample_value("headrace_event_time_lag_seconds", at) == 0.25
    assert registry.get_sample_value("headrace_watermark_timestamp_seconds", at) == T0_US / 1e6 - 5


def test_a_partition_that_was_handed_over_is_reported_no_more(metrics: Metrics, registry: CollectorRegistry) -> None:
    for partition in (0, 1):
        metrics.watermark("v", partition=partition, watermark_us=T0_US, computed_time_us=T0_US, event_time_us=T0_US)
        metrics.consumer_lag("features", topic="t", partition=partition, records=9)
    metrics.forget_partition("features", topic="t", partition=1, views=["v", "never_reported"])
    left = {
        (family.name, sample.labels["partition"])
        for family in registry.collect()
        for sample in family.samples
        if "partition" in sample.labels
    }
    assert {partition for _, partition in left} == {"0"}
    assert len(left) == 4


def test_stores_and_scores_are_counted(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.online_written("v", written=3, superseded=2)
    metrics.offline_committed("v", rows=4, skipped=1, seconds=0.2)
    metrics.offline_committed("v", rows=0, skipped=4, seconds=0.1)
    metrics.scored("m", arm="champion", served_by="model", complete=8, incomplete=1)
    metrics.score_latency("m", stage="total", seconds=np.array([0.1, 0.2, np.nan]))
    metrics.score_committed(
        "m", broker_time=pa.array([T0_US, T0_US - 300_000, None], TIMESTAMP), committed_time_us=T0_US + 100_000
    )
    metrics.epoch_committed("features", seconds=0.01)
    metrics.batch_processed("features", rows=50, seconds=0.004)
    metrics.store_retried("online", store="redis")
    for _ in range(3):
        metrics.store_retried("scoring", store="triton")
    metrics.lineage_sent()
    metrics.lineage_failed("queue_full", events=2)
    expected = {
        ("headrace_online_rows_total", ("view", "v"), ("outcome", "written")): 3,
        ("headrace_online_rows_total", ("view", "v"), ("outcome", "superseded")): 2,
        ("headrace_offline_rows_total", ("view", "v"), ("outcome", "appended")): 4,
        ("headrace_offline_rows_total", ("view", "v"), ("outcome", "skipped")): 5,
        ("headrace_offline_commits_total", ("view", "v")): 1,
        ("headrace_offline_commit_duration_seconds_count", ("view", "v")): 2,
        ("headrace_score_latency_seconds_count", ("model", "m"), ("stage", "total")): 2,
        ("headrace_score_freshness_seconds_count", ("model", "m")): 2,
        ("headrace_score_freshness_seconds_sum", ("model", "m")): 0.5,
        ("headrace_epoch_duration_seconds_count", ("role", "features")): 1,
        ("headrace_batch_duration_seconds_count", ("role", "features")): 1,
        ("headrace_store_retries_total", ("role", "online"), ("store", "redis")): 1,
        ("headrace_store_retries_total", ("role", "scoring"), ("store", "triton")): 3,
        ("headrace_lineage_events_total",): 1,
        ("headrace_lineage_failures_total", ("reason", "queue_full")): 2,
    }
    got = {key: registry.get_sample_value(key[0], dict(key[1:])) for key in expected}
    assert got == expected
    scores = {"model": "m", "arm": "champion", "served_by": "model"}
    assert registry.get_sample_value("headrace_scores_total", {**scores, "complete": "true"}) == 8
    assert registry.get_sample_value("headrace_scores_total", {**scores, "complete": "false"}) == 1


def test_series_are_bounded_whatever_the_labels(
    metrics: Metrics, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 3)
    for n in range(10):
        metrics.dead_letters("s", {f"r{n}": 1})
        metrics.freshness(f"v{n}", broker_time=pa.array([T0_US], TIMESTAMP), readable_time_us=T0_US)
    assert registry.get_sample_value("headrace_dead_letters_total", {"source": "s", "reason": "r2"}) == 1
    assert registry.get_sample_value("headrace_dead_letters_total", {"source": "s", "reason": "r3"}) is None
    assert registry.get_sample_value("headrace_dead_letters_total", {"source": "other", "reason": "other"}) == 7
    assert registry.get_sample_value("headrace_freshness_seconds_count", {"view": "other"}) == 7
    assert len([r for r in caplog.records if "headrace_dead_letters" in r.message]) == 1
