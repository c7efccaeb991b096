"""Contracts in Avro and Protobuf for tests, and payloads of them."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastavro

from schemas.avro import compile_avro
from schemas.contract import Contract
from schemas.protobuf import compile_protobuf
from streams.writer_schema import WriterSchema

ORDER_FIELDS: list[dict[str, Any]] = [
    {"name": "key", "type": "string", "minLength": 1},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "n", "type": "int", "minimum": 0},
    {"name": "kind", "type": ["null", {"type": "enum", "name": "Kind", "symbols": ["view", "click"]}], "default": None},
    {"name": "x", "type": ["null", "double"], "default": None, "maximum": 100},
    {"name": "tags", "type": {"type": "array", "items": "string"}, "default": []},
    {"name": "raw", "type": "bytes", "default": "", "x-ignored": True},
]
ORDER_PROTO = """
syntax = "proto3";
package shop;
import "headrace/contract.proto";
import "google/protobuf/timestamp.proto";

message Order {
  OPTIONS
  enum Kind { UNKNOWN = 0; VIEW = 1; CLICK = 2; }
  string key = 1 [(headrace.rules).min_length = 1];
  int64 at = 2 [(headrace.rules).unit = "ms"];
  optional int32 n = 3 [(headrace.rules) = {minimum: 0, required: true}];
  Kind kind = 4;
  optional double x = 5 [(headrace.rules).maximum = 100];
  repeated string tags = 6;
  google.protobuf.Timestamp placed = 7;
  bytes raw = 8 [(headrace.rules).ignored = true];
}
"""


def order_schema(fields: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "Order", "namespace": "shop", "fields": fields or ORDER_FIELDS, **more}


def avro_contract(
    version: int = 1, *, fields: list[dict[str, Any]] | None = None, name: str = "order", **more: Any
) -> Contract:
    reference = f"{name}@{version}"
    return Contract(reference, *compile_avro(reference, order_schema(fields, **more)))


def proto_contract(version: int = 1, *, options: str = "", text: str = ORDER_PROTO) -> Contract:
    reference = f"order@{version}"
    whole = text.replace("OPTIONS", f"option (headrace.payload) = {{{options}}};" if options else "")
    return Contract(reference, *compile_protobuf(reference, whole, beside=Path()))


def avro_payload(schema: Mapping[str, Any], **values: Any) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(dict(schema)), values)
    return buffer.getvalue()


def framed(schema_id: int, payload: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4) + payload


class FakeRegistry:
    """Schemas by id, without a server."""

    def __init__(self, *schemas: WriterSchema) -> None:
        self.schemas = {schema.id: schema for schema in schemas}
        self.asked: list[int] = []

    def find(self, schema_id: int) -> WriterSchema | None:
        self.asked.append(schema_id)
        return self.schemas.get(schema_id)
