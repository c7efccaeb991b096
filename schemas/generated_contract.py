"""Contracts that follow from definitions: of the feature rows of a view and the scores of a model.

They are generated, never written by hand: as JSON Schema (draft 2020-12), which every record on the topic passes, and
as Avro, for tables and readers that want one. The same definition gives the same text, to the byte.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.row import Pane
from schemas.score import score_json_schema, score_row_schema
from schemas.view import FeatureView

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
    """Text of the generated contracts of a view or model, by the ending of the file that each goes into."""
    if isinstance(definition, FeatureView):
        generated = {".json": feature_json_schema(definition), ".avsc": feature_avro_schema(definition)}
    else:
        generated = {".json": score_json_schema(definition), ".avsc": score_avro_schema(definition)}
    return {ending: json.dumps(document, indent=2) + "\n" for ending, document in generated.items()}


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
