"""What a version of a model has done, as sums that add up over batches and over workers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.output import ModelOutput
from streams.inference.latency import BINS, bin_of, p99_ms, size_of
from streams.inference.rollout import Evidence

Counts = NDArray[np.int64]

_BOUNDED_BINS: Final = 10
_MAGNITUDES: Final = 10
"""Of an output without bounds: powers of two up to 1,024, of either sign."""


@dataclass(kw_only=True)
class Tally:
    """Sums of what one version has done since a step of a rollout began.

    Attributes:
        rows: Rows given to it.
        failures: Those of them that it had no valid answer to.
        latency: Requests by their size, and by how long they took (:mod:`streams.inference.latency`).
        scores: Scores by value, in the bins of :func:`score_bins`; empty before the first.
        compared: Rows that the champion has answered too, in a shadow.
        difference_sum: Sum of the absolute differences of those.
        difference_max: The largest of them.
    """

    rows: int = 0
    failures: int = 0
    latency: dict[int, Counts] = field(default_factory=dict)
    scores: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    compared: int = 0
    difference_sum: float = 0.0
    difference_max: float = 0.0

    def add(self, *, rows: int, failures: int, took_ms: float, scores: Counts) -> None:
        """Count one request.

        Args:
            rows: Its rows.
            failures: Those without a valid answer.
            took_ms: How long it took.
            scores: Its scores by bins.
        """
        self.rows += rows
        self.failures += failures
        self.latency.setdefault(size_of(rows), np.zeros(BINS, dtype=np.int64))[bin_of(took_ms)] += 1
        self.scores = scores.copy() if not self.scores.size else self.scores + scores

    def compare(self, differences: NDArray[np.float64]) -> None:
        """Count absolute differences from what the champion answered, ``(n_rows,)``."""
        self.compared += differences.size
        self.difference_sum += float(differences.sum())
        self.difference_max = max(self.difference_max, float(differences.max(initial=0.0)))

    @property
    def p99_ms(self) -> float:
        """Time that 99 of 100 requests of any size were answered within; NaN where there are none."""
        return p99_ms(sum(self.latency.values(), np.zeros(BINS, dtype=np.int64)).tolist())

    @property
    def evidence(self) -> Evidence:
        """What a rollout is decided by."""
        return Evidence(
            rows=self.rows,
            failures=self.failures,
            latency={size: tuple(counts.tolist()) for size, counts in self.latency.items()},
            scores=tuple(self.scores.tolist()),
        )

    def to_document(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "rows": self.rows,
            "failures": self.failures,
            "latency": {str(size): counts.tolist() for size, counts in self.latency.items()},
            "scores": self.scores.tolist(),
            "compared": self.compared,
            "difference_sum": self.difference_sum,
            "difference_max": self.difference_max,
        }

    @staticmethod
    def from_document(document: Mapping[str, Any], *, n_bins: int) -> "Tally":
        """Read what :meth:`to_document` made.

        Args:
            document: The document.
            n_bins: Bins of the scores, of :func:`score_bins`.

        Raises:
            ValueError: It was made of other bins.
        """
        scores = np.array(document["scores"], dtype=np.int64)
        latency = {int(size): np.array(counts, dtype=np.int64) for size, counts in document["latency"].items()}
        if scores.size not in (0, n_bins) or any(counts.size != BINS for counts in latency.values()):
            msg = f"there are {scores.size} bins of scores, expected {n_bins}, or bins of latency other than {BINS}"
            raise ValueError(msg)
        return Tally(**{**document, "scores": scores, "latency": latency})


def merged(tallies: Iterable[Tally]) -> Tally:
    """Add up what several workers have seen of one version."""
    whole = Tally()
    for tally in tallies:
        whole.rows += tally.rows
        whole.failures += tally.failures
        for size, counts in tally.latency.items():
            whole.latency[size] = whole.latency.get(size, 0) + counts
        if tally.scores.size:
            whole.scores = tally.scores if not whole.scores.size else whole.scores + tally.scores
        whole.compared += tally.compared
        whole.difference_sum += tally.difference_sum
        whole.difference_max = max(whole.difference_max, tally.difference_max)
    return whole


def count_bins(output: ModelOutput) -> int:
    """How many bins :func:`score_bins` has."""
    return len(score_bins(output, np.empty(0)))


def score_bins(output: ModelOutput, values: NDArray[Any]) -> Counts:
    """Count values of an output by bins, the same for every version: ten between its bounds, else magnitudes."""
    numbers = values.astype(np.float64)
    if output.minimum is not None and output.maximum is not None and output.maximum > output.minimum:
        share = (numbers - output.minimum) / (output.maximum - output.minimum)
        places = np.clip((share * _BOUNDED_BINS).astype(np.int64), 0, _BOUNDED_BINS - 1)
        return np.bincount(places, minlength=_BOUNDED_BINS)
    magnitude = np.minimum(np.floor(np.log2(1 + np.abs(numbers))), _MAGNITUDES).astype(np.int64)
    return np.bincount(np.sign(numbers).astype(np.int64) * magnitude + _MAGNITUDES, minlength=2 * _MAGNITUDES + 1)
