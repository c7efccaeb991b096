"""Reads the Prometheus endpoints of the workers."""

import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0


@dataclass
class Samples:
    """Samples of one scrape, by metric sample name."""

    by_name: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples that carry ``labels``; 0 when there are none."""
        return sum(value for found, value in self.by_name.get(name, ()) if labels.items() <= found.items())

    def values(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sum the samples that carry ``labels`` by another label."""
        sums: dict[str, float] = {}
        for found, value in self.by_name.get(name, ()):
            if labels.items() <= found.items():
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def quantile(self, name: str, q: float, *, before: "Samples | None" = None, **labels: str) -> float | None:
        """Estimate a quantile of a histogram as Prometheus does, over what came since ``before``; None without data."""
        buckets = self.values(f"{name}_bucket", "le", **labels)
        for bound, count in (before.values(f"{name}_bucket", "le", **labels) if before else {}).items():
            buckets[bound] = buckets.get(bound, 0.0) - count
        ordered = sorted((float(bound), count) for bound, count in buckets.items())
        if not ordered or ordered[-1][1] <= 0:
            return None
        rank, low, below = q * ordered[-1][1], 0.0, 0.0
        for high, total in ordered:
            if total >= rank:
                if high == float("inf"):
                    return low
                return low + (high - low) * (rank - below) / max(total - below, 1e-9)
            low, below = high, total
        return low


def scrape(ports: Iterable[int]) -> Samples:
    """Scrape endpoints on this machine; one that does not answer adds nothing."""
    samples = Samples()
    for port in ports:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode()
        except OSError:
            continue
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples
