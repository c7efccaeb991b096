"""Raw JSON payloads to the columns of their contract.

The whole batch goes through Arrow's JSON reader with the contract's schema, and its rules are checked on columns. Where
the reader refuses, the rows that look odd are decoded one by one and the others together, so that one bad row costs
one dead letter. Whether a single row passes is always decided by the JSON Schema validator: columns only pick the rows
that it must look at.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from schemas.contract import Contract
from schemas.row import INPUT_COLUMNS, PRODUCED_TIME_HEADER, REJECTED_COLUMNS, REQUEST_ID_HEADER, Reason
from streams.batch import RawBatch

_DIFFERS: Final = re.compile(r"[\\.]|\(\?|\[:|\{\d{4}")
"""Patterns with these may mean one thing to Python and another to Arrow: classes, dots, look-around, long repeats."""
_NOT_A_NUMBER: Final = re.compile(rb"[:\[,]\s*-?(NaN|Inf)")
_EXACT_FLOAT: Final = 2.0**53
_MAX_DEPTH: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class DecodedBatch:
    """Columns of the rows that pass the contract, and the rows that do not.

    Attributes:
        rows: The contract's columns and :data:`schemas.row.INPUT_COLUMNS`, in offset order.
        rejected: :data:`schemas.row.REJECTED_COLUMNS`, in offset order.
    """

    rows: pa.Table
    rejected: pa.Table


def decode(batch: RawBatch, contract: Contract) -> DecodedBatch:
    """Decode and validate one raw batch."""
    rejected: list[dict[str, Any]] = []
    columns = _decode_together(batch.values, contract)
    if columns is not None:
        columns = _without_suspects(batch, columns, contract, rejected)
    else:
        columns = _decode_apart(batch, contract, rejected)
    bad = pa.array([reject["_offset"] for reject in rejected], pa.int64())
    positions = pc.indices_nonzero(pc.invert(pc.is_in(pa.array(batch.offsets), value_set=bad)))
    return DecodedBatch(
        rows=_with_input_columns(columns, batch=batch, positions=positions),
        rejected=pa.Table.from_pylist(rejected, schema=REJECTED_COLUMNS),
    )


def _decode_apart(batch: RawBatch, contract: Contract, rejected: list[dict[str, Any]]) -> pa.Table:
    """Decode the rows that look plain together again, and the others one by one."""
    plain = [position for position in range(len(batch)) if _is_plain(batch.values[position], contract)]
    together = _decode_together([batch.values[position] for position in plain], contract) if plain else None
    if together is None:
        plain, together = [], contract.arrow_schema.empty_table()
    documents, single = [], []
    for position in sorted(set(range(len(batch))) - set(plain)):
        document = _decode_row(batch, position, contract, rejected)
        if document is not None:
            documents.append(document)
            single.append(position)
    keep = np.ones(len(plain), dtype=np.bool_)
    if plain and (suspects := _suspect_rows(together, contract, [batch.values[at] for at in plain])) is not None:
        for index in pc.indices_nonzero(suspects).to_pylist():
            keep[index] = _decode_row(batch, plain[index], contract, rejected) is not None
    rejected.sort(key=lambda reject: int(reject["_offset"]))
    columns = pa.concat_tables(
        [together.filter(pa.array(keep)), pa.Table.from_pylist(documents, schema=contract.arrow_schema)]
    )
    order = np.argsort(np.concatenate([np.array(plain, np.int64)[keep], np.array(single, np.int64)]), kind="stable")
    return columns.take(pa.array(order))


def _without_suspects(
    batch: RawBatch, columns: pa.Table, contract: Contract, rejected: list[dict[str, Any]]
) -> pa.Table:
    """Leave out the rows that the validator, asked about those that columns find suspect, does not let pass."""
    if (suspects := _suspect_rows(columns, contract, batch.values)) is None:
        return columns
    keep = np.ones(len(batch), dtype=np.bool_)
    for position in pc.indices_nonzero(suspects).to_pylist():
        keep[position] = _decode_row(batch, position, contract, rejected) is not None
    return columns.filter(pa.array(keep))


def _is_plain(value: bytes | None, contract: Contract) -> bool:
    """Tell whether a payload should be one that the batch reader takes; a wrong guess costs time alone."""
    try:
        document = orjson.loads(value or b"")
    except orjson.JSONDecodeError:
        return False
    if type(document) is not dict or not _is_one_line(value or b""):
        return False
    get = document.get
    return all((found := get(name)) is None or type(found) in types for name, types in contract.python_types.items())


def _is_one_line(value: bytes) -> bool:
    """Tell whether a payload is so bracketed that lines of such are as many objects, or more, or none that parse."""
    if not value.startswith(b"{") or not value.endswith(b"}") or b"\n" in value:
        return False
    # The row parser refuses what nests deeper than this, the batch reader does not.
    return len(value) <= _MAX_DEPTH or value.count(b"[") + value.count(b"{") <= _MAX_DEPTH


def _decode_together(values: Sequence[bytes | None], contract: Contract) -> pa.Table | None:
    """Read payloads at once; None when that cannot be done faithfully."""
    if not values or not all(value is not None and _is_one_line(value) for value in values):
        return None
    options = pyarrow.json.ParseOptions(explicit_schema=contract.arrow_schema, unexpected_field_behavior="ignore")
    payload = b"\n".join(value for value in values if value is not None)
    # The reader takes numbers that JSON has not, and anything for text where it need not look.
    if (b"NaN" in payload or b"Inf" in payload) and _NOT_A_NUMBER.search(payload):
        return None
    try:
        payload.decode()
        # One block for all rows: Arrow splits blocks at newlines, and a row must not be longer than one.
        columns = pyarrow.json.read_json(
            io.BytesIO(payload),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(payload) + 1),
            parse_options=options,
        ).select(contract.arrow_schema.names)
        columns.validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    return columns if columns.num_rows == len(values) else None


def _suspect_rows(
    columns: pa.Table, contract: Contract, values: Sequence[bytes | None]
) -> pa.Array | pa.ChunkedArray | None:
    """Rows that break a rule or may hold a forbidden null; None when there are none."""
    suspects = None
    # An absent field and a null both read as null; only a payload with the word in it can hold a forbidden one.
    says_null = pa.array([value is not None and b"null" in value for value in values])
    for name, field in contract.fields.items():
        column = columns.column(name).combine_chunks()
        checks = _broken_rules(column, field)
        if column.null_count and name in contract.required:
            checks.append(pc.is_null(column))
        elif column.null_count and not contract.is_nullable(name):
            checks.append(pc.and_(pc.is_null(column), says_null))
        for check in checks:
            found = pc.fill_null(check, False)
            suspects = found if suspects is None else pc.or_(suspects, found)
    return suspects if suspects is not None and pc.any(suspects).as_py() else None


def _broken_rules(column: pa.Array, field: dict[str, Any]) -> list[pa.Array]:
    """Check each rule of a field; each mask is true where the rule is, or may be, broken."""
    broken = []
    for keyword, compare in (
        ("minimum", pc.less),
        ("maximum", pc.greater),
        ("exclusiveMinimum", pc.less_equal),
        ("exclusiveMaximum", pc.greater_equal),
    ):
        if keyword in field:
            broken.append(compare(column, field[keyword]))
    if "enum" in field:
        allowed = pa.array([value for value in field["enum"] if value is not None], column.type)
        broken.append(pc.and_(pc.is_valid(column), pc.invert(pc.is_in(column, value_set=allowed))))
    if "minLength" in field:
        broken.append(pc.less(pc.utf8_length(column), field["minLength"]))
    if "maxLength" in field:
        broken.append(pc.greater(pc.utf8_length(column), field["maxLength"]))
    if "pattern" in field:
        broken.append(_mismatches(column, field["pattern"]))
    if pa.types.is_floating(column.type):
        broken.append(pc.invert(pc.is_finite(column)))  # beyond float64
    if pa.types.is_list(column.type):
        items = pc.list_flatten(column)
        for check in (pc.is_null(items), *_broken_rules(items, field.get("items", {}))):
            parents = pc.list_parent_indices(column).filter(pc.fill_null(check, False))
            broken.append(pc.is_in(pa.array(range(len(column)), pa.int64()), value_set=pc.unique(parents)))
    return broken


def _mismatches(column: pa.Array, pattern: str) -> pa.Array:
    # Arrow's expressions are not Python's, by which the validator goes; what both read alike is checked on the column.
    if not _DIFFERS.search(pattern):
        return pc.invert(pc.match_substring_regex(column, pattern))
    compiled = re.compile(pattern)
    matching = [value for value in pc.unique(column).to_pylist() if value is not None and compiled.search(value)]
    return pc.invert(pc.is_in(column, value_set=pa.array(matching, column.type)))


def _decode_row(
    batch: RawBatch, position: int, contract: Contract, rejected: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Decode one row by the validator's word; a row that does not pass is added to ``rejected``."""
    value = batch.values[position]
    try:
        document: Any = orjson.loads(value) if value is not None else None
    except orjson.JSONDecodeError as exc:
        detail = f"the payload is no JSON: {exc}; expected an object as in {contract.reference}"
        rejected.append(_reject(batch, position, Reason.DECODE_ERROR, detail))
        return None
    if value is None:
        detail = f"the payload is empty (a tombstone), expected an object as in {contract.reference}"
        rejected.append(_reject(batch, position, Reason.DECODE_ERROR, detail))
        return None
    error = next(iter(sorted(contract.validator.iter_errors(document), key=str)), None)
    if error is None and (overflow := _out_of_int64(document, contract)) is not None:
        rejected.append(_reject(batch, position, Reason.SCHEMA_VIOLATION, overflow))
        return None
    if error is not None:
        detail = f"{error.json_path}: {error.message[:500]} (contract {contract.reference})"
        rejected.append(_reject(batch, position, Reason.SCHEMA_VIOLATION, detail))
        return None
    return {name: _coerce(document.get(name), field) for name, field in contract.fields.items()}


def _coerce(value: Any, field: dict[str, Any]) -> Any:
    # JSON Schema counts 5.0 as an integer and 5 as a number; Arrow wants the column's own type.
    types = field.get("type", [])
    names = {types} if isinstance(types, str) else set(types)
    if isinstance(value, list):
        return [_coerce(item, field.get("items", {})) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if "integer" in names and isinstance(value, float):
        return int(value)
    if "number" in names and isinstance(value, int):
        return float(value)
    return value


def _out_of_int64(document: dict[str, Any], contract: Contract) -> str | None:
    for name, arrow in zip(contract.arrow_schema.names, contract.arrow_schema.types, strict=True):
        value, item_type = document.get(name), arrow
        items = [value]
        while pa.types.is_list(item_type):
            items = [item for part in items if part is not None for item in part]
            item_type = item_type.value_type
        if not pa.types.is_integer(item_type):
            continue
        for item in items:
            # The parser makes a float of what has a point or is beyond 64 bits: from 2^53 on it may be another number.
            is_too_large = isinstance(item, float) and abs(item) >= _EXACT_FLOAT
            if is_too_large or (isinstance(item, int) and not -(2**63) <= item < 2**63):
                return f"$.{name}: {item} does not fit 64 bits, expected {-(2**63)} to {2**63 - 1}"
    return None


def _reject(batch: RawBatch, position: int, reason: Reason, detail: str) -> dict[str, Any]:
    return {"_offset": int(batch.offsets[position]), "reason": reason.value, "detail": detail, "late_by_us": None}


def _with_input_columns(columns: pa.Table, *, batch: RawBatch, positions: pa.Array) -> pa.Table:
    request_ids = [_request_id(headers) for headers in batch.headers]
    values = (
        pa.array(batch.offsets, pa.int64()).take(positions),
        pa.array(batch.broker_time_us, pa.int64()).take(positions),
        pa.array(request_ids, pa.string()).take(positions),
    )
    for field, column in zip(INPUT_COLUMNS, values, strict=True):
        columns = columns.append_column(field, column)
    return columns


def arrival_times_us(batch: RawBatch) -> NDArray[np.int64]:
    """Tell when each record came to the broker: its timestamp, or what its ``produced_time`` header says.

    Returns:
        ``(n_rows,)`` int64, microseconds since the epoch.
    """
    arrived = batch.broker_time_us.copy()
    for position, headers in enumerate(batch.headers):
        for name, value in headers or ():
            if name == PRODUCED_TIME_HEADER and value is not None and value.isdigit() and len(value) < 19:
                arrived[position] = int(value)
    return arrived


def _request_id(headers: list[tuple[str, bytes]] | None) -> str | None:
    for name, value in headers or ():
        if name == REQUEST_ID_HEADER and value is not None:
            return value.decode("utf-8", "replace")
    return None
