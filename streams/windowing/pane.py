"""Which panes close, and at which row: arithmetic on whole numbers of windows, no state.

A *closing* is one firing of the pane ``(key, window end)`` by the row that moved the watermark:

- a pane that has a row when the watermark first reaches its end fires ``ON_TIME``;
- the window end after the last one that holds a key's row fires ``EMPTY``, if nothing else has filled it;
- a pane that changes after its end was reached fires ``LATE`` at the next tick (when the watermark next passes a
  multiple of the slide); so does a window that was empty when it was reached, with the index 0 if it never fired.

A row counts in a window unless the window was expired when the row was judged. A changed pane that expires before the
tick is therefore read as of the last row that still counted.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from streams.windowing.plan import Plan
from streams.windowing.segment import Bools, Ints, expand, find_segments, scan, search, stable_argsort
from streams.windowing.watermark_path import WatermarkPath

_NOTHING: Final[Ints] = np.empty(0, dtype=np.int64)
_FEW_ENDS: Final = 4


@dataclass(frozen=True)
class WatermarkSteps:
    """The watermark over a batch, in numbers of window ends (see :class:`WatermarkPath`).

    Attributes:
        reached_start: Newest end reached before the batch.
        reached_before: Newest end reached when each row was judged.
        reached_after: Newest end reached after each step.
        expired_before: Newest end expired when each row was judged.
        expired_after: Newest end expired after each step.
        n_shown: Number of rows that what each step closes shows.
    """

    reached_start: int
    reached_before: Ints
    reached_after: Ints
    expired_before: Ints
    expired_after: Ints
    n_shown: Ints

    @property
    def has_tick(self) -> bool:
        """Whether the watermark passes a multiple of the slide."""
        return bool(self.reached_after[-1] > self.reached_start)

    def firing_step(self, ends: Ints) -> Ints:
        """First step after which these ends are reached; the number of steps for those that are not."""
        return search(self.reached_after, ends)

    def next_tick(self, reached: Ints) -> Ints:
        """First step that moves the newest reached end past ``reached``; the number of steps if none does."""
        return search(self.reached_after, reached, side="right")

    def last_counting(self, ends: Ints) -> Ints:
        """Last row that was judged while these ends were not expired, -1 for none."""
        return search(self.expired_before, ends) - 1


def watermark_steps(plan: Plan, path: WatermarkPath) -> WatermarkSteps:
    """Count a batch's watermarks in window ends."""
    return WatermarkSteps(
        reached_start=int(plan.reached_ends(np.array([path.start_us]))[0]),
        reached_before=plan.reached_ends(path.before_us),
        reached_after=plan.reached_ends(path.after_us),
        expired_before=plan.expired_ends(path.before_us),
        expired_after=plan.expired_ends(path.after_us),
        n_shown=path.n_shown,
    )


@dataclass(frozen=True)
class Panes:
    """Panes by key and window end, one array element each."""

    key: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: Ints | Bools) -> "Panes":
        """Some of them."""
        return Panes(self.key[rows], self.end[rows])

    def renumbered(self, number_of: Ints) -> "Panes":
        """The same under new numbers of the keys."""
        return Panes(number_of[self.key], self.end)


NO_PANES = Panes(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


class PaneCodes:
    """Numbers for panes of several sets, in the order of (window end, key), so that the sets can be compared."""

    def __init__(self, n_keys: int, *sets: Panes) -> None:
        ends = np.concatenate([panes.end for panes in sets])
        self._n_keys = n_keys
        self._distinct: Ints | None = None
        self._low = int(ends.min()) if len(ends) else 0
        span = (int(ends.max()) if len(ends) else 0) - self._low + 1
        if span * n_keys >= 2**62:
            self._distinct = np.unique(ends)

    def of(self, panes: Panes) -> Ints:
        """Code of each pane."""
        place = panes.end - self._low
        if self._distinct is not None:
            place = search(self._distinct, panes.end)
        return place * self._n_keys + panes.key


@dataclass(frozen=True)
class TileEnds:
    """Tiles with the window ends that hold them.

    Attributes:
        key: Key of each tile.
        first: First window end that holds it.
        last: Last one.
        reached: Newest end reached before the tile had its first row (of this batch, or before it).
    """

    key: Ints
    first: Ints
    last: Ints
    reached: Ints


class OnTimePanes:
    """Panes with a row whose ends are reached in this batch, each once, found from tiles that come in parts.

    Where a few ends are reached, as in a dense log, each pane is marked in an array of all keys, and nothing has to be
    sorted or kept; where many are, the ranges of a key's tiles are united.
    """

    def __init__(self, steps: WatermarkSteps, *, n_keys: int) -> None:
        self._steps = steps
        self._n_keys = n_keys
        self._ends = range(steps.reached_start + 1, int(steps.reached_after[-1]) + 1)
        self._marks: dict[int, Bools] | None = None
        if len(self._ends) <= _FEW_ENDS:
            self._marks = {end: np.zeros(n_keys, dtype=np.bool_) for end in self._ends}
        self._parts: list[tuple[Ints, Ints, Ints]] = []

    def add(self, tiles: TileEnds) -> None:
        """Take in some tiles."""
        low = np.maximum(tiles.first, tiles.reached + 1)
        high = np.minimum(tiles.last, self._steps.reached_after[-1])
        if self._marks is None:
            some = np.flatnonzero(low <= high)
            self._parts.append((tiles.key[some], low[some], high[some]))
            return
        for end, is_reached in self._marks.items():
            is_reached[tiles.key[(low <= end) & (end <= high)]] = True

    def panes(self) -> Panes:
        """The panes of all tiles taken in."""
        if self._marks is not None:
            found = {end: np.flatnonzero(is_reached) for end, is_reached in self._marks.items()}
            key = np.concatenate([_NOTHING, *found.values()])
            return Panes(key, np.repeat(np.array(self._ends), [len(keys) for keys in found.values()]))
        key, low, high = (np.concatenate([_NOTHING, *parts]) for parts in zip(*self._parts, strict=True))
        order = np.argsort(low, kind="stable")
        order = order[stable_argsort(key[order], self._n_keys)]
        key, low, high = key[order], low[order], high[order]
        starts, lengths = find_segments(key)
        covered = scan(np.maximum, low[starts] - 1, high, starts=starts, lengths=lengths)
        low[1:] = np.where(key[1:] == key[:-1], np.maximum(low[1:], covered[:-1] + 1), low[1:])
        owner, within = expand(np.maximum(high - low + 1, 0))
        return Panes(key[owner], low[owner] + within)


def emptied_panes(tiles: TileEnds, steps: WatermarkSteps) -> Panes:
    """Ends right after each tile's last one that are reached in this batch; some of them something else may fill."""
    end = tiles.last + 1
    return Panes(tiles.key, end).take((end > tiles.reached) & (end <= steps.reached_after[-1]))


def changed_panes(key: Ints, first: Ints, last: Ints, steps: WatermarkSteps) -> tuple[Panes, Ints]:
    """Panes already reached and not expired that each row changes, and that row."""
    is_behind = np.flatnonzero(first <= steps.reached_before)
    low = np.maximum(first, steps.expired_before + 1)[is_behind]
    high = np.minimum(last, steps.reached_before)[is_behind]
    owner, within = expand(np.maximum(high - low + 1, 0))
    rows = is_behind[owner]
    return Panes(key[rows], low[owner] + within), rows
