"""What stands on a dead-letter topic, read back, and the marks on a row that is sent to its source again.

A row that is sent again, to the topic that it came from, has its key, payload and headers, and besides:

- ``headrace.redriven``: how often that has been done, so that it comes to an end;
- ``headrace.origin``: ``topic-partition-offset`` of the record as its producer sent it;
- ``headrace.views``: the views that it is meant for, where others have counted it the first time;
- ``headrace.late_for``: the views that it is sent to for being late there, which a backfill that folds late rows in has
  counted where they came.

Pure: no I/O and no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.row import Reason
from streams.batch import Headers, RawBatch

PREFIX: Final = "headrace."
REDRIVEN_HEADER: Final = f"{PREFIX}redriven"
ORIGIN_HEADER: Final = f"{PREFIX}origin"
VIEWS_HEADER: Final = f"{PREFIX}views"
LATE_FOR_HEADER: Final = f"{PREFIX}late_for"
_REASON_HEADER: Final = f"{PREFIX}reason"
_MARKS: Final = frozenset({REDRIVEN_HEADER, ORIGIN_HEADER, VIEWS_HEADER, LATE_FOR_HEADER})


def place_name(topic: str, partition: int, offset: int) -> str:
    """Name a record as ``topic-partition-offset``."""
    return f"{topic}-{partition}-{offset}"


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """One record of a dead-letter topic.

    Attributes:
        topic: The dead-letter topic.
        partition: Its partition.
        offset: Offset there.
        time_us: When it was written, microseconds since the epoch.
        key: Key of the record that was rejected.
        value: Its payload.
        headers: Its headers, marks of earlier redrives among them.
        facts: What Headrace says of it, by name without ``headrace.``: ``reason``, ``detail``, ``topic``...
    """

    topic: str
    partition: int
    offset: int
    time_us: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    facts: dict[str, str]

    @property
    def name(self) -> str:
        """Its place, by which it is asked for."""
        return place_name(self.topic, self.partition, self.offset)

    @property
    def reason(self) -> str:
        """Why it is here."""
        return self.facts["reason"]

    @property
    def view(self) -> str | None:
        """The view that rejected it; None where every view of the source does."""
        return self.facts.get("view")

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset of the record that was rejected."""
        return self.facts["topic"], int(self.facts["partition"]), int(self.facts["offset"])

    @property
    def is_cut(self) -> bool:
        """Whether this is less than the record that was rejected."""
        return "cut" in self.facts

    @property
    def n_redriven(self) -> int:
        """How often the record had been sent again when it was rejected."""
        mark = _last(self.headers, REDRIVEN_HEADER)
        return int(mark) if mark is not None and mark.isdigit() and len(mark) < 10 else 0

    @property
    def origin(self) -> str:
        """Place of the record as its producer sent it."""
        mark = _last(self.headers, ORIGIN_HEADER) if self.n_redriven else None
        return place_name(*self.place) if mark is None else mark.decode("utf-8", "replace")

    @property
    def addressed(self) -> frozenset[str] | None:
        """The views that the record is still to be counted in; None for all of them."""
        if self.view is not None:
            return frozenset({self.view})
        return addressed_views(self.headers) if self.n_redriven else None

    @property
    def late_for(self) -> frozenset[str]:
        """The view that the record was late for, and those for which it has been sent again for that before."""
        own = {self.view} if self.view is not None and self.reason == Reason.LATE else set()
        before = _views(self.headers, LATE_FOR_HEADER) if self.n_redriven else None
        return frozenset(own | (before or frozenset()))


def read_dead_letters(batch: RawBatch) -> tuple[list[DeadLetter], int]:
    """Read a batch of a dead-letter topic.

    Returns:
        The letters, and how many records are none: something else than Headrace wrote them.
    """
    letters, n_others = [], 0
    for position, headers in enumerate(batch.headers):
        own, facts = _split(headers or [])
        if not _is_complete(facts):
            n_others += 1
            continue
        letters.append(
            DeadLetter(
                topic=batch.topic,
                partition=batch.partition,
                offset=int(batch.offsets[position]),
                time_us=int(batch.broker_time_us[position]),
                key=batch.keys[position],
                value=batch.values[position],
                headers=own,
                facts=facts,
            )
        )
    return letters, n_others


def marked(
    letter: DeadLetter,
    *,
    headers: list[tuple[str, bytes]],
    views: Iterable[str] | None,
    late_for: Iterable[str] = (),
) -> list[Any]:
    """Headers of the record that is sent again.

    Args:
        letter: What is known of it.
        headers: Those of the record that was rejected.
        views: The views that it is meant for, None for all.
        late_for: Those of them that it was late for.
    """
    kept: list[tuple[str, bytes | None]] = [header for header in headers if header[0] not in _MARKS]
    marks = {REDRIVEN_HEADER: str(letter.n_redriven + 1), ORIGIN_HEADER: letter.origin}
    if views is not None:
        marks[VIEWS_HEADER] = ",".join(sorted(views))
    if late := sorted(late_for):
        marks[LATE_FOR_HEADER] = ",".join(late)
    return [*kept, *((name, value.encode()) for name, value in marks.items())]


def addressed_views(headers: Headers) -> frozenset[str] | None:
    """Tell which views a record is meant for; None for all, as of every record that is not sent again."""
    return _views(headers or [], VIEWS_HEADER)


def find_addressed(offsets: NDArray[np.int64], headers: Sequence[Headers]) -> dict[int, frozenset[str]]:
    """Find the records, by their offsets, that are meant for some views alone."""
    found = {}
    for position, own in enumerate(headers):
        if own and (views := addressed_views(own)) is not None:
            found[int(offsets[position])] = views
    return found


def find_late(offsets: NDArray[np.int64], headers: Sequence[Headers]) -> dict[int, frozenset[str]]:
    """Find the records, by their offsets, that were sent again for being late, each with the views it was late for."""
    found = {}
    for position, own in enumerate(headers):
        if own and (views := _views(own, LATE_FOR_HEADER)) is not None:
            found[int(offsets[position])] = views
    return found


def _views(headers: list[tuple[str, bytes]], name: str) -> frozenset[str] | None:
    names = _last(headers, name)
    return None if names is None else frozenset(names.decode("utf-8", "replace").split(","))


def _last(headers: list[tuple[str, bytes]], name: str) -> bytes | None:
    return next((value for known, value in reversed(headers) if known == name), None)


def _split(headers: list[tuple[str, bytes]]) -> tuple[list[tuple[str, bytes]], dict[str, str]]:
    """Tell the headers of the record from what Headrace says of it, which is last and begins with the reason."""
    starts = [position for position, (name, _) in enumerate(headers) if name == _REASON_HEADER]
    start = starts[-1] if starts else len(headers)
    facts = {name.removeprefix(PREFIX): (value or b"").decode("utf-8", "replace") for name, value in headers[start:]}
    return headers[:start], facts


def _is_complete(facts: dict[str, str]) -> bool:
    return {"reason", "topic"} <= facts.keys() and all(
        facts.get(name, "").isdigit() for name in ("partition", "offset")
    )
