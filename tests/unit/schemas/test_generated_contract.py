import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from jsonschema import Draft202012Validator, ValidationError

from jobs.application import contracts_of
from jobs.flights import MODELS, VIEWS
from schemas.aggregation import count
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.evolution import check_evolution
from schemas.generated_contract import (
    avro_schema,
    check_generated,
    feature_json_schema,
    record_generated,
    render_contracts,
)
from schemas.model import ModelSpec
from schemas.score import score_row_schema
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.pipeline import PartitionPipeline
from streams.wire import encode_rows
from tests.support.feature_rows import T0_US, make_view
from tests.support.scoring import make_spec
from tests.support.transport import make_batch


def computed_rows(view: FeatureView) -> pa.Table:
    """Rows as the features role writes them, of every pane."""
    events: list[dict[str, Any]] = [
        {
            "user_id": f"u{number % 3}",
            "event_time": T0_US // 1_000 + 20_000 * number,
            "category": "a",
            "amount": number / 3,
        }
        for number in range(40)
    ]
    events += [{"user_id": "u1", "event_time": T0_US // 1_000 + 7_200_000, "prices": [1.0, 2.5], "clicked": True}]
    values = [json.dumps(event).encode() for event in events]
    batch = make_batch(values, topic="store.events", broker_time_us=T0_US + 10_000_000_000)
    pipeline = PartitionPipeline(view.sources[0], [view], partition=0)
    rows = pipeline.process(batch, processing_time_us=0, computed_time_us=T0_US, epoch=3).rows[view.name]
    assert {*rows["pane"].to_pylist()} == {"EARLY", "ON_TIME", "EMPTY"}
    return rows


def test_rows_of_every_pane_pass_the_json_schema_of_their_view() -> None:
    view = make_view()
    validator = Draft202012Validator(feature_json_schema(view), format_checker=Draft202012Validator.FORMAT_CHECKER)
    for row in encode_rows(computed_rows(view)):
        validator.validate(json.loads(row))


def test_rows_come_back_from_avro_as_they_were() -> None:
    view = make_view()
    schema = fastavro.parse_schema(avro_schema(view))
    for row in computed_rows(view).to_pylist():
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema, row, strict=True)
        buffer.seek(0)
        assert fastavro.schemaless_reader(buffer, schema) == row


@pytest.mark.parametrize(
    "change",
    [
        {"clicks_5m": "1"},
        {"clicks_5m": 1.5},
        {"amounts": [1.0, "x"]},
        {"pane": "SOON"},
        {"definition_hash": "0" * 16},
        {"window_end": None},
        {"user_id": None},
        {"further": 1},
    ],
)
def test_what_is_no_row_of_the_view_does_not_pass(change: dict[str, object]) -> None:
    view = make_view()
    row = json.loads(encode_rows(computed_rows(view))[0])
    with pytest.raises(ValidationError):
        Draft202012Validator(feature_json_schema(view)).validate(row | change)


def test_scores_fit_their_avro_schema() -> None:
    spec = make_spec()
    schema = avro_schema(spec)
    fastavro.parse_schema(schema)
    assert [field["name"] for field in schema["fields"]] == score_row_schema(spec).names


@pytest.mark.parametrize("definition", [*VIEWS, *MODELS], ids=lambda definition: definition.name)
def test_what_is_recorded_of_the_flights_is_what_their_definitions_say(definition: FeatureView | ModelSpec) -> None:
    assert check_generated([definition]) == []
    texts = render_contracts(definition)
    assert texts == render_contracts(definition)
    assert {*texts} == {".json", ".avsc"}
    Draft202012Validator.check_schema(json.loads(texts[".json"]))
    fastavro.parse_schema(json.loads(texts[".avsc"]))


def test_the_contracts_of_the_flights_are_recorded() -> None:
    assert check_evolution(contracts_of(VIEWS)) == []


def test_a_recorded_contract_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    view, spec = make_view(), make_spec()
    missing = ["features/user_activity@1.json", "features/user_activity@1.avsc"]
    missing += ["scores/delay@1.json", "scores/delay@1.avsc"]
    assert check_generated([view, spec]) == missing
    assert record_generated([view, spec]) == [tmp_path / "schemas" / name for name in missing]
    assert check_generated([view, spec]) == record_generated([view, spec]) == []
    changed = make_spec(inputs=spec.inputs[:1])
    with pytest.raises(ConfigError, match=r"delay@1.json differs from what model delay version 1 says; raise the ver"):
        check_generated([changed])


def test_a_column_without_an_avro_name_leaves_the_json_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    document = {"type": "object", "properties": {"größe": {"type": "string"}, "event_time": {"type": "string"}}}
    (tmp_path / "schemas" / "events" / "dashed@1.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    source = EventSource("dashed", contract="dashed@1")
    features = {"n_1m": count().over("1m")}
    view = FeatureView(
        "dashed", version=1, entity=Entity("user", key="größe"), source=source, slide="1m", features=features
    )
    assert {*render_contracts(view)} == {".json"}
    with pytest.raises(ConfigError, match="column 'größe' of dashed has no Avro schema, expected letters, digits"):
        avro_schema(view)
