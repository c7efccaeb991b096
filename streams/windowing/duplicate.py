"""Event ids of admitted rows, remembered to tell a copy.

A row is a duplicate iff an admitted row before it has the same id, their event times are less than the dedup window
apart, and the watermark it is judged against is not so far that any copy would be late anyway (the earlier event time +
the window + ``reach_us``). Rows without an id are never duplicates.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.time import MINUS_INFINITY_US
from streams.windowing.bucket import buckets_of_numbers
from streams.windowing.segment import Bools, Ints
from streams.windowing.snapshot import PartKind, Selection

_SLOTS: Final = 16
"""In how many steps a whole memory is forgotten."""


@dataclass
class _Slot:
    """Ids that are forgotten together."""

    ids: list[Any] = field(default_factory=list)
    times: "array[int]" = field(default_factory=lambda: array("q"))
    n_told: int = 0


class DuplicateMemory:
    """Ids of admitted rows, each kept until a copy of it would be late."""

    def __init__(self, *, window_us: int, reach_us: int) -> None:
        self._window_us = window_us
        self._reach_us = reach_us
        self._times: dict[Any, list[int]] = {}
        self._slots: dict[int, _Slot] = {}
        self._slot_us = max(1, (window_us + reach_us) // _SLOTS)

    def find(
        self,
        ids: pa.Array,
        time_us: Ints,
        *,
        watermark_us: Ints,
        start_us: int | None,
        is_rejected: Bools,
        is_late: Callable[[int, int], bool],
    ) -> Bools:
        """Tell which rows are duplicates.

        Whether a row is one may hang on whether a copy before it was admitted, and so on the watermark then; the rows
        whose id is met more than once are gone through one by one, the others are not looked at.

        Args:
            ids: Event id of each row, in offset order.
            time_us: Event times.
            watermark_us: What each row alone would raise the watermark to.
            start_us: Watermark before the first row; None where ``watermark_us`` is what each row is judged against.
            is_rejected: Rows that are rejected for another reason.
            is_late: Tells whether a row with this event time is late under this watermark.
        """
        is_duplicate = np.zeros(len(ids), dtype=np.bool_)
        rows = np.flatnonzero(self._is_repeated(ids))
        if not len(rows):
            return is_duplicate
        alone = watermark_us.copy()
        if start_us is not None:
            alone[rows] = start_us
            alone[is_rejected] = start_us
            alone = np.maximum.accumulate(np.maximum(alone, start_us))
        highest = MINUS_INFINITY_US if start_us is None else start_us
        seen: dict[Any, list[int]] = {}
        for row in rows[~is_rejected[rows]].tolist():
            event_id, time = ids[row].as_py(), int(time_us[row])
            before = max(int(alone[row]), highest)
            earlier = [*self._times.get(event_id, ()), *seen.get(event_id, ())]
            if any(self._covers(other, time, before) for other in earlier):
                is_duplicate[row] = True
            elif not is_late(time, before):
                seen.setdefault(event_id, []).append(time)
                highest = before if start_us is None else max(highest, int(watermark_us[row]))
        return is_duplicate

    def may_repeat(self, ids: pa.Array) -> bool:
        """Tell whether any of these ids is met more than once."""
        return bool(self._is_repeated(ids).any())

    def is_duplicate(self, event_id: Any, time_us: int, *, watermark_us: int, before: Sequence[int]) -> bool:
        """Tell whether a single row repeats an admitted one; ``before`` are times of that id in its own batch."""
        earlier = [*self._times.get(event_id, ()), *before]
        return any(self._covers(other, time_us, watermark_us) for other in earlier)

    def _is_repeated(self, ids: pa.Array) -> Bools:
        encoded = ids.dictionary_encode()
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        is_known = np.array([event_id in self._times for event_id in encoded.dictionary.to_pylist()], dtype=np.bool_)
        is_known |= np.bincount(codes[codes >= 0], minlength=len(is_known)) > 1
        repeated: Bools = np.append(is_known, np.False_)[codes]
        return repeated

    def _covers(self, earlier_us: int, time_us: int, watermark_us: int) -> bool:
        is_near = abs(time_us - earlier_us) < self._window_us
        return is_near and watermark_us < earlier_us + self._window_us + self._reach_us

    def add(self, ids: list[Any], time_us: list[int]) -> None:
        """Remember admitted rows."""
        kept_us = self._window_us + self._reach_us
        # Row by row, as each id has its own place in the dict (0.3 us).
        for event_id, time in zip(ids, time_us, strict=True):
            if event_id is not None:
                self._times.setdefault(event_id, []).append(time)
                slot = self._slots.setdefault((time + kept_us) // self._slot_us, _Slot())
                slot.ids.append(event_id)
                slot.times.append(time)

    def forget(self, watermark_us: int) -> None:
        """Drop the ids whose copies would be late; a slot of them at a time, so some are kept a little longer."""
        for number in [number for number in self._slots if (number + 1) * self._slot_us <= watermark_us]:
            slot = self._slots.pop(number)
            for event_id, time in zip(slot.ids, slot.times, strict=True):
                left = self._times[event_id]
                left.remove(time)
                if not left:
                    del self._times[event_id]

    def write(self, selection: Selection, id_type: pa.DataType) -> pa.Table:
        """Write the selected state."""
        ids, times = [pa.array([], id_type)], [np.empty(0, dtype=np.int64)]
        for slot in self._slots.values():
            slot_times = np.array(slot.times)
            rows = np.arange(slot.n_told if selection.kind is PartKind.CHANGES else 0, len(slot.ids))
            if selection.bucket is not None:
                rows = np.flatnonzero(buckets_of_numbers(slot_times) == selection.bucket)
            ids.append(pa.array([slot.ids[row] for row in rows.tolist()], id_type))
            times.append(slot_times[rows])
        return pa.table({"id": pa.concat_arrays(ids), "time_us": pa.array(np.concatenate(times))})

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        for slot in self._slots.values():
            slot.n_told = len(slot.ids)

    def read_part(self, table: pa.Table, *, watermark_us: int) -> None:
        """Take over the ids that are not here yet, and whose copies are not late under a watermark."""
        is_kept = table.column("time_us").to_numpy() + self._window_us + self._reach_us > watermark_us
        table = table.filter(pa.array(is_kept))
        ids, times = table.column("id").to_pylist(), table.column("time_us").to_pylist()
        fresh = [(i, t) for i, t in zip(ids, times, strict=True) if t not in self._times.get(i, ())]
        self.add([event_id for event_id, _ in fresh], [time for _, time in fresh])
