"""One field of a contract: its type, and the rules that its values are held to.

Every rule is one that both the JSON Schema validator and the batch reader can check, and read alike; any other is
refused when the contract is loaded, not at the first batch.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError

EVENT_TIME_UNITS_US: Final = {"us": 1, "ms": 1_000, "s": 1_000_000}
"""Units an integer event time may be declared in, as microseconds."""
ANNOTATIONS: Final = frozenset({"$comment", "title", "description", "examples"})
"""Keywords that are for a contract's readers alone."""
PII: Final = "x-pii"
"""Marks a field whose values are personal: they are masked wherever one would be shown or logged, and are no rule."""
IGNORED: Final = "x-ignored"
"""Marks a field of an Avro or Protobuf contract that is on the wire, but is no column."""
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_KEYWORDS: Final[dict[str, frozenset[str]]] = {
    "string": frozenset({"enum", "pattern", "format"}) | _LENGTHS,
    "integer": frozenset({"enum", "x-unit"}) | _BOUNDS,
    "number": frozenset({"enum"}) | _BOUNDS,
    "boolean": frozenset({"enum"}),
    "array": frozenset({"items"}),
}
FIELD_KEYWORDS: Final = ANNOTATIONS.union({"type", PII}, *_KEYWORDS.values())
"""Keywords that a field may use, each where it fits the field's type."""
_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_PYTHON: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (float, int),
    "boolean": (bool,),
    "array": (list,),
}
_DESCRIBED: Final = {
    "string": "a text",
    "integer": f"a whole number of {-(2**63)} to {2**63 - 1}",
    "number": "a finite number that float64 can hold",
    "boolean": "true or false",
}
_MAX_LENGTH: Final = 2**31 - 1


def json_types(field: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a field's values may have, ``"null"`` among them where it may be null."""
    declared = field.get("type", ())
    return frozenset({declared} if isinstance(declared, str) else declared)


def is_nullable(field: Mapping[str, Any]) -> bool:
    """Tell whether JSON null is allowed as the field's value."""
    return "null" in json_types(field) and ("enum" not in field or None in field["enum"])


def value_type(field: Mapping[str, Any]) -> str:
    """JSON type of the values of a checked field that are not null."""
    (name,) = json_types(field) - {"null"}
    return name


def arrow_type(field: Mapping[str, Any]) -> pa.DataType:
    """Arrow type of a checked field's column."""
    name = value_type(field)
    return pa.list_(arrow_type(field["items"])) if name == "array" else _ARROW[name]


def is_personal(field: Mapping[str, Any]) -> bool:
    """Tell whether a field, or what is inside a list, is marked as personal."""
    return bool(field.get(PII, False)) or ("items" in field and is_personal(field["items"]))


def python_types(field: Mapping[str, Any]) -> tuple[type, ...]:
    """Python types that a decoded value of a checked field has when it is of the field's own type."""
    return _PYTHON[value_type(field)]


def canonical_rules(field: Mapping[str, Any]) -> dict[str, Any]:
    """Write a checked field's rules, as JSON values, in the one way that all equal ones are written in."""
    rules = {keyword: _plain(value) for keyword, value in field.items() if keyword not in ANNOTATIONS | {PII}}
    rules["type"] = sorted(json_types(field))
    if "enum" in field:
        rules["enum"] = sorted(map(_plain, field["enum"]), key=json.dumps)
    if "items" in field:
        rules["items"] = canonical_rules(field["items"])
    return rules


def _plain(value: Any) -> Any:
    # 5.0 and 5 are one number to JSON Schema.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_field(name: str, field: Any, *, contract: str) -> None:
    """Make sure that a field has one type, and that each of its rules is known and fits it.

    Args:
        name: Its name, with ``[]`` for what is inside a list.
        field: Its part of the contract, valid JSON Schema.
        contract: Reference of the contract.

    Raises:
        ConfigError: Naming the contract, the field, the keyword, what was got and what was expected.
    """
    where = f"contract {contract}, field `{name}`"
    if not isinstance(field, Mapping):
        msg = f'{where} is {field!r}, expected an object such as {{"type": "string"}}'
        raise ConfigError(msg)
    if unknown := sorted(set(field) - FIELD_KEYWORDS):
        msg = (
            f"{where} uses {unknown}, expected keywords among {sorted(FIELD_KEYWORDS)}; move the rule into the "
            "consumer or leave it out"
        )
        raise ConfigError(msg)
    types = json_types(field) - {"null"}
    if len(types) != 1 or next(iter(types)) not in _KEYWORDS:
        msg = f"{where} has `type` {field.get('type')!r}, expected one of {sorted(_KEYWORDS)}, with or without 'null'"
        raise ConfigError(msg)
    (kind,) = types
    if type(field.get(PII, False)) is not bool:
        msg = f"{where} has `{PII}` {field[PII]!r}, expected true or false"
        raise ConfigError(msg)
    for keyword in sorted(set(field) - ANNOTATIONS - {"type", PII}):
        if keyword not in _KEYWORDS[kind]:
            fitting = sorted(other for other, keywords in _KEYWORDS.items() if keyword in keywords)
            msg = (
                f"{where} has `{keyword}` {field[keyword]!r} with type {kind!r}, expected it with type "
                f"{' or '.join(map(repr, fitting))} alone; a {kind} takes {sorted(_KEYWORDS[kind])}"
            )
            raise ConfigError(msg)
        if (expected := _expected(field, keyword, kind)) is not None:
            msg = f"{where} has `{keyword}` {field[keyword]!r}, expected {expected}"
            raise ConfigError(msg)
    if kind == "array":
        if "items" not in field:
            msg = f'{where} has no `items`, expected the rules of what is in the list, such as {{"type": "string"}}'
            raise ConfigError(msg)
        check_field(f"{name}[]", field["items"], contract=contract)


def _expected(field: Mapping[str, Any], keyword: str, kind: str) -> str | None:
    """Say what was expected of a keyword's value; None where it is as expected."""
    value = field[keyword]
    if keyword in _BOUNDS:
        # A whole number's bound may have a fraction, and is then the next whole number.
        bound = math.floor(value) if kind == "integer" and isinstance(value, float) and math.isfinite(value) else value
        return None if _holds(kind, bound) else _DESCRIBED[kind]
    if keyword in _LENGTHS:
        return None if value <= _MAX_LENGTH else f"at most {_MAX_LENGTH}"
    if keyword == "x-unit":
        return None if value in list(EVENT_TIME_UNITS_US) else f"one of {sorted(EVENT_TIME_UNITS_US)}"
    if keyword == "pattern":
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as exc:
            return f"a regular expression as Python reads it ({exc})"
    if keyword == "enum":
        allows_null = "null" in json_types(field)
        if not value or not all(_holds(kind, item) or (item is None and allows_null) for item in value):
            return f"one value or more, each {_DESCRIBED[kind]}{' or null' if allows_null else ''}"
    return None


def _holds(kind: str, value: Any) -> bool:
    """Tell whether a column of a scalar type can hold a value as it is."""
    if isinstance(value, bool) or kind not in ("integer", "number"):
        return type(value) in _PYTHON[kind]
    if not isinstance(value, int | float):
        return False
    if kind == "integer":
        return -(2**63) <= value < 2**63 and int(value) == value
    try:
        return math.isfinite(value) and float(value) == value
    except OverflowError:
        return False
