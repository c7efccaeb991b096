import json

import pyarrow as pa
import pytest
from jsonschema import Draft202012Validator, ValidationError

from schemas.generated_contract import render_contracts
from schemas.model import SCORE_COLUMNS
from schemas.score import score_json_schema, score_row_schema
from schemas.text_time import with_text_times
from tests.support.scoring import make_spec

SCORE = {
    "request_id": "r",
    "entity": "e",
    "model": "delay",
    "model_version": "1",
    "model_sha256": "0" * 64,
    "arm": "canary",
    "served_by": "cache",
    "probability": 0.5,
    "event_time": "2013-01-01T00:00:00.000000Z",
    "features": {
        name: {"version": 1, "hash": "0" * 16, "event_time": None, "age_ms": None, "status": "missing"}
        for name in ("trips", "carrier_trips", "aircraft_trips")
    },
    "complete": False,
    "watermark": None,
    "supersedes": None,
    "latency_ms": dict.fromkeys(("features", "queue", "lookup", "inference", "total"), 1.0),
}


def test_the_schema_is_a_json_schema_of_draft_2020_12():
    document = json.loads(render_contracts(make_spec())[".json"])

    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(document)
    Draft202012Validator(document).validate(SCORE)


def test_row_and_schema_have_the_same_columns():
    spec = make_spec()

    assert list(score_json_schema(spec)["properties"]) == score_row_schema(spec).names
    assert {*score_row_schema(spec).names} == {*SCORE_COLUMNS, "probability"}


@pytest.mark.parametrize(
    "change",
    [
        {"probability": 1.01},
        {"probability": None},
        {"model": "other"},
        {"arm": "winner"},
        {"served_by": "magic"},
        {"model_sha256": "?"},
        {"event_time": 5},
        {"entity": ""},
        {"complete": None},
        {"features": {"trips": {}}},
        {"features": SCORE["features"] | {"more": SCORE["features"]["trips"]}},
        {"latency_ms": {}},
        {"latency_ms": SCORE["latency_ms"] | {"queue": -1}},
        {"further": 1},
    ],
)
def test_what_is_no_score_does_not_pass(change: dict[str, object]):
    with pytest.raises(ValidationError):
        Draft202012Validator(score_json_schema(make_spec())).validate(SCORE | change)


@pytest.mark.parametrize("column", list(SCORE))
def test_no_column_may_lack(column: str):
    without = {name: value for name, value in SCORE.items() if name != column}
    with pytest.raises(ValidationError, match="is a required property"):
        Draft202012Validator(score_json_schema(make_spec())).validate(without)


def test_nested_times_are_written_as_text_too():
    time = pa.timestamp("us", "UTC")
    table = pa.table(
        {
            "at": pa.array([1, None], time),
            "nested": pa.array(
                [{"in": {"at": 1_500_000}}, {"in": {"at": None}}], pa.struct([("in", pa.struct([("at", time)]))])
            ),
            "n": [1, 2],
        }
    )

    assert with_text_times(table).to_pylist() == [
        {"at": "1970-01-01T00:00:00.000001Z", "nested": {"in": {"at": "1970-01-01T00:00:01.500000Z"}}, "n": 1},
        {"at": None, "nested": {"in": {"at": None}}, "n": 2},
    ]
