"""Computes feature rows and dead letters of a view anew, from its raw topic, by the oracle."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from jobs.topic_reader import read_topic
from schemas.view import FeatureView
from streams.batch import RawBatch
from tests.support.oracle import Oracle, parse_text

Row = dict[str, Any]
Place = tuple[Any, ...]
_OF_ONE_VIEW = {"missing_key", "duplicate", "late", "overflow"}
_NOT_OF_THE_EVENT = {"broker_time"}
"""Columns that tell when, and not what: of a record that was sent again, a header says it."""


class _ReadOnce:
    """Attributes of a definition, each read once: they parse their text each time."""

    def __init__(self, definition: Any) -> None:
        self._definition = definition

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._definition, name)
        setattr(self, name, found)
        return found


class ForgetfulOracle(Oracle):
    """The oracle for long logs: it lets go of panes that nothing can change or fire any more, to look at fewer."""

    def __init__(self, view: FeatureView, **options: Any) -> None:
        super().__init__(view, **options)
        self.view, self.source = cast(Any, _ReadOnce(view)), cast(Any, _ReadOnce(view.source))
        self.lateness_us = view.allowed_lateness_us
        self.slide_us = view.slide_us or 0
        self.looked_at = -math.inf

    def is_expired(self, end: int, watermark: float) -> bool:
        return end + self.lateness_us <= watermark

    def move_watermark(self, after: float, *, maker: Row | None) -> None:
        super().move_watermark(after, maker=maker)
        if after < self.looked_at + self.slide_us:
            return
        self.looked_at = after
        for key, end in [at for at in self.panes if self.is_expired(at[1] + self.slide_us, after)]:
            del self.panes[key, end]


@dataclass
class Sides:
    """What is on the topics, and what should be.

    Attributes:
        found: Feature rows by their place: partition, offset, key, pane, window end, pane index.
        expected: Those of the oracle.
        doubled: Places that are there more than once.
        letters: Dead letters: partition, offset and reason.
        expected_letters: Those of the oracle.
    """

    found: dict[Place, Row] = field(default_factory=dict)
    expected: dict[Place, Row] = field(default_factory=dict)
    doubled: list[Place] = field(default_factory=list)
    letters: list[Place] = field(default_factory=list)
    expected_letters: list[Place] = field(default_factory=list)

    def differences(self) -> list[str]:
        """Say what differs, at most some of it."""
        said = [f"{place}: there more than once" for place in self.doubled]
        said += [f"{place}: missing" for place in self.expected.keys() - self.found.keys()]
        said += [f"{place}: not expected" for place in self.found.keys() - self.expected.keys()]
        for place in self.found.keys() & self.expected.keys():
            got, expected = self.found[place], self.expected[place]
            said += [
                f"{place}: {name} is {got[name]!r}, expected {value!r}"
                for name, value in expected.items()
                if name not in _NOT_OF_THE_EVENT and not _is_same(got[name], value)
            ]
        if sorted(self.letters) != sorted(self.expected_letters):
            said.append(f"dead letters: {len(self.letters)}, expected {len(self.expected_letters)}")
        return sorted(said)[:20]


def compare(brokers: str, view: FeatureView) -> Sides:
    """Read a view's topics and compute them anew; the view emits each event, and its clock never moves by itself."""
    sides = Sides()
    rows: dict[int, list[Row]] = defaultdict(list)
    for batch in sorted(read_topic(brokers, view.source.topic), key=lambda batch: int(batch.offsets[0])):
        for row, reason in _events(batch, view):
            if reason is None:
                rows[batch.partition].append(row)
            else:
                sides.expected_letters.append((batch.partition, row["_offset"], reason))
    for partition, events in rows.items():
        output = ForgetfulOracle(view, partition=partition).run(events)
        sides.expected |= {_place(row, partition, view): row for row in output.rows}
        sides.expected_letters += [(partition, letter["_offset"], letter["reason"]) for letter in output.dead_letters]
    times = [item.name for item in view.row_schema if str(item.type).startswith("timestamp")]
    for batch in read_topic(brokers, view.topic):
        for value in batch.values:
            row = json.loads(value or b"null")
            row |= {name: None if row[name] is None else parse_text(row[name]) for name in times}
            place = _place(row, row["source_partition"], view)
            if place in sides.found:
                sides.doubled.append(place)
            sides.found[place] = row
    for batch in read_topic(brokers, view.source.dead_letter_topic):
        for headers in batch.headers:
            facts = {name: content.decode() for name, content in headers or ()}
            if facts.get("headrace.view", view.name) == view.name:
                at = (int(facts["headrace.partition"]), int(facts["headrace.offset"]))
                sides.letters.append((*at, facts["headrace.reason"]))
    return sides


def _events(batch: RawBatch, view: FeatureView) -> Iterator[tuple[Row, str | None]]:
    contract = view.source.schema
    for at, value in enumerate(batch.values):
        row: Row = {"_offset": int(batch.offsets[at])}
        try:
            document = json.loads(value or b"")
        except ValueError:
            yield row, "decode_error"
            continue
        if any(contract.validator.iter_errors(document)):
            yield row, "schema_violation"
            continue
        request_id = dict(batch.headers[at] or ()).get("request_id", b"").decode() or None
        row |= {"_broker_time": int(batch.broker_time_us[at]), "_request_id": request_id}
        yield row | {name: document.get(name) for name in contract.arrow_schema.names}, None


def _place(row: Row, partition: int, view: FeatureView) -> Place:
    key = row[view.entity.key]
    return (partition, row["source_offset"], key, row["pane"], row["window_end"], row["pane_index"])


def _is_same(got: Any, expected: Any) -> bool:
    if isinstance(got, float) and isinstance(expected, float):
        return math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-9)
    return bool(got == expected)
