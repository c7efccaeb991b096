"""Drift of a model's inputs and answers: are their values still distributed as in training?

Two statistics for each input, or output, and window, after the profile that training kept (:mod:`offline.profile`):

- PSI, the population stability index: sum of ``(p - q) ln(p / q)`` over bins, *p* being the shares now and *q* those in
  training. Bins are the values of a discrete input, else the deciles of training; further ones are for what training
  never saw (below, above, or between discrete values) and for missing values. It says how much has changed: by the
  usual reading below 0.1 little, from 0.2 on a lot.
- Kolmogorov-Smirnov, two samples: the greatest distance D between the distributions of the values that are there, taken
  at the values that the profile kept, where it knows the share exactly. So D is never too large, and too small by 1/200
  at most between quantiles. The p-value is the asymptotic one (M. A. Stephens, "Use of the Kolmogorov-Smirnov,
  Cramer-von Mises and related statistics without extensive tables", JRSS B 32, 1970), times the number of inputs that
  the window compares (Bonferroni). None for discrete inputs, which it does not hold for.

An input has drifted where PSI is 0.2 or more, or 0.1 or more and p < 0.05. p alone would not do: of many rows any
difference is significant, and rows that share an hour or an entity are fewer than they seem. PSI alone would not do
either: with few rows chance makes it large, ``(bins - 1) (1 / n + 1 / m)`` on average (B. Yurdakul, "Statistical
properties of population stability index", 2018); hence the rows a window must have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offline.profile import FeatureProfile
from streams.inference.rollout import stability_index

PSI_LARGE: Final = 0.2
PSI_MODERATE: Final = 0.1
SIGNIFICANT: Final = 0.05
ROWS_PER_BIN: Final = 20
"""Rows for each bin that a window must have: what has not changed then has a PSI of about 0.05 on average, at most."""
_DECILES: Final = 10
_CERTAIN_BELOW: Final = 0.2
"""Where the series for p converges too slowly, and p is 1 to ten digits."""


class Verdict(StrEnum):
    """What is to be thought of an input in a window."""

    DRIFT = "drift"
    STEADY = "steady"
    TOO_FEW_ROWS = "too_few_rows"
    """In the window or in training; statistics of them say nothing and are left out."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How an input is distributed in one window, next to training.

    Attributes:
        verdict: Whether it has drifted.
        psi: Population stability index; None of too few rows.
        ks: Kolmogorov-Smirnov distance, 0 to 1; None of a discrete input, of no values, or of too few rows.
        p_value: That of ``ks``, times the number of inputs compared; None where that is.
        missing_share: Share of the rows without a value, whether or not a default stood in; None of no rows.
        median: Median of the values; None of no values.
    """

    verdict: Verdict
    psi: float | None
    ks: float | None
    p_value: float | None
    missing_share: float | None
    median: float | None


def judge_inputs(profiles: Mapping[str, FeatureProfile], matrix: NDArray[np.floating[Any]]) -> dict[str, Drift]:
    """Compare the inputs of one window with training.

    Args:
        profiles: Profile by input name, in matrix order.
        matrix: ``(n_rows, n_features)``, NaN where missing.
    """
    return {
        name: judge_input(profile, matrix[:, index], n_inputs=len(profiles))
        for index, (name, profile) in enumerate(profiles.items())
    }


def judge_input(profile: FeatureProfile, values: NDArray[np.floating[Any]], *, n_inputs: int = 1) -> Drift:
    """Compare one input in one window with training.

    Args:
        profile: What it was in training.
        values: ``(n_rows,)`` its values, NaN where missing.
        n_inputs: Inputs that the window compares.
    """
    n_rows = len(values)
    present = np.sort(values[~np.isnan(values)].astype(np.float64))
    trained, now = _binned(profile, present, missing=n_rows - len(present))
    missing_share = (n_rows - len(present)) / n_rows if n_rows else None
    median = float(np.quantile(present, 0.5, method="inverted_cdf")) if len(present) else None
    if min(n_rows, profile.rows) < ROWS_PER_BIN * max(2, np.count_nonzero(trained)):
        return Drift(
            verdict=Verdict.TOO_FEW_ROWS, psi=None, ks=None, p_value=None, missing_share=missing_share, median=median
        )
    is_met = (trained > 0) | (now > 0)
    psi = stability_index(now[is_met].tolist(), trained[is_met].tolist())
    ks, p_value = None, None
    if not profile.is_discrete and len(present):
        ks = _distance(profile, present)
        p_value = min(1.0, ks_p_value(ks, sum(profile.counts), len(present)) * n_inputs)
    is_drift = psi >= PSI_LARGE or (psi >= PSI_MODERATE and p_value is not None and p_value < SIGNIFICANT)
    return Drift(
        verdict=Verdict.DRIFT if is_drift else Verdict.STEADY,
        psi=psi,
        ks=ks,
        p_value=p_value,
        missing_share=missing_share,
        median=median,
    )


def low_confidence_share(probabilities: NDArray[np.floating[Any]], confidence: float) -> float | None:
    """Share of answers that are hardly more sure than a coin: the likelier side has less than ``confidence``.

    Args:
        probabilities: ``(n_rows,)`` probability of one of two sides, 0 to 1.
        confidence: 0.5 to 1.

    Returns:
        None of no rows.
    """
    if not len(probabilities):
        return None
    return float((np.maximum(probabilities, 1 - probabilities) < confidence).mean())


def ks_p_value(distance: float, n: int, m: int) -> float:
    """Probability of a Kolmogorov-Smirnov distance this large between samples of ``n`` and ``m`` of one distribution.

    Asymptotic: to two digits from some ten rows on.
    """
    root = np.sqrt(n * m / (n + m))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < _CERTAIN_BELOW:
        return 1.0
    term = np.arange(1, 101)
    series = 2 * ((-1.0) ** (term - 1) * np.exp(-2 * (term * scaled) ** 2)).sum()
    return float(np.clip(series, 0.0, 1.0))


def _binned(
    profile: FeatureProfile, present: NDArray[np.float64], *, missing: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count training's rows and the window's by bin; the last bin is that of missing values."""
    kept, counts = np.array(profile.values), np.array(profile.counts, dtype=np.int64)
    if profile.is_discrete:
        at = np.searchsorted(present, kept, side="left")
        known = np.searchsorted(present, kept, side="right") - at
        return np.append(counts, [0, profile.missing]), np.append(known, [len(present) - known.sum(), missing])
    reached = np.cumsum(counts)
    wanted = np.arange(1, _DECILES + 1) / _DECILES * reached[-1]
    upper = np.unique(np.searchsorted(reached, wanted))
    edges = np.concatenate([[np.nextafter(kept[0], -np.inf)], kept[upper]])
    up_to = np.searchsorted(present, edges, side="right")
    return (
        np.concatenate([[0], np.diff(reached[upper], prepend=0), [0, profile.missing]]),
        np.concatenate([np.diff(up_to, prepend=0), [len(present) - up_to[-1], missing]]),
    )


def _distance(profile: FeatureProfile, present: NDArray[np.float64]) -> float:
    trained = np.cumsum(profile.counts) / sum(profile.counts)
    now = np.searchsorted(present, profile.values, side="right") / len(present)
    return float(np.abs(trained - now).max())
