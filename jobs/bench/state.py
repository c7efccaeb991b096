"""State of many keys: what it takes to tell what has changed, to write it whole and to restore it; and the floor.

The floor is what memory alone asks: an event reads and writes the rows of a key and of its tiles that the job needs,
with nothing computed. It grows with the number of keys as caches run out, whatever the engine does, so growth is quoted
above it too.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from jobs.bench.figure import Figure
from jobs.bench.job import SIZE_MS, SLIDE_MS
from streams.windowing import N_BUCKETS, WindowEngine

_FLOOR_ROUNDS: Final = 15
_FLOOR_EVENTS: Final = 20_000
_TILES: Final = SIZE_MS // SLIDE_MS
_LINK_WORDS: Final = 3
_REGISTER_WORDS: Final = 4
_NEWEST_WORDS: Final = 8


def measure_state(engine: WindowEngine, change: Callable[[], Any], *, n_keys: int, name: str) -> list[Figure]:
    """Measure the parts of the state of a full engine.

    Args:
        engine: The engine.
        change: Gives it events of one key in a hundred.
        n_keys: How many keys it has.
        name: How figures of so many keys are called.
    """
    engine.changes()
    change()
    taken: dict[str, float] = {}
    changes = _timed("changes", taken, engine.changes)
    buckets, bucket_s = [], 0.0
    for number in range(N_BUCKETS):
        buckets.append(_timed("bucket", taken, partial(engine.bucket, number)))
        bucket_s = max(bucket_s, taken["bucket"])
    blob = _timed("snapshot", taken, engine.snapshot)
    _timed("restore", taken, partial(WindowEngine.restore_parts, engine.view, [*buckets, changes]))

    def figure(title: str, value: float, unit: str, *, bar: float | None = None, ratio: float | None = None) -> Figure:
        compared = None if ratio is None else f"engine.snapshot_time.{name}"
        return Figure(
            name=f"engine.{title}.{name}",
            value=value,
            unit=unit,
            bar=bar,
            is_lower_better=True,
            compared_with=compared,
            ratio=ratio,
        )

    return [
        figure("snapshot", len(blob) / n_keys, "bytes/key", bar=1_000),
        figure("snapshot_time", taken["snapshot"] * 1_000, "ms"),
        figure("changes_of_1_percent", taken["changes"] * 1_000, "ms", ratio=taken["changes"] / taken["snapshot"]),
        figure("largest_bucket", bucket_s * 1_000, "ms", bar=100, ratio=bucket_s / taken["snapshot"]),
        figure("restore", taken["restore"], "s", bar=30),
    ]


def _timed(name: str, taken: dict[str, float], work: Callable[[], Any]) -> Any:
    started_s = time.process_time()
    result = work()
    taken[name] = time.process_time() - started_s
    return result


def measure_floor(*key_counts: int) -> dict[int, float]:
    """Seconds that memory alone asks of an event of the job, by the number of keys; rounds are interleaved."""
    floors = {n_keys: Floor(n_keys) for n_keys in key_counts}
    taken: dict[int, list[float]] = {n_keys: [] for n_keys in key_counts}
    for _ in range(_FLOOR_ROUNDS):
        for n_keys, floor in floors.items():
            taken[n_keys].append(floor.round())
    return {n_keys: statistics.median(times) / _FLOOR_EVENTS for n_keys, times in taken.items()}


class Floor:
    """Arrays of the size and shape of a state of the job."""

    def __init__(self, n_keys: int) -> None:
        self._n_keys = n_keys
        self._chance = np.random.default_rng(n_keys)
        # Filled, for pages that nothing was written to are all one page of zeros.
        self._slots = np.ones(4 * n_keys)
        self._keys = np.ones((n_keys, 2))
        self._heads = np.ones(n_keys)
        self._links = np.ones((_TILES * n_keys, _LINK_WORDS))
        self._registers = np.ones((_TILES * n_keys, _REGISTER_WORDS))
        self._newest = np.ones((n_keys, _NEWEST_WORDS))

    def round(self) -> float:
        """Read and write what events of random keys need; gives the seconds taken."""
        keys = self._chance.integers(0, self._n_keys, _FLOOR_EVENTS)
        slots = self._chance.integers(0, 4 * self._n_keys, _FLOOR_EVENTS)
        cells = (keys[:, None] + np.arange(_TILES) * self._n_keys).ravel()
        started_s = time.process_time()
        self._slots.take(slots)
        self._keys.take(keys, axis=0)
        self._heads.take(keys)
        self._links.take(cells, axis=0)
        self._registers.take(cells, axis=0)
        newest = self._newest.take(keys, axis=0)
        for column in self._registers.T:
            column[cells[_TILES - 1 :: _TILES]] = 2.0
        for column, values in zip(self._newest.T, newest.T, strict=True):
            column[keys] = values
        return time.process_time() - started_s
