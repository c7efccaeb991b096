"""The state of a sliding view as parts (:mod:`streams.windowing.snapshot`), and parts as the state."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from streams.windowing.pane import NO_PANES, PaneCodes, Panes
from streams.windowing.query import PendingPanes
from streams.windowing.segment import Bools, Ints, find_segments
from streams.windowing.sliding import SlidingState
from streams.windowing.snapshot import Content, PartKind, Selection
from streams.windowing.stored_code import CodeReader, CodeWriter


def write_sliding(state: SlidingState, selection: Selection) -> Content:
    """Write the selected state; in a part, keys are named by their row in the table ``keys``."""
    pending = state.pending
    panes = {"fired": state.fired, "changed": pending.changed, "emptied": pending.emptied, "frozen": pending.frozen}
    if selection.kind is PartKind.CHANGES:
        cells, own = state.windows.changed_cells(), state.windowless.changed_keys()
        chosen = {
            "fired": np.flatnonzero(~state.fired_is_told),
            "changed": np.flatnonzero(~pending.changed_is_told),
            "emptied": np.flatnonzero(~pending.emptied_is_told),
            "frozen": np.arange(pending.n_frozen_told, len(pending.frozen)),
        }
        owners = [state.windows.tiles.key[cells], own, *(panes[name].key[rows] for name, rows in chosen.items())]
        is_chosen = np.zeros(state.keys.capacity, dtype=np.bool_)
        is_chosen[np.concatenate(owners)] = True
        ids = np.flatnonzero(is_chosen)
    else:
        ids = state.keys.live_ids(selection.bucket)
        cells, _ = state.windows.cells_of(ids)
        own = state.windowless.known(ids)
        is_chosen = np.zeros(state.keys.capacity, dtype=np.bool_)
        is_chosen[ids] = True
        chosen = {name: np.flatnonzero(is_chosen[some.key]) for name, some in panes.items()}
    # Only the places of these keys are ever touched, so the size of the array costs nothing.
    row_of_key = np.empty(state.keys.capacity, dtype=np.int64)
    row_of_key[ids] = np.arange(len(ids))
    content = Content({"has_ticked": state.has_ticked}, {"keys": pa.table({"key": state.keys.to_arrow(ids)})})
    codes = CodeWriter(state.pools)
    state.windows.write(cells, row_of_key, content, codes=codes)
    state.windowless.write(own, row_of_key, content, codes=codes)
    more = {
        "fired": {"count": pa.array(state.fired_count[chosen["fired"]])},
        "frozen": {f"value.{n}": v.take(pa.array(chosen["frozen"])) for n, v in pending.frozen_values.items()},
    }
    for name, rows in chosen.items():
        some = panes[name].take(rows)
        columns = {"key": pa.array(row_of_key[some.key]), "end": pa.array(some.end), **more.get(name, {})}
        content.tables[name] = pa.table(columns)
    codes.finish(content)
    return content


@dataclass
class _Found:
    """Panes of one section, gathered from the parts."""

    panes: list[Panes] = field(default_factory=lambda: [NO_PANES])
    tables: list[pa.Table] = field(default_factory=list)

    def add(self, content: Content, section: str, ids: Ints) -> None:
        if (table := content.tables.get(section)) is not None:
            self.panes.append(Panes(ids[table.column("key").to_numpy()], table.column("end").to_numpy()))
            self.tables.append(table)

    def joined(self) -> Panes:
        return Panes(np.concatenate([p.key for p in self.panes]), np.concatenate([p.end for p in self.panes]))

    def distinct(self, n_keys: int) -> tuple[Panes, Ints]:
        """Each pane once, and where it stands among all of them."""
        panes = self.joined()
        _, at = np.unique(PaneCodes(n_keys, panes).of(panes), return_index=True)
        return panes.take(at), at


def read_sliding(state: SlidingState, contents: Iterable[Content], *, watermark_us: int) -> None:
    """Make parts, the newest first, the state of a view that has none; ``watermark_us`` is that of the newest."""
    fired, changed, emptied, frozen = _Found(), _Found(), _Found(), _Found()
    has_pending = True
    for content in contents:
        codes = CodeReader(state.pools, content)
        table = content.tables.get("keys")
        ids = _NO_IDS if table is None else state.keys.intern(table.column("key").combine_chunks())
        state.windows.tiles.grow_keys(state.keys.capacity)
        state.windows.read_part(content, ids, codes=codes)
        state.windowless.read_part(content, ids, codes=codes)
        fired.add(content, "fired", ids)
        if has_pending:
            changed.add(content, "changed", ids)
            emptied.add(content, "emptied", ids)
            frozen.add(content, "frozen", ids)
        # What was pending before a tick fired at it.
        has_pending &= not content.facts["has_ticked"]
    n_keys = state.keys.capacity
    frozen_panes, at = frozen.distinct(n_keys)
    values = state.nothing_pending().frozen_values
    if frozen.tables:
        table = pa.concat_tables(frozen.tables).take(pa.array(at))
        values = {name: table.column(f"value.{name}").combine_chunks() for name in values}
    pending = PendingPanes(changed.distinct(n_keys)[0], emptied.distinct(n_keys)[0], frozen_panes, values)
    pending.mark_told()
    state.pending = pending
    _count_firings(state, fired, expired=state.plan.expired(watermark_us))
    state.mark_told()
    state.release_idle(watermark_us)


def _count_firings(state: SlidingState, found: _Found, *, expired: int) -> None:
    """Keep how often each pane has fired, of those that may still fire."""
    panes = found.joined()
    count = np.concatenate([_NO_IDS, *(table.column("count").to_numpy() for table in found.tables)])
    codes = PaneCodes(state.keys.capacity, panes, state.pending.changed, state.pending.emptied)
    code = codes.of(panes)
    is_waiting = np.isin(code, np.union1d(codes.of(state.pending.changed), codes.of(state.pending.emptied)))
    keep: Bools = (panes.end > expired) | is_waiting
    rows = np.flatnonzero(keep)
    order = rows[np.lexsort((count[rows], code[rows]))]
    starts, lengths = find_segments(code[order])
    order = order[starts + lengths - 1]
    state.fired, state.fired_count = panes.take(order), count[order]


_NO_IDS: Ints = np.empty(0, dtype=np.int64)
