"""Every Prometheus metric of every role, in one place.

Names carry their unit (``_seconds``, ``_bytes``) and counters end in ``_total``. Labels take values that definitions,
Kafka partitions and fixed lists bound: never an entity, an offset or a message. Should they still be too many, the rest
is counted under ``other``.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, PlatformCollector, ProcessCollector

from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US
from streams.observability.histogram import ArrayHistogram

logger = logging.getLogger(__name__)

FRESHNESS_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.1, 0.12, 0.135, 0.15, 0.165, 0.18, 0.2, 0.225),
    *(0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Finest around 0.15 s and 0.25 s, the promised bounds, which are themselves among them: the share within is exact."""
DURATION_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
ROWS_BUCKETS: Final = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
LINEAGE_FAILURES: Final = ("queue_full", "rejected", "closed")
"""Why lineage events are lost: too many waited, the transport refused, the emitter was closed."""
MAX_SERIES: Final = 2_000
"""Series of one metric, after which further ones are counted under ``other``."""


class Metrics:
    """What the workers of a process report.

    Every method is safe to call from any thread, returns at once and never fails on account of what it is told.

    Args:
        registry: Where the metrics live; a new registry with the process's own metrics when left out.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
        self.registry = registry
        self._lock = threading.Lock()
        self._seen: dict[str, set[tuple[str, ...]]] = {}
        self._paused_s: dict[tuple[str, str], float] = {}
        self.retries: dict[str, int] = {}
        """How often a call was repeated, by store: what waits for a store does not stand still."""

        self._rows = self._counter(
            "headrace_rows_total",
            "Rows by what became of them; reason is empty where the outcome says it all.",
            labels=("role", "view", "outcome", "reason"),
        )
        self._dead_letters = self._counter(
            "headrace_dead_letters_total",
            "Rows that went to a source's dead-letter topic.",
            labels=("source", "reason"),
        )
        self._rows_routed = self._counter(
            "headrace_repartitioned_rows_total",
            "Rows of a source that went on to a repartition topic.",
            labels=("source", "topic"),
        )
        self._batch_duration = self._histogram(
            "headrace_batch_duration_seconds", "Work on one batch.", labels=("role",), buckets=DURATION_BUCKETS_S
        )
        self._batch_rows = self._histogram(
            "headrace_batch_rows", "Rows of one batch.", labels=("role",), buckets=ROWS_BUCKETS
        )
        self._epoch_duration = self._histogram(
            "headrace_epoch_duration_seconds",
            "Commit of one epoch, from flush to acknowledged.",
            labels=("role",),
            buckets=DURATION_BUCKETS_S,
        )
        self._watermark = self._gauge(
            "headrace_watermark_timestamp_seconds", "Watermark, as Unix time.", labels=("view", "partition")
        )
        self._watermark_lag = self._gauge(
            "headrace_watermark_lag_seconds",
            "Time of computing minus watermark, at the last batch.",
            labels=("view", "partition"),
        )
        self._event_time_lag = self._gauge(
            "headrace_event_time_lag_seconds",
            "Time of computing minus newest event time, at the last batch.",
            labels=("view", "partition"),
        )
        self._consumer_lag = self._gauge(
            "headrace_consumer_lag_records",
            "Records between a role's position and the end of a partition.",
            labels=("role", "topic", "partition"),
        )
        self._offsets_lost = self._counter(
            "headrace_offsets_lost_total",
            "Offsets that were gone from a topic (retention) before a role could read them.",
            labels=("role", "topic", "partition"),
        )
        self._freshness = self._histogram(
            "headrace_freshness_seconds",
            "Event in the broker until its features were readable in the online store.",
            labels=("view",),
            buckets=FRESHNESS_BUCKETS_S,
        )
        self._online_rows = self._counter(
            "headrace_online_rows_total",
            "Rows given to the online store: written, or superseded by a newer one.",
            labels=("view", "outcome"),
        )
        self._offline_rows = self._counter(
            "headrace_offline_rows_total",
            "Rows given to the offline store, of a view or of the archive raw.<topic>: appended, or skipped as already "
            "there.",
            labels=("view", "outcome"),
        )
        self._offline_commits = self._counter(
            "headrace_offline_commits_total", "Commits to the offline store.", labels=("view",)
        )
        self._offline_commit_duration = self._histogram(
            "headrace_offline_commit_duration_seconds",
            "One write to the offline store.",
            labels=("view",),
            buckets=DURATION_BUCKETS_S,
        )
        self._store_retries = self._counter(
            "headrace_store_retries_total",
            "Calls that a store did not answer, each of which is repeated.",
            labels=("role", "store"),
        )
        self._paused = self._counter(
            "headrace_paused_seconds_total",
            "Time in which no rows were fetched: too many held in memory, or partitions coming and going.",
            labels=("role", "reason"),
        )
        self._restore_remaining = self._gauge(
            "headrace_restore_remaining_records",
            "Records of a view's state that are still to be read before its rows flow.",
            labels=("view", "partition"),
        )
        self._scores = self._counter(
            "headrace_scores_total",
            "Scores; complete says whether every feature was there.",
            labels=("model", "arm", "served_by", "complete"),
        )
        self._fallen = self._counter(
            "headrace_fallback_scores_total",
            "Scores that the model itself did not make: why, and what made them.",
            labels=("model", "cause", "served_by"),
        )
        self._probe_failures = self._counter(
            "headrace_model_probe_failures_total",
            "Checks of one row that a version of a model did not answer; cause is failed, late or refused.",
            labels=("model", "version", "cause"),
        )
        self._heals = self._counter(
            "headrace_model_heals_total",
            "Times a version of a model was ready and failed, was loaded anew, and then answered.",
            labels=("model", "version"),
        )
        self._score_latency = self._histogram(
            "headrace_score_latency_seconds",
            "Time of a score's stages; total is event in the broker until the score was written.",
            labels=("model", "stage"),
            buckets=FRESHNESS_BUCKETS_S,
        )
        self._score_freshness = self._histogram(
            "headrace_score_freshness_seconds",
            "Event in the broker until its score was committed, and so readable, on the output topic.",
            labels=("model",),
            buckets=FRESHNESS_BUCKETS_S,
        )
        self._lineage_events = self._counter("headrace_lineage_events_total", "OpenLineage events sent.", labels=())
        self._lineage_failures = self._counter(
            "headrace_lineage_failures_total", "OpenLineage events lost.", labels=("reason",)
        )
        for reason in LINEAGE_FAILURES:  # from 0 on, so that the first loss is an increase
            self.lineage_failed(reason, events=0)

    def batch_processed(self, role: str, *, rows: int, seconds: float) -> None:
        """Report a batch that a role has worked on."""
        self._observe(self._batch_duration, seconds, role)
        self._observe(self._batch_rows, float(rows), role)

    def rows_counted(self, role: str, view: str, counts: Mapping[str, int], *, reason: str = "") -> None:
        """Report what became of rows, by outcome."""
        for outcome, rows in counts.items():
            self._add(self._rows, rows, role, view, outcome, reason)

    def rows_of_other_definitions(self, role: str, view: str, rows: int) -> None:
        """Report rows on a view's topic that another version of it made: they are not for this worker."""
        if rows:
            self.rows_counted(role, view, {"ignored": rows}, reason="other_definition")

    def dead_letters(self, source: str, reasons: Mapping[str, int] | pa.ChunkedArray | pa.Array) -> None:
        """Report dead letters: counts by reason, or the column of their reasons."""
        if not isinstance(reasons, Mapping):
            reasons = {entry["values"]: entry["counts"] for entry in pc.value_counts(reasons).to_pylist()}
        for reason, rows in reasons.items():
            self._add(self._dead_letters, rows, source, reason)

    def rows_routed(self, source: str, *, topic: str, rows: int) -> None:
        """Report rows of a source that went on to a repartition topic."""
        self._add(self._rows_routed, rows, source, topic)

    def watermark(
        self, view: str, *, partition: int, watermark_us: int, computed_time_us: int, event_time_us: int | None = None
    ) -> None:
        """Report the watermark of a view's partition after a batch, and the newest event time when there was one.

        While the watermark is minus infinity it is not reported.
        """
        labels = (view, str(partition))
        if MINUS_INFINITY_US < watermark_us < END_OF_TIME_US:
            self._set(self._watermark, watermark_us / 1e6, *labels)
            self._set(self._watermark_lag, (computed_time_us - watermark_us) / 1e6, *labels)
        if event_time_us is not None:
            self._set(self._event_time_lag, (computed_time_us - event_time_us) / 1e6, *labels)

    def consumer_lag(self, role: str, *, topic: str, partition: int, records: int) -> None:
        """Report how many records a role has yet to read from a partition."""
        self._set(self._consumer_lag, records, role, topic, str(partition))

    def offsets_lost(self, role: str, *, topic: str, partition: int, offsets: int) -> None:
        """Report offsets that a role could not read any more."""
        self._add(self._offsets_lost, offsets, role, topic, str(partition))

    def forget_partition(self, role: str, *, topic: str, partition: int, views: Collection[str] = ()) -> None:
        """Take back the gauges of a partition that this worker has handed over, so that they do not stand still here.

        Args:
            role: The role.
            topic: Topic of the partition.
            partition: The partition.
            views: Views whose watermarks were reported for it.
        """
        self._remove(self._consumer_lag, role, topic, str(partition))
        for view in views:
            for gauge in (self._watermark, self._watermark_lag, self._event_time_lag, self._restore_remaining):
                self._remove(gauge, view, str(partition))

    def epoch_committed(self, role: str, *, seconds: float) -> None:
        """Report a committed epoch."""
        self._observe(self._epoch_duration, seconds, role)

    def freshness(self, view: str, *, broker_time: pa.ChunkedArray | pa.Array, readable_time_us: int) -> None:
        """Report rows that became readable in the online store.

        Args:
            view: Name of the view.
            broker_time: Kafka's record timestamps of the events that made the rows; null where unknown.
            readable_time_us: When the store had acknowledged the rows.
        """
        self._observe(self._freshness, _ages_s(broker_time, readable_time_us), view)

    def online_written(self, view: str, *, written: int, superseded: int) -> None:
        """Report a write to the online store."""
        self._add(self._online_rows, written, view, "written")
        self._add(self._online_rows, superseded, view, "superseded")

    def offline_committed(self, view: str, *, rows: int, seconds: float, skipped: int = 0) -> None:
        """Report a write to the table of a view, or to an archive; it was a commit if it appended rows."""
        self._add(self._offline_rows, rows, view, "appended")
        self._add(self._offline_rows, skipped, view, "skipped")
        self._add(self._offline_commits, 1 if rows else 0, view)
        self._observe(self._offline_commit_duration, seconds, view)

    def store_retried(self, role: str, *, store: str) -> None:
        """Report that a call is repeated because a store (``redis``, ``delta``, ``triton``) did not answer.

        A schema registry counts as one.
        """
        self._add(self._store_retries, 1, role, store)
        self.retries[store] = self.retries.get(store, 0) + 1

    def paused(self, role: str, paused_s: Mapping[str, float]) -> None:
        """Report for how long no rows were fetched since the role began, by why."""
        for reason, total_s in paused_s.items():
            before_s = self._paused_s.get((role, reason), 0.0)
            self._paused_s[role, reason] = max(before_s, total_s)
            self._add(self._paused, max(0.0, total_s - before_s), role, reason)

    def restoring(self, view: str, *, partition: int, remaining: int) -> None:
        """Report how many records of a view's state are still to be read."""
        self._set(self._restore_remaining, remaining, view, str(partition))

    def scored(self, model: str, *, arm: str, served_by: str, complete: int, incomplete: int = 0) -> None:
        """Report scores, those with every feature there and those without."""
        self._add(self._scores, complete, model, arm, served_by, "true")
        self._add(self._scores, incomplete, model, arm, served_by, "false")

    def fell_back(self, model: str, *, cause: str, served_by: str, rows: int) -> None:
        """Report scores that a lower rung made, by why the model did not."""
        self._add(self._fallen, rows, model, cause, served_by)

    def model_probe_failed(self, cause: str, *, model: str, version: str) -> None:
        """Report a check that a version did not answer, as :class:`streams.inference.healing.Probed` has it."""
        self._add(self._probe_failures, 1, model, version, cause)

    def model_healed(self, *, model: str, version: str) -> None:
        """Report a version that called itself ready and failed, and that answers since it was loaded anew."""
        self._add(self._heals, 1, model, version)

    def score_latency(self, model: str, *, stage: str, seconds: float | NDArray[np.float64]) -> None:
        """Report the time that scores spent in a stage; NaN where unknown."""
        self._observe(self._score_latency, seconds, model, stage)

    def score_committed(self, model: str, *, broker_time: pa.ChunkedArray | pa.Array, committed_time_us: int) -> None:
        """Report scores that a reader of committed records sees from now on.

        Args:
            model: Name of the model.
            broker_time: When the events that were scored came to the broker; null where unknown.
            committed_time_us: When the broker had acknowledged the commit.
        """
        self._observe(self._score_freshness, _ages_s(broker_time, committed_time_us), model)

    def lineage_sent(self) -> None:
        """Report a lineage event that was sent."""
        self._add(self._lineage_events, 1)

    def lineage_failed(self, reason: str, *, events: int = 1) -> None:
        """Report lineage events that were lost, by one of :data:`LINEAGE_FAILURES`."""
        self._add(self._lineage_failures, events, reason)

    def _counter(self, name: str, documentation: str, *, labels: tuple[str, ...]) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, *, labels: tuple[str, ...]) -> Gauge:
        return Gauge(name, documentation, labels, registry=self.registry)

    def _histogram(
        self, name: str, documentation: str, *, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> ArrayHistogram:
        return ArrayHistogram(name, documentation, labels=labels, buckets=buckets, registry=self.registry)

    def _add(self, counter: Counter, amount: float, *labels: str) -> None:
        # A series is made even for 0: a rate over it is then 0 and not absent.
        bounded = self._bounded(counter, labels)
        (counter.labels(*bounded) if bounded else counter).inc(amount)

    def _set(self, gauge: Gauge, value: float, *labels: str) -> None:
        gauge.labels(*self._bounded(gauge, labels)).set(value)

    def _observe(self, histogram: ArrayHistogram, values: float | NDArray[np.float64], *labels: str) -> None:
        histogram.observe(values, *self._bounded(histogram, labels))

    def _remove(self, gauge: Gauge, *labels: str) -> None:
        with self._lock:
            self._seen.get(_name(gauge), set()).discard(labels)
        try:
            gauge.remove(*labels)
        except KeyError:
            return

    def _bounded(self, metric: Any, labels: tuple[str, ...]) -> tuple[str, ...]:
        name = _name(metric)
        with self._lock:
            seen = self._seen.setdefault(name, set())
            if labels in seen:
                return labels
            if len(seen) < MAX_SERIES:
                seen.add(labels)
                return labels
            if len(seen) == MAX_SERIES:
                seen.add(("other",) * len(labels))
                logger.warning(
                    "%s has %d series, further ones are counted as other, such as %s", name, MAX_SERIES, labels
                )
        return ("other",) * len(labels)


def _ages_s(broker_time: pa.ChunkedArray | pa.Array, now_us: int) -> NDArray[np.float64]:
    broker_time_us = pc.drop_null(broker_time).cast(pa.int64()).to_numpy()
    ages_s: NDArray[np.float64] = (now_us - broker_time_us) / 1e6
    return ages_s


def _name(metric: Any) -> str:
    return metric.name if isinstance(metric, ArrayHistogram) else str(metric._name)
