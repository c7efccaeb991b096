"""Runs a view over a file of events, through the very decoding, admission and engine of the live path.

The input is one event a row in arrival order: NDJSON, or Parquet whose rows are turned into the same JSON. A row may
name its ``_partition`` (default 0), ``_offset`` (default: its number in the file, from 0) and ``_broker_time`` (RFC 3339
or microseconds; without it the future guard does not apply). One engine runs per partition, as in the live path.

Output does not depend on how the input is cut into batches: feature rows stand in the order of the event that made
them, those that closing the input makes come last, by partition; of the as-of rows of ``latest`` the last of each key
in the whole file is kept.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.errors import DecodeError, SchemaMismatchError
from schemas.row import CONTEXT_COLUMNS, Pane
from schemas.time import parse_rfc3339_us
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.decoding import decode
from streams.windowing.engine import WindowEngine
from streams.wire import encode_rows

DEAD_LETTER_COLUMNS: Final = pa.schema(
    [
        pa.field("partition", pa.int64()),
        pa.field("offset", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("late_by_us", pa.int64()),
        pa.field("view", pa.string()),
        pa.field("value", pa.string()),
    ]
)
"""Columns of a dead letter of a file; ``value`` is the row's JSON."""
_UNKNOWN: Final = -(2**63)


@dataclass(frozen=True, kw_only=True)
class _Row:
    number: int
    partition: int
    offset: int
    broker_time_us: int
    value: bytes


@dataclass(kw_only=True)
class Computed:
    """What one cut of the input became.

    Attributes:
        rows: Feature rows, ``view.row_schema`` with ``computed_time`` and ``epoch`` null: nothing was committed.
        dead_letters: :data:`DEAD_LETTER_COLUMNS`, in the order of the input.
    """

    rows: pa.Table
    dead_letters: pa.Table


@dataclass(kw_only=True)
class Computation:
    """A view on its way through a file.

    Attributes:
        view: The view.
        emit: Emit mode in place of the view's own; None keeps that.
    """

    view: FeatureView
    emit: str | None = None
    _engines: dict[int, WindowEngine] = field(default_factory=dict, init=False)
    _latest: dict[tuple[int, Any], tuple[int, pa.Table]] = field(default_factory=dict, init=False)

    def run(self, path: Path, *, batch_rows: int = 50_000, closes: bool = False) -> Iterator[Computed]:
        """Compute cut by cut.

        Args:
            path: The input, Parquet if its name ends in ``.parquet`` and NDJSON otherwise.
            batch_rows: Rows of a cut.
            closes: Whether to take the watermark to the end of time after the last row.

        Raises:
            DecodeError: The file cannot be read, or a ``_partition``, ``_offset`` or ``_broker_time`` is none.
            SchemaMismatchError: The offsets of a partition do not rise.
        """
        emits_latest = (self.emit or self.view.emit) == "latest"
        kept: list[tuple[NDArray[np.int64], pa.Table]] = []
        for cut in _cuts(read_rows(path), batch_rows):
            numbers, rows, dead_letters = self._step(cut)
            if emits_latest:
                kept.append((numbers, rows))
                rows = rows.slice(0, 0)
            yield Computed(rows=rows, dead_letters=dead_letters)
        if emits_latest:
            yield Computed(rows=_last_as_of(kept, self.view), dead_letters=DEAD_LETTER_COLUMNS.empty_table())
        if closes:
            for partition in sorted(self._engines):
                rows = self._with_context(self._engines[partition].close().rows, partition)
                yield Computed(rows=rows, dead_letters=DEAD_LETTER_COLUMNS.empty_table())

    def _step(self, cut: list[_Row]) -> tuple[NDArray[np.int64], pa.Table, pa.Table]:
        made, letters = [], []
        for partition in sorted({row.partition for row in cut}):
            rows = [row for row in cut if row.partition == partition]
            numbers = np.array([row.number for row in rows], np.int64)
            batch = _raw_batch(self.view.source.topic, rows)
            decoded = decode(batch, self.view.source.schema)
            known = pc.not_equal(decoded.rows["_broker_time"], _UNKNOWN)
            column = pc.if_else(known, decoded.rows["_broker_time"], pa.scalar(None, pa.int64()))
            at = decoded.rows.schema.get_field_index("_broker_time")
            result = self._engine(partition).step(
                decoded.rows.set_column(at, "_broker_time", column), processing_time_us=0
            )
            makers = numbers[np.searchsorted(batch.offsets, result.rows["source_offset"].to_numpy())]
            made.append((makers, self._with_context(result.rows, partition)))
            for rejected in (decoded.rejected, result.dead_letters):
                letters += [self._dead_letter(letter, batch, numbers) for letter in rejected.to_pylist()]
        makers = np.concatenate([part for part, _ in made])
        order = np.argsort(makers, kind="stable")
        letters.sort(key=lambda letter: int(letter[0]))
        return (
            makers[order],
            pa.concat_tables([rows for _, rows in made]).take(pa.array(order)),
            pa.Table.from_pylist([letter for _, letter in letters], schema=DEAD_LETTER_COLUMNS),
        )

    def _engine(self, partition: int) -> WindowEngine:
        if partition not in self._engines:
            emit = "every_event" if (self.emit or self.view.emit) == "latest" else self.emit or self.view.emit
            self._engines[partition] = WindowEngine(replace(self.view, emit=emit), source_partition=partition)
        return self._engines[partition]

    def _dead_letter(
        self, letter: dict[str, Any], batch: RawBatch, numbers: NDArray[np.int64]
    ) -> tuple[int, dict[str, Any]]:
        position = int(np.searchsorted(batch.offsets, letter["_offset"]))
        value = batch.values[position] or b""
        return int(numbers[position]), {
            "partition": batch.partition,
            "offset": letter["_offset"],
            "reason": letter["reason"],
            "detail": letter["detail"],
            "late_by_us": letter["late_by_us"],
            "view": self.view.name,
            "value": value.decode("utf-8", "replace"),
        }

    def _with_context(self, rows: pa.Table, partition: int) -> pa.Table:
        values = {
            "view": self.view.name,
            "view_version": self.view.version,
            "definition_hash": self.view.definition_hash,
            "source_topic": self.view.source.topic,
            "source_partition": partition,
        }
        for column in CONTEXT_COLUMNS:
            scalar = pa.scalar(values.get(column.name), column.type)
            rows = rows.append_column(column, pa.repeat(scalar, rows.num_rows))
        return rows


def read_rows(path: Path) -> Iterator[_Row]:
    """Read the rows of a file, in order.

    Raises:
        DecodeError: The file cannot be read, or a ``_partition``, ``_offset`` or ``_broker_time`` is none.
        SchemaMismatchError: The offsets of a partition do not rise.
    """
    last: dict[int, int] = {}
    for number, value in enumerate(_payloads(path)):
        row = _row(number, value, path)
        if row.offset <= last.get(row.partition, _UNKNOWN):
            msg = (
                f"{path}, row {number + 1}: offset {row.offset} of partition {row.partition} comes after "
                f"{last[row.partition]}, expected rising offsets; sort the rows, or leave `_offset` out"
            )
            raise SchemaMismatchError(msg)
        last[row.partition] = row.offset
        yield row


def _payloads(path: Path) -> Iterator[bytes]:
    try:
        if path.suffix == ".parquet":
            for batch in pq.ParquetFile(path).iter_batches(10_000):
                yield from encode_rows(pa.Table.from_batches([batch]))
            return
        with path.open("rb") as lines:
            for line in lines:
                if payload := line.rstrip(b"\r\n"):
                    yield payload
    except (OSError, pa.ArrowInvalid) as exc:
        msg = f"{path} cannot be read: {exc}; expected NDJSON, or Parquet under a name that ends in .parquet"
        raise DecodeError(msg) from exc


def _row(number: int, value: bytes, path: Path) -> _Row:
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        document = None  # decoding makes a dead letter of it
    named = document if isinstance(document, dict) else {}
    partition, offset = named.get("_partition"), named.get("_offset")
    for name, found in (("_partition", partition), ("_offset", offset)):
        if found is not None and (type(found) is not int or not 0 <= found < 2**63):
            msg = f"{path}, row {number + 1}: `{name}` is {found!r}, expected a whole number of 0 or more"
            raise DecodeError(msg)
    return _Row(
        number=number,
        partition=partition or 0,
        offset=number if offset is None else offset,
        broker_time_us=_broker_time_us(named.get("_broker_time"), number, path),
        value=value,
    )


def _broker_time_us(found: Any, number: int, path: Path) -> int:
    if found is None:
        return _UNKNOWN
    if type(found) is int and _UNKNOWN < found < 2**63:
        return found
    try:
        return parse_rfc3339_us(found)
    except (TypeError, ValueError) as exc:
        msg = f"{path}, row {number + 1}: `_broker_time` is {found!r}, expected RFC 3339 or microseconds"
        raise DecodeError(msg) from exc


def _cuts(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    cut: list[_Row] = []
    for row in rows:
        cut.append(row)
        if len(cut) == size:
            yield cut
            cut = []
    if cut:
        yield cut


def _raw_batch(topic: str, rows: list[_Row]) -> RawBatch:
    return RawBatch(
        topic=topic,
        partition=rows[0].partition,
        offsets=np.array([row.offset for row in rows], np.int64),
        broker_time_us=np.array([row.broker_time_us for row in rows], np.int64),
        keys=[None] * len(rows),
        values=[row.value for row in rows],
        headers=[None] * len(rows),
        next_offset=rows[-1].offset + 1,
        size_bytes=sum(len(row.value) for row in rows),
    )


def _last_as_of(kept: list[tuple[NDArray[np.int64], pa.Table]], view: FeatureView) -> pa.Table:
    """Leave out the as-of rows that another one of the same key and partition follows."""
    if not kept:
        return view.row_schema.empty_table()
    rows = pa.concat_tables([table for _, table in kept])
    numbered = pa.table(
        {"key": rows[view.entity.key], "partition": rows["source_partition"], "at": np.arange(rows.num_rows)}
    )
    is_as_of = pc.equal(rows["pane"], str(Pane.EARLY))
    last = numbered.filter(is_as_of).group_by(["partition", "key"]).aggregate([("at", "max")])["at_max"]
    return rows.filter(pc.or_(pc.invert(is_as_of), pc.is_in(numbered["at"], value_set=last)))
