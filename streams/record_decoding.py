"""Avro and Protobuf payloads to the columns of their contract, and payloads that say which schema wrote them.

Each payload is read by itself, for a payload of Avro does not say where it ends, and one that is damaged must cost
itself alone; columns are made, and rules are checked, of all rows of a batch at once. As with JSON, a row that may
break a rule goes to the validator, which has the word.
"""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.contract import Contract
from schemas.errors import ConfigError, DecodeError, SchemaMismatchError
from schemas.field import json_types
from schemas.row import MASK, REJECTED_COLUMNS, Reason
from streams.batch import RawBatch
from streams.decoded import DecodedBatch, reject, with_input_columns
from streams.json_decoding import broken_rules, decode_json, violation, with_one_zero
from streams.writer_schema import WriterSchema, find_writer, unframe

if TYPE_CHECKING:
    from schemas.avro import AvroWire
    from schemas.protobuf import ProtobufWire

_KINDS: Final = {"json": "JSON", "avro": "AVRO", "protobuf": "PROTOBUF"}
"""What registries call the formats."""
_Read = Callable[[bytes], dict[str, Any]]
"""Reads a payload; raises DecodeError where it cannot be."""
_FAILURES: Final = (
    (EOFError, "it ends where more is expected"),
    (UnicodeDecodeError, "a text is no UTF-8"),
    (IndexError, "it ends where more is expected, or a number stands for no symbol or type"),
)
"""What becomes of damaged bytes, by what the reader raises."""


@dataclass
class _Reader:
    """Reads payloads of one contract; what it knows of the schemas that wrote them is kept."""

    contract: Contract
    by_writer: dict[WriterSchema | None, _Read | str] = field(default_factory=dict)
    """How to read what a schema has written, or why it cannot be; of plain payloads that of None."""

    def read(self, payload: bytes) -> dict[str, Any]:
        """Read one payload.

        Raises:
            DecodeError: It cannot be read.
        """
        writer, content = self.unframe(payload) if self.contract.is_framed else (None, payload)
        known = self.by_writer.get(writer)
        if known is None:
            known = self.by_writer[writer] = self._learn(writer)
        if isinstance(known, str):
            raise DecodeError(known)
        return known(content)

    def unframe(self, payload: bytes) -> tuple[WriterSchema, bytes]:
        """Take off the id of the schema.

        Raises:
            DecodeError: There is none, or none that the registry knows.
        """
        framed = unframe(payload)
        if framed is None:
            msg = (
                f"the payload has {len(payload)} bytes, the first {payload[:1].hex() or 'none'}, expected a zero byte "
                f"and the id of a schema in four ({self.contract.reference} is framed)"
            )
            raise DecodeError(msg)
        schema_id, content = framed
        if (writer := find_writer(schema_id)) is None:
            msg = f"the payload was written by schema {schema_id}, which the schema registry does not know"
            raise DecodeError(msg)
        if writer.kind != _KINDS[self.contract.format]:
            msg = (
                f"the payload was written by schema {schema_id}, which is {writer.kind}, expected "
                f"{_KINDS[self.contract.format]} as {self.contract.reference} is"
            )
            raise DecodeError(msg)
        return writer, content

    def _learn(self, writer: WriterSchema | None) -> _Read | str:
        wire: Any = self.contract.wire
        named = "" if writer is None else f"schema {writer.id}"
        try:
            if self.contract.format == "avro":
                return _avro_reading(wire, writer, named=named)
            return _protobuf_reading(wire, self.contract, writer, named=named)
        except (ConfigError, SchemaMismatchError) as exc:
            if writer is None:
                raise
            return f"the payload was written by {named}, which cannot be read as {self.contract.reference}: {exc}"


_readers: dict[int, _Reader] = {}


def _reader_of(contract: Contract) -> _Reader:
    """Give the reader of a contract; there are as many as contracts in use."""
    found = _readers.get(id(contract))
    if found is None or found.contract is not contract:
        found = _readers[id(contract)] = _Reader(contract)
    return found


def decode_framed_json(batch: RawBatch, contract: Contract) -> DecodedBatch:
    """Decode and validate a raw batch of JSON payloads that say which schema wrote them."""
    reader, rejected = _reader_of(contract), []
    positions, values = [], []
    for position, value in enumerate(batch.values):
        if (refusal := _unreadable(value, contract)) is None and value is not None:
            try:
                values.append(reader.unframe(value)[1])
                positions.append(position)
            except DecodeError as exc:
                refusal = Reason.DECODE_ERROR, str(exc)
        if refusal is not None:
            rejected.append(reject(batch, position, *refusal))
    if not positions:
        return _decoded(batch, contract.arrow_schema.empty_table(), [], rejected)
    decoded = decode_json(replace(batch.take(np.array(positions)), values=values), contract)
    return DecodedBatch(rows=decoded.rows, rejected=_sorted(rejected + decoded.rejected.to_pylist()))


def decode_records(batch: RawBatch, contract: Contract) -> DecodedBatch:
    """Decode and validate one raw batch of Avro or Protobuf."""
    reader = _reader_of(contract)
    documents: list[dict[str, Any]] = []
    positions: list[int] = []
    rejected: list[dict[str, Any]] = []
    for position, value in enumerate(batch.values):
        if (refusal := _unreadable(value, contract)) is None and value is not None:
            try:
                documents.append(reader.read(value))
                positions.append(position)
            except DecodeError as exc:
                refusal = Reason.DECODE_ERROR, str(exc)[:1_000]
        if refusal is not None:
            rejected.append(reject(batch, position, *refusal))
    columns = _columns(documents, contract)
    suspects = range(len(documents)) if columns is None else _suspects(columns, contract)
    broken = set()
    for at in suspects:
        refusal = _violation(documents[at], contract)
        if refusal is not None:
            broken.add(at)
            rejected.append(reject(batch, positions[at], *refusal))
    if broken:
        documents = [document for at, document in enumerate(documents) if at not in broken]
        positions = [position for at, position in enumerate(positions) if at not in broken]
    if broken or columns is None:
        columns = pa.Table.from_pylist(documents, schema=contract.arrow_schema)
    return _decoded(batch, columns, positions, rejected)


def _decoded(
    batch: RawBatch, columns: pa.Table, positions: Sequence[int], rejected: list[dict[str, Any]]
) -> DecodedBatch:
    rows = with_input_columns(with_one_zero(columns), batch=batch, positions=pa.array(positions, pa.int64()))
    return DecodedBatch(rows=rows, rejected=_sorted(rejected))


def _sorted(rejected: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(sorted(rejected, key=lambda row: int(row["_offset"])), schema=REJECTED_COLUMNS)


def _unreadable(value: bytes | None, contract: Contract) -> tuple[Reason, str] | None:
    if value is None:
        return Reason.DECODE_ERROR, f"the payload is empty (a tombstone), expected a record as in {contract.reference}"
    if len(value) > contract.max_bytes:
        detail = f"the payload has {len(value)} bytes, expected at most {contract.max_bytes} ({contract.reference})"
        return Reason.SCHEMA_VIOLATION, detail
    return None


def _columns(documents: Sequence[dict[str, Any]], contract: Contract) -> pa.Table | None:
    """Lay rows out as columns; None where a value does not fit its column."""
    schema = contract.arrow_schema
    try:
        return pa.table(
            [pa.array([document[name] for document in documents], arrow) for name, arrow in _typed(schema)],
            schema=schema,
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None


def _typed(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return list(zip(schema.names, schema.types, strict=True))


def _suspects(columns: pa.Table, contract: Contract) -> list[int]:
    """Tell which rows may break a rule."""
    suspects = pa.array(np.zeros(columns.num_rows, dtype=np.bool_))
    for name, rules in contract.fields.items():
        column = columns.column(name).combine_chunks()
        checks = broken_rules(column, rules)
        if column.null_count and (name in contract.required or not contract.is_nullable(name)):
            checks.append(pc.is_null(column))
        for check in checks:
            suspects = pc.or_(suspects, pc.fill_null(check, False))
    found: list[int] = pc.indices_nonzero(suspects).to_pylist()
    return found


def _violation(document: dict[str, Any], contract: Contract) -> tuple[Reason, str] | None:
    """Say which rule a row breaks."""
    for name, rules in contract.fields.items():
        if "number" in json_types(rules) or "number" in json_types(rules.get("items", {})):
            values = document[name] if isinstance(document[name], list) else [document[name]]
            if bad := [value for value in values if value is not None and not math.isfinite(value)]:
                shown = MASK if name in contract.personal else bad[0]
                return Reason.SCHEMA_VIOLATION, f"$.{name}: {shown} is not finite (contract {contract.reference})"
    # A field that was not set is absent; null is a value of fields that may be null.
    absent = contract.required if contract.format == "protobuf" else frozenset[str]()
    there = {name: value for name, value in document.items() if value is not None or name not in absent}
    return violation(there, contract)


def _avro_reading(wire: "AvroWire", writer: WriterSchema | None, *, named: str) -> _Read:
    import fastavro  # noqa: PLC0415 - loaded where it is used

    from schemas.avro import bare_schema, expanded, unresolvable  # noqa: PLC0415

    names = [name["name"] for name in wire.schema["fields"]]
    written = read = fastavro.parse_schema(wire.schema)
    if writer is not None:
        try:
            document = json.loads(writer.text)
            references = {name: json.loads(text) for name, text in writer.references}
        except ValueError as exc:
            msg = f"{named} is no JSON: {exc}"
            raise SchemaMismatchError(msg) from exc
        bare = bare_schema(document, named=named, references=references)
        if why := list(unresolvable(expanded(bare), expanded(wire.schema))):
            raise SchemaMismatchError("; ".join(why))
        written = fastavro.parse_schema(bare)
    return partial(_read_avro, written=written, read=None if written == read else read, names=names)


def _read_avro(payload: bytes, *, written: Any, read: Any, names: Sequence[str]) -> dict[str, Any]:
    from fastavro import schemaless_reader  # noqa: PLC0415 - loaded where it is used

    buffer = io.BytesIO(payload)
    try:
        found: Any = schemaless_reader(buffer, written, read)
    except Exception as exc:  # what damaged bytes make it raise is not told anywhere
        # Its own words may quote a value, which may be personal.
        why = next((text for kind, text in _FAILURES if isinstance(exc, kind)), type(exc).__name__)
        msg = f"the payload is no Avro of {written['name']}: {why}"
        raise DecodeError(msg) from exc
    if buffer.tell() != len(payload):
        msg = (
            f"the payload has {len(payload)} bytes, of which Avro of {written['name']} takes {buffer.tell()}, expected "
            "all of them to be taken: was it written by another schema?"
        )
        raise DecodeError(msg)
    return {name: found[name] for name in names}


def _protobuf_reading(wire: "ProtobufWire", contract: Contract, writer: WriterSchema | None, *, named: str) -> _Read:
    read = partial(_read_protobuf, wire=wire, read=_extractors(wire, contract), message=wire.widened)
    if writer is None:
        return read
    from schemas.protobuf import ProtobufWire, compile_file, message_names, unreadable_numbers  # noqa: PLC0415

    compiled = compile_file(writer.text, named=named, include=[], references=dict(writer.references))
    names = message_names(compiled)
    refusals: dict[tuple[int, ...], str | None] = {}

    def read_framed(payload: bytes) -> dict[str, Any]:
        path, start = _message_path(payload)
        if path not in refusals:
            if path not in names:
                refusals[path] = f"{named} has no message at {list(path)}, expected one of {[*map(list, names)]}"
            else:
                written = ProtobufWire(compiled, names[path], writer.text)
                refusals[path] = "; ".join(unreadable_numbers(written.definition, wire.definition)) or None
        if (why := refusals[path]) is not None:
            msg = f"the payload was written by {named}, which cannot be read as {contract.reference}: {why}"
            raise DecodeError(msg)
        return read(payload[start:])

    return read_framed


def _message_path(payload: bytes) -> tuple[tuple[int, ...], int]:
    """Read where in its file the message stands, and where the message begins."""
    n_steps, at = _varint(payload, 0)
    if n_steps == 0:
        return (0,), at
    path = []
    if n_steps > len(payload):
        msg = f"the payload says that its message stands {n_steps} levels deep, expected fewer"
        raise DecodeError(msg)
    for _ in range(n_steps):
        step, at = _varint(payload, at)
        path.append(step)
    return tuple(path), at


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(payload) and shift < 35:
        byte = payload[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            # Written with its sign in the lowest bit.
            return (value >> 1) ^ -(value & 1), at
    msg = "the payload ends where the place of its message in the schema stands, expected it and the message"
    raise DecodeError(msg)


def _read_protobuf(
    payload: bytes, *, wire: "ProtobufWire", read: Sequence[tuple[str, Callable[[Any], Any]]], message: Any
) -> dict[str, Any]:
    from google.protobuf.unknown_fields import UnknownFieldSet  # noqa: PLC0415 - loaded where it is used

    try:
        found = message.FromString(payload)
    except Exception as exc:
        msg = f"the payload is no Protobuf of {wire.message}: it cannot be parsed"
        raise DecodeError(msg) from exc
    for unknown in UnknownFieldSet(found):
        if (known := wire.fields.get(unknown.field_number)) is not None:
            msg = (
                f"the payload has field {unknown.field_number} of wire type {unknown.wire_type}, expected "
                f"{'repeated ' if known.is_repeated else ''}{known.type} `{known.name}` as in {wire.message}"
            )
            raise DecodeError(msg)
    return {name: get(found) for name, get in read}


def _extractors(wire: "ProtobufWire", contract: Contract) -> list[tuple[str, Callable[[Any], Any]]]:
    """Make what takes each column's value out of a message."""
    descriptor = wire.widened.DESCRIPTOR
    found = []
    for known in wire.fields.values():
        if known.name in contract.fields:
            get: Callable[[Any], Any] = partial(_value, known.name, _maker(dict(known.symbols), known.type))
            if known.is_repeated:
                get = partial(_values, known.name, _maker(dict(known.symbols), known.type))
            elif descriptor.fields_by_name[known.name].has_presence:
                get = partial(_set_value, known.name, _maker(dict(known.symbols), known.type))
            found.append((known.name, get))
    return found


def _maker(symbols: dict[int, str], kind: str) -> Callable[[Any], Any] | None:
    if symbols:
        return lambda number: symbols.get(number, str(number))
    if kind == "google.protobuf.Timestamp":
        return lambda time: time.seconds * 1_000_000 + time.nanos // 1_000
    return None


def _value(name: str, make: Callable[[Any], Any] | None, message: Any) -> Any:
    value = getattr(message, name)
    return value if make is None else make(value)


def _set_value(name: str, make: Callable[[Any], Any] | None, message: Any) -> Any:
    return _value(name, make, message) if message.HasField(name) else None


def _values(name: str, make: Callable[[Any], Any] | None, message: Any) -> list[Any]:
    values = getattr(message, name)
    return list(values) if make is None else [make(value) for value in values]
