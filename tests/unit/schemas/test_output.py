"""Output columns of a model: which values are valid, what is decided by them, and how that is declared."""

from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.output import Decision, ModelOutput, read_calibrations
from schemas.score import score_json_schema, score_row_schema
from tests.support.scoring import make_spec

NAN, INF = float("nan"), float("inf")


def output(**changes: Any) -> ModelOutput:
    return ModelOutput(**{"column": "answer", "tensor": "answers"} | changes)


@pytest.mark.parametrize(
    ("declared", "valid", "invalid"),
    [
        ({}, [0.0, -1e30, 0.5], [NAN, INF, -INF]),
        ({"minimum": 0, "maximum": 1}, [0.0, 1.0], [-1e-9, 1.0000001, NAN, INF]),
        ({"minimum": -0.1, "maximum": 0.1}, [float(np.float32(0.1)), float(np.float32(-0.1))], [0.10001, -0.10001]),
        ({"type": "integer"}, [0.0, -3.0, 2.0**53 - 1], [0.5, 2.0**53, -(2.0**53), 1e30, -1e30, NAN, INF]),
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
        ({"maximum": "1"}, r"`maximum` is '1', expected a number; leave it out"),
        ({"rounded_to": "0.1"}, r"`rounded_to` is '0.1', expected a number"),
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


def decision(**changes: Any) -> Decision:
    return Decision(
        **{"column": "risk", "output": "answer", "below": "low", "at_least": ((0.3, "some"), (0.7, "high"))} | changes
    )


def test_a_value_on_a_threshold_has_reached_it():
    below = np.nextafter(np.float32([0.3, 0.7]), np.float32(0))
    values = np.array([-1e30, 0, below[0], 0.3, 0.5, below[1], 0.7, 1e30], dtype=np.float32)

    words = ["low", "low", "low", "some", "some", "some", "high", "high"]
    assert decision().decide(values).to_pylist() == words
    assert decision().decide(np.empty(0, np.float32)).to_pylist() == []


def test_integers_are_decided_by_thresholds_between_them_too():
    made = decision(at_least=((1.5, "some"), (3, "high")))

    assert made.decide(np.array([1, 2, 3, 2**53])).to_pylist() == ["low", "some", "high", "high"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "answer"}, r"output column 'answer', expected a lower-case name, used once"),
        ({"column": "entity"}, r"output column 'entity', expected a lower-case name, used once and none of"),
        ({"output": "other"}, r"decision risk: `output` is 'other', no output; expected an output that is a number"),
        ({"output": "is_so"}, r"`output` is 'is_so', a boolean, which says yes or no itself"),
        ({"at_least": ()}, r"got the words \['low'\], expected at least one in `at_least`"),
        ({"below": ""}, r"got the words \['', 'some', 'high'\], .* none empty"),
        ({"below": "high"}, r"got the words \['high', 'some', 'high'\], .* each once"),
        ({"at_least": ((0.7, "a"), (0.3, "b"))}, r"thresholds are \[0.7, 0.3\], expected .* above the one before"),
        ({"at_least": ((0.5, "a"), (0.5 + 1e-12, "b"))}, r"each \(as float32\) above the one before"),
        ({"at_least": ((0, "a"),)}, r"thresholds are \[0\], expected .* above the minimum 0 and no"),
        ({"at_least": ((1e-60, "a"),)}, r"thresholds are \[1e-60\], expected"),
        ({"at_least": ((1.1, "a"),)}, r"thresholds are \[1.1\], expected .* no higher than the maximum 1 of `answer`"),
        ({"at_least": ((NAN, "a"),)}, r"thresholds are \[nan\], expected finite numbers"),
        ({"at_least": ((1e300, "a"),)}, r"thresholds are \[1e\+300\], expected finite numbers"),
        ({"at_least": (("much", "a"),)}, r"thresholds are \['much'\], expected finite numbers"),
    ],
)
def test_a_decision_that_cannot_say_all_its_words_is_refused(changes: dict[str, Any], message: str):
    outputs = (
        output(width=2, minimum=0, maximum=1),
        output(column="is_so", width=2, index=1, type="boolean"),
    )
    with pytest.raises(ConfigError, match=message):
        make_spec(outputs=outputs, decisions=(decision(**changes),))


def test_the_published_schema_has_the_words_and_says_when():
    spec = make_spec(outputs=(output(),), decisions=(decision(description="How risky."),))

    assert score_json_schema(spec)["properties"]["risk"] == {
        "enum": ["low", "some", "high"],
        "description": "How risky. By `answer`: low, from 0.3 on some, from 0.7 on high.",
    }
    assert score_row_schema(spec).names == list(score_json_schema(spec)["properties"])


def test_a_calibration_is_straight_between_its_points_and_level_beyond():
    points = [[0.2, 0.1], [0.4, 0.5], [0.8, 0.5]]
    table = read_calibrations({"answer": points}, [output()], where="model delay")["answer"]

    calibrated = table.apply(np.array([-5.0, 0.2, 0.3, 0.4, 0.6, 5.0, NAN]))
    np.testing.assert_allclose(calibrated, [0.1, 0.1, 0.3, 0.5, 0.5, 0.5, NAN])
    assert table.apply(np.empty(0)).tolist() == []
    assert read_calibrations(None, [output()], where="model delay") == {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("much", r"`calibration` is 'much', expected points by column, of \['answer'\], .*; correct the card"),
        ({"other": [[0, 0], [1, 1]]}, r"`calibration` is {'other': .*}, expected points by column"),
        ({"grade": [[0, 0], [1, 1]]}, r"expected points by column, of \['answer'\], which are numbers from FP32"),
        ({"answer": []}, r"calibration of answer: got \[\], expected two or more points"),
        ({"answer": [[0, 0]]}, r"expected two or more points"),
        ({"answer": [[0, 0, 0], [1, 1, 1]]}, r"expected two or more points"),
        ({"answer": [[0, 0], [1]]}, r"expected two or more points"),
        ({"answer": [[0, 0], [1, None]]}, r"expected two or more points"),
        ({"answer": [[0, 0], [1, INF]]}, r"expected two or more points \[answered, calibrated\], finite"),
        ({"answer": {"0": 0}}, r"expected two or more points"),
        ({"answer": [[0, 0], [0, 1]]}, r"expected the first to rise and the second never to fall"),
        ({"answer": [[0, 1], [1, 0]]}, r"expected the first to rise and the second never to fall"),
        ({"answer": [[0, 0], [1, 1.5]]}, r"`answer` is 1.5, expected a finite number within \[0, 1\]; correct"),
    ],
)
def test_a_calibration_that_is_none_is_refused(document: Any, message: str):
    outputs = [output(minimum=0, maximum=1), output(column="grade", type="integer")]
    with pytest.raises(ConfigError, match=message):
        read_calibrations(document, outputs, where="model delay version 3")


def test_a_number_is_rounded_to_a_step_and_stays_within_its_bounds():
    made = output(minimum=0, maximum=0.99, rounded_to=0.25)
    values = np.array([0.0, 0.124, 0.125, 0.2, 0.375, 0.99], dtype=np.float32)

    assert made.published(values).tolist() == [0.0, 0.0, 0.0, 0.25, 0.5, pytest.approx(0.99)]
    assert made.published(values).dtype == np.float32
    assert made.published(np.empty(0, np.float32)).tolist() == []


def test_rounding_makes_no_negative_zero_and_nothing_infinite():
    largest = np.finfo(np.float32).max
    rounded = output(rounded_to=1e9).published(np.array([-1.0, largest, -largest], dtype=np.float32))
    assert np.isfinite(rounded).all()
    assert not np.signbit(rounded[0])
    assert np.isfinite(output(rounded_to=1e-6).published(np.array([largest], dtype=np.float32))).all()


def test_a_fault_does_not_tell_dead_letters_what_scores_do_not():
    for masked in (output(maximum=1, is_published=False), output(maximum=1, rounded_to=0.1)):
        assert masked.fault(1.25, is_masked=True) == "`answer` is masked, expected a finite number within [1]"
        assert masked.fault(1.25) == "`answer` is 1.25, expected a finite number within [1]"
        assert masked.fault(NAN, is_masked=True) == "`answer` is nan, expected a finite number within [1]"
    assert output(maximum=1).fault(1.25, is_masked=True) == "`answer` is 1.25, expected a finite number within [1]"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"rounded_to": 0}, r"`rounded_to` is 0 of a number, expected 1e-6 to 1e9"),
        ({"rounded_to": -0.1}, r"`rounded_to` is -0.1 of a number"),
        ({"rounded_to": NAN}, r"`rounded_to` is nan of a number"),
        ({"rounded_to": INF}, r"`rounded_to` is inf of a number"),
        ({"rounded_to": 5, "type": "integer"}, r"`rounded_to` is 5 of a integer, expected .* of a number"),
        ({"rounded_to": 0.1, "is_published": False}, r"`rounded_to` is 0.1 of a number that is not published"),
        ({"is_published": False}, r"no output has `is_published` and there are no `decisions`, expected one of them"),
    ],
)
def test_a_wrong_mask_is_refused(declared: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_spec(outputs=(output(**declared),))


def test_the_published_schema_has_no_masked_output_and_tells_of_rounding():
    spec = make_spec(
        outputs=(
            output(width=2, is_published=False),
            output(column="rough", width=2, index=1, rounded_to=0.05, description="How risky."),
        ),
        decisions=(decision(),),
    )

    properties = score_json_schema(spec)["properties"]
    assert "answer" not in properties
    assert properties["rough"] == {"type": "number", "description": "How risky. Rounded to multiples of 0.05."}
    assert score_row_schema(spec).names == list(properties)
