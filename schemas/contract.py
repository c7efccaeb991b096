"""Contracts of raw events: one versioned JSON Schema file per topic contract, compiled to an Arrow schema.

A contract ``shop_event@1`` is the file ``schemas/events/shop_event@1.json``, looked for below the working directory
first and then beside this module. Event times given as integers declare their unit with ``"x-unit": "ms"`` (us, ms, s);
text event times are RFC 3339 (``"format": "date-time"``).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import jsonschema
import pyarrow as pa

from schemas.errors import ConfigError

_PACKAGED = Path(__file__).parent / "events"
_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_PYTHON: Final[tuple[tuple[Callable[[pa.DataType], bool], tuple[type, ...]], ...]] = (
    (pa.types.is_string, (str,)),
    (pa.types.is_integer, (int,)),
    (pa.types.is_floating, (float, int)),
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_list, (list,)),
)
FIELD_KEYWORDS: Final = frozenset(
    {
        "type",
        "format",
        "enum",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "pattern",
        "$comment",
        "description",
        "title",
        "examples",
        "items",
        "x-unit",
    }
)
"""JSON Schema keywords that a field of a contract may use; the batch reader checks each of them."""
ANNOTATIONS: Final = frozenset({"$comment", "title", "description", "examples"})
"""Keywords of a field that are for its readers alone."""
DOCUMENT_KEYWORDS: Final = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "examples", "type", "properties", "required"}
)
"""JSON Schema keywords that a contract itself may use. Further fields in a payload are always allowed, and ignored."""


@dataclass(frozen=True)
class Contract:
    """The agreed shape of one topic's payloads.

    Attributes:
        reference: ``name@version``.
        document: The JSON Schema (draft 2020-12) of one payload, an object with named properties.
    """

    reference: str
    document: dict[str, Any]

    def __post_init__(self) -> None:
        try:
            jsonschema.Draft202012Validator.check_schema(self.document)
        except jsonschema.SchemaError as exc:
            msg = f"contract {self.reference} is no valid JSON Schema: {exc.message}"
            raise ConfigError(msg) from exc
        if self.document.get("type") != "object" or not self.document.get("properties"):
            msg = (
                f"contract {self.reference} has type {self.document.get('type')!r}, expected 'object' with `properties`"
            )
            raise ConfigError(msg)
        if unknown := sorted(set(self.document) - DOCUMENT_KEYWORDS):
            msg = (
                f"contract {self.reference} uses {unknown}, expected keywords among {sorted(DOCUMENT_KEYWORDS)}: the "
                "rules stand at the fields; leave it out"
            )
            raise ConfigError(msg)
        for name, field in self.document["properties"].items():
            if unknown := sorted(set(field) - FIELD_KEYWORDS):
                msg = (
                    f"contract {self.reference}, field `{name}` uses {unknown}, expected keywords among "
                    f"{sorted(FIELD_KEYWORDS)}; move the rule into the consumer or leave it out"
                )
                raise ConfigError(msg)
            self._arrow_type(name, field)
        if unknown := sorted(set(self.document.get("required", [])) - set(self.document["properties"])):
            msg = f"contract {self.reference} requires {unknown}, which its `properties` do not name"
            raise ConfigError(msg)

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of each field, by name."""
        properties: dict[str, dict[str, Any]] = self.document["properties"]
        return properties

    @property
    def required(self) -> frozenset[str]:
        """Names of the fields that every payload must have."""
        return frozenset(self.document.get("required", []))

    def is_nullable(self, name: str) -> bool:
        """Tell whether JSON null is allowed as the field's value."""
        return "null" in _types(self.fields[name])

    @property
    def definition(self) -> dict[str, Any]:
        """The rules that payloads are held to, as JSON values; equal for contracts that say the same in other words."""
        return {
            "fields": {name: _rules(field) for name, field in self.fields.items()},
            "required": sorted(self.required),
        }

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """Arrow schema of the decoded columns; absent and null values are both null."""
        return pa.schema([pa.field(name, self._arrow_type(name, field)) for name, field in self.fields.items()])

    @cached_property
    def python_types(self) -> dict[str, tuple[type, ...]]:
        """Python types that a decoded value of each field has when it is of the field's own type."""
        return {
            name: next(types for accepts, types in _PYTHON if accepts(arrow))
            for name, arrow in zip(self.arrow_schema.names, self.arrow_schema.types, strict=True)
        }

    @cached_property
    def validator(self) -> jsonschema.Draft202012Validator:
        """Row-by-row validator, the authority on whether a single payload passes and why not.

        As JSON Schema has it by default, ``format`` describes and is not checked.
        """
        return jsonschema.Draft202012Validator(self.document)

    def _arrow_type(self, name: str, field: dict[str, Any]) -> pa.DataType:
        types = _types(field) - {"null"}
        if types == {"array"}:
            return pa.list_(self._arrow_type(f"{name}[]", field.get("items", {})))
        if len(types) != 1 or (arrow := _ARROW.get(next(iter(types)))) is None:
            msg = (
                f"contract {self.reference}, field `{name}` has type {field.get('type')!r}, expected one of "
                f"{sorted(_ARROW)} or 'array', with or without 'null'"
            )
            raise ConfigError(msg)
        return arrow


def _types(field: dict[str, Any]) -> set[str]:
    declared = field.get("type", [])
    return {declared} if isinstance(declared, str) else set(declared)


def _rules(field: dict[str, Any]) -> dict[str, Any]:
    """Write a field's rules in the one way that all equal ones are written in."""
    rules = {keyword: _plain(value) for keyword, value in field.items() if keyword not in ANNOTATIONS}
    rules["type"] = sorted(_types(field))
    if "enum" in field:
        rules["enum"] = sorted(map(_plain, field["enum"]), key=json.dumps)
    if "items" in field:
        rules["items"] = _rules(field["items"])
    return rules


def _plain(value: Any) -> Any:
    # 5.0 and 5 are one number to JSON Schema.
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def load_contract(reference: str) -> Contract:
    """Load and compile the contract ``name@version``.

    Raises:
        ConfigError: There is no such file, or it is no usable contract.
    """
    name, at, version = reference.partition("@")
    if not at or not name or not version.isdigit():
        msg = f"`contract` is {reference!r}, expected name@version such as 'shop_event@1'"
        raise ConfigError(msg)
    places = [Path.cwd() / "schemas" / "events" / f"{reference}.json", _PACKAGED / f"{reference}.json"]
    for path in places:
        if path.is_file():
            try:
                document = json.loads(path.read_bytes())
            except ValueError as exc:
                msg = f"contract file {path} is no JSON: {exc}"
                raise ConfigError(msg) from exc
            return Contract(reference, document)
    msg = f"contract {reference!r} not found, expected a file {places[0]} (or shipped with Headrace in {_PACKAGED})"
    raise ConfigError(msg)
