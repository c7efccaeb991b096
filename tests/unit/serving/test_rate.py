"""Limits of this process: the same as a bucket that is filled by a clock, counted in whole numbers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.serving.gate import limit_headers
from streams.serving.producer_key import Rate
from streams.serving.rate import Limit, LocalLimits

RATES = [Rate(1, 1), Rate(10, 5), Rate(1_000, 20), Rate(1_000_000, 7)]
"""An event takes a whole number of microseconds, so that nothing is rounded."""
T0_US = 1_000_000


class Bucket:
    """A token bucket: what the algorithm is to do, by counting."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.tokens = Fraction(rate.burst)
        self.at_us = T0_US

    def fill(self, now_us: int) -> None:
        gained = Fraction((now_us - self.at_us) * self.rate.per_s, 1_000_000)
        self.tokens, self.at_us = min(Fraction(self.rate.burst), self.tokens + gained), now_us


@given(
    st.lists(st.sampled_from(RATES), min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 10)), max_size=60),
)
def test_it_takes_what_a_bucket_has(rates: list[Rate], requests: list[tuple[int, int]]) -> None:
    limits = LocalLimits()
    named = [(str(n), rate) for n, rate in enumerate(rates)]
    buckets = [Bucket(rate) for rate in rates]
    now_us = T0_US
    for later_us, events in requests:
        now_us += later_us
        is_taken, ahead_us = limits.take(named, events=events, now_us=now_us)
        for bucket in buckets:
            bucket.fill(now_us)
        # Its measure may be one microsecond short, as that of the store, and never more.
        grace = [Fraction(bucket.rate.per_s, 1_000_000) for bucket in buckets]
        if is_taken:
            assert all(b.tokens + g >= events for b, g in zip(buckets, grace, strict=True))
            for bucket in buckets:
                bucket.tokens -= events
        else:
            assert any(bucket.tokens < events for bucket in buckets)
        for bucket, us in zip(buckets, ahead_us, strict=True):
            left = Limit("client", bucket.rate, us)
            assert abs(left.remaining - max(0, bucket.tokens)) <= 1


def test_after_the_time_that_it_names_they_may_be_sent() -> None:
    rate = Rate(3, 10)
    limits = LocalLimits()
    assert limits.take([("a", rate)], events=10, now_us=T0_US)[0]
    is_taken, (ahead_us,) = limits.take([("a", rate)], events=4, now_us=T0_US)
    assert not is_taken
    wait_us = Limit("client", rate, ahead_us).wait_us(4)
    assert wait_us == pytest.approx(4 / 3 * 1e6)
    assert not limits.take([("a", rate)], events=4, now_us=T0_US + int(wait_us) - 2)[0]
    assert limits.take([("a", rate)], events=4, now_us=T0_US + int(wait_us) + 1)[0]


def test_headers_tell_what_is_left() -> None:
    limits = [Limit("client", Rate(10, 50), 1_500_000.0), Limit("global", Rate(1_000, 10_000), 0.0)]
    assert limit_headers(limits) == {
        "RateLimit-Policy": '"client";q=50;w=5, "global";q=10000;w=10',
        "RateLimit": '"client";r=35;t=2, "global";r=10000;t=0',
    }
