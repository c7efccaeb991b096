"""How good predicted probabilities are."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def roc_auc(labels: NDArray[np.bool_], scores: NDArray[np.floating[Any]]) -> float | None:
    """Area under the ROC curve: the chance that a positive row scores above a negative one, ties counting half.

    Args:
        labels: ``(n_rows,)`` what came true.
        scores: ``(n_rows,)`` scores, none NaN; any order-preserving scale.

    Returns:
        0 to 1, or None where only one class came true.
    """
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][labels].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def brier(labels: NDArray[np.bool_], probabilities: NDArray[np.floating[Any]]) -> float:
    """Brier score: mean squared distance of the probabilities from what came true; 0 is perfect.

    Args:
        labels: ``(n_rows,)`` what came true, at least one row.
        probabilities: ``(n_rows,)`` predicted probabilities.
    """
    return float(np.mean((probabilities.astype(np.float64) - labels) ** 2))
