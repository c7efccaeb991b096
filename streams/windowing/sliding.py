"""Sliding windows, a row at a time."""

from collections import defaultdict
from typing import Any

import pyarrow as pa

from schemas.row import Pane
from streams.windowing.accumulator import Accumulator, make_accumulator
from streams.windowing.plan import Plan, Scope
from streams.windowing.row import RowSink, RowView
from streams.windowing.windowless import WindowlessPlan, WindowlessState


class _Key:
    def __init__(self, windowless: WindowlessState) -> None:
        self.tiles: dict[int, list[Accumulator]] = {}
        self.fired: dict[int, int] = {}
        self.changed: set[int] = set()
        self.emptied: set[int] = set()
        self.frozen: dict[int, dict[str, Any]] = {}
        self.windowless = windowless


class SlidingState:
    """All keys of a sliding view."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.windowless = WindowlessPlan(plan)
        self.windowed = [f for f in plan.features if f.scope is Scope.WINDOW]
        self.keys: dict[Any, _Key] = {}
        self.due: dict[int, set[Any]] = defaultdict(set)
        self.dirty: set[Any] = set()

    def ends(self, time_us: int) -> tuple[int, int, int]:
        tile = (time_us - self.plan.align_us) // self.plan.tile_us
        per = self.plan.tiles_per_slide
        return tile, tile // per + 1, (tile + self.plan.max_tiles) // per

    def is_late(self, row: RowView, watermark_us: int) -> bool:
        return self.ends(row.time_us)[2] <= self.plan.expired(watermark_us)

    def is_partially_late(self, row: RowView, watermark_us: int) -> bool:
        return self.ends(row.time_us)[1] <= self.plan.expired(watermark_us)

    def has_as_of(self, row: RowView, watermark_us: int) -> bool:
        return self.ends(row.time_us)[1] > self.plan.expired(watermark_us)

    def overflows(self, row: RowView, key: Any, watermark_us: int) -> str | None:
        plan = self.plan
        tile, first, last = self.ends(row.time_us)
        state = self.keys.get(key)
        for index, feature in enumerate(self.windowed):
            if not feature.is_integer_sum or not row.feeds(feature):
                continue
            for end in range(max(first, plan.expired(watermark_us) + 1), last + 1):
                start, stop = end * plan.tiles_per_slide - feature.n_tiles, end * plan.tiles_per_slide
                if start <= tile < stop:
                    total = row.value(feature)
                    if state is not None:
                        total += sum(state.tiles[t][index + 1].total for t in range(start, stop) if t in state.tiles)
                    if not -(2**63) <= total < 2**63:
                        return f"`{feature.name}` would leave int64"
        if state is None:
            return None
        return self.windowless.overflows(state.windowless, row, watermark_us=watermark_us)

    def values(self, state: _Key, end: int) -> dict[str, Any]:
        per = self.plan.tiles_per_slide
        result = {}
        for index, feature in enumerate(self.windowed):
            total = make_accumulator(feature.function, feature.result_type)
            for tile in range(end * per - feature.n_tiles, end * per):
                if tile in state.tiles:
                    total.merge(state.tiles[tile][index + 1])
            result[feature.name] = total.result()
        return result

    def is_empty(self, state: _Key, end: int) -> bool:
        per = self.plan.tiles_per_slide
        return not any(t in state.tiles for t in range(end * per - self.plan.max_tiles, end * per))

    def apply(self, row: RowView, key: Any, before_us: int, after_us: int) -> None:
        state = self.keys.get(key)
        if state is None:
            state = self.keys[key] = _Key(self.windowless.new_state())
        plan = self.plan
        expired, reached = plan.expired(before_us), plan.reached(before_us)
        for end in state.changed:
            if end <= expired and end not in state.frozen:
                state.frozen[end] = self.values(state, end)
        tile, first, last = self.ends(row.time_us)
        if plan.has_windows:
            for end in range(max(first, expired + 1), last + 1):
                if end <= reached:
                    state.changed.add(end)
                    self.dirty.add(key)
                else:
                    self.due[end].add(key)
            if last + 1 <= reached:
                state.emptied.add(last + 1)
                self.dirty.add(key)
            else:
                self.due[last + 1].add(key)
            if tile not in state.tiles:
                state.tiles[tile] = [
                    make_accumulator("count", pa.int64()),
                    *(make_accumulator(f.function, f.result_type) for f in self.windowed),
                ]
            accumulators = state.tiles[tile]
            accumulators[0].update(None, (0, 0))
            for feature, accumulator in zip(self.windowed, accumulators[1:], strict=True):
                if row.feeds(feature):
                    accumulator.update(row.value(feature), (row.time_us, row.offset))
        self.windowless.update(state.windowless, row, watermark_us=before_us)

    def advance(self, before_us: int, after_us: int, maker: int, sink: RowSink) -> None:
        plan = self.plan
        if not plan.has_windows or plan.reached(after_us) <= plan.reached(before_us):
            return
        panes = []
        for key in self.dirty:
            state = self.keys[key]
            for end in state.changed:
                panes.append((end, key, Pane.LATE))
            for end in state.emptied - state.changed:
                if self.is_empty(state, end) and not state.fired.get(end):
                    panes.append((end, key, Pane.EMPTY))
            state.changed, state.emptied = set(), set()
        self.dirty.clear()
        for end in [e for e in self.due if e <= plan.reached(after_us)]:
            for key in self.due.pop(end):
                panes.append((end, key, Pane.EMPTY if self.is_empty(self.keys[key], end) else Pane.ON_TIME))
        for end, key, pane in sorted(panes):
            state = self.keys[key]
            index = state.fired.get(end, 0)
            state.fired[end] = index + 1
            sink.add(
                maker,
                key=key,
                features=(state.frozen.pop(end, None) or self.values(state, end))
                | self.windowless.results(state.windowless, watermark_us=after_us),
                event_time_us=plan.end_us(end),
                window_us=(0, plan.end_us(end)),
                pane=pane,
                pane_index=index,
                is_final=end <= plan.expired(after_us),
                watermark_us=after_us,
            )
        expired = plan.expired(after_us)
        for state in self.keys.values():
            state.fired = {end: n for end, n in state.fired.items() if end > expired}
            oldest = (expired + 1) * plan.tiles_per_slide - plan.max_tiles
            state.tiles = {tile: a for tile, a in state.tiles.items() if tile >= oldest}

    def as_of(self, row: RowView, key: Any, watermark_us: int, sink: RowSink) -> None:
        state = self.keys[key]
        _, first, _ = self.ends(row.time_us)
        sink.add(
            row.index,
            key=key,
            features=self.values(state, first)
            | self.windowless.results(state.windowless, watermark_us=watermark_us)
            | {f.name: row.raw(f.column) for f in self.plan.features if f.scope is Scope.EVENT},
            event_time_us=row.time_us,
            window_us=(0, self.plan.end_us(first)),
            pane=Pane.EARLY,
            pane_index=state.fired.get(first, 0),
            is_final=False,
            watermark_us=watermark_us,
        )

    def dump(self) -> Any:
        return [
            [
                key,
                [[t, [a.dump() for a in tile]] for t, tile in s.tiles.items()],
                list(s.fired.items()),
                sorted(s.changed),
                sorted(s.emptied),
                list(s.frozen.items()),
                self.windowless.dump(s.windowless),
            ]
            for key, s in self.keys.items()
        ], [[end, sorted(keys)] for end, keys in self.due.items()]

    def load(self, dumped: Any) -> None:
        for key, tiles, fired, changed, emptied, frozen, windowless in dumped[0]:
            state = self.keys[key] = _Key(self.windowless.load(windowless))
            for t, tile in tiles:
                accumulators = [
                    make_accumulator("count", pa.int64()),
                    *(make_accumulator(f.function, f.result_type) for f in self.windowed),
                ]
                for accumulator, values in zip(accumulators, tile, strict=True):
                    accumulator.load(values)
                state.tiles[t] = accumulators
            state.fired = dict(fired)
            state.changed, state.emptied, state.frozen = set(changed), set(emptied), dict(frozen)
            if changed or emptied:
                self.dirty.add(key)
        for end, keys in dumped[1]:
            self.due[end] = set(keys)
