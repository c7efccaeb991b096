"""The state of a session view as parts (:mod:`streams.windowing.snapshot`), and parts as the state.

A part that holds a key holds all that there is of it. What has run out is told by the watermark.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from streams.windowing.segment import Ints
from streams.windowing.session import SessionState
from streams.windowing.session_layout import Sessions
from streams.windowing.snapshot import Content, PartKind, Selection
from streams.windowing.stored_code import CodeReader, CodeWriter

_NONE = -1


def write_sessions(state: SessionState, selection: Selection) -> Content:
    """Write the selected state; in a part, keys are named by their row in the table ``keys``."""
    changed = selection.kind is PartKind.CHANGES
    ids = state.changed_keys() if changed else state.keys.live_ids(selection.bucket)
    # Only the places of these keys are ever touched, so the size of the array costs nothing.
    row_of_key = np.empty(state.keys.capacity, dtype=np.int64)
    row_of_key[ids] = np.arange(len(ids))
    cells = _cells_of(state, ids)
    held = state.cells.take(cells)
    owners = {
        "key": pa.array(row_of_key[held.key]),
        "start_us": pa.array(held.start_us),
        "end_us": pa.array(held.end_us),
        "n_fired": pa.array(held.n_fired),
    }
    content = Content({}, {"keys": pa.table({"key": state.keys.to_arrow(ids)})})
    codes = CodeWriter(state.pools)
    state.bank.write(cells, content, codes=codes, name="sessions", owners=owners)
    state.windowless.grow(state.keys.capacity)
    state.windowless.write(state.windowless.known(ids), row_of_key, content, codes=codes)
    codes.finish(content)
    return content


def _cells_of(state: SessionState, ids: Ints) -> Ints:
    """Live cells of these keys, by key and time."""
    is_chosen = np.zeros(state.keys.capacity, dtype=np.bool_)
    is_chosen[ids] = True
    live = np.flatnonzero(state.is_live)
    live = live[is_chosen[state.cells.key[live]]]
    by_key: Ints = live[np.lexsort((state.cells.start_us[live], state.cells.key[live]))]
    return by_key


def read_sessions(state: SessionState, contents: Iterable[Content], *, watermark_us: int) -> None:
    """Make parts, the newest first, the state of a view that has none; ``watermark_us`` is that of the newest."""
    for content in contents:
        codes = CodeReader(state.pools, content)
        if (table := content.tables.get("keys")) is None:
            continue
        keys = table.column("key").combine_chunks()
        is_new = state.keys.find(keys) < 0
        ids = state.keys.intern(keys)
        state.windowless.read_part(content, ids, codes=codes)
        owner, *times = (content.column("sessions", name) for name in ("key", "start_us", "end_us", "n_fired"))
        rows = np.flatnonzero(is_new[owner])
        cells = np.full(len(owner), _NONE, dtype=np.int64)
        cells[rows] = state.add(Sessions(rows, ids[owner[rows]], *(column[rows] for column in times)))
        state.bank.read_part(content, cells, codes=codes, name="sessions")
    state.drop_expired(watermark_us)
    state.mark_told()
