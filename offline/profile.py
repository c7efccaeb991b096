"""Profile of a training set: how the values of each input were distributed, in little room.

An input with few distinct values is kept by value, any other one by some of its quantiles; either way the counts are
those of the rows themselves, so that shares up to a kept value are exact.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

DISCRETE_VALUES: Final = 20
"""Distinct values up to which an input is kept by value."""
QUANTILES: Final = 200
"""Quantiles that are kept of any other input, besides its least value."""


@dataclass(frozen=True, kw_only=True)
class FeatureProfile:
    """How the values of one input were distributed.

    Attributes:
        values: Values in ascending order: all that there were if ``is_discrete``, else quantiles from the least to the
            greatest.
        counts: Rows of each value; of quantiles, rows above the one before and up to this one.
        missing: Rows without a value, whether or not a default stood in for it.
        is_discrete: Whether ``values`` are all that there were.
    """

    values: tuple[float, ...]
    counts: tuple[int, ...]
    missing: int
    is_discrete: bool

    @property
    def rows(self) -> int:
        """Rows with and without a value."""
        return sum(self.counts) + self.missing

    @property
    def missing_share(self) -> float:
        """Share of the rows without a value; 0 of no rows."""
        return self.missing / max(self.rows, 1)

    @property
    def median(self) -> float | None:
        """The median, within the room between two kept values; None of no values."""
        if not self.values:
            return None
        reached = np.cumsum(self.counts)
        return self.values[int(np.searchsorted(reached, reached[-1] / 2))]


@dataclass(frozen=True, kw_only=True)
class TrainingProfile:
    """Profile of all inputs of a training set.

    Attributes:
        since: Event time of its first row, RFC 3339.
        until: Event time of its last row, RFC 3339.
        features: Profile by input name (``view.feature``).
        outputs: Profile of the answers to the rows that it was measured on, calibrated, by output column; none where it
            was trained by an earlier release.
    """

    since: str
    until: str
    features: Mapping[str, FeatureProfile]
    outputs: Mapping[str, FeatureProfile] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The profile as it stands in its file."""
        document = {
            "since": self.since,
            "until": self.until,
            "features": {name: asdict(kept) for name, kept in self.features.items()},
            "outputs": {name: asdict(kept) for name, kept in self.outputs.items()},
        }
        return json.dumps(document).encode() + b"\n"

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, as hexadecimal digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def from_json(cls, content: bytes) -> "TrainingProfile":
        """Read what :meth:`to_json` made.

        Raises:
            ValueError: It is something else.
        """
        try:
            document: dict[str, Any] = json.loads(content)
            features, outputs = (_read(document[part]) for part in ("features", "outputs"))
            return cls(since=document["since"], until=document["until"], features=features, outputs=outputs)
        except (KeyError, TypeError, AttributeError) as exc:
            msg = f"{type(exc).__name__}: {exc}"
            raise ValueError(msg) from exc


def _read(profiles: Mapping[str, Any]) -> dict[str, FeatureProfile]:
    return {
        name: FeatureProfile(
            values=tuple(kept["values"]),
            counts=tuple(kept["counts"]),
            missing=kept["missing"],
            is_discrete=kept["is_discrete"],
        )
        for name, kept in profiles.items()
    }


def profile_feature(values: NDArray[np.floating[Any]]) -> FeatureProfile:
    """Make the profile of one input.

    Args:
        values: ``(n_rows,)`` its values, NaN where missing.
    """
    present = np.sort(values[~np.isnan(values)].astype(np.float64))
    kept = np.unique(present)
    is_discrete = len(kept) <= DISCRETE_VALUES
    if not is_discrete:
        # Values that are there, never some between two of them.
        kept = np.unique(np.quantile(present, np.linspace(0, 1, QUANTILES + 1), method="inverted_cdf"))
    up_to = np.searchsorted(present, kept, side="right")
    return FeatureProfile(
        values=tuple(kept.tolist()),
        counts=tuple(np.diff(up_to, prepend=0).tolist()),
        missing=len(values) - len(present),
        is_discrete=is_discrete,
    )


def profile_inputs(names: Sequence[str], matrix: NDArray[np.floating[Any]]) -> dict[str, FeatureProfile]:
    """Make the profile of each input.

    Args:
        names: Names of the inputs, in matrix order.
        matrix: ``(n_rows, n_features)``, NaN where missing.
    """
    return {name: profile_feature(matrix[:, index]) for index, name in enumerate(names)}
