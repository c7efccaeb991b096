from typing import Any

import pytest

from schemas.contract import Contract, load_contract
from schemas.errors import ConfigError

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
        (document(properties={"a": {}}), "field `a` has type None"),
        (document(properties={}), "properties"),
        (document(required=["nobody"]), "nobody"),
        (document(type="array"), "'array'"),
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
