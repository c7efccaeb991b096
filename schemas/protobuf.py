"""Contracts written as Protobuf: from the first message of ``shop_event@1.proto`` to the rules of its fields.

Rules are options of ``headrace/contract.proto``. Fields of 32 bits are held to them and read as if they had 64, which
is written alike: one that grew upstream shows, and is not cut to 32 bits unseen. A field without presence has its
default where it was not written; one that tells whether it was set (``optional``, or of a ``oneof``) is null. Fields
that no column can hold (messages but ``google.protobuf.Timestamp``, maps, bytes) must be marked as ignored: what is not
read should be seen in the contract.
"""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor

from schemas.errors import ConfigError

_INCLUDED: Final = Path(__file__).parent
_TIMEOUT_S: Final = 60.0
_Type = descriptor_pb2.FieldDescriptorProto
_TIMESTAMP: Final = ".google.protobuf.Timestamp"
_SIGNED_32: Final = {"minimum": -(2**31), "maximum": 2**31 - 1}
_UNSIGNED_32: Final = {"minimum": 0, "maximum": 2**32 - 1}
_SCALARS: Final[dict[int, dict[str, Any]]] = {
    _Type.TYPE_DOUBLE: {"type": "number"},
    _Type.TYPE_FLOAT: {"type": "number"},
    _Type.TYPE_INT64: {"type": "integer"},
    _Type.TYPE_SINT64: {"type": "integer"},
    _Type.TYPE_SFIXED64: {"type": "integer"},
    _Type.TYPE_UINT64: {"type": "integer", "minimum": 0},
    _Type.TYPE_FIXED64: {"type": "integer", "minimum": 0},
    _Type.TYPE_INT32: {"type": "integer", **_SIGNED_32},
    _Type.TYPE_SINT32: {"type": "integer", **_SIGNED_32},
    _Type.TYPE_SFIXED32: {"type": "integer", **_SIGNED_32},
    _Type.TYPE_UINT32: {"type": "integer", **_UNSIGNED_32},
    _Type.TYPE_FIXED32: {"type": "integer", **_UNSIGNED_32},
    _Type.TYPE_BOOL: {"type": "boolean"},
    _Type.TYPE_STRING: {"type": "string"},
}
_WIDENED: Final = {
    _Type.TYPE_INT32: _Type.TYPE_INT64,
    _Type.TYPE_UINT32: _Type.TYPE_UINT64,
    _Type.TYPE_SINT32: _Type.TYPE_SINT64,
    _Type.TYPE_ENUM: _Type.TYPE_INT64,
}
"""Types that are written alike, and hold more."""
_ALIKE: Final = {
    "int64": "int32",
    "uint64": "uint32",
    "sint64": "sint32",
}
"""Names of types that are read alike, by the one that stands for both."""
_RULES: Final = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusive_minimum": "exclusiveMinimum",
    "exclusive_maximum": "exclusiveMaximum",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
    "format": "format",
    "unit": "x-unit",
    "pii": "x-pii",
}
_PAYLOAD: Final = {"max_bytes": "x-max-bytes", "compatibility": "x-compatibility", "framing": "x-framing"}
_EXACT: Final = 2**53


@dataclass(frozen=True)
class ProtobufField:
    """One field of a message.

    Attributes:
        name: Its name.
        type: Type by the language's name; of messages and enums the full name.
        is_repeated: Whether it is a list.
        symbols: Numbers and names of an enum; none of other types.
    """

    name: str
    type: str
    is_repeated: bool
    symbols: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, eq=False)
class ProtobufWire:
    """How payloads of a contract are written.

    Attributes:
        file: The compiled file and all that it imports.
        message: Full name of the message.
        text: The file.
    """

    file: descriptor_pb2.FileDescriptorSet = dataclasses.field(repr=False)
    message: str
    text: str = dataclasses.field(repr=False)

    @cached_property
    def fields(self) -> dict[int, ProtobufField]:
        """Fields by number."""
        return message_fields(_pool(self.file).FindMessageTypeByName(self.message))

    @cached_property
    def definition(self) -> dict[str, Any]:
        """What decides how bytes are read, as JSON values."""
        fields = {
            str(number): {
                "name": known.name,
                "type": known.type,
                **({"repeated": True} if known.is_repeated else {}),
                **({"symbols": {str(at): name for at, name in known.symbols}} if known.symbols else {}),
            }
            for number, known in sorted(self.fields.items())
        }
        return {"format": "protobuf", "message": self.message, "numbers": fields}

    @property
    def description(self) -> tuple[str, Any]:
        """Media type of the schema, and the schema, for documents."""
        return "application/vnd.google.protobuf;version=3", self.text

    @cached_property
    def widened(self) -> type[Any]:
        """Class of the message that reads fields of 32 bits as if they had 64, and enums as numbers."""
        widened = descriptor_pb2.FileDescriptorSet()
        widened.CopyFrom(self.file)
        package = widened.file[-1].package
        for message in widened.file[-1].message_type:
            if self.message == f"{package}.{message.name}".strip("."):
                for written in message.field:
                    written.type = _WIDENED.get(written.type, written.type)
                    written.ClearField("default_value")
                    if written.type == _Type.TYPE_INT64:
                        written.ClearField("type_name")
        found: type[Any] = message_factory.GetMessageClass(_pool(widened).FindMessageTypeByName(self.message))
        return found


def compile_protobuf(reference: str, text: str, *, beside: Path) -> tuple[dict[str, Any], ProtobufWire]:
    """Compile a contract's file.

    Args:
        reference: Reference of the contract.
        text: What stands in the file.
        beside: Directory that its own imports are looked for in.

    Returns:
        The rules of its fields as JSON Schema, and how payloads are written.

    Raises:
        ConfigError: Naming the contract, the field, what was got and what was expected.
    """
    compiled = compile_file(text, named=f"contract {reference}", include=[beside])
    if not compiled.file[-1].message_type:
        msg = f"contract {reference} has no message, expected one; the first is the payload's"
        raise ConfigError(msg)
    file, message = compiled.file[-1], compiled.file[-1].message_type[0]
    wire = ProtobufWire(compiled, f"{file.package}.{message.name}".strip("."), text)
    descriptor = _pool(compiled).FindMessageTypeByName(wire.message)
    properties, required = {}, []
    for field in message.field:
        where = f"contract {reference}, field `{field.name}`"
        own = _options(compiled, field.options, "google.protobuf.FieldOptions", "headrace.rules")
        has_presence = descriptor.fields_by_name[field.name].has_presence
        rules = _rules(field, wire, own, where=where, has_presence=has_presence)
        if rules is None:
            continue
        properties[field.name] = rules
        if own.get("required"):
            if not has_presence:
                msg = f"{where} is `required`, expected it `optional`, too: else it can't be told whether it was set"
                raise ConfigError(msg)
            required.append(field.name)
    own = _options(compiled, message.options, "google.protobuf.MessageOptions", "headrace.payload")
    payload = {_PAYLOAD[name]: value for name, value in own.items()}
    return {"type": "object", "properties": properties, "required": required, **payload}, wire


def compile_file(
    text: str, *, named: str, include: list[Path], references: Mapping[str, str] | None = None
) -> descriptor_pb2.FileDescriptorSet:
    """Compile the text of a ``.proto`` file by the compiler of the language itself.

    Args:
        text: The text.
        named: What it is, for messages.
        include: Directories that its imports are looked for in, after those shipped with Headrace.
        references: Texts of files that it imports, by name.

    Returns:
        The file, last, and all that it imports.

    Raises:
        ConfigError: It does not compile; the message says where.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-proto-") as directory:
        own = Path(directory)
        for name, referenced in {**(references or {}), "contract_.proto": text}.items():
            path = (own / name).resolve()
            if not path.is_relative_to(own.resolve()):
                msg = f"{named} imports {name!r}, expected a name without '..'"
                raise ConfigError(msg)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(referenced)
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{own}", f"-I{_INCLUDED}"),
            *(f"-I{place}" for place in include if place.is_dir()),
            *(f"--descriptor_set_out={own / 'set'}", "--include_imports", "contract_.proto"),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            msg = f"{named} was not compiled within {_TIMEOUT_S:.0f} s; expected a file that is"
            raise ConfigError(msg) from exc
        if done.returncode:
            # Warnings of the compiler's own start stand there, too.
            told = [line for line in done.stderr.splitlines() if ".proto" in line] or [done.stderr.strip()[-500:]]
            shown = "; ".join(told[:5]).replace(f"{own}/", "").replace("contract_.proto:", "line ")
            msg = f"{named} is no Protobuf: {shown}"
            raise ConfigError(msg)
        return descriptor_pb2.FileDescriptorSet.FromString((own / "set").read_bytes())


def message_names(compiled: descriptor_pb2.FileDescriptorSet) -> dict[tuple[int, ...], str]:
    """Name the messages of a compiled file by where they stand: positions, from the outermost one."""
    found: dict[tuple[int, ...], str] = {}

    def walk(messages: Any, outer: str, path: tuple[int, ...]) -> None:
        for position, message in enumerate(messages):
            found[*path, position] = f"{outer}.{message.name}".strip(".")
            walk(message.nested_type, found[*path, position], (*path, position))

    walk(compiled.file[-1].message_type, compiled.file[-1].package, ())
    return found


def message_fields(descriptor: Descriptor) -> dict[int, ProtobufField]:
    """List the fields of a message by number."""
    found = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            named = field.message_type.full_name
        elif field.enum_type is not None:
            named = field.enum_type.full_name
        else:
            named = _Type.Type.Name(field.type).removeprefix("TYPE_").lower()
        symbols = [] if field.enum_type is None else [(value.number, value.name) for value in field.enum_type.values]
        found[field.number] = ProtobufField(field.name, named, _is_repeated(field), tuple(symbols))
    return found


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def unreadable_numbers(written: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    """Say why messages that were written by one definition's numbers are misread by another's."""
    if written["message"] != read["message"]:
        yield f"the message is {written['message']}, expected {read['message']}"
    numbers = {field["name"]: number for number, field in written["numbers"].items()}
    for number, field in read["numbers"].items():
        name = field["name"]
        if name in numbers and numbers[name] != number:
            yield f"`{name}` has number {numbers[name]}, expected {number}"
        if (other := written["numbers"].get(number)) is None:
            continue
        if _alike(other["type"], other) != _alike(field["type"], field):
            yield f"`{name}` has number {number}, which is {_shown(other)}, expected {_shown(field)}"
        elif "symbols" in field:
            kept = [at for at, symbol in other["symbols"].items() if field["symbols"].get(at, symbol) != symbol]
            yield from (f"`{name}` has {other['symbols'][at]!r} as number {at}, expected another one" for at in kept)


def _alike(name: str, field: Mapping[str, Any]) -> tuple[str, bool]:
    # Enums are told apart by their symbols: they may have moved to another file.
    kind = "enum" if "symbols" in field else _ALIKE.get(name, name)
    return kind, bool(field.get("repeated"))


def _shown(field: Mapping[str, Any]) -> str:
    return f"{'repeated ' if field.get('repeated') else ''}{field['type']} `{field['name']}`"


def _pool(compiled: descriptor_pb2.FileDescriptorSet) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in compiled.file:
        pool.Add(file)
    return pool


def _options(compiled: descriptor_pb2.FileDescriptorSet, options: Any, kind: str, extension: str) -> dict[str, Any]:
    """Read an option of Headrace's, by its fields that are set; the file's own pool alone knows it."""
    pool = _pool(compiled)
    try:
        known = pool.FindExtensionByName(extension)
        found = message_factory.GetMessageClass(pool.FindMessageTypeByName(kind))
    except KeyError:
        return {}  # the file does not import it
    message_factory.GetMessageClass(known.message_type)
    read = found.FromString(options.SerializeToString())
    values = read.Extensions[known].ListFields()
    return {field.name: list(value) if _is_repeated(field) else value for field, value in values}


def _rules(
    field: Any, wire: ProtobufWire, own: Mapping[str, Any], *, where: str, has_presence: bool
) -> dict[str, Any] | None:
    """Make the rules of a field, as JSON Schema; None where it is ignored."""
    if own.get("ignored"):
        return None
    if field.type == _Type.TYPE_ENUM:
        rules: dict[str, Any] = {"type": "string", "enum": [name for _, name in wire.fields[field.number].symbols]}
    elif field.type == _Type.TYPE_MESSAGE and field.type_name == _TIMESTAMP:
        rules = {"type": "integer", "x-unit": "us"}
    elif field.type in _SCALARS:
        rules = dict(_SCALARS[field.type])
    else:
        kind = field.type_name.strip(".") or _Type.Type.Name(field.type).removeprefix("TYPE_").lower()
        msg = (
            f"{where} is {kind}, expected a number, bool, string, enum or google.protobuf.Timestamp, or a list of "
            "them; say [(headrace.rules).ignored = true] where no feature reads it"
        )
        raise ConfigError(msg)
    for name, value in own.items():
        if name in _RULES:
            rules[_RULES[name]] = _whole(value, where=where, name=name) if rules["type"] == "integer" else value
    if own.get("one_of"):
        rules["enum"] = own["one_of"]
    if field.label == _Type.LABEL_REPEATED:
        return {"type": "array", "items": rules}
    if has_presence and not own.get("required"):
        rules["type"] = [rules["type"], "null"]
        if "enum" in rules:
            rules["enum"] = [*rules["enum"], None]
    return rules


def _whole(value: Any, *, where: str, name: str) -> Any:
    """Make a whole number of a bound, which the option holds as a double."""
    if not isinstance(value, float) or not value.is_integer():
        return value
    if abs(value) > _EXACT:
        msg = f"{where} has `{name}` {value:.0f}, expected at most {_EXACT}: above, the option is not exact"
        raise ConfigError(msg)
    return int(value)
