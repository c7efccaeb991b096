"""Contracts of raw events: one versioned file per topic contract, compiled to an Arrow schema and rules.

A contract ``shop_event@1`` is the file ``schemas/events/shop_event@1.json``, or ``.avsc`` for payloads in Avro or
``.proto`` for those in Protobuf, looked for below the working directory first and then beside this module. Whatever the
format, its rules are those of JSON Schema, so that they are checked, compared and shown in one way
(:mod:`schemas.avro` and :mod:`schemas.protobuf` make them). With ``"x-framing": "confluent"`` the id of the schema
that wrote a payload stands before it, as clients of a schema registry write it.

Event times given as integers declare their unit with ``"x-unit": "ms"`` (us, ms, s);
text event times are RFC 3339 (``"format": "date-time"``). A payload may have ``"x-max-bytes"`` bytes, 1 MiB unless set.
``"x-compatibility"`` says how a version has to fit the one before it, BACKWARD unless set (:mod:`schemas.evolution`).
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import pyarrow as pa

from schemas.errors import ConfigError
from schemas.field import arrow_type, canonical_rules, check_field, is_nullable, is_personal, python_types

if TYPE_CHECKING:
    from schemas.avro import AvroWire
    from schemas.protobuf import ProtobufWire

_PACKAGED = Path(__file__).parent / "events"
DOCUMENT_KEYWORDS: Final = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "examples", "type", "properties", "required"}
    | {"x-max-bytes", "x-compatibility", "x-framing"}
)
"""JSON Schema keywords that a contract itself may use. Further fields in a payload are always allowed, and ignored."""
_MAX_BYTES: Final = 2**20
COMPATIBILITIES: Final = ("BACKWARD", "FORWARD", "FULL", "NONE")
"""What a version may have to do with the one before it, see :mod:`schemas.evolution`."""
FRAMINGS: Final = ("plain", "confluent")
"""What stands before a payload: nothing, or a zero byte and the id of the schema that wrote it."""
ENDINGS: Final = (".json", ".avsc", ".proto")
"""Of a contract's file, by the format of the payloads: JSON, Avro or Protobuf."""


@dataclass(frozen=True)
class Contract:
    """The agreed shape of one topic's payloads.

    Attributes:
        reference: ``name@version``.
        document: The JSON Schema (draft 2020-12) of one payload, an object with named properties.
        wire: How Avro or Protobuf payloads are written; None of JSON.
    """

    reference: str
    document: dict[str, Any]
    wire: "AvroWire | ProtobufWire | None" = None

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
        if self.framing not in FRAMINGS:
            msg = (
                f"contract {self.reference} has `x-framing` {self.framing!r}, expected one of {list(FRAMINGS)}; leave "
                "it out for plain"
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

    @property
    def format(self) -> str:
        """Format of the payloads: ``json``, ``avro`` or ``protobuf``."""
        return "json" if self.wire is None else str(self.wire.definition["format"])

    @property
    def framing(self) -> str:
        """What stands before a payload: one of :data:`FRAMINGS`."""
        found: str = self.document.get("x-framing", "plain")
        return found

    @property
    def is_framed(self) -> bool:
        """Whether payloads say by which schema of a registry they were written."""
        return self.framing != "plain"

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
            **({"framing": self.framing} if self.is_framed else {}),
            **({} if self.wire is None else self.wire.definition),
        }

    @cached_property
    def as_plain_json(self) -> "Contract":
        """The same rules for plain JSON, as events stand in files of rows."""
        if self.wire is None and not self.is_framed:
            return self
        document = {name: value for name, value in self.document.items() if name != "x-framing"}
        if self.wire is not None:
            document["required"] = sorted(name for name in self.fields if not self.is_nullable(name))
        return Contract(self.reference, document)

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
    own = Path.cwd() / "schemas" / "events"
    for place in (own, _PACKAGED):
        found = [path for ending in ENDINGS if (path := place / f"{reference}{ending}").is_file()]
        if len(found) > 1:
            msg = f"contract {reference!r} has the files {', '.join(map(str, found))}, expected one; delete the others"
            raise ConfigError(msg)
        if found:
            try:
                return _compile(reference, found[0])
            except ConfigError as exc:
                msg = f"contract file {found[0]}: {exc}"
                raise ConfigError(msg) from exc
    msg = (
        f"contract {reference!r} not found, expected a file {own / reference}.json, .avsc or .proto (or shipped with "
        f"Headrace in {_PACKAGED})"
    )
    raise ConfigError(msg)


def _compile(reference: str, path: Path) -> Contract:
    try:
        text = path.read_text("utf-8")
        document: Any = None if path.suffix == ".proto" else json.loads(text)
    except (OSError, ValueError, RecursionError) as exc:
        msg = f"it is no {'text in UTF-8' if path.suffix == '.proto' else 'JSON'}: {exc}"
        raise ConfigError(msg) from exc
    # The libraries of a format are loaded where it is used.
    if path.suffix == ".avsc":
        from schemas.avro import compile_avro  # noqa: PLC0415

        return Contract(reference, *compile_avro(reference, document))
    if path.suffix == ".proto":
        from schemas.protobuf import compile_protobuf  # noqa: PLC0415

        return Contract(reference, *compile_protobuf(reference, text, beside=path.parent))
    return Contract(reference, document)
