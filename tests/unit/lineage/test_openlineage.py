import json
import logging
import threading
import uuid
from typing import Any

import attr
import jsonschema
import pytest
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    dataset_type_dataset,
    dataset_version_dataset,
    input_statistics_input_dataset,
    job_type_job,
    nominal_time_run,
    output_statistics_output_dataset,
    ownership_dataset,
    processing_engine_run,
    schema_dataset,
    storage_dataset,
    tags_run,
)
from openlineage.client.serde import Serde
from openlineage.client.transport import Config, Transport

from schemas.errors import ConfigError
from schemas.ladder import NO_LADDER
from schemas.model import ModelInput, ModelSpec, ViewReference
from schemas.output import ModelOutput
from schemas.time import parse_rfc3339_us
from streams.lineage.dataset import FACETS, FeatureViewDatasetFacet, KafkaOffsetsInputDatasetFacet, Stores
from streams.lineage.openlineage import LineageEmitter
from tests.support.feature_rows import T0_US, make_view

VIEW = make_view()
STORES = Stores(kafka="kafka-1:9092,kafka-2:9092", redis="redis://user:secret@redis:6379/3", delta="s3://lake/features")
FACET_CLASSES: dict[str, Any] = {
    "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet,
    "version": dataset_version_dataset.DatasetVersionDatasetFacet,
    "ownership": ownership_dataset.OwnershipDatasetFacet,
    "schema": schema_dataset.SchemaDatasetFacet,
    "storage": storage_dataset.StorageDatasetFacet,
    "inputStatistics": input_statistics_input_dataset.InputStatisticsInputDatasetFacet,
    "outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
    "jobType": job_type_job.JobTypeJobFacet,
    "nominalTime": nominal_time_run.NominalTimeRunFacet,
    "processing_engine": processing_engine_run.ProcessingEngineRunFacet,
    "tags": tags_run.TagsRunFacet,
    "headrace_kafkaOffsets": KafkaOffsetsInputDatasetFacet,
    "headrace_featureView": FeatureViewDatasetFacet,
}


class RecordingTransport(Transport):
    """Keeps events as JSON; may refuse them, or hold them until told to go on."""

    kind = "recording"
    config_class = Config

    def __init__(self, *, refuses: bool = False, holds: bool = False) -> None:
        self.refuses = refuses
        self.entered = threading.Event()
        self.go = threading.Event()
        if not holds:
            self.go.set()
        self.events: list[dict[str, Any]] = []

    def emit(self, event: Any) -> None:
        self.entered.set()
        assert self.go.wait(20)
        if self.refuses:
            msg = "no thanks"
            raise RuntimeError(msg)
        self.events.append(json.loads(Serde.to_json(event)))


class Counts:
    def __init__(self) -> None:
        self.sent = 0
        self.lost: dict[str, int] = {}

    def lineage_sent(self) -> None:
        self.sent += 1

    def lineage_failed(self, reason: str, *, events: int = 1) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + events


def tell(emitter: LineageEmitter, role: str = "online", **changes: Any) -> None:
    note = {"view": VIEW, "topic": VIEW.topic, "partition": 0, "offsets": (0, 10), "rows": 10, "started_us": T0_US}
    emitter.batch_done(role, **{**note, **changes})


def events_of(*, role: str = "online", **changes: Any) -> list[dict[str, Any]]:
    transport = RecordingTransport()
    with LineageEmitter(transport, stores=STORES, clock_us=lambda: T0_US + 250_000) as emitter:
        tell(emitter, role, **changes)
    return transport.events


def rebuild(event: dict[str, Any]) -> RunEvent:
    """Read an event with the library's own classes; they refuse what their schema does not know."""

    def facets(found: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for key, facet in found.items():
            fields = {name: value for name, value in facet.items() if name not in ("_producer", "_schemaURL")}
            made[key] = FACET_CLASSES[key](**fields, producer=facet["_producer"])
            assert made[key]._schemaURL == facet["_schemaURL"]
        return made

    def inputs(found: dict[str, Any]) -> InputDataset:
        read = facets(found["inputFacets"])
        return InputDataset(found["namespace"], found["name"], facets=facets(found["facets"]), inputFacets=read)

    def outputs(found: dict[str, Any]) -> OutputDataset:
        written = facets(found["outputFacets"])
        return OutputDataset(found["namespace"], found["name"], facets=facets(found["facets"]), outputFacets=written)

    job = event["job"]
    return RunEvent(
        eventType=RunState(event["eventType"]),
        eventTime=event["eventTime"],
        producer=event["producer"],
        run=Run(event["run"]["runId"], facets=facets(event["run"]["facets"])),
        job=Job(job["namespace"], job["name"], facets=facets(job["facets"])),
        inputs=[inputs(found) for found in event["inputs"]],
        outputs=[outputs(found) for found in event["outputs"]],
    )


class TestEvents:
    @pytest.mark.parametrize("role", ["features", "online", "offline"])
    def test_an_event_is_read_back_the_same_by_the_library(self, role: str) -> None:
        (event,) = events_of(role=role)
        assert json.loads(Serde.to_json(rebuild(event))) == event

    def test_a_batch_is_one_complete_run(self) -> None:
        (event,) = events_of()
        assert (event["eventType"], event["eventTime"]) == ("COMPLETE", "2023-11-14T22:13:20.250000Z")
        assert event["job"] | {"facets": None} == {
            "namespace": "headrace",
            "name": "online.user_activity",
            "facets": None,
        }
        assert event["run"]["facets"]["nominalTime"]["nominalStartTime"] == "2023-11-14T22:13:20.000000Z"
        assert event["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
        assert event["job"]["facets"]["jobType"]["emissionPattern"]["eventContentMode"] == "COMPLETE_SNAPSHOT"
        assert event["producer"].startswith("urn:headrace:")
        assert "sourceCodeLocation" not in event["job"]["facets"]

    def test_run_ids_rise_with_time(self) -> None:
        ids = [uuid.UUID(events_of()[0]["run"]["runId"]) for _ in range(2)]
        assert [run_id.version for run_id in ids] == [7, 7]
        assert ids[0] != ids[1]

    def test_what_was_read_says_which_offsets_of_which_partition(self) -> None:
        (event,) = events_of(partition=3, offsets=(100, 120), rows=18)
        (read,) = event["inputs"]
        assert (read["namespace"], read["name"]) == ("kafka://kafka-1:9092", "features.user_activity")
        assert read["inputFacets"]["inputStatistics"]["rowCount"] == 18
        assert read["inputFacets"]["headrace_kafkaOffsets"]["partitions"] == [
            {"partition": 3, "startOffset": 100, "endOffset": 120, "rowCount": 18}
        ]

    @pytest.mark.parametrize(
        ("role", "namespace", "name"),
        [
            ("features", "kafka://kafka-1:9092", "features.user_activity"),
            ("online", "redis://redis:6379", "headrace:user_activity:v1"),
            ("offline", "s3://lake", "features/user_activity/v1"),
        ],
    )
    def test_what_was_written_says_where_and_under_which_definition(self, role: str, namespace: str, name: str) -> None:
        (event,) = events_of(role=role, output_rows=7)
        (written,) = event["outputs"]
        assert (written["namespace"], written["name"]) == (namespace, name)
        assert written["outputFacets"]["outputStatistics"]["rowCount"] == 7
        assert written["facets"]["version"]["datasetVersion"] == f"v1@{VIEW.definition_hash}"
        assert written["facets"]["headrace_featureView"]["definitionHash"] == VIEW.definition_hash
        fields = {field["name"]: field["type"] for field in written["facets"]["schema"]["fields"]}
        assert fields["clicks_5m"] == "int64"
        assert fields["prices"] == "list<item: list<item: double>>"
        assert list(fields) == VIEW.row_schema.names

    def test_the_features_role_reads_raw_events_under_their_contract(self) -> None:
        (event,) = events_of(role="features", topic="store.events")
        (read,) = event["inputs"]
        assert read["name"] == "store.events"
        assert read["facets"]["version"]["datasetVersion"] == "store_event@1"

    def test_scores_come_from_the_trigger_and_the_views_looked_up(self) -> None:
        other = make_view("shop_activity")
        model = ModelSpec(
            name="buys",
            version="1",
            trigger=ViewReference.of(VIEW),
            entity="user_id",
            inputs=(ModelInput.of(VIEW, "clicks_5m"), ModelInput.of(other, "clicks_5m", key="category_last")),
            outputs=(ModelOutput(column="probability", tensor="p"),),
            ladder=NO_LADDER,
        )
        transport = RecordingTransport()
        with LineageEmitter(transport, stores=STORES) as emitter:
            emitter.scores_done(
                model, view=VIEW, partition=1, offsets=(5, 9), rows=4, scores=3, started_us=T0_US, model_version="12"
            )
        (event,) = transport.events
        assert json.loads(Serde.to_json(rebuild(event))) == event
        assert event["job"]["name"] == "scoring.buys"
        assert [read["name"] for read in event["inputs"]] == ["features.user_activity", "headrace:shop_activity:v1"]
        (written,) = event["outputs"]
        assert written["name"] == "scores.buys"
        assert written["facets"]["version"]["datasetVersion"] == "buys@1, model 12"
        assert written["outputFacets"]["outputStatistics"]["rowCount"] == 3
        latency = next(field for field in written["facets"]["schema"]["fields"] if field["name"] == "latency_ms")
        assert [field["name"] for field in latency["fields"]][-1] == "total"

    def test_facets_of_our_own_pass_the_schema_they_point_to(self) -> None:
        documents = [json.loads(path.read_bytes()) for path in FACETS.glob("*.json")]
        schemas = {document["$id"]: document for document in documents}
        (event,) = events_of(role="online")
        own = [
            facet
            for dataset in event["inputs"] + event["outputs"]
            for kind in ("facets", "inputFacets", "outputFacets")
            for key, facet in dataset.get(kind, {}).items()
            if key.startswith("headrace_")
        ]
        assert {facet["_schemaURL"] for facet in own} == set(schemas)
        for facet in own:
            jsonschema.Draft202012Validator(schemas[facet["_schemaURL"]]).validate(facet)

    def test_no_password_is_told(self) -> None:
        assert "secret" not in json.dumps(events_of(role="online"))

    def test_a_directory_is_named_by_its_absolute_path(self) -> None:
        assert Stores(delta="/data/delta/").offline(VIEW) == ("file", "/data/delta/user_activity/v1")
        assert Stores(delta="file:///data").offline(VIEW) == ("file", "/data/user_activity/v1")
        assert Stores(delta="s3://lake").offline(VIEW) == ("s3://lake", "user_activity/v1")


class TestWindows:
    def test_batches_of_a_window_are_one_event_for_each_job(self) -> None:
        transport = RecordingTransport()
        clock = iter(range(T0_US, T0_US + 100))
        with LineageEmitter(transport, window_s=600, clock_us=lambda: next(clock)) as emitter:
            tell(emitter, offsets=(0, 10), rows=10, started_us=T0_US - 9)
            tell(emitter, offsets=(12, 20), rows=7, started_us=T0_US)
            tell(emitter, partition=1, offsets=(5, 6), rows=1)
            tell(emitter, "offline", offsets=(0, 3), rows=3)
        online, offline = transport.events
        assert (online["job"]["name"], offline["job"]["name"]) == ("online.user_activity", "offline.user_activity")
        assert online["inputs"][0]["inputFacets"]["headrace_kafkaOffsets"]["partitions"] == [
            {"partition": 0, "startOffset": 0, "endOffset": 20, "rowCount": 17},
            {"partition": 1, "startOffset": 5, "endOffset": 6, "rowCount": 1},
        ]
        assert online["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 18
        start = online["run"]["facets"]["nominalTime"]["nominalStartTime"]
        assert parse_rfc3339_us(start) == T0_US - 9
        assert parse_rfc3339_us(online["eventTime"]) == T0_US + 2

    def test_a_window_is_sent_while_the_emitter_lives(self) -> None:
        transport = RecordingTransport()
        with LineageEmitter(transport, window_s=0.01) as emitter:
            tell(emitter)
            assert transport.entered.wait(20)

    def test_nothing_told_is_nothing_sent(self) -> None:
        transport = RecordingTransport()
        LineageEmitter(transport, window_s=0).close()
        assert transport.events == []


class TestFailures:
    def test_an_event_that_is_refused_is_counted_and_logged_once_a_minute(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        counts = Counts()
        with LineageEmitter(RecordingTransport(refuses=True), metrics=counts, window_s=600) as emitter:
            for role in ("features", "online", "offline"):
                tell(emitter, role)
        assert (counts.sent, counts.lost) == (0, {"rejected": 3})
        warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "no thanks" in warnings[0]
        assert "data goes on" in warnings[0]

    def test_a_full_queue_loses_notes_and_never_blocks(self) -> None:
        counts, transport = Counts(), RecordingTransport(holds=True)
        emitter = LineageEmitter(transport, metrics=counts, window_s=0, queue_size=2)
        tell(emitter)
        assert transport.entered.wait(20)  # the thread hangs in the transport
        for _ in range(5):
            tell(emitter)
        assert counts.lost == {"queue_full": 3}
        transport.go.set()
        assert emitter.close(20)
        assert counts.sent == len(transport.events) >= 2

    def test_closing_gives_up_on_a_transport_that_hangs(self) -> None:
        transport = RecordingTransport(holds=True)
        emitter = LineageEmitter(transport, window_s=0)
        tell(emitter)
        assert transport.entered.wait(20)
        assert emitter.close(0.01) is False
        transport.go.set()
        assert emitter.close(20) is True

    def test_notes_after_closing_are_counted_as_lost(self) -> None:
        counts = Counts()
        emitter = LineageEmitter(RecordingTransport(), metrics=counts)
        emitter.close()
        tell(emitter)
        assert counts.lost == {"closed": 1}

    def test_a_note_that_makes_no_event_does_not_stop_the_others(self) -> None:
        counts, transport = Counts(), RecordingTransport()
        with LineageEmitter(transport, metrics=counts, window_s=600) as emitter:
            tell(emitter, "no such role")
            tell(emitter, "online")
        assert (counts.sent, counts.lost) == (1, {"rejected": 1})

    @pytest.mark.parametrize("config", [{"type": "no.such.Transport", "api_key": "secret"}, {"type": "file"}, {}])
    def test_a_transport_that_cannot_be_made_is_a_configuration_error(self, config: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match=r"cannot be made.*expected a file that can be written") as caught:
            LineageEmitter(config)
        assert "secret" not in str(caught.value)


def test_own_facets_are_attrs_classes_as_the_librarys_are() -> None:
    assert attr.has(KafkaOffsetsInputDatasetFacet)
    assert attr.has(FeatureViewDatasetFacet)
