import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from offline.drift import Drift, Verdict, judge_input, judge_inputs, ks_p_value, low_confidence_share
from offline.profile import profile_feature

NAN = float("nan")


def normal(n: int, *, seed: int = 0, mean: float = 0.0, spread: float = 1.0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(mean, spread, n)


def judge(trained: NDArray[np.float64], now: NDArray[np.float64]) -> Drift:
    return judge_input(profile_feature(trained), now)


def test_the_same_distribution_is_steady():
    found = judge(normal(20_000), normal(2_000, seed=1))
    assert found.verdict is Verdict.STEADY
    assert found.psi is not None
    assert found.psi < 0.02
    assert found.p_value is not None
    assert found.p_value > 0.05


@pytest.mark.parametrize(
    "now",
    [
        normal(2_000, seed=1, mean=0.6),
        normal(2_000, seed=1, spread=2.0),
        normal(2_000, seed=1, mean=100),
        np.full(2_000, 0.1),
        np.where(np.arange(2_000) % 4, normal(2_000, seed=1), NAN),
        np.full(2_000, NAN),
        np.full(2_000, np.inf),
    ],
    ids=["shifted", "wider", "elsewhere", "one value", "a quarter missing", "all missing", "infinite"],
)
def test_another_distribution_is_drift(now: NDArray[np.float64]):
    assert judge(normal(20_000), now).verdict is Verdict.DRIFT


def test_a_moderate_change_is_drift_only_where_it_is_significant():
    moved = judge(normal(20_000), normal(5_000, seed=1, mean=0.37))
    assert moved.psi is not None
    assert 0.1 < moved.psi < 0.2
    assert moved.verdict is Verdict.DRIFT
    # As much by PSI, but of values within their bins: the distributions up to a value are hardly apart.
    trained = np.arange(20_000) % 20_000 / 2_000
    uneven = np.where(np.arange(10) % 2, 0.69, 1.31)
    now = np.repeat(np.arange(10) + 0.5, (uneven * 30).astype(int))
    found = judge(trained, now)
    assert found.psi is not None
    assert found.p_value is not None
    assert 0.1 < found.psi < 0.2
    assert found.p_value > 0.05
    assert found.verdict is Verdict.STEADY


def test_a_small_change_of_very_many_rows_is_significant_and_no_drift():
    found = judge(normal(200_000), normal(200_000, seed=1, mean=0.05))
    assert found.p_value is not None
    assert found.p_value < 0.001
    assert found.verdict is Verdict.STEADY


def test_a_constant_is_steady_until_it_is_another():
    trained = np.zeros(1_000)
    steady = judge(trained, np.zeros(100))
    assert (steady.verdict, steady.psi, steady.ks, steady.p_value) == (Verdict.STEADY, 0.0, None, None)
    assert judge(trained, np.ones(100)).verdict is Verdict.DRIFT
    assert judge(trained, np.full(100, NAN)).verdict is Verdict.DRIFT


def test_discrete_values_are_compared_by_value():
    trained = np.arange(3_000) % 3
    assert judge(trained, np.arange(300) % 3).verdict is Verdict.STEADY
    assert judge(trained, np.arange(300) % 2).verdict is Verdict.DRIFT
    # A value that is in training's range, and was never there.
    assert judge(trained, np.where(np.arange(300) % 4, np.arange(300) % 3, 0.5)).verdict is Verdict.DRIFT


def test_where_a_quantile_is_most_of_training_a_move_beyond_it_shows():
    trained = np.concatenate([np.arange(100) / 100, np.full(900, 1.0)])
    assert judge(trained, np.where(np.arange(500) % 2, 1.0, 5.0)).verdict is Verdict.DRIFT
    assert judge(-trained, np.where(np.arange(500) % 2, -1.0, -5.0)).verdict is Verdict.DRIFT


def test_what_was_always_missing_is_steady_until_it_comes():
    trained = np.full(1_000, NAN)
    assert judge(trained, trained[:100]).verdict is Verdict.STEADY
    assert judge(trained, np.arange(100.0)).verdict is Verdict.DRIFT


@pytest.mark.parametrize("n_rows", [0, 1, 9, 199])
def test_fewer_rows_than_the_bins_need_are_not_judged(n_rows: int):
    found = judge(normal(20_000), normal(n_rows, mean=100))
    assert found.verdict is Verdict.TOO_FEW_ROWS
    assert (found.psi, found.ks, found.p_value) == (None, None, None)
    assert found.missing_share == (None if n_rows == 0 else 0)


def test_a_training_set_of_too_few_rows_judges_nothing():
    assert judge(normal(100), normal(10_000, mean=100)).verdict is Verdict.TOO_FEW_ROWS
    assert judge(np.array([]), normal(10_000)).verdict is Verdict.TOO_FEW_ROWS


def test_a_p_value_counts_for_as_many_inputs_as_are_compared():
    profile, now = profile_feature(normal(20_000)), normal(1_000, seed=1, mean=0.15)
    one = judge_input(profile, now).p_value
    both = judge_inputs({"a": profile, "b": profile}, np.column_stack([now, now]))["b"].p_value
    assert one is not None
    assert both == pytest.approx(2 * one)


def test_confidence_is_low_where_neither_side_is_likely():
    assert low_confidence_share(np.array([0.0, 0.4, 0.41, 0.5, 0.59, 0.6, 1.0]), 0.6) == pytest.approx(3 / 7)
    assert low_confidence_share(np.array([]), 0.6) is None


@pytest.mark.parametrize(("n", "m"), [(20_000, 1_000), (1_000, 1_000), (500, 60)])
@pytest.mark.parametrize("mean", [0.0, 0.05, 0.1, 0.3])
def test_distance_and_p_are_those_of_scipy_but_for_the_quantiles_between(n: int, m: int, mean: float):
    trained, now = normal(n), normal(m, seed=1, mean=mean)
    expected = stats.ks_2samp(trained, now)
    assert ks_p_value(expected.statistic, n, m) == pytest.approx(expected.pvalue, abs=0.02)
    found = judge(trained, now).ks
    if found is not None:
        assert expected.statistic - 1 / 200 - 1e-9 <= found <= expected.statistic + 1e-9


@given(st.floats(0, 1), st.integers(1, 10**7), st.integers(1, 10**7))
def test_p_is_a_probability_and_falls_with_distance(distance: float, n: int, m: int):
    p = ks_p_value(distance, n, m)
    assert 0 <= p <= 1
    assert ks_p_value(min(1.0, distance * 1.1), n, m) <= p + 1e-9


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["normal", "skewed", "tied", "discrete", "holed"]),
    n_rows=st.integers(600, 3_000),
)
def test_rows_of_the_training_set_itself_are_hardly_ever_drift(seed: int, kind: str, n_rows: int):
    random = np.random.default_rng(seed)
    trained = {
        "normal": random.normal(size=10_000),
        "skewed": random.lognormal(sigma=2, size=10_000),
        "tied": np.maximum(random.normal(size=10_000), 0),
        "discrete": random.poisson(2, 10_000).astype(float),
        "holed": np.where(random.random(10_000) < 0.3, NAN, random.normal(size=10_000)),
    }[kind]
    profile = profile_feature(trained)
    assert judge_input(profile, trained).psi == pytest.approx(0, abs=1e-3)
    found = judge_input(profile, random.choice(trained, n_rows))
    assert found.verdict is Verdict.STEADY
    moved = judge_input(profile, random.choice(trained, n_rows) + 1.5 * np.nanstd(trained))
    assert moved.verdict is Verdict.DRIFT


@settings(max_examples=100)
@given(
    trained=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=60),
    now=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=60),
    times=st.sampled_from([1, 40]),
)
def test_any_values_have_a_verdict(trained: list[float], now: list[float], times: int):
    found = judge(np.repeat(np.array(trained, dtype=np.float64), times), np.repeat(np.array(now, np.float64), times))
    for number, highest in ((found.psi, np.inf), (found.ks, 1), (found.p_value, 1), (found.missing_share, 1)):
        assert number is None or 0 <= number <= highest
    assert (found.psi is None) == (found.verdict is Verdict.TOO_FEW_ROWS)
