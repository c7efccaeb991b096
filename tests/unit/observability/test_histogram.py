import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from streams.observability.histogram import ArrayHistogram

BUCKETS = (0.125, 0.25, 1.0)


def text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@settings(deadline=None)
@given(
    batches=st.lists(
        st.lists(st.sampled_from([0.0, 0.125, 0.1875, 0.25, 0.5, 1.0, 7.0, math.inf]), max_size=9), max_size=4
    )
)
def test_it_reports_what_a_histogram_fed_one_by_one_does(batches: list[list[float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = ArrayHistogram("x_seconds", "X.", labels=("view",), buckets=BUCKETS, registry=ours)
    one_by_one = Histogram("x_seconds", "X.", ("view",), buckets=BUCKETS, registry=theirs)
    for batch in batches:
        histogram.observe(np.asarray(batch), "a")
        for value in batch:
            one_by_one.labels("a").observe(value)
    assert text(ours) == text(theirs)


def test_a_value_on_a_bound_counts_as_within() -> None:
    registry = CollectorRegistry()
    ArrayHistogram("x_seconds", "X.", labels=(), buckets=BUCKETS, registry=registry).observe(0.25)
    assert registry.get_sample_value("x_seconds_bucket", {"le": "0.25"}) == 1
    assert registry.get_sample_value("x_seconds_bucket", {"le": "0.125"}) == 0


def test_what_is_unknown_is_left_out_and_what_is_below_zero_counts_as_zero() -> None:
    registry = CollectorRegistry()
    histogram = ArrayHistogram("x_seconds", "X.", labels=("view",), buckets=BUCKETS, registry=registry)
    histogram.observe(np.array([math.nan, -3.0, 0.5]), "a")
    assert registry.get_sample_value("x_seconds_count", {"view": "a"}) == 2
    assert registry.get_sample_value("x_seconds_sum", {"view": "a"}) == 0.5
    assert registry.get_sample_value("x_seconds_bucket", {"view": "a", "le": "0.125"}) == 1


def test_no_values_make_no_series() -> None:
    registry = CollectorRegistry()
    histogram = ArrayHistogram("x_seconds", "X.", labels=("view",), buckets=BUCKETS, registry=registry)
    histogram.observe(np.array([]), "a")
    assert registry.get_sample_value("x_seconds_count", {"view": "a"}) is None


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    ArrayHistogram("x_seconds", "X.", labels=(), buckets=BUCKETS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        ArrayHistogram("x_seconds", "X.", labels=(), buckets=BUCKETS, registry=registry)
