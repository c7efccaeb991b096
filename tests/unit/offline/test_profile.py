import numpy as np
import pytest

from offline.profile import DISCRETE_VALUES, QUANTILES, TrainingProfile, profile_feature, profile_inputs

NAN = float("nan")


def test_few_distinct_values_are_kept_with_their_counts():
    profile = profile_feature(np.array([1, 0, 1, NAN, 1], dtype=np.float32))
    assert (profile.values, profile.counts, profile.missing) == ((0.0, 1.0), (1, 3), 1)
    assert profile.is_discrete
    assert (profile.rows, profile.missing_share, profile.median) == (5, 0.2, 1.0)


def test_of_many_distinct_values_quantiles_are_kept_with_the_rows_up_to_each():
    profile = profile_feature(np.random.default_rng(0).permutation(10_001).astype(np.float32))
    assert not profile.is_discrete
    assert len(profile.values) == len(profile.counts) == QUANTILES + 1
    assert (profile.values[0], profile.values[-1]) == (0, 10_000)
    assert np.cumsum(profile.counts).tolist() == [int(value) + 1 for value in profile.values]
    assert profile.median == pytest.approx(5_000, abs=50)


def test_ties_of_many_quantiles_are_one_value():
    values = np.concatenate([np.zeros(900), np.arange(1, DISCRETE_VALUES + 81)])
    profile = profile_feature(values)
    assert (profile.values[0], profile.counts[0]) == (0, 900)
    assert len(set(profile.values)) == len(profile.values)
    assert profile.rows == 1_000


@pytest.mark.parametrize("values", [np.array([]), np.array([NAN, NAN])])
def test_an_input_without_a_value_has_a_profile(values: np.ndarray):
    profile = profile_feature(values)
    assert (profile.values, profile.median, profile.missing) == ((), None, len(values))
    assert profile.missing_share == min(len(values), 1)


def test_infinite_values_are_values():
    profile = profile_feature(np.concatenate([np.arange(99.0), [np.inf]]))
    assert profile.values[-1] == np.inf
    assert profile.missing == 0


def test_a_profile_reads_as_it_was_written():
    matrix = np.column_stack([np.arange(500), np.arange(500) % 3]).astype(np.float32)
    profile = TrainingProfile(
        since="a", until="b", features=profile_inputs(["v.x", "v.y"], matrix), outputs=profile_inputs(["p"], matrix)
    )
    read = TrainingProfile.from_json(profile.to_json())
    assert read == profile
    assert read.sha256 == profile.sha256
    assert [*read.features] == ["v.x", "v.y"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"features": {"a": 1}}', b'{"features": [1]}', b"\xff"])
def test_what_is_no_profile_is_refused(content: bytes):
    with pytest.raises(ValueError, match=r"."):
        TrainingProfile.from_json(content)
