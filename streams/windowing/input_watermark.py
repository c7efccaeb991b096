"""The watermark behind a repartition topic: the minimum over the partitions that feed it.

Each record on the topic tells how far the watermark of a partition of a source was before it, and how far it is after.
The watermark here is the minimum of what is known of all of them but the idle ones; where all are idle it is their
maximum, so that it does not matter which of them fell silent first. It never goes back: a partition that comes back
from idleness may be behind it. A record is judged by what was before it; what is after it counts with the next record.

A source is waited for until one of its records has come, which tells how many partitions it has. All of them count from
then on, at minus infinity until they speak.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.time import MINUS_INFINITY_US
from streams.windowing.segment import Bools, Ints

_AT_ONCE: Final = 2**20
"""Watermarks that are laid out at once: records times partitions."""
_FAR_US: Final = 2**63 - 1


@dataclass
class _SourceInput:
    """What is known of a source: one element for each of its partitions, none before its first record."""

    watermark_us: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_idle: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    def grow(self, n_partitions: int) -> None:
        more = max(n_partitions - len(self.is_idle), 0)
        self.watermark_us = np.concatenate([self.watermark_us, np.full(more, MINUS_INFINITY_US)])
        self.is_idle = np.concatenate([self.is_idle, np.zeros(more, dtype=np.bool_)])


class InputWatermarks:
    """Merges the watermarks of the partitions of some sources.

    Args:
        topics: Topics of the sources.
    """

    def __init__(self, topics: list[str]) -> None:
        self._sources = {topic: _SourceInput() for topic in topics}

    def move(self, records: pa.Table, *, watermark_us: int) -> Ints:
        """Take in records and tell where each moves the watermark to.

        Args:
            records: ``schemas.row.RECORD_COLUMNS``, each column one chunk.
            watermark_us: Watermark before them.

        Returns:
            ``(n_records,)`` microseconds, never falling.
        """
        source = pc.index_in(records.column("_source").chunk(0), value_set=pa.array(list(self._sources))).to_numpy()
        partition = records.column("_source_partition").to_numpy()
        told_us = pc.fill_null(records.column("_watermark").chunk(0), MINUS_INFINITY_US).to_numpy()
        after_us = pc.fill_null(records.column("_watermark_after").chunk(0), MINUS_INFINITY_US).to_numpy()
        is_idle = records.column("_is_idle").chunk(0).to_numpy(zero_copy_only=False)
        n_partitions = np.maximum(records.column("_source_partitions").to_numpy(), partition + 1)
        moved_us = np.empty(len(source), dtype=np.int64)
        start = 0
        while start < len(source):
            for number, known in enumerate(self._sources.values()):
                if source[start] == number:
                    known.grow(int(n_partitions[start]))
            stop = start + self._n_alike(source[start:], n_partitions[start:])
            part = slice(start, stop)
            inputs = self._first_inputs()[source[part]] + partition[part]
            edges_us = told_us[part], np.maximum(told_us, after_us)[part]
            moved_us[part] = self._move(inputs, *edges_us, is_idle=is_idle[part], watermark_us=watermark_us)
            watermark_us, start = int(moved_us[stop - 1]), stop
        return moved_us

    def _n_alike(self, source: Ints, n_partitions: Ints) -> int:
        """Number of records before one that tells of partitions not known yet; of as many as are laid out at once."""
        known = np.array([len(one.is_idle) for one in self._sources.values()])
        most = max(1, _AT_ONCE // max(int(known.sum()), 1))
        news = np.flatnonzero(n_partitions[:most] > known[source[:most]])
        return int(news[0]) if len(news) else min(most, len(source))

    def _first_inputs(self) -> Ints:
        sizes = np.array([len(known.is_idle) for known in self._sources.values()])
        first: Ints = np.cumsum(sizes) - sizes
        return first

    def _move(self, inputs: Ints, told_us: Ints, after_us: Ints, *, is_idle: Bools, watermark_us: int) -> Ints:
        """Merge records of known inputs; at least one."""
        known = list(self._sources.values())
        known_us = np.concatenate([one.watermark_us for one in known])
        known_idle = np.concatenate([one.is_idle for one in known])
        n_records, n_inputs = len(inputs), len(known_us)
        at = np.arange(n_records)
        each_us = np.full((n_records + 1, n_inputs), MINUS_INFINITY_US)
        each_us[at + 1, inputs] = after_us
        each_us[at, inputs] = np.maximum(each_us[at, inputs], told_us)
        each_us[0] = np.maximum(each_us[0], known_us)
        np.maximum.accumulate(each_us, axis=0, out=each_us)
        last = np.full((n_records, n_inputs), -1)
        last[at, inputs] = at
        np.maximum.accumulate(last, axis=0, out=last)
        each_idle = np.where(last >= 0, is_idle[last], known_idle)
        merged_us = np.where(each_idle, _FAR_US, each_us[:-1]).min(axis=1)
        merged_us = np.where(each_idle.all(axis=1), each_us[:-1].max(axis=1), merged_us)
        edges = np.cumsum([len(one.is_idle) for one in known])[:-1]
        parts = zip(known, np.split(each_us[-1].copy(), edges), np.split(each_idle[-1].copy(), edges), strict=True)
        for one, part_us, part_idle in parts:
            one.watermark_us, one.is_idle = part_us, part_idle
        if any(not len(one.is_idle) for one in known):
            merged_us = np.full(n_records, watermark_us)
        moved_us: Ints = np.maximum.accumulate(np.maximum(merged_us, watermark_us))
        return moved_us

    def inputs(self) -> dict[str, list[tuple[int, bool]]]:
        """Watermark and idleness of each partition, by topic."""
        return {
            topic: list(zip(known.watermark_us.tolist(), known.is_idle.tolist(), strict=True))
            for topic, known in self._sources.items()
        }

    def read(self, inputs: dict[str, Any]) -> None:
        """Go on from what :meth:`inputs` told."""
        for topic, partitions in inputs.items():
            watermarks_us = np.array([watermark_us for watermark_us, _ in partitions], dtype=np.int64)
            idle = np.array([is_idle for _, is_idle in partitions], dtype=np.bool_)
            self._sources[topic] = _SourceInput(watermarks_us, idle)
