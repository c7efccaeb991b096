"""Metrics of the serve role: what is read online, how old it is, and how requests fare."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from streams.observability.metrics import DURATION_BUCKETS_S, FRESHNESS_BUCKETS_S, Metrics

_ENTITIES_BUCKETS: Final = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000)


class ReadValue(Protocol):
    """What is told of a value that was read."""

    @property
    def status(self) -> str:
        """What a reader may make of it."""
        ...

    @property
    def source(self) -> str:
        """Where it was found."""
        ...

    @property
    def broker_time_us(self) -> int | None:
        """When the event that made it came to the broker."""
        ...


class ServingMetrics(Metrics):
    """What the serve role reports, beside what every role does.

    Args:
        registry: As for :class:`Metrics`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self._reads = self._counter(
            "headrace_online_reads_total",
            "Values read online, by what a reader may make of them and where they were found.",
            labels=("view", "status", "source"),
        )
        self._read_age = self._histogram(
            "headrace_online_read_age_seconds",
            "Age of values when they are read: since the event that made them came to the broker.",
            labels=("view",),
            buckets=FRESHNESS_BUCKETS_S,
        )
        self._read_values = self._histogram(
            "headrace_online_read_entities",
            "Entities of one read of a view.",
            labels=("view",),
            buckets=_ENTITIES_BUCKETS,
        )
        self._unavailable = self._counter(
            "headrace_online_read_failures_total", "Reads that found a store unavailable.", labels=("store",)
        )
        self._requests = self._counter(
            "headrace_http_requests_total", "HTTP requests by route and status.", labels=("route", "status")
        )
        self._request_duration = self._histogram(
            "headrace_http_request_duration_seconds",
            "HTTP requests, from the whole request to the whole answer.",
            labels=("route",),
            buckets=DURATION_BUCKETS_S,
        )

        self._events = self._counter(
            "headrace_http_events_total",
            "Events that were sent to the API, by what became of them: accepted, a reason, too_large or unavailable.",
            labels=("source", "outcome"),
        )

    def events_taken(self, source: str, outcomes: Mapping[str, int]) -> None:
        """Report what became of events of a request."""
        for outcome, times in outcomes.items():
            self._add(self._events, times, source, outcome)

    def values_read(self, view: str, values: Sequence[ReadValue], *, now_us: int) -> None:
        """Report the values of one read of a view."""
        for (status, source), times in Counter((str(v.status), str(v.source)) for v in values).items():
            self._add(self._reads, times, view, status, source)
        ages_s = [(now_us - v.broker_time_us) / 1e6 for v in values if v.broker_time_us is not None]
        self._observe(self._read_age, np.array(ages_s), view)
        self._observe(self._read_values, float(len(values)), view)

    def store_unavailable(self, store: str) -> None:
        """Report a read that found ``redis`` or ``delta`` unavailable."""
        self._add(self._unavailable, 1, store)

    def request_done(self, route: str, *, status: int, seconds: float) -> None:
        """Report an answered request; ``route`` is its template, never its path."""
        self._add(self._requests, 1, route, str(status))
        self._observe(self._request_duration, seconds, route)
