"""Contracts that follow from definitions: of the feature rows of a view and the scores of a model.

They are generated, never written by hand: as JSON Schema (draft 2020-12), which every record on the topic passes, and
as Avro, for tables and readers that want one. The same definition gives the same text, to the byte. Recorded, they are
files such as ``schemas/features/user_activity@1.json`` and ``.avsc`` beside it, looked for below the working directory
first and then beside this module.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.row import Pane
from schemas.score import score_json_schema, score_row_schema
from schemas.view import FeatureView

_PACKAGED: Final = Path(__file__).parent
_AVRO_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIMESTAMP: Final = {"type": "string", "format": "date-time"}
_ALWAYS: Final = frozenset(
    {
        "event_time",
        "window_end",
        "pane",
        "pane_index",
        "is_final",
        "source_offset",
        "window_start",
        "view",
        "view_version",
        "definition_hash",
        "source_topic",
        "source_partition",
        "computed_time",
        "epoch",
    }
)
"""Columns of a feature row, besides the entity key, that always have a value."""


def feature_json_schema(view: FeatureView) -> dict[str, Any]:
    """JSON Schema of one feature row of the view, as it stands on its topic."""
    constants = {"view": view.name, "view_version": view.version, "definition_hash": view.definition_hash}
    properties: dict[str, Any] = {}
    for column in view.row_schema:
        rules = _json_type(column.type, is_nullable=_is_nullable(column.name, view))
        if column.name in constants:
            rules = {"const": constants[column.name]}
        elif column.name == "pane":
            rules = {"enum": [str(pane) for pane in Pane]}
        properties[column.name] = rules
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{view.name}@{view.version}",
        "description": f"One feature row of view {view.name}, on topic {view.topic}.",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def feature_avro_schema(view: FeatureView) -> dict[str, Any]:
    """Avro schema of one feature row of the view.

    Raises:
        ConfigError: A column has a name that Avro does not allow.
    """
    columns = [column.with_nullable(_is_nullable(column.name, view)) for column in view.row_schema]
    doc = f"One feature row of view {view.name}, version {view.version}, definition {view.definition_hash}."
    return _avro_record(pa.struct(columns), name=view.name, namespace="headrace.features", doc=doc)


def score_avro_schema(spec: ModelSpec) -> dict[str, Any]:
    """Avro schema of one score of the model.

    Raises:
        ConfigError: A column has a name that Avro does not allow.
    """
    doc = f"One score of model {spec.name}, version {spec.version} of its contract."
    return _avro_record(pa.struct(list(score_row_schema(spec))), name=spec.name, namespace="headrace.scores", doc=doc)


def render_contracts(definition: FeatureView | ModelSpec) -> dict[str, str]:
    """Text of the generated contracts of a view or model, by the ending of the file that each goes into.

    There is no Avro where a column has a name that Avro does not allow; :func:`feature_avro_schema` says which.
    """
    if isinstance(definition, FeatureView):
        generated, columns = {".json": feature_json_schema(definition)}, definition.row_schema
    else:
        generated, columns = {".json": score_json_schema(definition)}, score_row_schema(definition)
    if all(_AVRO_NAME.fullmatch(name) for name in columns.names):
        generated[".avsc"] = avro_schema(definition)
    return {ending: json.dumps(document, indent=2) + "\n" for ending, document in generated.items()}


def avro_schema(definition: FeatureView | ModelSpec) -> dict[str, Any]:
    """Avro schema of one row of a view or one score of a model.

    Raises:
        ConfigError: A column has a name that Avro does not allow.
    """
    return feature_avro_schema(definition) if isinstance(definition, FeatureView) else score_avro_schema(definition)


def check_generated(definitions: Iterable[FeatureView | ModelSpec]) -> list[str]:
    """See whether recorded contracts are still what the definitions say.

    Returns:
        Names, such as ``features/user_activity@1.json``, of those that are not recorded; they may change freely.

    Raises:
        ConfigError: A recorded one is another one.
    """
    missing = []
    for definition in definitions:
        for name, text in _files(definition).items():
            path = next((path for path in (_own() / name, _PACKAGED / name) if path.is_file()), None)
            if path is None:
                missing.append(name)
            elif path.read_text() != text:
                what = "view" if isinstance(definition, FeatureView) else "model"
                msg = (
                    f"{path} differs from what {what} {definition.name} version {definition.version} says; raise the "
                    "version where consumers must act on the change, else delete the file and run `headrace schemas "
                    "record`"
                )
                raise ConfigError(msg)
    return missing


def record_generated(definitions: Iterable[FeatureView | ModelSpec]) -> list[Path]:
    """Record the contracts that are not yet, below the working directory; all are checked first.

    Raises:
        ConfigError: A recorded one is another one, or a file cannot be written.
    """
    definitions = list(definitions)
    missing = set(check_generated(definitions))
    texts = {name: text for definition in definitions for name, text in _files(definition).items() if name in missing}
    for name, text in texts.items():
        write_record(_own() / name, text)
    return [_own() / name for name in texts]


def write_record(path: Path, text: str) -> None:
    """Write a file of a record, and the directory that it is in.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as exc:
        msg = f"{path} cannot be written: {exc.strerror or exc}; expected a directory that can be written to"
        raise ConfigError(msg) from exc


def _files(definition: FeatureView | ModelSpec) -> dict[str, str]:
    directory = "features" if isinstance(definition, FeatureView) else "scores"
    stem = f"{directory}/{definition.name}@{definition.version}"
    return {f"{stem}{ending}": text for ending, text in render_contracts(definition).items()}


def _own() -> Path:
    return Path.cwd() / "schemas"


def _is_nullable(column: str, view: FeatureView) -> bool:
    return column not in _ALWAYS and column != view.entity.key


def _json_type(arrow: pa.DataType, *, is_nullable: bool) -> dict[str, Any]:
    rules: dict[str, Any]
    if pa.types.is_list(arrow):
        # A value that is no finite number is null, in a list too.
        rules = {"type": "array", "items": _json_type(arrow.value_type, is_nullable=True)}
    elif pa.types.is_timestamp(arrow):
        rules = dict(_TIMESTAMP)
    elif pa.types.is_boolean(arrow):
        rules = {"type": "boolean"}
    elif pa.types.is_integer(arrow):
        rules = {"type": "integer"}
    elif pa.types.is_floating(arrow):
        rules = {"type": "number"}
    elif pa.types.is_string(arrow):
        rules = {"type": "string"}
    else:
        msg = f"a column of {arrow} has no JSON Schema, expected text, numbers, booleans, times or lists of them"
        raise ConfigError(msg)
    return rules | ({"type": [rules["type"], "null"]} if is_nullable else {})


def _avro_record(arrow: pa.StructType, *, name: str, namespace: str, doc: str | None = None) -> dict[str, Any]:
    fields = []
    for column in arrow:
        if not _AVRO_NAME.fullmatch(column.name):
            msg = f"column {column.name!r} of {name} has no Avro schema, expected letters, digits and _; rename it"
            raise ConfigError(msg)
        kind = _avro_type(column.type, name=f"{name}_{column.name}", namespace=namespace)
        optional = {"type": ["null", kind], "default": None}
        fields.append({"name": column.name, **(optional if column.nullable else {"type": kind})})
    record = {"type": "record", "name": name, "namespace": namespace, "doc": doc, "fields": fields}
    return {key: value for key, value in record.items() if value is not None}


def _avro_type(arrow: pa.DataType, *, name: str, namespace: str) -> Any:
    if pa.types.is_struct(arrow):
        return _avro_record(arrow, name=name, namespace=namespace)
    if pa.types.is_list(arrow):
        return {"type": "array", "items": ["null", _avro_type(arrow.value_type, name=name, namespace=namespace)]}
    if pa.types.is_timestamp(arrow):
        return {"type": "long", "logicalType": "timestamp-micros"}
    return _AVRO_TYPES[str(arrow)]


_AVRO_TYPES: Final[Mapping[str, str]] = {
    "string": "string",
    "int64": "long",
    "double": "double",
    "float": "float",
    "bool": "boolean",
}
