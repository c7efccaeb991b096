"""A Prometheus histogram that takes arrays: a batch of a hundred thousand values costs one pass, not as many calls."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class ArrayHistogram(Collector):
    """A histogram with labels. Thread-safe.

    Args:
        name: Metric name, with its unit.
        documentation: What it measures.
        labels: Label names.
        buckets: Upper bounds (inclusive), rising; ``+Inf`` is added.
        registry: Where it is registered.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self.name = name
        self.label_names = tuple(labels)
        self.buckets = tuple(buckets)
        self._documentation = documentation
        self._bounds = np.asarray(buckets, np.float64)
        self._series: dict[tuple[str, ...], tuple[NDArray[np.int64], float]] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def observe(self, values: float | NDArray[np.float64], *labels: str) -> None:
        """Count values under the given label values; NaN is left out, what is below 0 counts as 0."""
        observed = np.atleast_1d(np.asarray(values, np.float64))
        observed = np.maximum(observed[~np.isnan(observed)], 0.0)
        if not len(observed):
            return
        found = np.bincount(np.searchsorted(self._bounds, observed), minlength=len(self._bounds) + 1)
        with self._lock:
            counts, total = self._series.get(labels, (np.zeros(len(self._bounds) + 1, np.int64), 0.0))
            self._series[labels] = (counts + found, total + float(observed.sum()))

    def collect(self) -> Iterator[Metric]:
        """Report every series; called by the registry at each scrape."""
        family = self._family()
        with self._lock:
            series = dict(self._series)
        names = [*map(floatToGoString, self.buckets), "+Inf"]
        for labels, (counts, total) in series.items():
            cumulative = np.cumsum(counts).tolist()
            family.add_metric(labels, list(zip(names, cumulative, strict=True)), total)
        yield family

    def describe(self) -> Iterator[Metric]:
        """Report the name alone; called by the registry to refuse a second metric of that name."""
        yield self._family()

    def _family(self) -> Any:
        return HistogramMetricFamily(self.name, self._documentation, labels=self.label_names)
