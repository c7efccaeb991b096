"""Contracts written as Avro: from a record schema, ``shop_event@1.avsc``, to the rules of its fields.

Fields have Avro's types; rules stand beside them as further attributes, by the names that JSON Schema has for them
(``"minimum": 0``, ``"x-pii": true``), and those of the payload (``"x-max-bytes"``) at the record. An ``int`` is held to
32 bits, so that one that became a ``long`` upstream shows. Fields that no column can hold (records, maps, bytes, unions
of several types) must say ``"x-ignored": true``: what is not read should be seen in the contract.

Payloads of a plain contract are one value each and say nothing of the schema that wrote them, so that fields cannot
change under it. Those of a framed one (``"x-framing": "confluent"``) name it, and are read as Avro resolves schemas.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import fastavro
from fastavro.schema import SchemaParseException

from schemas.errors import ConfigError
from schemas.field import FIELD_KEYWORDS, IGNORED, PII

PAYLOAD_KEYWORDS: Final = frozenset({"x-max-bytes", "x-compatibility", "x-framing"})
_RULES: Final = (FIELD_KEYWORDS - {"type", "items", "$comment", "title", "description", "examples"}) | {IGNORED}
_FIELD: Final = frozenset({"name", "type", "doc", "default", "order", "aliases"}) | _RULES
_RECORD: Final = frozenset({"name", "namespace", "type", "doc", "aliases", "fields"}) | PAYLOAD_KEYWORDS
_SCALARS: Final[dict[str, dict[str, Any]]] = {
    "int": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "long": {"type": "integer"},
    "float": {"type": "number"},
    "double": {"type": "number"},
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
}
_UNITS: Final = {"timestamp-millis": "ms", "timestamp-micros": "us"}
_PROMOTED: Final = {
    "int": {"int", "long", "float", "double"},
    "long": {"long", "float", "double"},
    "float": {"float", "double"},
    "string": {"string", "bytes"},
    "bytes": {"bytes", "string"},
}
"""What a written type may be read as."""
_KEPT: Final = ("type", "name", "fields", "symbols", "items", "values", "size", "default", "aliases")


@dataclass(frozen=True)
class AvroWire:
    """How payloads of a contract are written.

    Attributes:
        schema: The record's schema, bare: with full names, and without texts, logical types and rules.
    """

    schema: dict[str, Any]

    @cached_property
    def definition(self) -> dict[str, Any]:
        """What decides how bytes are read, as JSON values."""
        return {"format": "avro", "schema": self.schema}

    @property
    def description(self) -> tuple[str, Any]:
        """Media type of the schema, and the schema, for documents."""
        return "application/vnd.apache.avro+json;version=1.9.0", self.schema


def compile_avro(reference: str, document: Any) -> tuple[dict[str, Any], AvroWire]:
    """Compile the schema of a contract's file.

    Returns:
        The rules of its fields as JSON Schema, and how payloads are written.

    Raises:
        ConfigError: Naming the contract, the field, what was got and what was expected.
    """
    bare = bare_schema(document, named=f"contract {reference}")
    if unknown := sorted(set(document) - _RECORD):
        msg = f"contract {reference} uses {unknown}, expected keywords among {sorted(_RECORD)}; leave it out"
        raise ConfigError(msg)
    properties = {}
    for field, plain in zip(document["fields"], expanded(bare)["fields"], strict=True):
        where = f"contract {reference}, field `{plain['name']}`"
        if unknown := sorted(set(field) - _FIELD):
            msg = f"{where} uses {unknown}, expected keywords among {sorted(_FIELD)}; leave it out"
            raise ConfigError(msg)
        if type(field.get(IGNORED, False)) is not bool:
            msg = f"{where} has `{IGNORED}` {field[IGNORED]!r}, expected true or false"
            raise ConfigError(msg)
        rules = _rules(field["type"], plain["type"], where=where, is_ignored=field.get(IGNORED, False))
        if rules is not None:
            own = {name: value for name, value in field.items() if name in _RULES - {IGNORED}}
            properties[plain["name"]] = rules | own
    described = {name: document[name] for name in PAYLOAD_KEYWORDS if name in document}
    return {"type": "object", "properties": properties, **described}, AvroWire(bare)


def bare_schema(document: Any, *, named: str, references: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parse a schema, and leave out what does not decide how bytes are read.

    Args:
        document: The schema, JSON values.
        named: What it is, for messages.
        references: Schemas that it refers to, by name; each may refer to those before it.

    Raises:
        ConfigError: It is no Avro schema of a record.
    """
    names: dict[str, Any] = {}
    try:
        for referenced in (references or {}).values():
            fastavro.parse_schema(referenced, named_schemas=names)
        known = dict(names)
        bare = _bare(_inlined(fastavro.parse_schema(document, named_schemas=names), known, set()))
    except (SchemaParseException, KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        msg = f"{named} is no Avro schema: {exc!r}"
        raise ConfigError(msg) from exc
    if not isinstance(bare, dict) or bare.get("type") != "record":
        msg = f"{named} is Avro of type {_kind(bare)!r}, expected a record"
        raise ConfigError(msg)
    if (endless := next(_endless(expanded(bare)), None)) is not None:
        msg = f"{named} has an array of {endless}, which takes no bytes, expected items that do"
        raise ConfigError(msg)
    return bare


def expanded(bare: dict[str, Any]) -> dict[str, Any]:
    """Write out what a bare schema names again, but for what is inside itself; so can schemas be compared."""
    written: dict[str, Any] = _bare(fastavro.schema.expand_schema(bare))
    return written


def _inlined(schema: Any, names: Mapping[str, Any], written: set[str]) -> Any:
    """Write each schema of another document out where it is named first; later it is a name to Avro."""
    if isinstance(schema, str):
        if schema not in names or schema in written:
            return schema
        return _inlined(names[schema], names, written)
    if isinstance(schema, list):
        return [_inlined(branch, names, written) for branch in schema]
    written |= {schema["name"]} if "name" in schema else set()
    inlined = dict(schema)
    if "fields" in schema:
        inlined["fields"] = [{**field, "type": _inlined(field["type"], names, written)} for field in schema["fields"]]
    for part in ("items", "values"):
        if part in schema:
            inlined[part] = _inlined(schema[part], names, written)
    return inlined


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name in _KEPT:
        if name not in schema:
            continue
        value = schema[name]
        if name == "fields":
            kept[name] = [_bare(field) for field in value]
        elif name in ("type", "items", "values"):
            kept[name] = _bare(value)
        else:
            kept[name] = value
    return kept["type"] if set(kept) == {"type"} and isinstance(kept["type"], str) else kept


def _kind(schema: Any) -> str:
    """Name the kind of a type; of a union ``union``, of a name of a type above it the name."""
    if isinstance(schema, list):
        return "union"
    if isinstance(schema, dict):
        return _kind(schema["type"])
    return str(schema)


def _endless(schema: Any) -> Iterator[str]:
    """Find repeated items that take no bytes: a few bytes could stand for as many as there are numbers."""
    for part in ("items", "values") if isinstance(schema, dict) else ():
        if part in schema:
            if part == "items" and _is_empty(schema[part]):
                yield _kind(schema[part])
            yield from _endless(schema[part])
    if isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield from _endless(field["type"])
        if isinstance(schema.get("type"), dict | list):
            yield from _endless(schema["type"])
    elif isinstance(schema, list):
        for branch in schema:
            yield from _endless(branch)


def _is_empty(schema: Any) -> bool:
    kind = _kind(schema)
    if kind == "record":
        return all(_is_empty(field["type"]) for field in schema["fields"])
    return kind == "null" or (kind == "fixed" and schema["size"] == 0)


def _rules(written: Any, plain: Any, *, where: str, is_ignored: bool) -> dict[str, Any] | None:
    """Make the rules of a field's type, as JSON Schema; None where it is ignored."""
    if is_ignored:
        return None
    if isinstance(plain, list):
        branches = [(one, bare) for one, bare in zip(written, plain, strict=True) if bare != "null"]
        if len(branches) != 1:
            msg = (
                f"{where} is a union of {list(map(_kind, plain))}, expected one type, with or without 'null'; say "
                f'"{IGNORED}": true where no feature reads it'
            )
            raise ConfigError(msg)
        rules = _rules(*branches[0], where=where, is_ignored=False) or {}
        if len(plain) == 1:
            return rules
        allowed = {"enum": [*rules["enum"], None]} if "enum" in rules else {}
        return rules | {"type": [rules["type"], "null"]} | allowed
    attributes = written if isinstance(written, dict) else {}
    own = {name: value for name, value in attributes.items() if name in _RULES - {IGNORED, PII}}
    kind = _kind(plain)
    if kind == "enum":
        return {"type": "string", "enum": list(plain["symbols"])}
    if kind in _SCALARS:
        unit = _UNITS.get(str(attributes.get("logicalType"))) if kind == "long" else None
        return _SCALARS[kind] | ({"x-unit": unit} if unit else {}) | own
    if kind == "array":
        items = _rules(attributes["items"], plain["items"], where=f"{where}[]", is_ignored=False)
        return {"type": "array", "items": items} | own
    msg = (
        f"{where} is {kind}, expected one of {[*_SCALARS, 'enum', 'array']}, or a union of one with null; say "
        f'"{IGNORED}": true where no feature reads it'
    )
    raise ConfigError(msg)


def unresolvable(written: Any, read: Any, *, where: str = "") -> Iterator[str]:
    """Say why values written by one bare schema cannot all be read by another, as Avro resolves schemas."""
    if isinstance(written, list):
        for branch in written:
            yield from unresolvable(branch, read, where=where)
        return
    kind = _kind(written)
    if isinstance(read, list):
        if not any(next(unresolvable(written, branch, where=where), None) is None for branch in read):
            yield f"{where or 'it'} may be {kind}, expected one of {list(map(_kind, read))}"
        return
    if _kind(read) not in _PROMOTED.get(kind, {kind}):
        yield f"{where or 'it'} is {kind}, which is not read as {_kind(read)}"
    elif kind == "record" and isinstance(written, dict) and isinstance(read, dict):
        yield from _unresolvable_fields(written, read, where=where)
    elif kind == "enum" and isinstance(written, dict) and isinstance(read, dict) and "default" not in read:
        if more := [symbol for symbol in written["symbols"] if symbol not in read["symbols"]]:
            yield f"{where or 'it'} may be {more}, expected one of {read['symbols']}"
    elif kind == "fixed" and isinstance(written, dict) and written["size"] != read["size"]:
        yield f"{where or 'it'} has {written['size']} bytes, expected {read['size']}"
    elif kind in ("array", "map"):
        part = "items" if kind == "array" else "values"
        yield from unresolvable(written[part], read[part], where=f"{where}[]")


def _unresolvable_fields(written: Mapping[str, Any], read: Mapping[str, Any], *, where: str) -> Iterator[str]:
    if written["name"].rpartition(".")[2] not in _own_names(read):
        yield f"the record is {written['name']}, expected {read['name']}, or that name among its `aliases`"
    there = {field["name"]: field for field in written["fields"]}
    for field in read["fields"]:
        place = f"{where}.{field['name']}".strip(".")
        found = next((there[name] for name in (field["name"], *field.get("aliases", ())) if name in there), None)
        if found is not None:
            yield from unresolvable(found["type"], field["type"], where=f"`{place}`")
        elif "default" not in field:
            yield f"`{place}` is not written, expected it, or a `default`"


def _own_names(schema: Mapping[str, Any]) -> set[str]:
    return {name.rpartition(".")[2] for name in (schema["name"], *schema.get("aliases", ()))}


def unlike(written: Any, read: Any, *, where: str = "") -> Iterator[str]:
    """Say why bytes written by one bare schema mean something else by another, which stands in its place."""
    kind = _kind(written)
    # Both are written alike; that the value fits 32 bits is a rule.
    if {kind, _kind(read)} <= {"int", "long"}:
        return
    if kind != _kind(read):
        yield f"{where or 'it'} is {kind}, expected {_kind(read)}"
    elif kind == "union":
        if len(written) > len(read):
            yield f"{where} is a union of {len(written)} types, expected {len(read)}"
        for branch, other in zip(written, read, strict=False):
            yield from unlike(branch, other, where=where)
    elif kind == "record" and isinstance(written, dict) and isinstance(read, dict):
        names = [[field["name"] for field in schema["fields"]] for schema in (written, read)]
        if names[0] != names[1]:
            yield f"the fields are {names[0]}, expected {names[1]} in this order"
            return
        for field, other in zip(written["fields"], read["fields"], strict=True):
            yield from unlike(field["type"], other["type"], where=f"`{where}{field['name']}`")
    elif kind == "enum" and isinstance(written, dict) and isinstance(read, dict):
        if read["symbols"][: len(written["symbols"])] != written["symbols"]:
            yield f"{where} has the symbols {written['symbols']}, expected {read['symbols']} to begin with them"
    elif kind == "fixed" and isinstance(written, dict) and written["size"] != read["size"]:
        yield f"{where} has {written['size']} bytes, expected {read['size']}"
    elif kind in ("array", "map"):
        part = "items" if kind == "array" else "values"
        yield from unlike(written[part], read[part], where=f"{where}[]")
