"""Which session each row of a batch falls into, and what fires: arithmetic on times, no aggregates and no state.

A row's window is ``[t, t + gap)``; windows of a key that overlap are one session. Rows and open sessions of a key that
all of them together would join are a *cluster*; clusters never meet. In nearly all of them each row joins what the rows
before it have made of the cluster, while its end is not reached: that is seen from running extremes of the times, for
all clusters at once. The rows of the others are gone through one by one (:mod:`streams.windowing.session_walk`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from schemas.row import Pane
from streams.windowing.segment import Bools, Ints, find_segments, scan, stable_argsort
from streams.windowing.session_walk import NO_ROW, REACHED, Closing, SessionWalk, Span

FAR_US: Final = 2**62
EMPTY, LATE, ON_TIME, EARLY = range(4)
KINDS: Final = (Pane.EMPTY, Pane.LATE, Pane.ON_TIME, Pane.EARLY)
_NONE: Final = -1
_NOTHING: Final[Ints] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Sessions:
    """Sessions, one array element each.

    Attributes:
        node: Number of the cell of each.
        key: Position of its key.
        start_us: Start of it.
        end_us: End of it.
        n_fired: How often it has fired.
    """

    node: Ints
    key: Ints
    start_us: Ints
    end_us: Ints
    n_fired: Ints

    def __len__(self) -> int:
        return len(self.node)

    def take(self, rows: Ints | Bools) -> "Sessions":
        """Some of them."""
        return Sessions(*(part[rows] for part in self.parts))

    def assign(self, changed: "Sessions") -> None:
        """Put sessions where their cells are."""
        for part, values in zip(self.parts, changed.parts, strict=True):
            part[changed.node] = values

    def joined(self, other: "Sessions") -> "Sessions":
        """These, then others."""
        return Sessions(*(np.concatenate(pair) for pair in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[Ints, ...]:
        """Its arrays."""
        return self.node, self.key, self.start_us, self.end_us, self.n_fired


NO_SESSIONS: Final = Sessions(*[_NOTHING] * 5)


@dataclass(frozen=True)
class Firings:
    """Closing panes.

    Attributes:
        sessions: What each shows; the node is -1 for an empty one.
        maker: Row that makes it; -1 for the one that makes the watermark reach its end.
        phase: Order among the panes of a row.
        kind: Code of its pane.
        as_of: Row as of which its cell is read, -1 for the state before the batch.
    """

    sessions: Sessions
    maker: Ints
    phase: Ints
    kind: Ints
    as_of: Ints

    def take(self, rows: Ints | Bools) -> "Firings":
        """Some of them."""
        return Firings(self.sessions.take(rows), self.maker[rows], self.phase[rows], self.kind[rows], self.as_of[rows])

    def joined(self, other: "Firings") -> "Firings":
        """These, then others."""
        return Firings(
            self.sessions.joined(other.sessions),
            *(
                np.concatenate([getattr(self, name), getattr(other, name)])
                for name in ("maker", "phase", "kind", "as_of")
            ),
        )

    @classmethod
    def on_time(cls, sessions: Sessions, as_of: Ints) -> "Firings":
        """The first closing of each of these sessions, when the watermark reaches its end."""
        maker, phase, kind = (np.full(len(sessions), code) for code in (NO_ROW, REACHED, ON_TIME))
        return cls(sessions, maker, phase, kind, as_of)


@dataclass(frozen=True)
class Layout:
    """A batch laid out.

    Attributes:
        is_late: Rows whose session had expired.
        row: Of each other row, the session that it is in, as it stands after the row.
        firings: Closing panes of the sessions that rows of the batch are near; of others see ``Firings.on_time``.
        left: The sessions near the batch's rows that are left after it.
        near: Cells of the sessions of before the batch that are near its rows.
        parents: The cells that each new cell is merged from, in time order; a new cell that is not among them, or has
            none, is opened by a row. Those that others are merged from stand before these.
    """

    is_late: Bools
    row: Sessions
    firings: Firings
    left: Sessions
    near: Ints
    parents: dict[int, list[int]]

    @cached_property
    def turns(self) -> dict[int, int]:
        """How many mergers follow upon each other in each cell that is merged from others."""
        turns: dict[int, int] = {}
        for node, older in self.parents.items():
            if older:
                turns[node] = 1 + max(turns.get(parent, 0) for parent in older)
        return turns

    def n_rows_within(self, most_turns: int) -> int:
        """Number of rows before the first in whose session more mergers than this follow upon each other."""
        deep = [node for node, turn in self.turns.items() if turn > most_turns]
        rows = np.flatnonzero(np.isin(self.row.node, deep)) if deep else _NOTHING
        return int(rows[0]) if len(rows) else len(self.is_late)

    def n_new(self, first_node: int) -> int:
        """Number of new cells."""
        return max(int(self.row.node.max(initial=-1)) + 1 - first_node, 0)

    def renumbered(self, first_node: int, cells: Ints) -> "Layout":
        """With these cells in place of the new ones."""
        rename = np.concatenate([np.arange(first_node), cells, [_NONE]])

        def named(sessions: Sessions) -> Sessions:
            return replace(sessions, node=rename[sessions.node])

        parents = {
            int(rename[node]): [int(rename[parent]) for parent in older]
            for node, older in self.parents.items()
            if older
        }
        firings = replace(self.firings, sessions=named(self.firings.sessions))
        return replace(self, row=named(self.row), firings=firings, left=named(self.left), parents=parents)

    def among(self, kept: Ints, key: Ints) -> "Layout":
        """The layout of rows of these keys, of which only some were laid out."""
        if len(kept) == len(key):
            return self
        blank = empty_layout(key, near=self.near)
        blank.is_late[kept] = self.is_late
        for part, values in zip(blank.row.parts, self.row.parts, strict=True):
            part[kept] = values
        place = np.append(kept, NO_ROW)
        firings = replace(self.firings, maker=place[self.firings.maker], as_of=place[self.firings.as_of])
        return replace(self, is_late=blank.is_late, row=blank.row, firings=firings)

    def without(self, is_rejected: Bools) -> "Layout":
        """Without these rows, which are in no session."""
        kept = np.flatnonzero(~is_rejected)
        place = np.append(np.cumsum(~is_rejected) - 1, NO_ROW)
        firings = replace(self.firings, maker=place[self.firings.maker], as_of=place[self.firings.as_of])
        return replace(self, is_late=self.is_late[kept], row=self.row.take(kept), firings=firings)


NO_FIRINGS: Final = Firings(NO_SESSIONS, *[_NOTHING] * 4)
NO_LAYOUT: Final = Layout(np.empty(0, dtype=np.bool_), NO_SESSIONS, NO_FIRINGS, NO_SESSIONS, _NOTHING, {})
"""What a step of the watermark without rows is laid out as."""


@dataclass(frozen=True)
class Clusters:
    """Rows and held sessions by cluster.

    Attributes:
        of_row: ``(n_rows,)``.
        of_held: ``(n_held,)``.
        n_clusters: Number of clusters.
    """

    of_row: Ints
    of_held: Ints
    n_clusters: int


def empty_layout(key: Ints, *, near: Ints) -> Layout:
    """A layout of rows of these keys that have yet to be put into sessions."""
    node, start_us, end_us, n_fired = (np.full(len(key), _NONE) for _ in range(4))
    row = Sessions(node, key.copy(), start_us, end_us, n_fired)
    return Layout(np.zeros(len(key), dtype=np.bool_), row, NO_FIRINGS, NO_SESSIONS, near, {})


def find_clusters(key: Ints, time_us: Ints, held: Sessions, *, gap_us: int) -> Clusters:
    """Put together what overlaps, by way of whatever overlaps both."""
    keys = np.concatenate([key, held.key])
    start_us = np.concatenate([time_us, held.start_us])
    end_us = np.concatenate([time_us + gap_us, held.end_us])
    low = int(start_us.min(initial=FAR_US))
    order = stable_argsort(start_us - low, int(start_us.max(initial=low)) - low + 1)
    order = order[stable_argsort(keys[order], int(keys.max(initial=0)) + 1)]
    starts, lengths = find_segments(keys[order])
    reach_us = scan(np.maximum, np.full(len(starts), -FAR_US), end_us[order], starts=starts, lengths=lengths)
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = start_us[order][1:] >= reach_us[:-1]
    is_new[starts] = True
    cluster = np.empty(len(order), dtype=np.int64)
    cluster[order] = np.cumsum(is_new) - 1
    return Clusters(cluster[: len(key)], cluster[len(key) :], int(is_new.sum()))


def lay_out(
    key: Ints,
    time_us: Ints,
    before_us: Ints,
    held: Sessions,
    *,
    start_us: int,
    gap_us: int,
    allowed_lateness_us: int,
    first_node: int,
) -> Layout:
    """Lay a batch out whose rows are all admitted, or late.

    Args:
        key: Position of the key of each row.
        time_us: Event times.
        before_us: Watermark that each row is judged against, and at the end the one after the batch.
        held: Live sessions of these keys; they had not expired before the batch.
        start_us: Watermark before the batch.
        gap_us: Gap of the view.
        allowed_lateness_us: Allowed lateness of the view.
        first_node: Number from which on cells are new.
    """
    clusters = find_clusters(key, time_us, held, gap_us=gap_us)
    order = stable_argsort(clusters.of_row, clusters.n_clusters)
    starts, lengths = find_segments(clusters.of_row[order])
    cluster = clusters.of_row[order[starts]]
    n_held = np.bincount(clusters.of_held, minlength=clusters.n_clusters)
    held_of = np.full(clusters.n_clusters, _NONE, dtype=np.int64)
    held_of[clusters.of_held] = np.arange(len(held))
    has_held = held_of[cluster] != _NONE
    own = held.take(held_of[cluster][has_held])
    base_start, base_end = np.full(len(starts), FAR_US), np.full(len(starts), -FAR_US)
    base_start[has_held], base_end[has_held] = own.start_us, own.end_us

    times, judged = time_us[order], before_us[:-1][order]
    starts_us = scan(np.minimum, base_start, times, starts=starts, lengths=lengths)
    ends_us = scan(np.maximum, base_end, times + gap_us, starts=starts, lengths=lengths)
    old_start, old_end = _previous(starts_us, base_start, starts), _previous(ends_us, base_end, starts)
    is_opening = old_end == -FAR_US
    joins = (times < old_end) & (times + gap_us > old_start) & (old_end > judged)
    is_plain_row = np.where(is_opening, times + gap_us > judged, joins)
    is_plain = np.logical_and.reduceat(is_plain_row, starts) if len(starts) else np.empty(0, dtype=np.bool_)
    is_plain &= n_held[cluster] <= 1
    is_plain[has_held] &= own.n_fired == 0

    node = np.full(len(starts), _NONE, dtype=np.int64)
    node[has_held] = own.node
    opens = np.flatnonzero(is_plain & ~has_held)
    node[opens] = first_node + np.arange(len(opens))
    zeros = np.zeros(len(order), dtype=np.int64)
    row = Sessions(np.repeat(node, lengths), key[order], starts_us, ends_us, zeros)
    last = starts + lengths - 1
    ended = row.take(last[is_plain])
    is_reached = ended.end_us <= before_us[-1]
    firings = Firings.on_time(ended.take(is_reached), order[last[is_plain]][is_reached])
    ended.n_fired[is_reached] += 1
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    is_near = np.bincount(clusters.of_row, minlength=clusters.n_clusters)[clusters.of_held] > 0
    plain = Layout(np.zeros(len(key), dtype=np.bool_), row.take(back), firings, ended, held.node[is_near], {})
    if is_plain.all():
        return plain
    is_walked = np.zeros(clusters.n_clusters, dtype=np.bool_)
    is_walked[cluster[~is_plain]] = True
    walk = SessionWalk(gap_us=gap_us, allowed_lateness_us=allowed_lateness_us, first_node=first_node + len(opens))
    of_held = is_walked[clusters.of_held]
    hold(walk, held.take(of_held), groups=clusters.of_held[of_held], watermark_us=start_us)
    # Row by row: which session each falls into hangs on the rows before it (some 5 us a row).
    walked = np.flatnonzero(is_walked[clusters.of_row])
    columns = walked, clusters.of_row[walked], key[walked], time_us[walked], before_us[walked]
    for position, group, row_key, row_time_us, row_before_us in zip(*(c.tolist() for c in columns), strict=True):
        if not walk.add(position, group=group, key=row_key, time_us=row_time_us, before_us=row_before_us):
            plain.is_late[position] = True
    return with_walk(plain, walk, watermark_us=int(before_us[-1]))


def hold(walk: SessionWalk, held: Sessions, *, groups: Ints, watermark_us: int) -> None:
    """Let a walk begin with sessions of before the batch."""
    columns = groups, held.node, held.key, held.start_us, held.end_us, held.n_fired
    for group, node, key, start_us, end_us, n_fired in zip(*(c.tolist() for c in columns), strict=True):
        walk.hold(group, Span(node, key, start_us, end_us, n_fired, NO_ROW, end_us > watermark_us))


def with_walk(layout: Layout, walk: SessionWalk, *, watermark_us: int) -> Layout:
    """Add to a layout what a walk has found; ``watermark_us`` is the watermark after the batch."""
    left = walk.finish(watermark_us)
    row = layout.row
    if walk.rows:
        positions = np.fromiter(walk.rows, dtype=np.int64, count=len(walk.rows))
        found = np.array(list(walk.rows.values()), dtype=np.int64)
        for column, part in enumerate((row.node, row.start_us, row.end_us, row.n_fired)):
            part[positions] = found[:, column]
    spans = [(s.node, s.key, s.start_us, s.end_us, s.n_fired) for s in left]
    return Layout(
        layout.is_late,
        row,
        layout.firings.joined(_firings(walk.closings)),
        layout.left.joined(_sessions(spans)),
        layout.near,
        walk.parents,
    )


def _firings(closings: list[Closing]) -> Firings:
    shown = [(_NONE if c.node is None else c.node, c.key, c.start_us, c.end_us, c.index) for c in closings]
    codes = [(c.maker, c.phase, KINDS.index(c.kind), c.as_of) for c in closings]
    columns = np.array(codes, dtype=np.int64).reshape(-1, 4).T
    return Firings(_sessions(shown), *columns)


def _sessions(rows: list[tuple[int, int, int, int, int]]) -> Sessions:
    return Sessions(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


def _previous(running: Ints, base: Ints, starts: Ints) -> Ints:
    previous = np.empty_like(running)
    previous[1:] = running[:-1]
    previous[starts] = base
    return previous
