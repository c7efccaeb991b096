"""How the watermark goes through a batch: which rows are judged against it, and which rows a step of it shows.

There are two ways. Where the rows of a partition move the watermark, each is judged, taken in, and moves it: what it
closes shows it. Behind a repartition topic every record says how far the watermark was when it was sent: it moves the
watermark first, which closes panes without it, and is then judged and taken in. There, rows that are rejected and
records that hold no event move the watermark like any other, so a batch has more steps than admitted rows.
"""

from dataclasses import dataclass

import numpy as np

from streams.windowing.segment import Ints

_NOTHING: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class WatermarkPath:
    """The watermark over a batch of admitted rows.

    Attributes:
        start_us: Watermark before the batch.
        before_us: ``(n_rows,)`` what each row was judged against.
        after_us: ``(n_steps,)`` watermark after each step; a batch has at least one.
        step: ``(n_rows,)`` the step at which each row makes what it makes, rising.
        n_shown: ``(n_steps,)`` number of rows that what a step closes shows, rising.
        moves_first: Whether a row moves the watermark before it is taken in, so that what it reaches fires before
            what the row changes.
    """

    start_us: int
    before_us: Ints
    after_us: Ints
    step: Ints
    n_shown: Ints
    moves_first: bool

    @classmethod
    def by_rows(cls, before_us: Ints, after_us: Ints) -> "WatermarkPath":
        """Each row moves the watermark after it was taken in; at least one row."""
        steps = np.arange(len(after_us), dtype=np.int64)
        return cls(int(before_us[0]), before_us, after_us, steps, steps + 1, moves_first=False)

    @classmethod
    def by_records(cls, start_us: int, moved_us: Ints, rows: Ints) -> "WatermarkPath":
        """Each record moves the watermark before it is judged.

        Args:
            start_us: Watermark before the batch.
            moved_us: ``(n_records,)`` where each record has moved it to; at least one.
            rows: Positions of the admitted rows among the records.
        """
        n_shown = np.searchsorted(rows, np.arange(len(moved_us)))
        return cls(start_us, moved_us[rows], moved_us, rows, n_shown.astype(np.int64), moves_first=True)

    @classmethod
    def single(cls, before_us: int, after_us: int) -> "WatermarkPath":
        """One step without a row."""
        nothing_shown = np.zeros(1, dtype=np.int64)
        return cls(before_us, _NOTHING, np.array([after_us]), _NOTHING, nothing_shown, moves_first=True)

    @property
    def end_us(self) -> int:
        """Watermark after the batch."""
        return int(self.after_us[-1])
