import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from schemas.errors import ConfigError
from streams.decoded import DecodedBatch
from streams.decoding import decode
from streams.writer_schema import WriterSchema, new_ids, use_registry
from tests.support.contracts import (
    ORDER_FIELDS,
    ORDER_PROTO,
    FakeRegistry,
    avro_contract,
    avro_payload,
    framed,
    order_schema,
    proto_contract,
)
from tests.support.transport import make_batch

GOOD: dict[str, Any] = {"key": "a", "at": 5, "n": 1, "kind": "click", "x": 2.5, "tags": ["t"], "raw": b""}
AVRO = avro_contract()
PROTO = proto_contract()
FRAMED = avro_contract(**{"x-framing": "confluent"})


@pytest.fixture(autouse=True)
def no_registry() -> Iterator[None]:
    use_registry(None)
    yield
    use_registry(None)


def registry(*schemas: tuple[int, str, Any]) -> FakeRegistry:
    made = [
        WriterSchema(id=number, kind=kind, text=text if isinstance(text, str) else json.dumps(text))
        for number, kind, text in schemas
    ]
    fake = FakeRegistry(*made)
    use_registry(lambda: fake)
    return fake


def avro(**values: Any) -> bytes:
    return avro_payload(order_schema(), **(GOOD | values))


def proto(**values: Any) -> bytes:
    message = PROTO.wire.widened  # type: ignore[union-attr]
    given: dict[str, Any] = {"key": "a", "at": 5, "n": 1, "kind": 2, "x": 2.5, "tags": ["t"]} | values
    made: bytes = message(**{name: value for name, value in given.items() if value is not None}).SerializeToString()
    return made


def content(decoded: DecodedBatch, *names: str) -> list[dict[str, Any]]:
    return decoded.rows.select([*names, "_offset"]).to_pylist()


def reasons(decoded: DecodedBatch) -> list[tuple[int, str]]:
    return [(row["_offset"], row["reason"]) for row in decoded.rejected.to_pylist()]


def details(decoded: DecodedBatch) -> list[str]:
    return decoded.rejected["detail"].to_pylist()


def test_avro_rows_come_out_in_the_types_of_their_contract() -> None:
    decoded = decode(make_batch([avro(), avro(kind=None, x=None, tags=[])]), AVRO)
    assert content(decoded, *AVRO.fields) == [
        {"key": "a", "at": 5, "n": 1, "kind": "click", "x": 2.5, "tags": ["t"], "_offset": 0},
        {"key": "a", "at": 5, "n": 1, "kind": None, "x": None, "tags": [], "_offset": 1},
    ]
    assert decoded.rows.schema.names[: len(AVRO.fields)] == [name for name in GOOD if name != "raw"]
    assert not decoded.rejected.num_rows


def test_protobuf_rows_come_out_in_the_types_of_their_contract() -> None:
    filled = PROTO.wire.widened(key="a", at=5, n=1, kind=2, x=2.5, tags=["t"])  # type: ignore[union-attr]
    filled.placed.seconds, filled.placed.nanos = 3, 5_999
    decoded = decode(make_batch([filled.SerializeToString(), proto(kind=None, x=None, tags=None)]), PROTO)
    assert content(decoded, *PROTO.fields) == [
        {"key": "a", "at": 5, "n": 1, "kind": "CLICK", "x": 2.5, "tags": ["t"], "placed": 3_000_005, "_offset": 0},
        {"key": "a", "at": 5, "n": 1, "kind": "UNKNOWN", "x": None, "tags": [], "placed": None, "_offset": 1},
    ]
    assert not decoded.rejected.num_rows


@pytest.mark.parametrize(
    ("bad", "reason", "detail"),
    [
        (None, "decode_error", "the payload is empty"),
        (b"", "decode_error", "the payload is no Avro of shop.Order: it ends where more is expected"),
        (avro()[:-1], "decode_error", "the payload is no Avro of shop.Order"),
        (avro() + b"\0", "decode_error", "expected all of them to be taken"),
        (avro(n=-1), "schema_violation", "$.n: -1 is less than the minimum of 0"),
        (avro(n=2**31 - 1).replace(b"\xfe\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x10"), "schema_violation", "2147483647"),
        (avro(key=""), "schema_violation", "$.key: '' should be non-empty"),
        (avro(x=100.5), "schema_violation", "$.x: 100.5 is greater than the maximum of 100"),
        (avro(x=float("nan")), "schema_violation", "$.x: nan is not finite"),
        (b"\0" * (2**20 + 1), "schema_violation", "1048577 bytes, expected at most 1048576"),
    ],
)
def test_a_bad_avro_row_costs_one_dead_letter(bad: bytes | None, reason: str, detail: str) -> None:
    decoded = decode(make_batch([avro(), bad, avro()]), AVRO)
    assert [row["_offset"] for row in content(decoded, "key")] == [0, 2]
    assert reasons(decoded) == [(1, reason)]
    assert detail in details(decoded)[0]


@pytest.mark.parametrize(
    ("bad", "reason", "detail"),
    [
        (None, "decode_error", "the payload is empty"),
        (b"", "schema_violation", "'n' is a required property"),
        (proto()[:-1], "decode_error", "the payload is no Protobuf of shop.Order"),
        (b"\xff\xff", "decode_error", "the payload is no Protobuf of shop.Order"),
        # Written as text upstream, which the field is not: the bytes are there, but not where they are looked for.
        (proto(n=None) + b"\x1a\x01a", "decode_error", "field 3 of wire type 2, expected int32 `n`"),
        (proto(n=2**40), "schema_violation", f"$.n: {2**40} is greater than the maximum of 2147483647"),
        (proto(n=-1), "schema_violation", "$.n: -1 is less than the minimum of 0"),
        (proto(kind=7), "schema_violation", "$.kind: '7' is not one of ['UNKNOWN', 'VIEW', 'CLICK']"),
        (proto(x=float("inf")), "schema_violation", "$.x: inf is not finite"),
        (proto() + b"\x3a\x0a\x08" + b"\xff" * 8 + b"\x7f", "schema_violation", "$.placed: "),
    ],
)
def test_a_bad_protobuf_row_costs_one_dead_letter(bad: bytes | None, reason: str, detail: str) -> None:
    decoded = decode(make_batch([proto(), bad, proto()]), PROTO)
    assert [row["_offset"] for row in content(decoded, "key")] == [0, 2]
    assert reasons(decoded) == [(1, reason)]
    assert detail in details(decoded)[0]


def test_fields_that_a_protobuf_contract_does_not_know_are_allowed() -> None:
    decoded = decode(make_batch([proto() + struct.pack("<BBq", 0x81 | 0x80, 0x01, 7)]), PROTO)
    assert content(decoded, "key") == [{"key": "a", "_offset": 0}]


def test_values_of_personal_fields_stay_out_of_details() -> None:
    fields = [dict(field) for field in ORDER_FIELDS]
    fields[4]["x-pii"] = True
    decoded = decode(
        make_batch([avro(x=1234.5), avro(x=float("inf"))]),
        avro_contract(fields=fields),
    )
    assert "1234.5" not in details(decoded)[0]
    assert "inf " not in details(decoded)[1]
    assert reasons(decoded) == [(0, "schema_violation"), (1, "schema_violation")]


def test_a_framed_avro_row_is_read_by_the_schema_that_wrote_it() -> None:
    fields = [*reversed(ORDER_FIELDS[:3]), {"name": "more", "type": "string"}]
    older = order_schema(fields)
    fake = registry((7, "AVRO", order_schema()), (8, "AVRO", older))
    payloads = [framed(7, avro()), framed(8, avro_payload(older, key="b", at=6, n=2, more="m")), framed(7, avro(n=3))]
    decoded = decode(make_batch(payloads), FRAMED)
    assert content(decoded, "key", "n", "kind", "tags") == [
        {"key": "a", "n": 1, "kind": "click", "tags": ["t"], "_offset": 0},
        {"key": "b", "n": 2, "kind": None, "tags": [], "_offset": 1},
        {"key": "a", "n": 3, "kind": "click", "tags": ["t"], "_offset": 2},
    ]
    decode(make_batch(payloads), FRAMED)
    assert fake.asked == [7, 8], "what an id means is asked once"


def test_an_int_that_grew_to_a_long_upstream_is_read_where_it_fits_and_caught_where_not() -> None:
    grown = [{**field, "type": "long"} if field["name"] == "n" else field for field in ORDER_FIELDS]
    registry((9, "AVRO", order_schema(grown)))
    contract = avro_contract(
        fields=[{**field, "type": "long", "maximum": 2**31 - 1} if field["name"] == "n" else field
                for field in ORDER_FIELDS],
        **{"x-framing": "confluent"},
    )  # fmt: skip
    big, small = (framed(9, avro_payload(order_schema(grown), **(GOOD | {"n": n}))) for n in (2**40, 5))
    decoded = decode(make_batch([big, small]), contract)
    assert content(decoded, "n") == [{"n": 5, "_offset": 1}]
    assert reasons(decoded) == [(0, "schema_violation")]
    # A reader whose own type is `int` cannot take a `long`, whatever its value: Avro does not shorten.
    decoded = decode(make_batch([small]), FRAMED)
    assert reasons(decoded) == [(0, "decode_error")]
    assert "`n` is long, which is not read as int" in details(decoded)[0]


@pytest.mark.parametrize(
    ("payload", "detail"),
    [
        (b"\0\0\0", "has 3 bytes, the first 00, expected a zero byte and the id"),
        (avro(), "expected a zero byte and the id"),
        (framed(99, b""), "schema 99, which the schema registry does not know"),
        (framed(2, avro()), "schema 2, which is PROTOBUF, expected AVRO"),
        (framed(3, avro()), "schema 3 is no Avro schema"),
        (framed(4, avro()), "the record is Other, expected shop.Order"),
        (framed(5, b""), "`key` is not written, expected it, or a `default`"),
        (framed(6, b""), "schema 6 is no JSON"),
        (framed(7, avro()[:3]), "no Avro of shop.Order"),
    ],
)
def test_a_framed_row_that_cannot_be_read_is_a_dead_letter_that_says_why(payload: bytes, detail: str) -> None:
    other = {**order_schema(), "name": "Other", "namespace": ""}
    registry(
        (2, "PROTOBUF", ORDER_PROTO),
        (3, "AVRO", {"type": "record", "name": "Order", "fields": [{"name": "a", "type": "nope"}]}),
        (4, "AVRO", other),
        (5, "AVRO", order_schema([{"name": "n", "type": "int"}])),
        (6, "AVRO", "{"),
        (7, "AVRO", order_schema()),
    )
    decoded = decode(make_batch([payload, framed(7, avro())]), FRAMED)
    assert reasons(decoded) == [(0, "decode_error")]
    assert detail in details(decoded)[0]
    assert content(decoded, "key") == [{"key": "a", "_offset": 1}]


def test_a_framed_protobuf_row_names_its_message_by_its_place() -> None:
    contract = proto_contract(options='framing: "confluent"')
    text = ORDER_PROTO.replace("OPTIONS", "").replace("message Order", "message Line { int32 n = 1; }\nmessage Order")
    bare = "\n".join(line.partition(" [(headrace")[0] + ";" * ("[(headrace" in line) for line in text.splitlines())
    registry((1, "PROTOBUF", bare.replace('import "headrace/contract.proto";', "")), (2, "PROTOBUF", "message {"))
    second = b"\x02\x02"  # one level deep, and there the one at 1
    payloads = [
        framed(1, second + proto()),
        framed(1, b"\0" + proto()),  # the first, which is another message
        framed(1, b"\x02\x08" + proto()),
        framed(1, b""),
        framed(2, b"\0"),
    ]
    decoded = decode(make_batch(payloads), contract)
    assert content(decoded, "key", "n") == [{"key": "a", "n": 1, "_offset": 0}]
    assert reasons(decoded) == [(at, "decode_error") for at in (1, 2, 3, 4)]
    for detail, expected in zip(
        details(decoded),
        ("the message is shop.Line, expected shop.Order", "no message at [4]", "the payload ends", "is no Protobuf"),
        strict=True,
    ):
        assert expected in detail


def test_a_protobuf_number_of_another_type_upstream_is_no_row() -> None:
    contract = proto_contract(options='framing: "confluent"')
    text = 'syntax = "proto3"; package shop; message Order { string key = 1; int64 at = 2; sint64 n = 3; }'
    registry((1, "PROTOBUF", text))
    decoded = decode(make_batch([framed(1, b"\0\x18\x02")]), contract)
    assert "`n` has number 3, which is sint64 `n`, expected int32 `n`" in details(decoded)[0]


def test_framed_json_is_read_as_plain_json_is() -> None:
    contract = avro_contract().as_plain_json
    framed_contract = type(contract)(contract.reference, {**contract.document, "x-framing": "confluent"})
    registry((1, "JSON", {"type": "object"}))
    text = json.dumps({"key": "a", "at": 5, "n": 1, "tags": []}).encode()
    decoded = decode(make_batch([framed(1, text), text, framed(1, b"{"), framed(2, text), None]), framed_contract)
    assert content(decoded, "key") == [{"key": "a", "_offset": 0}]
    assert reasons(decoded) == [(at, "decode_error") for at in (1, 2, 3, 4)]


def test_what_is_unknown_is_not_asked_again_at_once() -> None:
    fake = registry()
    for _ in range(3):
        decode(make_batch([framed(5, b""), framed(5, b"x")]), FRAMED)
    assert fake.asked == [5]
    assert new_ids([framed(5, b""), framed(6, b""), b"\0\0", None, b"{}"]) == [6]


def test_without_a_registry_it_is_said_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_SCHEMA_REGISTRY"):
        decode(make_batch([framed(5, b"")]), FRAMED)
