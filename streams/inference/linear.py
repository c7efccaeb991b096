"""A linear model computed in the worker: what is left of a light model where there is no server at all."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError
from schemas.model import ModelSpec
from streams.ports import Inference, Recovery

COEFFICIENTS: Final = ("mean", "scale", "coefficient", "missing")
"""Numbers of each input: what is taken off it, what it is divided by, its weight, and that of its being missing."""


class LinearModel:
    """A logistic regression over the inputs of a model; implements :class:`streams.ports.ModelServer`, without waiting.

    The sum of ``intercept``, of ``(x - mean) / scale * coefficient`` for each input that is there, and of ``missing``
    for each that is not, goes through the logistic function.

    Args:
        spec: Contract of the model.
        coefficients: ``intercept``, and for each of :data:`COEFFICIENTS` a list in the order of the inputs.

    Raises:
        ConfigError: The coefficients are not those of such a model, or it answers otherwise than a classifier.
    """

    def __init__(self, spec: ModelSpec, coefficients: Mapping[str, Any]) -> None:
        where = f"linear model {spec.name}"
        if list(spec.output_tensors.values()) != [("FP32", 2)]:
            msg = f"{where}: output tensors are {spec.output_tensors}, expected one, FP32 of width 2"
            raise ConfigError(msg)
        (self._tensor,) = spec.output_tensors
        n_features = len(spec.inputs)
        try:
            self._intercept = float(coefficients["intercept"])
            self._mean, self._scale, self._weight, self._missing = (
                _vector(coefficients[name], n_features=n_features) for name in COEFFICIENTS
            )
        except (KeyError, TypeError, ValueError) as exc:
            msg = (
                f"{where}: its card's `linear` is not usable ({exc!r}), expected `intercept` and {list(COEFFICIENTS)} "
                f"of {n_features} finite numbers each; train it anew"
            )
            raise ConfigError(msg) from exc

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute ``(n_rows, 2)``: the probabilities of no and of yes."""
        is_missing = np.isnan(features)
        scaled = np.where(is_missing, 0.0, (features.astype(np.float64) - self._mean) / self._scale)
        sums = self._intercept + scaled @ self._weight + is_missing @ self._missing
        yes = 1.0 / (1.0 + np.exp(-np.clip(sums, -500, 500)))
        both: NDArray[np.float32] = np.stack([1 - yes, yes], axis=1).astype(np.float32)
        return both

    async def infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        """Answer a matrix; see the port."""
        return Inference(outputs={self._tensor: self.probabilities(features)})

    async def recover(self) -> Recovery:
        """Nothing can be away."""
        return Recovery.UNNEEDED


def _vector(values: Sequence[float], *, n_features: int) -> NDArray[np.float64]:
    vector = np.array(values, dtype=np.float64)
    if vector.shape != (n_features,) or not np.isfinite(vector).all():
        msg = f"{vector.shape} values, or some that are not finite"
        raise ValueError(msg)
    return vector
