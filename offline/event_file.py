"""Files of events: NDJSON or Parquet, one event a row in arrival order, read in cuts.

Of a view over several sources, each row names the topic it came from in ``_source``; what is no JSON object cannot, and
counts as one of the first.

A row is one JSON object, without the white space around it; blank lines and a byte order mark are none of it. A Parquet
row becomes the JSON that a producer would have sent (see :mod:`offline.parquet_event`). A row may say where it was in
Kafka: ``_partition`` (default 0), ``_offset`` (default: its number in the file, from 0) and ``_broker_time`` (RFC 3339,
or microseconds since the epoch). What is no JSON object cannot say so: it has the defaults, and since it reaches no
engine its offset need not rise.
"""

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from offline.parquet_event import encode_events
from schemas.errors import ConfigError, DecodeError, SchemaMismatchError
from schemas.source import EventSource
from schemas.time import parse_rfc3339_us
from schemas.view_input import SOURCE_COLUMN
from streams.windowing.event_time import read_event_times

UNKNOWN_US: Final = -(2**63)
"""Broker time of a row that names none."""
_WHITE_SPACE: Final = b" \t\r\n"
_MARKS: Final = (b'"_', rb"\u005")
"""Bytes of which one stands in every row that names its partition, offset or broker time: a quoted name that starts
with an underscore, as itself or escaped."""
_INT64_END: Final = 2**63
_FIRST_US: Final = parse_rfc3339_us("0001-01-01T00:00:00Z")
_LAST_US: Final = parse_rfc3339_us("9999-12-31T23:59:59.999999Z")


@dataclass(frozen=True, kw_only=True)
class EventCut:
    """Consecutive rows of a file, as columns of equal length.

    Attributes:
        first_number: Number of the first row in the file, from 0; the others follow it.
        sources: ``(n_rows,)`` int64, position of each row's source among those of the file.
        partitions: ``(n_rows,)`` int64.
        offsets: ``(n_rows,)`` int64; they rise within a partition but for rows that are no JSON object.
        broker_time_us: ``(n_rows,)`` int64, :data:`UNKNOWN_US` where the row names none.
        values: JSON text of each row.
    """

    first_number: int
    sources: NDArray[np.int64]
    partitions: NDArray[np.int64]
    offsets: NDArray[np.int64]
    broker_time_us: NDArray[np.int64]
    values: list[bytes]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """``(n_rows,)`` number of each row in the file."""
        return np.arange(self.first_number, self.first_number + len(self), dtype=np.int64)


@dataclass(frozen=True)
class EventFile:
    """A file of events of some sources, Parquet if its name ends in ``.parquet`` and NDJSON otherwise."""

    path: Path
    sources: tuple[EventSource, ...]

    def check(self, *, is_read_twice: bool = False) -> None:
        """See whether there is such a file.

        Args:
            is_read_twice: Whether it has to be read from its beginning again, as a pipe can't be.

        Raises:
            ConfigError: There is not.
        """
        reason = None
        if not self.path.exists():
            reason = "there is no such file"
        elif self.path.is_dir():
            reason = "it is a directory"
        elif not os.access(self.path, os.R_OK):
            reason = "reading it is not permitted"
        elif is_read_twice and not self.path.is_file():
            reason = "it is a pipe or a device, and a view by way of a repartition topic reads its input twice"
        if reason is not None:
            msg = f"input {self.path} cannot be read: {reason}; expected a file of NDJSON, or Parquet (.parquet)"
            raise ConfigError(msg)

    def cuts(self, size: int) -> Iterator[EventCut]:
        """Read the rows in order, at most ``size`` at a time.

        Raises:
            DecodeError: The file cannot be read, or a ``_source``, ``_partition``, ``_offset`` or ``_broker_time`` is
                none.
            SchemaMismatchError: The offsets of a partition do not rise.
        """
        yield from self._cuts(size, self._placement())

    def partitions(self, size: int) -> list[list[int]]:
        """Read the file and tell, of each source, the partitions that some JSON object in it is in.

        Raises:
            DecodeError, SchemaMismatchError: As for :meth:`cuts`.
        """
        place = self._placement()
        for _ in self._cuts(size, place):
            pass
        return [sorted(n for source, n in place.last if source == at) for at in range(len(self.sources))]

    def _placement(self) -> "_Placement":
        plausible_us = (
            min(source.plausible_from_us for source in self.sources),
            max(source.plausible_until_us for source in self.sources),
        )
        return _Placement(self.path, self._topics, plausible_us)

    @property
    def _topics(self) -> list[str]:
        return [source.topic for source in self.sources]

    def _cuts(self, size: int, place: "_Placement") -> Iterator[EventCut]:
        number = 0
        try:
            for values in self._payloads(size):
                yield place.cut(values, first_number=number)
                number += len(values)
        except (OSError, pa.ArrowException) as exc:
            msg = f"{self.path} cannot be read: {exc}; expected NDJSON, or Parquet under a name that ends in .parquet"
            raise DecodeError(msg) from exc

    def _payloads(self, size: int) -> Iterator[list[bytes]]:
        if self.path.suffix.lower() == ".parquet":
            number = 0
            file = pq.ParquetFile(self.path)
            names = file.schema_arrow.names
            if double := sorted({name for name in names if names.count(name) > 1}):
                msg = f"{self.path} has the columns {double} more than once, expected each once; drop or rename one"
                raise DecodeError(msg)
            for batch in file.iter_batches(size):
                if batch.num_rows:
                    yield self._encode(pa.Table.from_batches([batch]), number)
                number += batch.num_rows
            return
        with self.path.open("rb") as stream:
            lines = list(islice(stream, size))
            if lines:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            while lines:
                if values := [value for line in lines if (value := line.strip(_WHITE_SPACE))]:
                    yield values
                lines = list(islice(stream, size))

    def _encode(self, rows: pa.Table, first_number: int) -> list[bytes]:
        """Write rows as their producers would have, each by the contract of its source."""
        if len(self.sources) == 1:
            return encode_events(rows, self.sources[0].schema)
        named = rows.column(SOURCE_COLUMN).to_pylist() if SOURCE_COLUMN in rows.column_names else [None] * len(rows)
        of_row = np.array(
            [_find_source(name, self._topics, self.path, first_number + at) for at, name in enumerate(named)]
        )
        values = [b""] * len(rows)
        for at, source in enumerate(self.sources):
            mine = np.flatnonzero(of_row == at)
            for position, value in zip(mine.tolist(), encode_events(rows.take(mine), source.schema), strict=True):
                values[position] = value
        return values


def _find_source(name: Any, topics: list[str], path: Path, number: int) -> int:
    if name in topics:
        return topics.index(name)
    msg = (
        f"{path}, row {number + 1}: `{SOURCE_COLUMN}` is {name!r}, expected the topic that the event came from, one of "
        f"{topics}: the view reads several"
    )
    raise DecodeError(msg)


@dataclass
class _Placement:
    """Says where each row was in Kafka, and sees to it that offsets rise.

    Attributes:
        path: The file.
        topics: Topics of its sources.
        plausible_us: Range that event times lie in, by which a broker time in another unit is told.
        last: Last offset of each partition of a source (its position among them) so far.
    """

    path: Path
    topics: list[str]
    plausible_us: tuple[int, int]
    last: dict[tuple[int, int], int] = field(default_factory=dict)

    def cut(self, values: list[bytes], *, first_number: int) -> EventCut:
        numbers = np.arange(first_number, first_number + len(values), dtype=np.int64)
        joined = b"\n".join(values)
        is_one = len(self.topics) == 1
        if is_one and first_number > self.last.get((0, 0), -1) and not any(mark in joined for mark in _MARKS):
            # No row names a place, so that the numbers rise as they are; the last offset is that of the last object.
            newest = next((at for at in reversed(range(len(values))) if _document(values[at]) is not None), None)
            if newest is not None:
                self.last[0, 0] = first_number + newest
            unknown = np.full(len(values), UNKNOWN_US, dtype=np.int64)
            return EventCut(
                first_number=first_number,
                sources=np.zeros(len(values), dtype=np.int64),
                partitions=np.zeros(len(values), dtype=np.int64),
                offsets=numbers,
                broker_time_us=unknown,
                values=values,
            )
        documents = _documents(values)
        cut = EventCut(
            first_number=first_number,
            sources=self._sources(documents, first_number),
            partitions=self._whole_numbers("_partition", documents, np.zeros(len(values), np.int64), first_number),
            offsets=self._whole_numbers("_offset", documents, numbers, first_number),
            broker_time_us=self._broker_times(documents, first_number),
            values=values,
        )
        self._check_order(cut, np.array([document is not None for document in documents]))
        return cut

    def _sources(self, documents: list[dict[str, Any] | None], first_number: int) -> NDArray[np.int64]:
        found = np.zeros(len(documents), dtype=np.int64)
        for at, document in enumerate(documents if len(self.topics) > 1 else ()):
            if document is not None:
                found[at] = _find_source(document.get(SOURCE_COLUMN), self.topics, self.path, first_number + at)
        return found

    def _whole_numbers(
        self, name: str, documents: list[dict[str, Any] | None], default: NDArray[np.int64], first_number: int
    ) -> NDArray[np.int64]:
        found = [None if document is None else document.get(name) for document in documents]
        named = [at for at, value in enumerate(found) if value is not None]
        for at in named:
            value = found[at]
            if type(value) is not int or not 0 <= value < _INT64_END:
                msg = (
                    f"{self.path}, row {first_number + at + 1}: `{name}` is {value!r}, expected a whole number of 0 or "
                    "more; correct it, or leave it out"
                )
                raise DecodeError(msg)
        result = default.copy()
        result[named] = [found[at] for at in named]
        return result

    def _broker_times(self, documents: list[dict[str, Any] | None], first_number: int) -> NDArray[np.int64]:
        found = [None if document is None else document.get("_broker_time") for document in documents]
        result = np.full(len(found), UNKNOWN_US, dtype=np.int64)
        texts = [at for at, value in enumerate(found) if type(value) is str]
        is_read = np.array([value is None for value in found])
        if texts:
            column = pa.array([found[at] for at in texts], pa.string())
            times = read_event_times(column, unit_us=None, plausible_us=(_FIRST_US, _LAST_US + 1))
            result[texts], is_read[texts] = times.time_us, times.is_usable
        numbers = [at for at, value in enumerate(found) if type(value) is int and -_INT64_END <= value < _INT64_END]
        if numbers:
            values = pa.array([found[at] for at in numbers], pa.int64())
            times = read_event_times(values, unit_us=1, plausible_us=self.plausible_us)
            if times.other_unit:
                at, unit = min(times.other_unit.items())
                msg = (
                    f"{self.path}, row {first_number + numbers[at] + 1}: `_broker_time` is {values[at]}, expected "
                    f"microseconds since 1970, which it would be in {unit}; convert it"
                )
                raise DecodeError(msg)
            result[numbers] = values.to_numpy()
            is_read[numbers] = (result[numbers] >= _FIRST_US) & (result[numbers] <= _LAST_US)
        if not is_read.all():
            at = int(np.argmin(is_read))
            msg = (
                f"{self.path}, row {first_number + at + 1}: `_broker_time` is {found[at]!r}, expected RFC 3339 such as "
                "'2013-01-01T10:00:00Z', or microseconds since 1970 as a whole number, in the years 1 to 9999"
            )
            raise DecodeError(msg)
        return result

    def _check_order(self, cut: EventCut, is_object: NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(is_object)
        rows = rows[np.lexsort((cut.partitions[rows], cut.sources[rows]))]
        sources, partitions, offsets = cut.sources[rows], cut.partitions[rows], cut.offsets[rows]
        is_other = (partitions[1:] != partitions[:-1]) | (sources[1:] != sources[:-1])
        starts = np.flatnonzero(np.r_[True, is_other]) if len(rows) else rows
        before = np.r_[np.int64(-1), offsets[:-1]][: len(rows)]
        places = zip(sources[starts].tolist(), partitions[starts].tolist(), strict=True)
        before[starts] = [self.last.get(place, -1) for place in places]
        if len(falling := np.flatnonzero(offsets <= before)):
            at = falling[np.argmin(rows[falling])]
            msg = (
                f"{self.path}, row {cut.first_number + rows[at] + 1}: offset {offsets[at]} of partition "
                f"{partitions[at]} comes after {before[at]}, expected rising offsets; sort the rows, or leave "
                "`_offset` out of all of them"
            )
            raise SchemaMismatchError(msg)
        ends = np.r_[starts[1:], len(rows)] - 1 if len(rows) else rows
        places = zip(sources[ends].tolist(), partitions[ends].tolist(), strict=True)
        self.last.update(zip(places, offsets[ends].tolist(), strict=True))


def _document(value: bytes) -> dict[str, Any] | None:
    """The object that a row is, None for anything else: decoding makes a dead letter of it."""
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return document if type(document) is dict else None


def _documents(values: list[bytes]) -> list[dict[str, Any] | None]:
    return [_document(value) for value in values]
