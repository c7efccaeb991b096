"""Freshness objectives: what share of a view's rows became readable in time, and whether that is enough.

Freshness is measured twice. ``write``: from the event in the broker until the online store had acknowledged its row.
``read``: until the row was read back, of one row of a view a second at most. A breach is a gauge, and a log line when
it begins and when it ends.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import Counter, Gauge

from schemas.time import format_duration
from schemas.view import FeatureView
from streams.observability.histogram import ArrayHistogram
from streams.observability.metrics import FRESHNESS_BUCKETS_S, Metrics

logger = logging.getLogger(__name__)

WINDOW_S: Final = 60
"""Seconds over which the share is counted."""


class Stage(StrEnum):
    """Where freshness is measured."""

    WRITE = "write"
    READ = "read"


class Objective:
    """Counts, over the last minute, the rows of one view and stage that were in time. Thread-safe.

    Args:
        view: The view; it has an objective.
        stage: Where it is measured.
        timer_s: Monotonic clock.
    """

    def __init__(self, view: FeatureView, stage: Stage, *, timer_s: Callable[[], float]) -> None:
        self._view = view
        self._stage = stage
        self._timer_s = timer_s
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, int, int]] = deque()
        self._was_breached = False

    def count(self, *, rows: int, within: int) -> None:
        """Count rows, and how many of them were in time; tells the log where that begins or ends a breach."""
        second = int(self._timer_s())
        with self._lock:
            if self._seconds and self._seconds[-1][0] == second:
                _, before, before_within = self._seconds.pop()
                rows, within = rows + before, within + before_within
            self._seconds.append((second, rows, within))
            share = self._share()
            is_breached = share is not None and share < self._view.serving.freshness_share
            has_changed, self._was_breached = is_breached != self._was_breached, is_breached
        if has_changed and share is not None:
            told = logger.warning if is_breached else logger.info
            serving = self._view.serving
            told(
                "freshness of view %s at %s: %s, %.2f %% of the rows of the last %d s within %s, objective %.2f %%",
                self._view.name,
                self._stage,
                "breached" if is_breached else "met again",
                share * 100,
                WINDOW_S,
                format_duration(serving.freshness_us or 0),
                serving.freshness_share * 100,
            )

    def is_breached(self) -> bool:
        """Tell whether too few rows of the last minute were in time; without rows it is not."""
        with self._lock:
            share = self._share()
        return share is not None and share < self._view.serving.freshness_share

    def _share(self) -> float | None:
        oldest = int(self._timer_s()) - WINDOW_S
        while self._seconds and self._seconds[0][0] <= oldest:
            self._seconds.popleft()
        rows = sum(rows for _, rows, _ in self._seconds)
        return sum(within for _, _, within in self._seconds) / rows if rows else None


class FreshnessObjectives:
    """Measures freshness against the objectives of views.

    Args:
        views: The views; those without an objective are measured at read alone.
        metrics: Where it is reported.
        timer_s: Monotonic clock.
    """

    def __init__(
        self, views: Sequence[FeatureView], *, metrics: Metrics, timer_s: Callable[[], float] = time.monotonic
    ) -> None:
        registry = metrics.registry
        labels = ("view", "stage")
        self._read = ArrayHistogram(
            "headrace_read_freshness_seconds",
            "Event in the broker until its features were read back from the online store; a sample.",
            labels=("view",),
            buckets=FRESHNESS_BUCKETS_S,
            registry=registry,
        )
        self._rows = Counter(
            "headrace_freshness_rows_total",
            "Rows of views with a freshness objective, by whether they were in time.",
            (*labels, "within"),
            registry=registry,
        )
        self._lost = Counter(
            "headrace_read_back_failures_total",
            "Rows that were acknowledged and then not read back.",
            ("view",),
            registry=registry,
        )
        objective = Gauge(
            "headrace_freshness_objective_seconds",
            "Time within which rows must be readable.",
            ("view",),
            registry=registry,
        )
        breached = Gauge(
            "headrace_freshness_breached",
            "1 while fewer rows of the last minute were in time than the objective says.",
            labels,
            registry=registry,
        )
        self._objectives: dict[tuple[str, Stage], Objective] = {}
        self._bounds_s: dict[str, float] = {}
        for view in views:
            self._lost.labels(view.name)
            if (bound_us := view.serving.freshness_us) is None:
                continue
            self._bounds_s[view.name] = bound_us / 1e6
            objective.labels(view.name).set(bound_us / 1e6)
            for stage in Stage:
                own = self._objectives[view.name, stage] = Objective(view, stage, timer_s=timer_s)
                breached.labels(view.name, stage).set_function(own.is_breached)
                for within in ("true", "false"):
                    self._rows.labels(view.name, stage, within)

    def written(self, view: str, *, broker_time: pa.ChunkedArray, readable_time_us: int) -> None:
        """Take note of rows that the store has acknowledged; those of an unknown time in the broker do not count."""
        if view in self._bounds_s:
            self._count(view, Stage.WRITE, (readable_time_us - _known_us(broker_time)) / 1e6)

    def read_back(self, view: str, *, broker_time_us: int | None, read_time_us: int, is_there: bool) -> None:
        """Take note of a row that was read back; one that was not there was in time for nobody."""
        if not is_there:
            self._lost.labels(view).inc()
            logger.warning("view %s: a row that the online store had acknowledged was not read back from it", view)
        if broker_time_us is None:
            return
        seconds = np.array([(read_time_us - broker_time_us) / 1e6]) if is_there else np.array([np.inf])
        if is_there:
            self._read.observe(seconds, view)
        if view in self._bounds_s:
            self._count(view, Stage.READ, seconds)

    def _count(self, view: str, stage: Stage, seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
        within = int((seconds <= self._bounds_s[view]).sum())
        self._rows.labels(view, stage, "true").inc(within)
        self._rows.labels(view, stage, "false").inc(len(seconds) - within)
        if len(seconds):
            self._objectives[view, stage].count(rows=len(seconds), within=within)


def _known_us(broker_time: pa.ChunkedArray) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    known: np.ndarray[tuple[int], np.dtype[np.int64]] = pc.drop_null(broker_time).cast(pa.int64()).to_numpy()
    return known
