import json
from pathlib import Path
from typing import Any

import pytest

from schemas.contract import Contract, load_contract
from schemas.errors import ConfigError
from schemas.field import FIELD_KEYWORDS

FIELDS = {"user_id": {"type": "string"}, "amount": {"type": ["number", "null"], "minimum": 0}}


def document(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": FIELDS, "required": ["user_id"], **more}


def test_fields_become_columns_in_order() -> None:
    contract = Contract("shop@1", document())
    assert [(field.name, str(field.type)) for field in contract.arrow_schema] == [
        ("user_id", "string"),
        ("amount", "double"),
    ]
    assert (contract.is_nullable("user_id"), contract.is_nullable("amount")) == (False, True)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (document(additionalProperties=False), "additionalProperties"),
        (document(anyOf=[{"required": ["amount"]}]), "anyOf"),
        (document(minProperties=1), "minProperties"),
        (
            document(properties={"a": {"type": "string", "contentEncoding": "base64"}}),
            "contentEn",
        ),
        (document(properties={"a": {"type": ["string", "integer"]}}), r"\['string', 'integer'\]"),
        (document(properties={"a": {}}), "field `a` has `type` None"),
        (document(properties={}), "properties"),
        (document(required=["nobody"]), "nobody"),
        (document(type="array"), "'array'"),
        (document(**{"x-max-bytes": 0}), "`x-max-bytes` 0, expected a whole number of bytes, 1 or more"),
        (document(**{"x-max-bytes": "1 MB"}), "`x-max-bytes` '1 MB', expected a whole number"),
        (document(properties={"a": {"type": "string", "pattern": 3}}), "no valid JSON Schema"),
    ],
)
def test_what_columns_cannot_check_is_refused(broken: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        Contract("shop@1", broken)
    assert "shop@1" in str(refusal.value)


@pytest.mark.parametrize("reference", ["shop", "@1", "shop@", "shop@one"])
def test_a_reference_names_a_version(reference: str) -> None:
    with pytest.raises(ConfigError, match="expected name@version"):
        load_contract(reference)


def test_a_missing_contract_names_the_file_that_was_expected() -> None:
    with pytest.raises(ConfigError, match=r"schemas/events/nowhere@1\.json"):
        load_contract("nowhere@1")


TEXTS = {"type": "string"}


@pytest.mark.parametrize(
    ("field", "keyword", "got", "expected"),
    [
        ({"type": "string", "minimum": 1}, "minimum", "1 with type 'string'", "with type 'integer' or 'number' alone"),
        ({"type": "boolean", "exclusiveMaximum": 1}, "exclusiveMaximum", "1 with type 'boolean'", "'integer' or 'num"),
        ({"type": "integer", "pattern": "^a"}, "pattern", "'^a' with type 'integer'", "with type 'string' alone"),
        ({"type": ["null", "number"], "maxLength": 3}, "maxLength", "3 with type 'number'", "with type 'string' alone"),
        (
            {"type": "array", "items": TEXTS, "minLength": 3},
            "minLength",
            "3 with type 'array'",
            "a array takes",
        ),
        ({"type": "array", "items": TEXTS, "enum": [["a"]]}, "enum", "[['a']] with type 'array'", "'boolean' or"),
        ({"type": "string", "items": TEXTS}, "items", "{'type': 'string'} with type 'string'", "type 'array' alone"),
        ({"type": "integer", "format": "date-time"}, "format", "'date-time' with type", "type 'string' alone"),
        ({"type": "string", "x-unit": "ms"}, "x-unit", "'ms' with type 'string'", "type 'integer' alone"),
        ({"type": "integer", "x-unit": "ns"}, "x-unit", "'ns'", "one of ['ms', 's', 'us']"),
        ({"type": "integer", "x-unit": ["ms"]}, "x-unit", "['ms']", "one of ['ms', 's', 'us']"),
        ({"type": "string", "pattern": "[a-"}, "pattern", "'[a-'", "a regular expression as Python reads it (unterm"),
        ({"type": "string", "pattern": "a{99999999999}"}, "pattern", "'a{9", "as Python reads it (the repetition"),
        ({"type": "string", "maxLength": 10**12}, "maxLength", "1000000000000", "at most 2147483647"),
        ({"type": "integer", "maximum": 2**63}, "maximum", "9223372036854775808", "whole number of -92233"),
        ({"type": "integer", "minimum": 1e300}, "minimum", "1e+300", "whole number of -92233"),
        ({"type": "number", "maximum": 2**60 + 1}, "maximum", "1152921504606846977", "finite number that float64 can"),
        ({"type": "number", "maximum": 10**400}, "maximum", "1000", "finite number that float64 can hold"),
        ({"type": "number", "maximum": float("nan")}, "maximum", "nan", "finite number that float64 can hold"),
        ({"type": "integer", "maximum": float("inf")}, "maximum", "inf", "whole number of -92233"),
        ({"type": "string", "enum": ["a", 1]}, "enum", "['a', 1]", "one value or more, each a text"),
        ({"type": "string", "enum": ["a", None]}, "enum", "['a', None]", "one value or more, each a text"),
        ({"type": ["string", "null"], "enum": [None, 1]}, "enum", "[None, 1]", "each a text or null"),
        ({"type": "integer", "enum": [1, 1.5]}, "enum", "[1, 1.5]", "each a whole number of"),
        ({"type": "integer", "enum": [True]}, "enum", "[True]", "each a whole number of"),
        ({"type": "integer", "enum": [2**64]}, "enum", "[18446744073709551616]", "each a whole number of"),
        ({"type": "number", "enum": [2**60 + 1]}, "enum", "[1152921504606846977]", "float64 can hold"),
        ({"type": "boolean", "enum": [0]}, "enum", "[0]", "each true or false"),
        ({"type": "string", "enum": []}, "enum", "[]", "one value or more"),
    ],
)
def test_a_rule_that_does_not_fit_its_field_is_refused(
    field: dict[str, Any], keyword: str, got: str, expected: str
) -> None:
    for name, properties in (("a", field), ("a[]", {"type": "array", "items": field})):
        with pytest.raises(ConfigError) as refusal:
            Contract("shop@1", {"type": "object", "properties": {"a": properties}})
        message = str(refusal.value)
        assert f"contract shop@1, field `{name}` has `{keyword}` {got}" in message
        assert ", expected " in message
        assert expected in message


def test_an_unknown_keyword_is_refused_with_the_list_of_known_ones() -> None:
    for name, field in (
        ("a", {"type": "string", "multipleOf": 2}),
        ("a[]", {"type": "array", "items": {"type": "string", "multipleOf": 2}}),
    ):
        with pytest.raises(ConfigError) as refusal:
            Contract("shop@1", {"type": "object", "properties": {"a": field}})
        assert f"field `{name}` uses ['multipleOf'], expected keywords among {sorted(FIELD_KEYWORDS)}" in str(
            refusal.value
        )


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"type": "array"}, "field `a` has no `items`, expected the rules of what is in the list"),
        ({"type": "array", "items": True}, r"field `a\[\]` is True, expected an object"),
        (True, "field `a` is True, expected an object"),
        ({"type": "array", "items": {"type": "array"}}, r"field `a\[\]` has no `items`"),
        ({"type": "array", "items": {"type": "object"}}, r"field `a\[\]` has `type` 'object', expected one of"),
        ({"type": "null"}, "field `a` has `type` 'null', expected one of"),
    ],
)
def test_a_field_without_a_type_of_its_own_is_refused(field: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Contract("shop@1", {"type": "object", "properties": {"a": field}})


@pytest.mark.parametrize(
    "field",
    [
        {
            "type": "integer",
            "minimum": 0.5,
            "exclusiveMaximum": 1e18,
            "maximum": 2**63 - 1,
            "exclusiveMinimum": -(2**63),
        },
        {"type": ["number", "null"], "minimum": 2**60, "maximum": 1e308, "enum": [1, 2.5, None]},
        {"type": "integer", "enum": [1.0, 2**63 - 1]},
        {"type": "boolean", "enum": [True]},
        {
            "type": "string",
            "pattern": r"^(?!x)\w+$",
            "minLength": 1,
            "maxLength": 8.0,
            "format": "uri",
            "$comment": "x",
        },
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "maximum": 3}}},
    ],
)
def test_a_rule_that_fits_its_field_is_taken(field: dict[str, Any]) -> None:
    Contract("shop@1", {"type": "object", "properties": {"a": field}})


def test_a_broken_contract_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schemas" / "events" / "wrong@1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"type": "object", "properties": {"a": {"type": "string", "minimum": 3}}}))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        ConfigError, match=r"contract file .*wrong@1\.json: contract wrong@1, field `a` has `minimum` 3"
    ):
        load_contract("wrong@1")


def test_a_nullable_field_whose_enum_leaves_null_out_is_not_nullable() -> None:
    fields = {"a": {"type": ["string", "null"], "enum": ["x"]}, "b": {"type": ["string", "null"], "enum": ["x", None]}}
    contract = Contract("shop@1", {"type": "object", "properties": fields})

    assert (contract.is_nullable("a"), contract.is_nullable("b")) == (False, True)


def test_that_a_field_is_personal_is_no_rule_and_is_yes_or_no() -> None:
    fields = {"email": {"type": "string", "x-pii": True}, "names": {"type": "array", "items": {"type": "string"}}}
    marked = Contract("c@1", {"type": "object", "properties": fields})
    plain = Contract("c@1", {"type": "object", "properties": {**fields, "email": {"type": "string"}}})
    assert (marked.personal, plain.personal) == ({"email"}, frozenset())
    assert marked.definition == plain.definition
    with pytest.raises(ConfigError, match="field `email` has `x-pii` 'yes', expected true or false"):
        Contract("c@1", {"type": "object", "properties": {"email": {"type": "string", "x-pii": "yes"}}})
