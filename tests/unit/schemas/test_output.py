"""Output columns of a model: which values are valid, and how they are declared."""

from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.output import ModelOutput
from schemas.score import score_json_schema
from tests.support.scoring import make_spec

NAN, INF = float("nan"), float("inf")


def output(**changes: Any) -> ModelOutput:
    return ModelOutput(**{"column": "answer", "tensor": "answers"} | changes)


@pytest.mark.parametrize(
    ("declared", "valid", "invalid"),
    [
        ({}, [0.0, -1e30, 0.5], [NAN, INF, -INF]),
        ({"minimum": 0, "maximum": 1}, [0.0, 1.0], [-1e-9, 1.0000001, NAN, INF]),
        ({"type": "integer"}, [0.0, -3.0, 2.0**53], [0.5, 1e30, -1e30, NAN, INF]),
        ({"type": "integer", "values": (1, 3)}, [1.0, 3.0], [0.0, 2.0, 4.0, 1.5, NAN]),
        ({"type": "boolean"}, [0.0, 1.0], [2.0, -1.0, 0.5, NAN]),
    ],
)
def test_each_value_is_valid_by_itself(declared: dict[str, Any], valid: list[float], invalid: list[float]):
    is_wrong = output(**declared).wrong(np.array(valid + invalid))

    assert is_wrong.tolist() == [False] * len(valid) + [True] * len(invalid)
    assert output(**declared).wrong(np.empty(0)).tolist() == []


@pytest.mark.parametrize(
    ("declared", "value", "fault"),
    [
        ({"type": "integer", "values": (1, 3)}, 2.0, "`answer` is 2, expected a finite integer of [1, 3]"),
        ({"type": "integer"}, 1e30, "`answer` is 1e+30, expected a finite integer of at most 53 bits"),
        ({"minimum": 0}, NAN, "`answer` is nan, expected a finite number within [0]"),
    ],
)
def test_a_fault_says_what_was_expected(declared: dict[str, Any], value: float, fault: str):
    assert output(**declared).fault(value) == fault


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"minimum": 1, "maximum": 0}, r"`minimum` is 1 and `maximum` 0, expected finite numbers, the first no larger"),
        ({"minimum": NAN}, r"`minimum` is nan and `maximum` None, expected finite"),
        ({"maximum": INF}, r"`maximum` inf, expected finite"),
        ({"values": (1, 2)}, r"`values` is \(1, 2\) of a number, expected them of an integer only"),
        (
            {"type": "integer", "values": (1, 1)},
            r"`values` is \(1, 1\), expected integers within its bounds, each once",
        ),
        ({"type": "integer", "values": (1.5,)}, r"`values` is \(1.5,\), expected integers"),
        ({"type": "integer", "values": (True,)}, r"`values` is \(True,\), expected integers"),
        ({"type": "integer", "values": (5,), "maximum": 4}, r"`values` is \(5,\), expected integers within its bounds"),
        ({"type": "integer", "values": (10**30,)}, r"expected integers within its bounds"),
    ],
)
def test_a_wrong_declaration_is_refused(declared: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_spec(outputs=(output(**declared),))


def test_the_published_schema_has_the_values():
    spec = make_spec(outputs=(output(type="integer", values=(3, 1)),))

    assert score_json_schema(spec)["properties"]["answer"] == {"type": "integer", "enum": [3, 1]}
