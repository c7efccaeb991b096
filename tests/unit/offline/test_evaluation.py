import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline.evaluation import brier, roc_auc


def test_auc_is_one_where_every_positive_scores_above_every_negative():
    assert roc_auc(np.array([False, True, False, True]), np.array([0.1, 0.8, 0.2, 0.9])) == 1.0
    assert roc_auc(np.array([True, False]), np.array([0.1, 0.8])) == 0.0


def test_auc_is_none_where_one_class_came_true():
    assert roc_auc(np.array([True, True]), np.array([0.1, 0.8])) is None
    assert roc_auc(np.array([], dtype=bool), np.array([])) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[bool, int]]):
    pairs = [(p > n) + (p == n) / 2 for is_late, p in rows if is_late for was_late, n in rows if not was_late]
    got = roc_auc(np.array([label for label, _ in rows]), np.array([score for _, score in rows], dtype=float))

    assert got == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


def test_brier_is_the_mean_squared_distance():
    assert brier(np.array([True, False]), np.array([1.0, 0.0])) == 0
    assert brier(np.array([True, False]), np.array([0.5, 0.5])) == 0.25
