"""Session windows of all keys of a partition, a row at a time.

A row's window is ``[t, t + gap)``; windows of a key that overlap are one session. Which session a row belongs to, and
whether it is late, hangs on the rows of its key before it, so rows are gone through one by one (about 30 us a row).

- A session fires ``ON_TIME`` when the watermark first reaches its end.
- A row that changes a session which has fired, or that makes one whose end is already reached, fires ``LATE`` at once;
  there is no slide here to collect changes by. Each fired session that the row merges away or extends first fires
  ``EMPTY`` under its old bounds, so that a reader can take it back. If the new end is yet to be reached, ``ON_TIME``
  follows when it is.
- ``pane_index`` goes on from the highest of the sessions merged, so the newest row of a session always has the highest.
- Sums merge in time order, then take the new row.
"""

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from schemas.row import Pane
from streams.windowing.accumulator import Accumulator, fits_int64, make_accumulator
from streams.windowing.bucket import bucket_of
from streams.windowing.plan import Plan, Scope
from streams.windowing.row import RowSink, RowView
from streams.windowing.snapshot import Content, PartKind, Selection
from streams.windowing.windowless import WindowlessPlan, WindowlessState

_FEWEST_SWEPT: Final = 1_024


@dataclass(eq=False)
class _Session:
    start_us: int
    end_us: int
    accumulators: list[Accumulator]
    n_fired: int = 0


@dataclass(eq=False)
class _Key:
    windowless: WindowlessState
    bucket: int
    sessions: list[_Session] = field(default_factory=list)


class SessionState:
    """State of a session view over one partition."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._windowless = WindowlessPlan(plan)
        self._windowed = [f for f in plan.features if f.scope is Scope.WINDOW]
        self._events = [f for f in plan.features if f.scope is Scope.EVENT]
        self._keys: dict[Any, _Key] = {}
        self._due: list[tuple[int, Any, int, _Session]] = []
        self._n_pushed = 0
        self._n_since_sweep = 0
        self._changed: dict[Any, None] = {}

    def _is_expired(self, end_us: int, watermark_us: int) -> bool:
        return end_us + self._plan.allowed_lateness_us <= watermark_us

    def _overlapping(self, row: RowView, key: Any, watermark_us: int) -> list[_Session]:
        """Live sessions that the row's window overlaps, oldest first."""
        state = self._keys.get(key)
        if state is None:
            return []
        state.sessions = [s for s in state.sessions if not self._is_expired(s.end_us, watermark_us)]
        end_us = row.time_us + self._plan.gap_us
        return [s for s in state.sessions if s.start_us < end_us and row.time_us < s.end_us]

    def is_late(self, row: RowView, key: Any, *, watermark_us: int) -> bool:
        """Tell whether the session that the row would be in has expired."""
        if not self._is_expired(row.time_us + self._plan.gap_us, watermark_us):
            return False
        return not self._overlapping(row, key, watermark_us)

    def overflowing(self, row: RowView, key: Any, *, watermark_us: int) -> str | None:
        """Name the integer sum that the row would take out of int64, if any."""
        parts = self._overlapping(row, key, watermark_us)
        for index, feature in enumerate(self._windowed):
            if feature.is_integer_sum and row.feeds(feature):
                total = sum(s.accumulators[index].integer_total() for s in parts)
                if not fits_int64(total + row.value(feature)):
                    return feature.name
        state = self._keys.get(key)
        return None if state is None else self._windowless.overflows(state.windowless, row, watermark_us=watermark_us)

    def add(self, row: RowView, key: Any, *, before_us: int, after_us: int, sink: RowSink, has_as_of: bool) -> None:
        """Take in an admitted row, and fire what it fires."""
        parts = self._overlapping(row, key, before_us)
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key(self._windowless.new_state(), bucket_of(key))
        self._changed[key] = None
        self._n_since_sweep += 1
        merged = self._merge(row, parts)
        state.sessions = [s for s in state.sessions if s not in parts]
        state.sessions.append(merged)
        self._windowless.update(state.windowless, row, watermark_us=before_us)
        if merged.end_us > before_us:
            self._push(merged, key)
        self._fire_changes(parts, merged, maker=row.index, key=key, watermark_us=after_us, sink=sink)
        self.advance(before_us, after_us, maker=row.index, sink=sink)
        if has_as_of:
            own = {f.name: row.raw(f.column) for f in self._events if f.column is not None}
            self._emit(
                merged,
                Pane.EARLY,
                maker=row.index,
                key=key,
                watermark_us=after_us,
                sink=sink,
                time_us=row.time_us,
                own=own,
            )

    def _merge(self, row: RowView, parts: list[_Session]) -> _Session:
        accumulators = parts[0].accumulators if parts else self._new_accumulators()
        for part in parts[1:]:
            for accumulator, later in zip(accumulators, part.accumulators, strict=True):
                accumulator.merge(later)
        for feature, accumulator in zip(self._windowed, accumulators, strict=True):
            if row.feeds(feature):
                accumulator.update(row.value(feature), (row.time_us, row.offset))
        start_us = min([row.time_us, *(s.start_us for s in parts)])
        end_us = max([row.time_us + self._plan.gap_us, *(s.end_us for s in parts)])
        return _Session(start_us, end_us, accumulators)

    def _fire_changes(
        self, parts: list[_Session], merged: _Session, *, maker: int, key: Any, watermark_us: int, sink: RowSink
    ) -> None:
        fired = [s for s in parts if s.n_fired]
        for part in sorted(fired, key=lambda s: s.end_us):
            if (part.start_us, part.end_us) != (merged.start_us, merged.end_us):
                gone = _Session(part.start_us, part.end_us, self._new_accumulators(), part.n_fired)
                self._emit(gone, Pane.EMPTY, maker=maker, key=key, watermark_us=watermark_us, sink=sink)
                part.n_fired += 1
        merged.n_fired = max((s.n_fired for s in fired), default=0)
        # A row that changes a fired session, or comes behind the watermark, does not move it.
        if fired or merged.end_us <= watermark_us:
            self._emit(merged, Pane.LATE, maker=maker, key=key, watermark_us=watermark_us, sink=sink)
            merged.n_fired += 1

    def advance(self, before_us: int, after_us: int, *, maker: int, sink: RowSink) -> None:
        """Fire the sessions whose ends the watermark reaches, ordered by (end, key)."""
        if after_us == before_us:
            return
        while self._due and self._due[0][0] <= after_us:
            end_us, key, _, session = heapq.heappop(self._due)
            state = self._keys.get(key)
            if state is not None and session in state.sessions and session.end_us == end_us:
                self._emit(session, Pane.ON_TIME, maker=maker, key=key, watermark_us=after_us, sink=sink)
                session.n_fired += 1
                self._changed[key] = None
        if self._n_since_sweep >= max(_FEWEST_SWEPT, len(self._keys)):
            self._sweep(after_us)

    def _push(self, session: _Session, key: Any) -> None:
        self._n_pushed += 1
        heapq.heappush(self._due, (session.end_us, key, self._n_pushed, session))

    def _sweep(self, watermark_us: int) -> None:
        """Forget keys that have nothing left; looked at again after as many rows as there are keys."""
        for key, state in list(self._keys.items()):
            state.sessions = [s for s in state.sessions if not self._is_expired(s.end_us, watermark_us)]
            if not state.sessions and not self._windowless.is_alive(state.windowless, watermark_us):
                del self._keys[key]
                self._changed.pop(key, None)
        self._n_since_sweep = 0

    def _new_accumulators(self) -> list[Accumulator]:
        return [make_accumulator(f) for f in self._windowed]

    def _emit(
        self,
        session: _Session,
        pane: Pane,
        *,
        maker: int,
        key: Any,
        watermark_us: int,
        sink: RowSink,
        time_us: int | None = None,
        own: dict[str, Any] | None = None,
    ) -> None:
        at_us, span_us = session.end_us if time_us is None else time_us, session.end_us - session.start_us
        values = {f.name: a.result(at_us, span_us) for f, a in zip(self._windowed, session.accumulators, strict=True)}
        sink.add(
            maker,
            key=key,
            features=values
            | self._windowless.results(self._keys[key].windowless, at_us=at_us, watermark_us=watermark_us)
            | (own or {}),
            event_time_us=at_us,
            window_us=(session.start_us, session.end_us),
            pane=pane,
            pane_index=session.n_fired,
            is_final=self._is_expired(session.end_us, watermark_us),
            watermark_us=watermark_us,
        )

    def write(self, selection: Selection) -> Content:
        """Write the selected state: a table of one row for each key, its sessions and windowless state as JSON."""
        chosen: Iterable[Any] = self._keys
        if selection.kind is PartKind.BUCKET:
            chosen = (key for key, state in self._keys.items() if state.bucket == selection.bucket)
        elif selection.kind is PartKind.CHANGES:
            chosen = self._changed
        keys = list(chosen)
        states = [self._dump(self._keys[key]) for key in keys]
        key_type = self._plan.view.source.schema.arrow_schema.field(self._plan.key).type
        table = pa.table({"key": pa.array(keys, key_type), "state": pa.array(states, pa.string())})
        return Content({}, {"sessions": table})

    def _dump(self, state: _Key) -> str:
        sessions = [[s.start_us, s.end_us, s.n_fired, [a.dump() for a in s.accumulators]] for s in state.sessions]
        return json.dumps({"sessions": sessions, "windowless": self._windowless.dump(state.windowless)})

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._changed = {}

    def read(self, contents: Iterable[Content], *, watermark_us: int) -> None:
        """Make parts, the newest first, the state of a view that has none."""
        for content in contents:
            if (table := content.tables.get("sessions")) is None:
                continue
            for key, text in zip(table.column("key").to_pylist(), table.column("state").to_pylist(), strict=True):
                if key not in self._keys:
                    self._load(key, json.loads(text), watermark_us)
        self._sweep(watermark_us)

    def _load(self, key: Any, stored: dict[str, Any], watermark_us: int) -> None:
        state = self._keys[key] = _Key(self._windowless.load(stored["windowless"]), bucket_of(key))
        for start_us, end_us, n_fired, dumped in stored["sessions"]:
            accumulators = self._new_accumulators()
            for accumulator, values in zip(accumulators, dumped, strict=True):
                accumulator.load(values)
            session = _Session(start_us, end_us, accumulators, n_fired)
            state.sessions.append(session)
            if end_us > watermark_us:
                self._push(session, key)
