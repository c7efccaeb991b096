"""Sliding windows of all keys of a partition, a batch of columns at a time.

Nothing is cut at window ends. A batch is scanned once: rows sorted by cell (a tile of a key) give running aggregates,
so that the state of any cell as of any row is at hand. Then every row of output, whether an as-of row or a closing pane
of any tick in the batch, is a *query*: a key, a window end, and the row as of which it is read. All queries are
answered together:

1. sort rows into cells, scan the aggregates; sort rows by key, scan the windowless features;
2. find the closings (:mod:`streams.windowing.pane`) and the rows that get an as-of row;
3. for each query, fold the cells of its window from the oldest to the newest;
4. make the last running values the state, drop expired tiles, release keys that have nothing left.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from schemas.row import Pane
from streams.windowing.columns import BatchColumns, Pools
from streams.windowing.key_table import KeyTable
from streams.windowing.newest import KeyRows
from streams.windowing.overflow import GuardedRows, OverflowGuard
from streams.windowing.pane import (
    NO_PANES,
    OnTimePanes,
    PaneCodes,
    Panes,
    TileEnds,
    WatermarkSteps,
    changed_panes,
    emptied_panes,
    watermark_steps,
)
from streams.windowing.plan import Plan, Scope
from streams.windowing.query import AdmittedRows, OutputRows, PendingPanes, Prepared, Queries, Scanned
from streams.windowing.segment import Bools, Ints, Places, expand, find_segments, search, stable_argsort
from streams.windowing.window_column import WindowColumns
from streams.windowing.windowless_column import WindowlessColumns

_NOTHING: Final[Ints] = np.empty(0, dtype=np.int64)
_PANES: Final = np.array([Pane.EARLY, Pane.ON_TIME, Pane.LATE, Pane.EMPTY], dtype=object)
_EARLY, _ON_TIME, _LATE, _EMPTY = range(4)
_TILES_AT_ONCE: Final = 1 << 18
_CELLS_WORTH_GIVING_BACK: Final = 1 << 16
_KEYS_WORTH_GIVING_BACK: Final = 1 << 14


class SlidingState:
    """State of a sliding view over one partition.

    Attributes:
        plan: The view, compiled.
        keys: Numbers of the keys that have a state.
        windows, windowless: Their features.
        fired, fired_count: How often panes that may still fire have fired.
        fired_is_told: Whether the last changes told that.
        pending: Panes that wait for the next tick.
        has_ticked: Whether there has been a tick since the last changes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pools = Pools(plan)
        self.keys = KeyTable(plan.view.columns.field(plan.key).type)
        self.windows = WindowColumns(plan, pools=self.pools)
        self.windowless = WindowlessColumns(plan, pools=self.pools)
        self._guard = OverflowGuard(plan, keys=self.keys, windows=self.windows, windowless=self.windowless)
        self._places = Places()
        self.fired = NO_PANES
        self.fired_count = _NOTHING
        self.fired_is_told: Bools = np.empty(0, dtype=np.bool_)
        self.pending = self.nothing_pending()
        self.has_ticked = False

    def nothing_pending(self) -> PendingPanes:
        """No pane waits for a tick."""
        values = {f.name: pa.array([], f.result_type) for f in self.windows.features}
        return PendingPanes(NO_PANES, NO_PANES, NO_PANES, values)

    # Taking in a batch

    def tiles_of(self, time_us: Ints) -> tuple[Ints, Ints, Ints]:
        """Tile of each event time, and the first and last window end that holds it."""
        tile = self.plan.tile_of(time_us)
        return tile, *self.windows.ends(tile)

    def prepare(self, rows: AdmittedRows) -> Prepared:
        """Make a batch ready; changes nothing."""
        tile, first, last = self.tiles_of(rows.time_us)
        if rows.table is None:
            return Prepared(rows, None, self.keys.to_arrow(_NOTHING), _NOTHING, tile, first, last)
        encoded = rows.table.column(self.plan.key).combine_chunks().dictionary_encode()
        return Prepared(
            rows,
            BatchColumns(rows.table, plan=self.plan, pools=self.pools),
            encoded.dictionary,
            encoded.indices.to_numpy().astype(np.int64),
            tile,
            first,
            last,
        )

    def process(self, prepared: Prepared, *, emit: str) -> OutputRows:
        """Take in a batch and give the rows of output."""
        steps = watermark_steps(self.plan, prepared.rows.path)
        scanned = self._scan(prepared)
        closings = self._closings(scanned, steps)
        queries = self._with_as_of_rows(closings, scanned, steps, emit=emit)
        output = self._output(queries, scanned, steps)
        self._commit(closings, scanned, steps)
        return output

    def _scan(self, prepared: Prepared) -> Scanned:
        rows, columns = prepared.rows, prepared.columns
        if columns is None:
            return Scanned(prepared, _NOTHING, None, None)
        ids, place = self.keys.intern(prepared.keys), prepared.place
        self.windows.tiles.grow_keys(self.keys.capacity)
        self.windowless.grow(self.keys.capacity)
        self._places.grow(self.keys.capacity)
        windows = windowless = None
        if self.plan.has_windows:
            windows = self.windows.scan(columns, place=place, ids=ids, tile=prepared.tile, time_us=rows.time_us)
        if not self.windowless.is_empty:
            order = stable_argsort(place, len(ids))
            starts, lengths = find_segments(place[order])
            keys = ids[place[order][starts]]
            key_rows = KeyRows(order, starts, lengths, keys, rows.time_us[order])
            windowless = self.windowless.scan(columns, key_rows, watermark_us=rows.path.before_us[order])
        return Scanned(prepared, ids[place], windows, windowless)

    def first_overflow(self, prepared: Prepared) -> tuple[int, str] | None:
        """Find the first row that would take an integer sum out of int64, and that sum's name."""
        if prepared.columns is None:
            return None
        rows = prepared.rows
        guarded = GuardedRows(
            prepared.columns,
            prepared.keys,
            prepared.place,
            rows.time_us,
            rows.path.before_us,
            prepared.tile,
            np.maximum(prepared.first, self.plan.expired_ends(rows.path.before_us) + 1),
            prepared.last,
        )
        return self._guard.first_overflow(guarded) if self._guard.is_in_reach(guarded) else None

    # Finding the closings

    def _closings(self, scanned: Scanned, steps: WatermarkSteps) -> Queries:
        nothing = Queries(NO_PANES, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
        if not self.plan.has_windows or not steps.has_tick:
            return nothing
        batch = scanned.prepared
        on_time, emptied = OnTimePanes(steps, n_keys=self.keys.capacity), NO_PANES
        for tiles in self._tile_ends(scanned, steps):
            on_time.add(tiles)
            emptied = _joined(emptied, emptied_panes(tiles, steps))
        reached = on_time.panes()
        changed, changed_at = changed_panes(scanned.key, batch.first, batch.last, steps)
        late_empty, late_empty_at = self._late_empties(scanned, steps)
        pending = self.pending
        before = np.array([steps.reached_start])
        groups = [
            (reached, steps.firing_step(reached.end), _ON_TIME),
            (emptied, steps.firing_step(emptied.end), _EMPTY),
            (pending.changed, np.repeat(steps.next_tick(before), len(pending.changed)), _LATE),
            (changed, steps.next_tick(steps.reached_before[changed_at]), _LATE),
            (pending.emptied, np.repeat(steps.next_tick(before), len(pending.emptied)), _EMPTY),
            (late_empty, steps.next_tick(steps.reached_before[late_empty_at]), _EMPTY),
        ]
        panes = Panes(
            np.concatenate([p.key for p, *_ in groups]),
            np.concatenate([p.end for p, *_ in groups]),
        )
        maker = np.concatenate([step for _, step, _ in groups])
        kind = np.concatenate([np.full(len(p), code, dtype=np.int64) for p, _, code in groups])
        return self._number(panes, maker, kind, steps)

    def _tile_ends(self, scanned: Scanned, steps: WatermarkSteps) -> Iterator[TileEnds]:
        """Tiles with the ends that hold them, so many at once that what is made of them stays in the cache."""
        tiles, batch = self.windows.tiles, scanned.prepared
        is_old = tiles.is_live.copy()
        if scanned.windows is not None:
            heads = scanned.windows.heads
            is_old[scanned.windows.rows.cells[scanned.windows.is_new]] = False
            yield TileEnds(scanned.key[heads], batch.first[heads], batch.last[heads], steps.reached_before[heads])
        for start in range(0, len(is_old), _TILES_AT_ONCE):
            old = start + np.flatnonzero(is_old[start : start + _TILES_AT_ONCE])
            first, last = self.windows.ends(tiles.tile[old])
            yield TileEnds(tiles.key[old], first, last, np.full(len(old), steps.reached_start))

    def _late_empties(self, scanned: Scanned, steps: WatermarkSteps) -> tuple[Panes, Ints]:
        """Ends right after a new tile that had been reached when it came, and the row that brought it."""
        if scanned.windows is None:
            return NO_PANES, _NOTHING
        heads = scanned.windows.heads[scanned.windows.is_new]
        end = scanned.prepared.last[heads] + 1
        is_reached = end <= steps.reached_before[heads]
        return Panes(scanned.key[heads], end).take(is_reached), heads[is_reached]

    def _number(self, panes: Panes, maker: Ints, kind: Ints, steps: WatermarkSteps) -> Queries:
        """Drop what repeats or does not fire, and count the firings of each pane."""
        codes = PaneCodes(self.keys.capacity, panes, self.fired)
        code = codes.of(panes)
        fires = np.flatnonzero(maker < len(steps.reached_after))
        # By pane, then by step, then LATE or ON_TIME before EMPTY: what has a row is not empty.
        order = fires[np.lexsort((kind[fires], maker[fires], code[fires]))]
        starts, _ = find_segments(code[order], maker[order])
        order = order[starts]
        # EMPTY fires only for a pane that never fired: it stays empty from its first firing on, or is LATE.
        _, lengths = find_segments(code[order])
        fired = self._fired_before(codes, code[order])
        _, rank = expand(lengths)
        keep = (kind[order] != _EMPTY) | ((rank == 0) & (fired == 0))
        order, fired = order[keep], fired[keep]
        _, lengths = find_segments(code[order])
        _, rank = expand(lengths)
        chosen = panes.take(order)
        row = steps.n_shown[maker[order]] - 1
        as_of = np.minimum(row, steps.last_counting(chosen.end))
        return Queries(chosen, maker[order], row, as_of, kind[order], fired + rank)

    def _fired_before(self, codes: PaneCodes, code: Ints) -> Ints:
        if not len(self.fired):
            return np.zeros(len(code), dtype=np.int64)
        known = codes.of(self.fired)
        order = np.argsort(known)
        at = search(known[order], code)
        at[at == len(order)] = 0
        match = order[at]
        return np.where(known[match] == code, self.fired_count[match], 0)

    # As-of rows

    def _with_as_of_rows(self, closings: Queries, scanned: Scanned, steps: WatermarkSteps, *, emit: str) -> Queries:
        if emit == "on_close" or not len(scanned.key):
            return closings
        rows = np.flatnonzero(scanned.prepared.first > steps.expired_before)
        if emit == "latest":
            rows = rows[self._places.last_of_each(scanned.key[rows])]
        panes = Panes(scanned.key[rows], scanned.prepared.first[rows])
        index, step = np.zeros(len(rows), dtype=np.int64), scanned.prepared.rows.path.step
        behind = np.flatnonzero(panes.end <= steps.reached_before[rows])
        if len(behind):
            index[behind] = self._firings_until(panes.take(behind), step[rows[behind]], closings)
        return Queries(
            panes=Panes(
                np.concatenate([closings.panes.key, panes.key]), np.concatenate([closings.panes.end, panes.end])
            ),
            maker=np.concatenate([closings.maker, step[rows]]),
            row=np.concatenate([closings.row, rows]),
            as_of=np.concatenate([closings.as_of, rows]),
            kind=np.concatenate([closings.kind, np.full(len(rows), _EARLY, dtype=np.int64)]),
            index=np.concatenate([closings.index, index]),
        )

    def _firings_until(self, panes: Panes, steps: Ints, closings: Queries) -> Ints:
        """How often each pane has fired when a row comes, at this step."""
        codes = PaneCodes(self.keys.capacity, panes, self.fired, closings.panes)
        code = codes.of(panes)
        before = self._fired_before(codes, code)
        if not len(closings.panes):
            return before
        closed = codes.of(closings.panes)
        order = np.lexsort((closings.maker, closed))
        n_steps = int(max(steps.max(), closings.maker.max())) + 2
        distinct, place = np.unique(closed[order], return_inverse=True)
        ranked = place * n_steps + closings.maker[order]
        at = search(distinct, code)
        at[at == len(distinct)] = 0
        is_known = distinct[at] == code
        low = search(ranked, at * n_steps)
        high = search(ranked, at * n_steps + steps, side="right")
        counts: Ints = before + np.where(is_known, high - low, 0)
        return counts

    # Answering the queries

    def _output(self, queries: Queries, scanned: Scanned, steps: WatermarkSteps) -> OutputRows:
        plan, rows = self.plan, scanned.prepared.rows
        is_early = queries.kind == _EARLY
        ranks = np.zeros(len(queries.panes), dtype=np.int64)
        if not is_early.all():
            ranks[~is_early] = self.keys.ranks(queries.panes.key[~is_early])
            order = np.lexsort((ranks, np.where(is_early, 0, queries.panes.end), is_early, queries.maker))
            queries = queries.take(order)
            is_early = is_early[order]
        maker, end_us = queries.maker, plan.end_us(queries.panes.end)
        watermark_us = rows.path.after_us[maker]
        columns = {plan.key: self._keys_of(queries, rows)}
        event_time_us = end_us.copy()
        event_time_us[is_early] = rows.time_us[queries.row[is_early]]
        columns |= self._windowed(queries, scanned, at_us=event_time_us)
        columns |= self.windowless.read(
            queries.panes.key,
            self.windowless.versions(queries.panes.key, queries.row, scanned.windowless),
            at_us=event_time_us,
            batch=scanned.windowless,
        )
        own = pa.array(queries.row, pa.int64(), mask=~is_early)
        for feature in plan.features:
            if feature.scope is Scope.EVENT:
                values = rows.table.column(feature.column).combine_chunks() if rows.table is not None else None
                nothing = pa.nulls(len(maker), feature.result_type)
                columns[feature.name] = nothing if values is None else values.take(own)
        columns |= {
            "event_time": pa.array(event_time_us),
            "window_end": pa.array(end_us),
            "pane": pa.DictionaryArray.from_arrays(queries.kind, pa.array(_PANES)).dictionary_decode(),
            "pane_index": pa.array(queries.index),
            "is_final": pa.array(queries.panes.end <= steps.expired_after[maker]),
            "watermark": pa.array(watermark_us),
        }
        return OutputRows(maker, columns)

    def _keys_of(self, queries: Queries, rows: AdmittedRows) -> pa.Array:
        """Entity keys: of as-of rows straight from the batch, of closing panes from the key table."""
        closing = np.flatnonzero(queries.kind != _EARLY)
        if rows.table is None or len(closing) == len(queries.kind):
            return self.keys.to_arrow(queries.panes.key)
        given = rows.table.column(self.plan.key).combine_chunks()
        source = queries.row.copy()
        source[closing] = len(given) + np.arange(len(closing))
        known = self.keys.to_arrow(queries.panes.key[closing])
        return (pa.concat_arrays([given, known]) if len(closing) else given).take(pa.array(source))

    def _windowed(self, queries: Queries, scanned: Scanned, *, at_us: Ints) -> dict[str, pa.Array]:
        """Window features of each query."""
        values = self._read_windows(queries.panes, queries.as_of, scanned, at_us=at_us)
        if len(self.pending.frozen):
            # Nothing changes a frozen pane: its first firing from here on is the one that was waiting.
            codes = PaneCodes(self.keys.capacity, queries.panes, self.pending.frozen)
            frozen = codes.of(self.pending.frozen)
            order = np.argsort(frozen)
            at = search(frozen[order], codes.of(queries.panes))
            at[at == len(order)] = 0
            match = order[at]
            is_frozen = (frozen[match] == codes.of(queries.panes)) & (queries.kind == _LATE)
            source = pa.array(np.where(is_frozen, len(queries.panes) + match, np.arange(len(queries.panes))))
            values = {
                name: pa.concat_arrays([computed, self.pending.frozen_values[name]]).take(source)
                for name, computed in values.items()
            }
        return values

    def _read_windows(self, panes: Panes, as_of: Ints, scanned: Scanned, *, at_us: Ints) -> dict[str, pa.Array]:
        return self.windows.read(panes, as_of, at_us=at_us, batch=scanned.windows)

    # Going on

    def _commit(self, closings: Queries, scanned: Scanned, steps: WatermarkSteps) -> None:
        if self.plan.has_windows:
            self._remember(closings, scanned, steps)
        if scanned.windows is not None:
            self.windows.commit(scanned.windows)
        if scanned.windowless is not None:
            self.windowless.commit(scanned.windowless)
        if steps.has_tick:
            self.has_ticked = True
            # A tile outlives its last window until the end after it is reached, which may fire EMPTY.
            done = min(int(steps.expired_after[-1]), int(steps.reached_after[-1]) - 1)
            self._forget(scanned.prepared.rows.path.end_us, done)

    def _remember(self, closings: Queries, scanned: Scanned, steps: WatermarkSteps) -> None:
        """Keep what the next ticks need: changed panes, frozen values, and how often each pane has fired."""
        if not self.plan.allowed_lateness_us:
            # A window is gone as soon as it is reached, so nothing can change or fire again.
            return
        batch = scanned.prepared
        changed, changed_at = changed_panes(scanned.key, batch.first, batch.last, steps)
        emptied, emptied_at = self._late_empties(scanned, steps)
        waits = steps.next_tick(steps.reached_before[changed_at]) == len(steps.reached_after)
        waits_empty = steps.next_tick(steps.reached_before[emptied_at]) == len(steps.reached_after)
        old = self.nothing_pending() if steps.has_tick else self.pending
        changed, changed_is_told = self._added(old.changed, old.changed_is_told, changed.take(waits))
        emptied, emptied_is_told = self._added(old.emptied, old.emptied_is_told, emptied.take(waits_empty))
        expired = int(steps.expired_after[-1])
        codes = PaneCodes(self.keys.capacity, changed, old.frozen)
        is_frozen = (changed.end <= expired) & ~np.isin(codes.of(changed), codes.of(old.frozen))
        frozen, frozen_values = old.frozen, old.frozen_values
        if is_frozen.any():
            fresh = changed.take(is_frozen)
            end_us = self.plan.end_us(fresh.end)
            values = self._read_windows(fresh, steps.last_counting(fresh.end), scanned, at_us=end_us)
            frozen = _joined(frozen, fresh)
            frozen_values = {name: pa.concat_arrays([frozen_values[name], values[name]]) for name in values}
        self.pending = PendingPanes(
            changed, emptied, frozen, frozen_values, changed_is_told, emptied_is_told, old.n_frozen_told
        )
        self._count_firings(closings, expired)

    def _count_firings(self, closings: Queries, expired: int) -> None:
        panes = _joined(self.fired, closings.panes)
        count = np.concatenate([self.fired_count, closings.index + 1])
        is_told = np.concatenate([self.fired_is_told, np.zeros(len(closings.panes), dtype=np.bool_)])
        codes = PaneCodes(self.keys.capacity, panes, self.pending.changed, self.pending.emptied)
        code = codes.of(panes)
        waiting = np.union1d(codes.of(self.pending.changed), codes.of(self.pending.emptied))
        keep = np.flatnonzero((panes.end > expired) | np.isin(code, waiting))
        order = keep[np.lexsort((count[keep], code[keep]))]
        starts, lengths = find_segments(code[order])
        order = order[starts + lengths - 1]
        self.fired, self.fired_count, self.fired_is_told = panes.take(order), count[order], is_told[order]

    def _added(self, old: Panes, is_told: Bools, new: Panes) -> tuple[Panes, Bools]:
        """Join panes, each once, and what was told of them."""
        panes = _joined(old, new)
        _, at = np.unique(PaneCodes(self.keys.capacity, panes).of(panes), return_index=True)
        return panes.take(at), np.concatenate([is_told, np.zeros(len(new), dtype=np.bool_)])[at]

    def _forget(self, watermark_us: int, done: int) -> None:
        """Drop the tiles of windows up to the end ``done``, and release the keys that have nothing left."""
        oldest = (done + 1) * self.plan.tiles_per_slide - self.plan.max_tiles
        self.windows.drop_before(oldest)
        self.release_idle(watermark_us)
        for column, pool in self.pools.pools.items():
            if pool.wants_compaction:
                mapping = pool.compact([*self.windows.bank.used_codes(column), *self.windowless.used_codes(column)])
                self.windows.bank.recode(column, mapping)
                self.windowless.recode(column, mapping)
        self._give_back()

    def _give_back(self) -> None:
        """Number keys and cells anew where most numbers are free, so that those gone quiet cost nothing any more."""
        n_cells = np.count_nonzero(self.windows.tiles.is_live)
        is_roomy = _is_roomy(self.windows.tiles.capacity, n_cells, fewest=_CELLS_WORTH_GIVING_BACK)
        if not is_roomy and not _is_roomy(self.keys.capacity, len(self.keys), fewest=_KEYS_WORTH_GIVING_BACK):
            return
        number_of = np.full(self.keys.capacity, -1, dtype=np.int64)
        self.windows.tiles.grow_keys(self.keys.capacity)
        keys = self.keys.renumber()
        number_of[keys] = np.arange(len(keys))
        self.windows.renumber(keys, number_of)
        self.windowless.renumber(keys)
        self._places = Places()
        self.fired = self.fired.renumbered(number_of)
        pending = self.pending
        pending.changed = pending.changed.renumbered(number_of)
        pending.emptied = pending.emptied.renumbered(number_of)
        pending.frozen = pending.frozen.renumbered(number_of)

    def release_idle(self, watermark_us: int) -> None:
        """Release the keys that have nothing left under a watermark."""
        is_idle = np.zeros(self.keys.capacity, dtype=np.bool_)
        live = self.keys.live_ids()
        is_idle[live] = ~self.windows.tiles.has_tiles(live)
        if not self.windowless.is_empty:
            is_idle[live] &= ~self.windowless.is_alive(self.windowless.newest_us[live], watermark_us)
        for panes in (self.fired, self.pending.changed, self.pending.emptied):
            is_idle[panes.key] = False
        idle = np.flatnonzero(is_idle)
        if len(idle):
            self.windowless.release(idle)
            self.keys.release(idle)

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self.windows.mark_told()
        self.windowless.mark_told()
        self.fired_is_told = np.ones(len(self.fired), dtype=np.bool_)
        self.pending.mark_told()
        self.has_ticked = False


def _is_roomy(capacity: int, n_live: int, *, fewest: int) -> bool:
    """Whether fewer than one number in four is in use, of so many that it matters."""
    return capacity > fewest and 4 * n_live < capacity


def _joined(one: Panes, other: Panes) -> Panes:
    return Panes(np.concatenate([one.key, other.key]), np.concatenate([one.end, other.end]))
