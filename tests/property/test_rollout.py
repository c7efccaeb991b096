"""Rollouts: sticky splits, and no bad version that stays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.model import ServedVersion
from streams.inference.latency import BINS, Latency, bin_of, is_slower, p99_ms, size_of
from streams.inference.rollout import (
    Evidence,
    Limits,
    Rollout,
    Stage,
    belongs_to_candidate,
    observe,
    promote,
    roll_back,
    start_canary,
    start_shadow,
)
from streams.inference.tally import Tally, score_bins
from tests.support.scoring import make_spec

OLD, NEW, OTHER = (ServedVersion(version=str(n), sha256=f"{n}" * 64) for n in (1, 2, 3))
STABLE = Rollout(model="delay", champion=OLD)
WINDOW_US = Limits().window_us


def took(*milliseconds: float, size: int = 5) -> Latency:
    """Latency of a hundred requests of each."""
    counts = [0] * BINS
    for each in milliseconds:
        counts[bin_of(each)] += 100
    return {size: counts}


GOOD = Evidence(
    rows=1_000,
    failures=1,
    latency=took(8.0, 10.0),
    scores=(500, 300, 200),
    labelled=500,
    squared_error=50.0,
)
BAD = {
    "failures": (replace(GOOD, failures=50), "5.00% of its rows failed, 0.10% of the champion's"),
    "latency": (
        replace(GOOD, latency=took(8.0, 16.0)),
        "its p99 is 16.6 ms in requests of up to 32 rows, the champion's 10.8 ms",
    ),
    "scores": (replace(GOOD, scores=(200, 300, 500)), "PSI"),
    "quality": (replace(GOOD, squared_error=100.0), "its Brier score is 0.200, the champion's 0.100"),
}


@given(st.lists(st.text(min_size=1), min_size=1, max_size=50), st.floats(0.001, 1), st.floats(0.001, 1))
def test_an_entity_keeps_its_arm_and_a_larger_share_only_adds(entities: list[str], one: float, two: float):
    small, large = sorted((one, two))
    first, second = (
        belongs_to_candidate(start_canary(STABLE, NEW, now_us=0, shares=[share]), entities) for share in (small, large)
    )
    alone = belongs_to_candidate(start_canary(STABLE, NEW, now_us=7, shares=[small]), entities[::-1])[::-1]

    assert (first <= second).all()
    np.testing.assert_array_equal(first, alone)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
def test_the_split_is_as_large_as_asked_and_another_one_for_each_version(share: float):
    entities = [f"flight-{number}" for number in range(20_000)]
    new, other = (
        belongs_to_candidate(start_canary(STABLE, version, now_us=0, shares=[share]), entities)
        for version in (NEW, OTHER)
    )

    assert abs(new.mean() - share) < 5 * (share * (1 - share) / 20_000) ** 0.5 + 1e-9
    assert abs((new & other).mean() - share**2) < 0.02


@given(st.lists(st.sampled_from([WINDOW_US, WINDOW_US - 1, 1]), max_size=30), st.integers(0, 30))
def test_a_bad_version_is_rolled_back_whenever_it_turns_bad(passed_us: list[int], turns_bad: int):
    state, now_us = start_canary(STABLE, NEW, now_us=0), 0
    for number, each in enumerate(passed_us):
        now_us += each
        seen = BAD["failures"][0] if number >= turns_bad else GOOD
        is_watched = state.stage is Stage.WATCH
        was = state
        state = observe(state, champion=seen if is_watched else GOOD, candidate=seen, now_us=now_us)
        if number >= turns_bad and was.stage is not Stage.STABLE:
            assert (state.stage, state.champion) == (Stage.STABLE, OLD)
        if state.stage is Stage.STABLE:
            break


def test_a_good_version_goes_through_every_share_and_is_watched_before_it_stays():
    state, seen = start_canary(STABLE, NEW, now_us=0), []
    for number in range(1, 6):
        seen.append((state.stage, state.share))
        state = observe(state, champion=GOOD, candidate=GOOD, now_us=number * WINDOW_US)

    assert seen == [*((Stage.CANARY, share) for share in (0.01, 0.05, 0.25, 0.5)), (Stage.WATCH, 0.0)]
    assert (state.stage, state.champion, state.candidate, state.previous) == (Stage.STABLE, NEW, None, None)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("stage", [Stage.SHADOW, Stage.CANARY, Stage.WATCH])
def test_each_fault_rolls_back_in_each_stage_and_says_why(kind: str, stage: Stage):
    canary = start_canary(STABLE, NEW, now_us=0)
    state = {
        Stage.SHADOW: start_shadow(STABLE, NEW, now_us=0),
        Stage.CANARY: canary,
        Stage.WATCH: promote(canary, now_us=0, baseline=GOOD),
    }[stage]
    bad, why = BAD[kind]

    ended = observe(state, champion=bad if stage is Stage.WATCH else GOOD, candidate=bad, now_us=1)

    assert (ended.stage, ended.champion, ended.candidate) == (Stage.STABLE, OLD, None)
    assert why in ended.reason


def test_too_few_rows_prolong_a_step():
    state = start_canary(STABLE, NEW, now_us=0)
    few = replace(BAD["failures"][0], rows=199, failures=199)

    assert observe(state, champion=GOOD, candidate=few, now_us=10 * WINDOW_US) == state


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("failing", "rows_per_request", "every"), [(0.0, 1, 1), (0.02, 20, 1), (0.1, 1, 1), (0.02, 20, 10)]
)
def test_chance_alone_takes_no_version_back(seed: int, failing: float, rows_per_request: int, every: int):
    """Two versions that do the very same are judged after each request, from the fewest rows on.

    The champion has as many of them as the candidate, or a tenth.
    """
    random = np.random.default_rng(seed)
    output = make_spec().outputs[0]
    state, seen = start_canary(STABLE, NEW, now_us=0, shares=[0.5]), (Tally(), Tally())
    for number in range(200):
        for tally in seen if number % every == 0 else seen[1:]:
            tally.add(
                rows=rows_per_request,
                failures=int(random.binomial(rows_per_request, failing)),
                took_ms=float(random.lognormal(2.0, 0.4)),
                scores=score_bins(output, random.beta(2, 5, rows_per_request)),
            )
        champion, candidate = (tally.evidence for tally in seen)
        limits = Limits(min_rows=50)
        assert observe(state, champion=champion, candidate=candidate, now_us=1, limits=limits) is state


def test_a_p99_is_certain_only_of_many_requests():
    one_slow, one_in_twenty = [0] * BINS, [0] * BINS
    for counts, n_quick, n_slow in ((one_slow, 19, 1), (one_in_twenty, 950, 50)):
        counts[bin_of(1.0)], counts[bin_of(100.0)] = n_quick, n_slow
    quick = took(1.0, 1.0, 1.0, 1.0, 1.0)[5]

    assert p99_ms(one_slow) > 90
    assert not is_slower(one_slow, quick, times=1.5), "that may be the one in a hundred"
    assert is_slower(one_in_twenty, quick, times=1.5)
    assert not is_slower(one_in_twenty, [count and 10 for count in quick], times=1.5), (
        "ten say nothing of one in twenty"
    )
    assert not is_slower([0] * BINS, quick, times=1.5)
    assert not is_slower(quick, [0] * BINS, times=1.5)


def test_requests_of_other_sizes_are_not_compared():
    slower = replace(GOOD, latency=took(80.0, 100.0, size=6))
    state = start_canary(STABLE, NEW, now_us=0)

    assert observe(state, champion=GOOD, candidate=slower, now_us=1) is state
    assert [size_of(rows) for rows in (1, 2, 3, 4, 5, 1_024, 1_025)] == [0, 1, 2, 2, 3, 10, 11]


def test_an_a_b_test_is_not_promoted_by_itself_but_is_rolled_back():
    state = start_canary(STABLE, NEW, now_us=0, shares=[0.5], is_held=True)

    assert observe(state, champion=GOOD, candidate=GOOD, now_us=10 * WINDOW_US) == state
    assert observe(state, champion=GOOD, candidate=BAD["latency"][0], now_us=1).champion == OLD


def test_what_cannot_be_done_is_refused_with_what_can():
    canary = start_canary(STABLE, NEW, now_us=0)
    with pytest.raises(ConfigError, match="is canary with champion 1 and candidate 2, expected stable or shadow"):
        start_canary(canary, OTHER, now_us=0)
    with pytest.raises(ConfigError, match="version 1 to be neither champion nor second candidate"):
        start_shadow(STABLE, OLD, now_us=0)
    with pytest.raises(ConfigError, match="has no candidate, expected one in shadow or canary"):
        promote(STABLE, now_us=0)
    with pytest.raises(ConfigError, match="is stable, expected a candidate"):
        roll_back(STABLE, now_us=0)
    for shares in ([], [0.0], [0.5, 0.1], [1.5], [0.1, 0.1]):
        with pytest.raises(ConfigError, match="canary shares are"):
            start_canary(STABLE, NEW, now_us=0, shares=shares)
    with pytest.raises(ConfigError, match="watch window is 0 us"):
        Limits(window_us=0)
