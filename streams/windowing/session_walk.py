"""Sessions that need each row to be looked at: those that merge, have fired, or meet a row behind the watermark.

Whole numbers only: which session a row falls into, whether it is late, and what fires. Aggregates are not touched here.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from schemas.row import Pane

NO_ROW: Final = -1
CHANGE, REACHED = 0, 1
"""Order of closing panes of one row: what it changes, then the sessions whose ends it makes the watermark reach."""


@dataclass(eq=False)
class Span:
    """A session on its way through a batch.

    Attributes:
        node: Number of the cell that its aggregates are in; another one after each merger.
        key: Position of its key.
        last_row: The last row that it took in, :data:`NO_ROW` for none of this batch.
        is_due: Whether its end has yet to be reached since it changed.
    """

    node: int
    key: int
    start_us: int
    end_us: int
    n_fired: int
    last_row: int
    is_due: bool


@dataclass(frozen=True)
class Closing:
    """A closing pane.

    Attributes:
        maker: Row that makes it; :data:`NO_ROW` for the one that makes the watermark reach its end.
        phase: :data:`CHANGE` or :data:`REACHED`.
        node: Cell that it shows; None for an empty one.
        as_of: Row as of which the cell is read.
    """

    maker: int
    phase: int
    kind: Pane
    key: int
    node: int | None
    as_of: int
    start_us: int
    end_us: int
    index: int


class SessionWalk:
    """Takes rows in offset order, each into the sessions of its group.

    Attributes:
        closings: What fires, in order for each row.
        parents: The cells that each new cell is merged from, in time order; none for one that a row opens.
        rows: Of each row taken in, its cell, and its session's start, end and number of firings after it.
    """

    def __init__(self, *, gap_us: int, allowed_lateness_us: int, first_node: int) -> None:
        self._gap_us = gap_us
        self._lateness_us = allowed_lateness_us
        self._next_node = first_node
        self._spans: defaultdict[int, list[Span]] = defaultdict(list)
        self.closings: list[Closing] = []
        self.parents: dict[int, list[int]] = {}
        self.rows: dict[int, tuple[int, int, int, int]] = {}

    def hold(self, group: int, span: Span) -> None:
        """Begin with a session of before the batch."""
        self._spans[group].append(span)

    def add(self, row: int, *, group: int, key: int, time_us: int, before_us: int) -> bool:
        """Take in a row, judged against the watermark before it; False if it is late."""
        self._reach(group, before_us)
        end_us = time_us + self._gap_us
        alive = [s for s in self._spans[group] if s.end_us + self._lateness_us > before_us]
        parts = sorted((s for s in alive if s.start_us < end_us and time_us < s.end_us), key=lambda span: span.start_us)
        if not parts and end_us + self._lateness_us <= before_us:
            return False
        merged = Span(
            node=parts[0].node if len(parts) == 1 else self._new_node([s.node for s in parts]),
            key=key,
            start_us=min([time_us, *(s.start_us for s in parts)]),
            end_us=max([end_us, *(s.end_us for s in parts)]),
            n_fired=max((s.n_fired for s in parts), default=0),
            last_row=row,
            is_due=False,
        )
        merged.is_due = merged.end_us > before_us
        self._spans[group] = [*(s for s in alive if s not in parts), merged]
        self._fire_changes(row, parts, merged, before_us)
        self.rows[row] = (merged.node, merged.start_us, merged.end_us, merged.n_fired)
        return True

    def _new_node(self, parents: list[int]) -> int:
        node, self._next_node = self._next_node, self._next_node + 1
        self.parents[node] = parents
        return node

    def _fire_changes(self, row: int, parts: list[Span], merged: Span, before_us: int) -> None:
        fired = [s for s in parts if s.n_fired]
        for part in sorted(fired, key=lambda span: span.end_us):
            if (part.start_us, part.end_us) != (merged.start_us, merged.end_us):
                gone = (part.start_us, part.end_us, part.n_fired)
                self.closings.append(Closing(row, CHANGE, Pane.EMPTY, merged.key, None, NO_ROW, *gone))
                merged.n_fired = max(merged.n_fired, part.n_fired + 1)
        # A row that changes a fired session, or comes behind the watermark, does not move it.
        if fired or merged.end_us <= before_us:
            self._fire(merged, Pane.LATE, maker=row, phase=CHANGE)

    def _reach(self, group: int, watermark_us: int) -> None:
        for span in self._spans[group]:
            if span.is_due and span.end_us <= watermark_us:
                span.is_due = False
                self._fire(span, Pane.ON_TIME, maker=NO_ROW, phase=REACHED)

    def _fire(self, span: Span, kind: Pane, *, maker: int, phase: int) -> None:
        shown = (span.node, span.last_row, span.start_us, span.end_us, span.n_fired)
        self.closings.append(Closing(maker, phase, kind, span.key, *shown))
        span.n_fired += 1

    def finish(self, watermark_us: int) -> list[Span]:
        """Fire what the watermark reaches after the last row; gives the sessions that are left."""
        for group in self._spans:
            self._reach(group, watermark_us)
        return [span for spans in self._spans.values() for span in spans]
