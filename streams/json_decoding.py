"""Raw JSON payloads to the columns of their contract.

What becomes of a row depends on its bytes and the contract alone, never on the rows that share its batch. Arrow's JSON
reader has the first word: a payload that it takes by itself has the values that it reads. What it does not take (no
JSON, a value of another type, white space around the object, an integer written as 5.0, a name given twice) is decoded
by itself, and the JSON Schema validator says whether it passes; a rule is checked on columns first, and the rows that
may break it go to the validator too.

That batches are read at once is then only a matter of speed: the reader refuses a whole batch for one payload, so what
it refuses is split until each part is taken or is a single payload. Rows with a value of another type go aside first,
so that a few bad ones cost little more than themselves.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jsonschema
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from schemas.contract import Contract
from schemas.field import value_type
from schemas.row import MASK, REJECTED_COLUMNS, Reason
from streams.batch import PayloadColumn, RawBatch
from streams.decoded import DecodedBatch, reject, with_input_columns

_ALIKE: Final = re.compile(r"\^?(?:(?:[\w /:@-]|\[[\w /:@-]+\])(?:[*+?]|\{\d\d?(?:,\d\d?)?\})?)*\$?", re.ASCII)
"""Regular expressions, of those that Python compiles, that Arrow reads the same way."""
_NOT_A_NUMBER: Final = re.compile(rb"[:\[,]\s*-?(NaN|Inf)")
_TEXT_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {"integer": int, "number": float}
"""What makes a column's value of a JSON number, by the field's type."""
_EXACT_FLOAT: Final = 2.0**53
_MAX_DEPTH: Final = 512
"""Levels that a payload may nest: parsers bear different depths, and Python bears to write out no more than 1,000."""


def decode_json(batch: RawBatch, contract: Contract) -> DecodedBatch:
    """Decode and validate one raw batch of plain JSON."""
    rejected: list[dict[str, Any]] = []
    columns, read = _read_most(batch.values, contract)
    keep = np.ones(len(read), dtype=np.bool_)
    for index in suspect_rows(columns, contract, batch.values, read):
        keep[index] = _decode_row(batch, int(read[index]), contract, rejected) is not None
    documents, single = [], []
    unread = np.setdiff1d(np.arange(len(batch)), read, assume_unique=True) if len(read) < len(batch) else read[:0]
    for position in unread.tolist():
        document = _decode_row(batch, position, contract, rejected)
        if document is not None:
            documents.append(document)
            single.append(position)
    if not keep.all():
        columns, read = columns.filter(pa.array(keep)), read[keep]
    if documents:
        columns = pa.concat_tables([columns, pa.Table.from_pylist(documents, schema=contract.arrow_schema)])
        positions = np.concatenate([read, np.array(single, np.int64)])
        order = np.argsort(positions)
        columns, read = columns.take(pa.array(order)), positions[order]
    rejected.sort(key=lambda refused: int(refused["_offset"]))
    return DecodedBatch(
        rows=with_input_columns(with_one_zero(columns), batch=batch, positions=pa.array(read)),
        rejected=pa.Table.from_pylist(rejected, schema=REJECTED_COLUMNS),
    )


def _read_most(values: Sequence[bytes | None], contract: Contract) -> tuple[pa.Table, NDArray[np.int64]]:
    """Read every payload that the reader takes by itself, as many at once as it can be.

    Returns:
        The contract's columns, and the rising position of each row.
    """
    if (columns := _read_together(values, contract)) is not None:
        return columns, np.arange(len(values))
    plain: list[int] = []
    waiting = [plain]
    for position, value in enumerate(values):
        if value is not None and len(value) <= contract.max_bytes and _is_one_line(value):
            try:
                document = orjson.loads(value)
            except orjson.JSONDecodeError:
                waiting.append([position])  # so does the reader say, most likely, but it has the word
            else:
                if _fits(document, contract):
                    plain.append(position)
    parts = [(contract.arrow_schema.empty_table(), np.array([], np.int64))]
    while waiting:
        positions = waiting.pop()
        columns = _read_together([values[position] for position in positions], contract)
        if columns is not None:
            parts.append((columns, np.array(positions, np.int64)))
        elif len(positions) > 1:
            middle = len(positions) // 2
            waiting += [positions[:middle], positions[middle:]]
    columns = pa.concat_tables([columns for columns, _ in parts])
    read = np.concatenate([positions for _, positions in parts])
    order = np.argsort(read)
    return columns.take(pa.array(order)), read[order]


def _fits(document: dict[str, Any], contract: Contract) -> bool:
    """Tell whether each value is of its field's own type: the reader refuses a payload for one that is not."""
    get = document.get
    return all((found := get(name)) is None or type(found) in types for name, types in contract.python_types.items())


def _is_one_line(value: bytes) -> bool:
    """Tell whether a payload is so bracketed that lines of such are as many objects, or more, or none that parse."""
    return value.startswith(b"{") and value.endswith(b"}") and b"\n" not in value and not _is_too_deep(value)


def _is_too_deep(value: bytes) -> bool:
    if len(value) <= 2 * _MAX_DEPTH or value.count(b"[") + value.count(b"{") <= _MAX_DEPTH:
        return False
    depth = deepest = 0
    for found in _TEXT_OR_BRACKET.finditer(value):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        deepest = max(depth, deepest)
    return deepest > _MAX_DEPTH


def _read_together(values: Sequence[bytes | None], contract: Contract) -> pa.Table | None:
    """Read payloads at once; None where one of them is not taken, and for none."""
    if (payload := _joined(values, contract)) is None:
        return None
    options = pyarrow.json.ParseOptions(explicit_schema=contract.arrow_schema, unexpected_field_behavior="ignore")
    # The reader takes numbers that JSON has not, and anything for text where it need not look.
    text = np.frombuffer(payload, np.uint8)
    if (_holds(text, b"NaN") or _holds(text, b"Inf")) and _NOT_A_NUMBER.search(payload):
        return None
    try:
        if not payload.isascii():
            payload.decode()
        # One block for all rows: Arrow splits blocks at newlines, and a row must not be longer than one.
        columns = pyarrow.json.read_json(
            pa.BufferReader(payload),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(payload) + 1),
            parse_options=options,
        ).select(contract.arrow_schema.names)
        columns.validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    return columns if columns.num_rows == len(values) else None


def _joined(values: Sequence[bytes | None], contract: Contract) -> bytes | None:
    """Join payloads, one a line; None where one of them is too large, or is not :func:`_is_one_line`, and for none.

    As few calls as can be look at all of them at once: this is done to every row.
    """
    if isinstance(values, PayloadColumn):
        return _joined_column(values, contract)
    if not values or None in values:
        return None
    whole: Sequence[bytes] = values  # type: ignore[assignment]  # there is no None in them
    lengths = np.fromiter(map(len, whole), np.int64, len(whole))
    longest = int(lengths.max())
    if longest > contract.max_bytes or not lengths.min():
        return None
    payload = b"\n".join(whole)
    text = np.frombuffer(payload, np.uint8)
    ends = np.cumsum(lengths + 1) - 1
    if (
        (text[ends - lengths] != ord("{")).any()
        or (text[ends - 1] != ord("}")).any()
        or np.count_nonzero(text == ord("\n")) != len(whole) - 1
        or (longest > 2 * _MAX_DEPTH and any(map(_is_too_deep, whole)))
    ):
        return None
    return payload


def _holds(text: NDArray[np.uint8], word: bytes) -> bool:
    """Tell whether a word stands anywhere: an eighth of the time of ``in``, and outside of Python's lock."""
    at = np.flatnonzero(text[: 1 - len(word)] == word[0])
    for place, letter in enumerate(word[1:], start=1):
        at = at[text[at + place] == letter]
    return bool(len(at))


def _joined_column(values: PayloadColumn, contract: Contract) -> bytes | None:
    """Join payloads that are a column, by the same rules."""
    column = values.column
    if not len(column) or column.null_count:
        return None
    _, ends, content = column.buffers()
    edges = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    lengths = np.diff(edges)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if not shortest or longest > contract.max_bytes or int(edges[-1]) - int(edges[0]) + len(column) >= 2**31:
        return None
    text = np.frombuffer(content, np.uint8)
    if (text[edges[:-1]] != ord("{")).any() or (text[edges[1:] - 1] != ord("}")).any():
        return None
    if longest > 2 * _MAX_DEPTH and any(value is not None and _is_too_deep(value) for value in values):
        return None
    whole = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), column)
    payload: bytes = pc.binary_join(whole, b"\n")[0].as_buffer().to_pybytes()
    return payload if payload.count(b"\n") == len(column) - 1 else None


def suspect_rows(
    columns: pa.Table, contract: Contract, values: Sequence[bytes | None], read: NDArray[np.int64]
) -> list[int]:
    """Tell which rows break a rule, or may: all that the validator would not let pass are among them."""
    suspects = pa.array(np.zeros(columns.num_rows, dtype=np.bool_))
    for name, field in contract.fields.items():
        column = columns.column(name).combine_chunks()
        checks = broken_rules(column, field)
        if column.null_count and name in contract.required:
            checks.append(pc.is_null(column))
        elif column.null_count and not contract.is_nullable(name):
            # An absent field and a null both read as null; only a payload with the word in it can hold a forbidden one.
            nulls = pc.indices_nonzero(pc.is_null(column)).to_numpy()
            says_null = np.zeros(len(column), dtype=np.bool_)
            says_null[nulls] = [b"null" in (values[position] or b"") for position in read[nulls]]
            checks.append(pa.array(says_null))
        for check in checks:
            suspects = pc.or_(suspects, pc.fill_null(check, False))
    indices: list[int] = pc.indices_nonzero(suspects).to_pylist()
    return indices


def broken_rules(column: pa.Array, field: Mapping[str, Any]) -> list[pa.Array]:
    """Check each rule of a field; each mask is true where the rule is, or may be, broken."""
    broken = []
    arrow = column.type
    for keyword, compare, to_whole in (
        ("minimum", pc.less, math.ceil),
        ("maximum", pc.greater, math.floor),
        ("exclusiveMinimum", pc.less_equal, math.floor),
        ("exclusiveMaximum", pc.greater_equal, math.ceil),
    ):
        if keyword in field:
            bound = to_whole(field[keyword]) if pa.types.is_integer(arrow) else float(field[keyword])
            broken.append(compare(column, pa.scalar(bound, arrow)))
    if "enum" in field:
        make = _MAKERS.get(value_type(field), lambda value: value)
        allowed = pa.array([make(value) for value in field["enum"] if value is not None], arrow)
        broken.append(pc.and_(pc.is_valid(column), pc.invert(pc.is_in(column, value_set=allowed))))
    if "minLength" in field:
        broken.append(pc.less(pc.utf8_length(column), int(field["minLength"])))
    if "maxLength" in field:
        broken.append(pc.greater(pc.utf8_length(column), int(field["maxLength"])))
    if "pattern" in field:
        broken.append(_mismatches(column, field["pattern"]))
    if pa.types.is_floating(arrow):
        broken.append(pc.invert(pc.is_finite(column)))  # beyond float64
    if pa.types.is_list(arrow):
        items = pc.list_flatten(column)
        for check in (pc.is_null(items), *broken_rules(items, field["items"])):
            parents = pc.list_parent_indices(column).filter(pc.fill_null(check, False))
            broken.append(pc.is_in(pa.array(range(len(column)), pa.int64()), value_set=pc.unique(parents)))
    return broken


def _mismatches(column: pa.Array, pattern: str) -> pa.Array:
    # Arrow's expressions are not Python's, by which the validator goes; what both read alike is checked on the column.
    if _ALIKE.fullmatch(pattern):
        return pc.invert(pc.match_substring_regex(column, pattern))
    compiled = re.compile(pattern)
    matching = [value for value in pc.unique(column).to_pylist() if value is not None and compiled.search(value)]
    return pc.invert(pc.is_in(column, value_set=pa.array(matching, column.type)))


def _decode_row(
    batch: RawBatch, position: int, contract: Contract, rejected: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Decode one row by the validator's word; a row that does not pass is added to ``rejected``."""
    value = batch.values[position]
    document: Any = None
    if (refusal := _unreadable(value, contract)) is None and value is not None:
        try:
            document = orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            expected = f"expected an object as in {contract.reference}"
            refusal = Reason.DECODE_ERROR, f"the payload is no JSON: {exc}; {expected}"
        else:
            refusal = violation(document, contract)
    if refusal is not None:
        rejected.append(reject(batch, position, *refusal))
        return None
    return {name: _coerce(document.get(name), field) for name, field in contract.fields.items()}


def _unreadable(value: bytes | None, contract: Contract) -> tuple[Reason, str] | None:
    """Say why a payload is not even parsed."""
    expected = f"expected an object as in {contract.reference}"
    if value is None:
        return Reason.DECODE_ERROR, f"the payload is empty (a tombstone), {expected}"
    if len(value) > contract.max_bytes:
        detail = f"the payload has {len(value)} bytes, expected at most {contract.max_bytes} ({contract.reference})"
        return Reason.SCHEMA_VIOLATION, detail
    if _is_too_deep(value):
        return Reason.DECODE_ERROR, f"the payload nests deeper than {_MAX_DEPTH} levels, {expected}"
    return None


def violation(document: Any, contract: Contract) -> tuple[Reason, str] | None:
    """Say which rule a document breaks: the first one by place in it."""
    errors = contract.validator.iter_errors(document)
    error = min(errors, key=lambda error: (error.json_path, error.message), default=None)
    if error is not None:
        detail = f"{error.json_path}: {_message(error, contract)} (contract {contract.reference})"
        return Reason.SCHEMA_VIOLATION, detail
    overflow = _out_of_int64(document, contract)
    return None if overflow is None else (Reason.SCHEMA_VIOLATION, overflow)


def _message(error: jsonschema.ValidationError, contract: Contract) -> str:
    """Say how a rule is broken; the validator quotes the value, which is left out where it is personal."""
    # At the root, it is the whole payload that is quoted.
    is_shown = error.absolute_path[0] not in contract.personal if error.absolute_path else error.validator != "type"
    if is_shown or not contract.personal:
        return error.message[:500]
    return f"{MASK} breaks `{error.validator}` {json.dumps(error.validator_value)[:500]}"


def _coerce(value: Any, field: Mapping[str, Any]) -> Any:
    # JSON Schema counts 5.0 as an integer and 5 as a number; Arrow wants the column's own type.
    if isinstance(value, list):
        return [_coerce(item, field["items"]) for item in value]
    make = _MAKERS.get(value_type(field))
    return value if make is None or value is None else make(value)


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
                shown = MASK if name in contract.personal else item
                return f"$.{name}: {shown} does not fit 64 bits, expected {-(2**63)} to {2**63 - 1}"
    return None


def with_one_zero(columns: pa.Table) -> pa.Table:
    """Let each zero be 0.0: JSON knows -0 and -0.0, and what is made of them hangs on the parser."""
    for position, field in enumerate(columns.schema):
        if _holds_floats(field.type):
            column = _without_sign_of_zero(columns.column(position).combine_chunks())
            columns = columns.set_column(position, field, column)
    return columns


def _holds_floats(arrow: pa.DataType) -> bool:
    return _holds_floats(arrow.value_type) if pa.types.is_list(arrow) else bool(pa.types.is_floating(arrow))


def _without_sign_of_zero(column: pa.Array) -> pa.Array:
    if not pa.types.is_list(column.type):
        return pc.add(column, 0.0)
    mask = column.is_null() if column.null_count else None
    return pa.ListArray.from_arrays(column.offsets, _without_sign_of_zero(column.values), mask=mask)
