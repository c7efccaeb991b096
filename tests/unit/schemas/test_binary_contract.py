"""Contracts in Avro and Protobuf: what their files may say, and how versions may differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.contract import Contract, load_contract
from schemas.errors import ConfigError
from schemas.evolution import check_evolution, record_contracts, unreadable
from tests.support.contracts import ORDER_FIELDS, ORDER_PROTO, avro_contract, order_schema, proto_contract

CONFLUENT = {"x-framing": "confluent"}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    load_contract.cache_clear()
    return tmp_path


def changed(name: str, **more: Any) -> list[dict[str, Any]]:
    return [{**field, **more} if field["name"] == name else field for field in ORDER_FIELDS]


def test_a_contract_is_found_by_the_ending_of_its_file(directory: Path) -> None:
    events = directory / "schemas" / "events"
    (events / "a@1.avsc").write_text(json.dumps(order_schema(**{"x-max-bytes": 99, "x-compatibility": "FULL"})))
    (events / "b@1.proto").write_text(
        ORDER_PROTO.replace("OPTIONS", 'option (headrace.payload) = {max_bytes: 98, framing: "confluent"};')
    )
    (avro, proto) = load_contract("a@1"), load_contract("b@1")
    assert (avro.format, avro.max_bytes, avro.compatibility, avro.is_framed) == ("avro", 99, "FULL", False)
    assert (proto.format, proto.max_bytes, proto.framing) == ("protobuf", 98, "confluent")
    assert str(avro.arrow_schema.field("tags").type) == "list<item: string>"
    assert avro.fields["at"]["x-unit"] == "ms"
    assert avro.fields["n"] == {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    assert proto.required == {"n"}
    assert "raw" not in {**avro.fields, **proto.fields}


def test_two_files_of_one_contract_are_refused(directory: Path) -> None:
    for ending in (".json", ".avsc"):
        (directory / "schemas" / "events" / f"a@1{ending}").write_text("{}")
    with pytest.raises(ConfigError, match=r"has the files .*a@1\.json.*a@1\.avsc, expected one"):
        load_contract("a@1")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a@1.avsc", "{", "a@1.avsc: it is no JSON"),
        ("a@1.avsc", '"string"', "is Avro of type 'string', expected a record"),
        ("a@1.avsc", '["null"]', "expected a record"),
        ("a@1.avsc", "3", "is no Avro schema"),
        ("a@1.avsc", json.dumps(order_schema([{"name": "a", "type": "nope"}])), "is no Avro schema: UnknownType"),
        ("a@1.avsc", json.dumps(order_schema([{"name": "a", "type": "bytes"}])), "field `a` is bytes, expected one of"),
        ("a@1.avsc", json.dumps(order_schema([{"name": "a", "type": ["int", "string"]}])), "is a union of"),
        ("a@1.avsc", json.dumps(order_schema([{"name": "a", "type": "int", "least": 1}])), "uses ['least'], expected"),
        (
            "a@1.avsc",
            json.dumps(order_schema([{"name": "a", "type": "int", "minLength": 1}])),
            "`minLength` 1 with",
        ),
        (
            "a@1.avsc",
            json.dumps(order_schema([{"name": "a", "type": "int", "x-ignored": 1}])),
            "expected true or false",
        ),
        ("a@1.avsc", json.dumps(order_schema(**{"x-framing": "odd"})), "`x-framing` 'odd', expected one of"),
        ("a@1.avsc", json.dumps(order_schema(more=1)), "uses ['more'], expected keywords"),
        (
            "a@1.avsc",
            json.dumps(order_schema([{"name": "a", "type": {"type": "array", "items": "null"}, "x-ignored": True}])),
            "an array of null, which takes no bytes",
        ),
        ("a@1.proto", 'syntax = "proto3";\nmessage A { strin a = 1; }', 'line 2:13: "strin" is not defined'),
        ("a@1.proto", 'syntax = "proto3";', "has no message, expected one"),
        ("a@1.proto", 'syntax = "proto3"; message A { bytes b = 1; }', "field `b` is bytes, expected a number"),
        ("a@1.proto", 'syntax = "proto3"; message A { map<string, int32> b = 1; }', "field `b` is A.BEntry, expected"),
        (
            "a@1.proto",
            'syntax = "proto3"; import "headrace/contract.proto"; '
            "message A { int32 b = 1 [(headrace.rules).required = true]; }",
            "`required`, expected it `optional`, too",
        ),
        (
            "a@1.proto",
            'syntax = "proto3"; import "headrace/contract.proto"; '
            "message A { int64 b = 1 [(headrace.rules).maximum = 1e18]; }",
            "`maximum` 1000000000000000000, expected at most 9007199254740992",
        ),
        (
            "a@1.proto",
            'syntax = "proto3"; import "headrace/contract.proto"; '
            'message A { int64 b = 1 [(headrace.rules).unit = "h"]; }',
            "`x-unit` 'h', expected one of",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(directory: Path, name: str, text: str, message: str) -> None:
    (directory / "schemas" / "events" / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_contract("a@1")
    assert name in str(caught.value)
    assert message in str(caught.value)


def between(old: Contract, new: Contract) -> tuple[list[str], list[str]]:
    """What is in the way of the new one as reader, and of the old one."""
    return unreadable(old.definition, new.definition), unreadable(new.definition, old.definition)


ADDED = [*ORDER_FIELDS, {"name": "more", "type": ["null", "string"], "default": None}]
DEMANDED = [*ORDER_FIELDS, {"name": "more", "type": "string"}]
LONG = changed("n", type="long")
SYMBOLS = changed("kind", type=["null", {"type": "enum", "name": "Kind", "symbols": ["view", "click", "buy"]}])


@pytest.mark.parametrize(
    ("fields", "options", "backward", "forward"),
    [
        (ORDER_FIELDS, CONFLUENT, "", ""),
        (ADDED, CONFLUENT, "", ""),
        (DEMANDED, CONFLUENT, "`more` is not written", ""),
        (ORDER_FIELDS[1:], CONFLUENT, "", "`key` is not written"),
        (LONG, CONFLUENT, "", "`n` is long, which is not read as int"),
        (SYMBOLS, CONFLUENT, "", "`kind` may be"),
        (changed("n", minimum=5), CONFLUENT, "has minimum 0, expected 5", ""),
        (changed("x", type="double", default=0.0), CONFLUENT, "`x` may be null", ""),
        # Plain payloads do not say what wrote them: fields stay as they are.
        (ADDED, {}, "the fields are", "the fields are"),
        (LONG, {}, "", "`n` has maximum 9223372036854775807, expected 2147483647"),
        (SYMBOLS, {}, "", "to begin with them"),
        (
            changed("x", type=["double", "null"], default=0.0),
            {},
            "`x` is null, expected double",
            "is double, expected null",
        ),
    ],
)
def test_avro_versions_fit_as_avro_resolves_them(
    fields: list[dict[str, Any]], options: dict[str, str], backward: str, forward: str
) -> None:
    found = between(avro_contract(**options), avro_contract(2, fields=fields, **options))
    for reasons, expected in zip(found, (backward, forward), strict=True):
        assert expected in "; ".join(reasons)
        assert bool(reasons) == bool(expected), reasons


@pytest.mark.parametrize(
    ("before", "after", "backward", "forward"),
    [
        ("int32 n = 3", "int32 n = 3", "", ""),
        ("int32 n = 3", "int64 n = 3", "", "`n` has maximum 9223372036854775807, expected 2147483647"),
        ("int32 n = 3", "sint32 n = 3", "which is int32 `n`, expected sint32", "which is sint32 `n`, expected int32"),
        ("optional int32 n = 3", "optional int32 n = 13", "`n` has number 3, expected 13", "`n` has number 13"),
        ("VIEW = 1; CLICK = 2;", "VIEW = 1; CLICK = 2; BUY = 3;", "", "`kind` may be ['BUY']"),
        (
            "VIEW = 1; CLICK = 2;",
            "CLICK = 1; VIEW = 2;",
            "`kind` has 'VIEW' as number 1",
            "`kind` has 'CLICK' as number 1",
        ),
        ("message Order", "message Orders", "the message is shop.Order, expected", "the message is shop.Orders"),
        ("repeated string tags", "string tags", "repeated string `tags`, expected string", "expected repeated string"),
        ("bytes raw = 8 [(headrace.rules).ignored = true];", "string more = 9;", "", ""),
    ],
)
def test_protobuf_versions_fit_by_their_numbers(before: str, after: str, backward: str, forward: str) -> None:
    assert before in ORDER_PROTO
    found = between(proto_contract(), proto_contract(2, text=ORDER_PROTO.replace(before, after)))
    for reasons, expected in zip(found, (backward, forward), strict=True):
        assert expected in "; ".join(reasons)
        assert bool(reasons) == bool(expected), reasons


def test_another_format_or_framing_is_another_contract() -> None:
    assert between(avro_contract(), proto_contract(2))[0] == ["payloads are avro, plain, expected protobuf, plain"]
    assert between(avro_contract(), avro_contract(2, **CONFLUENT))[0] == [
        "payloads are avro, plain, expected avro, confluent"
    ]
    assert between(avro_contract().as_plain_json, avro_contract(2))[0] == [
        "payloads are json, plain, expected avro, plain"
    ]


def test_records_of_all_formats_hold_new_versions_to_the_old_ones() -> None:
    full = {"x-compatibility": "FULL", **CONFLUENT}
    record_contracts([avro_contract(**CONFLUENT)])
    assert check_evolution([avro_contract(**CONFLUENT)]) == []
    with pytest.raises(ConfigError, match="not FORWARD: `n` is long, which is not read as int"):
        check_evolution([avro_contract(2, fields=LONG, **full)])
    assert check_evolution([avro_contract(2, fields=ADDED, **full)]) == ["order@2"]
    with pytest.raises(ConfigError, match=r"contract order@1 differs from its record"):
        check_evolution([avro_contract(fields=ADDED, **CONFLUENT)])


def test_texts_and_rules_that_decide_nothing_change_no_definition() -> None:
    worded = [{**field, "doc": "words"} for field in ORDER_FIELDS]
    assert avro_contract(fields=worded, doc="words").definition == avro_contract().definition
    assert proto_contract(text=f"// words\n{ORDER_PROTO}").definition == proto_contract().definition
