"""Fitting the calibration of a classifier: Platt scaling, written down as a table."""

import numpy as np
from numpy.typing import NDArray

from offline.export import missing_extra
from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.output import Calibration

_ODDS = np.linspace(-8.0, 8.0, 33)
"""Log-odds at which the table has points, besides the ends: between them a line is near enough to the curve."""
_NEAR_CERTAIN = 1e-6


def fit_calibration(probabilities: NDArray[np.float32], labels: NDArray[np.bool_]) -> Calibration:
    """Fit what probabilities should have been: a logistic regression of what came true on their log-odds.

    Two parameters, so that a few days of rows that depend on each other do not bend it, and rising everywhere, so that
    no two rows change places. Source: Platt, "Probabilistic Outputs for Support Vector Machines", 1999.

    Args:
        probabilities: ``(n_rows,)``, of rows that the model was not trained on.
        labels: ``(n_rows,)`` what came true, of both classes.

    Returns:
        The table, from 0 to 1.

    Raises:
        ConfigError: What came true does not rise with the probabilities, or packages that training needs are missing.
    """
    try:
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  # only training needs the extra `demo`
    except ImportError as exc:
        raise missing_extra(exc) from exc
    model = LogisticRegression(C=1e6).fit(_log_odds(probabilities.astype(np.float64))[:, np.newaxis], labels)
    slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if slope <= 0:
        msg = (
            f"calibration on {len(labels)} rows has slope {slope:.3g}, expected more than 0: what came true does not "
            "rise with what the model says; train on a longer range, or without `--calibrate`"
        )
        raise ConfigError(msg)
    answered = np.concatenate([[0.0], 1 / (1 + np.exp(-_ODDS)), [1.0]])
    calibrated = 1 / (1 + np.exp(-(slope * _log_odds(answered) + intercept)))
    return Calibration(answered, calibrated)


def by_column(calibration: Calibration, spec: ModelSpec) -> dict[str, list[list[float]]]:
    """Points ``[answered, calibrated]`` by output column of a classifier, as its card keeps them.

    Args:
        calibration: Of the probability of yes, which is the second column of its tensor; the first is that of no.
        spec: The classifier.
    """
    yes = np.stack([calibration.answered, calibration.calibrated], axis=1)
    return {output.column: (yes if output.index else 1 - yes[::-1]).tolist() for output in spec.outputs}


def _log_odds(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(probabilities, _NEAR_CERTAIN, 1 - _NEAR_CERTAIN)
    odds: NDArray[np.float64] = np.log(inside / (1 - inside))
    return odds
