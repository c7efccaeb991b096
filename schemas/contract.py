"""Contracts of raw events: one versioned JSON Schema file per topic contract, compiled to an Arrow schema.

A contract ``shop_event@1`` is the file ``schemas/events/shop_event@1.json``, looked for below the working directory
first and then beside this module. Event times given as integers declare their unit with ``"x-unit": "ms"`` (us, ms, s);
text event times are RFC 3339 (``"format": "date-time"``). A payload may have ``"x-max-bytes"`` bytes, 1 MiB unless set.
``"x-compatibility"`` says how a version has to fit the one before it, BACKWARD unless set (:mod:`schemas.evolution`).
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import jsonschema
import pyarrow as pa

from schemas.errors import ConfigError
from schemas.field import arrow_type, canonical_rules, check_field, is_nullable, is_personal, python_types

_PACKAGED = Path(__file__).parent / "events"
DOCUMENT_KEYWORDS: Final = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "examples", "type", "properties", "required"}
    | {"x-max-bytes", "x-compatibility"}
)
"""JSON Schema keywords that a contract itself may use. Further fields in a payload are always allowed, and ignored."""
_MAX_BYTES: Final = 2**20
COMPATIBILITIES: Final = ("BACKWARD", "FORWARD", "FULL", "NONE")
"""What a version may have to do with the one before it, see :mod:`schemas.evolution`."""


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
            # Formats are left to the fields' own checks, which name the field.
            jsonschema.Draft202012Validator.check_schema(self.document, format_checker=jsonschema.FormatChecker(()))
        except jsonschema.SchemaError as exc:
            msg = f"contract {self.reference} is no valid JSON Schema at {exc.json_path}: {exc.message}"
            raise ConfigError(msg) from exc
        document = self.document if isinstance(self.document, dict) else {}  # `true` is JSON Schema, too
        if document.get("type") != "object" or not document.get("properties"):
            msg = f"contract {self.reference} has type {document.get('type')!r}, expected 'object' with `properties`"
            raise ConfigError(msg)
        if unknown := sorted(set(self.document) - DOCUMENT_KEYWORDS):
            msg = (
                f"contract {self.reference} uses {unknown}, expected keywords among {sorted(DOCUMENT_KEYWORDS)}: the "
                "rules stand at the fields; leave it out"
            )
            raise ConfigError(msg)
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            msg = (
                f"contract {self.reference} has `x-max-bytes` {self.max_bytes!r}, expected a whole number of bytes, 1 "
                f"or more; leave it out for {_MAX_BYTES}"
            )
            raise ConfigError(msg)
        if self.compatibility not in COMPATIBILITIES:
            msg = (
                f"contract {self.reference} has `x-compatibility` {self.compatibility!r}, expected one of "
                f"{list(COMPATIBILITIES)}; leave it out for BACKWARD"
            )
            raise ConfigError(msg)
        for name, field in self.document["properties"].items():
            check_field(name, field, contract=self.reference)
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

    @property
    def max_bytes(self) -> int:
        """Bytes that a payload may have."""
        limit: int = self.document.get("x-max-bytes", _MAX_BYTES)
        return limit

    @property
    def compatibility(self) -> str:
        """How it has to fit the version before it: one of :data:`COMPATIBILITIES`."""
        found: str = self.document.get("x-compatibility", "BACKWARD")
        return found

    def is_nullable(self, name: str) -> bool:
        """Tell whether JSON null is allowed as the field's value."""
        return is_nullable(self.fields[name])

    @property
    def definition(self) -> dict[str, Any]:
        """The rules that payloads are held to, as JSON values; equal for contracts that say the same in other words."""
        limit = {} if self.max_bytes == _MAX_BYTES else {"max_bytes": self.max_bytes}
        return {
            "fields": {name: canonical_rules(field) for name, field in self.fields.items()},
            "required": sorted(self.required),
            **limit,
        }

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """Arrow schema of the decoded columns; absent and null values are both null."""
        return pa.schema([pa.field(name, arrow_type(field)) for name, field in self.fields.items()])

    @cached_property
    def personal(self) -> frozenset[str]:
        """Names of the fields whose values must not be shown."""
        return frozenset(name for name, field in self.fields.items() if is_personal(field))

    @cached_property
    def python_types(self) -> dict[str, tuple[type, ...]]:
        """Python types that a decoded value of each field has when it is of the field's own type."""
        return {name: python_types(field) for name, field in self.fields.items()}

    @cached_property
    def validator(self) -> jsonschema.Draft202012Validator:
        """Row-by-row validator, the authority on whether a single payload passes and why not.

        As JSON Schema has it by default, ``format`` describes and is not checked.
        """
        return jsonschema.Draft202012Validator(self.document)


@cache
def load_contract(reference: str) -> Contract:
    """Load and compile the contract ``name@version``.

    Raises:
        ConfigError: There is no such file, or it is no usable contract.
    """
    name, at, version = reference.partition("@") if isinstance(reference, str) else ("", "", "")
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
            try:
                return Contract(reference, document)
            except ConfigError as exc:
                msg = f"contract file {path}: {exc}"
                raise ConfigError(msg) from exc
    msg = f"contract {reference!r} not found, expected a file {places[0]} (or shipped with Headrace in {_PACKAGED})"
    raise ConfigError(msg)
