"""Datasets as OpenLineage names them, and the facets that say what is in them.

Headrace's own facets are described by the JSON Schemas in ``streams/lineage/facets``; their ``_schemaURL`` is the
``$id`` of that file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attr
import pyarrow as pa
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    DatasetFacet,
    InputDatasetFacet,
    dataset_type_dataset,
    dataset_version_dataset,
    input_statistics_input_dataset,
    output_statistics_output_dataset,
    ownership_dataset,
    schema_dataset,
    storage_dataset,
)

from schemas.model import ModelSpec
from schemas.score import score_row_schema
from schemas.view import FeatureView

OFFSETS_FACET: Final = "headrace_kafkaOffsets"
FEATURE_VIEW_FACET: Final = "headrace_featureView"
FACETS: Final = Path(__file__).parent / "facets"
"""Directory of the JSON Schemas of Headrace's own facets."""


@attr.define
class PartitionOffsets:
    """What was read of one partition: ``rowCount`` records at ``startOffset <= offset < endOffset``."""

    partition: int
    startOffset: int  # noqa: N815  # spelled as in the event
    endOffset: int  # noqa: N815
    rowCount: int  # noqa: N815


@attr.define
class KafkaOffsetsInputDatasetFacet(InputDatasetFacet):
    """Which part of a topic a run has read."""

    partitions: list[PartitionOffsets] = attr.field(factory=list)

    @staticmethod
    def _get_schema() -> str:
        return "urn:headrace:openlineage:1-0-0:KafkaOffsetsInputDatasetFacet"


@attr.define
class FeatureViewDatasetFacet(DatasetFacet):
    """Which feature view a dataset holds rows of."""

    view: str = ""
    version: int = 1
    definitionHash: str = ""  # noqa: N815
    entityKey: str = ""  # noqa: N815
    windows: str = ""

    @staticmethod
    def _get_schema() -> str:
        return "urn:headrace:openlineage:1-0-0:FeatureViewDatasetFacet"


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Where datasets are; their OpenLineage namespaces come from it.

    Attributes:
        kafka: Bootstrap servers; the first one names the namespace.
        redis: URL of the online store; user, password and database are left out.
        delta: Root of the offline store, a directory or URL.
        prefix: Prefix of online keys.
    """

    kafka: str = "localhost:9092"
    redis: str = "redis://localhost:6379/0"
    delta: str | Path = "delta"
    prefix: str = "headrace"

    def topic(self, name: str) -> tuple[str, str]:
        """Namespace and name of a topic."""
        return f"kafka://{self.kafka.split(',')[0].strip()}", name

    def online(self, view: str, *, version: int) -> tuple[str, str]:
        """Namespace and name of a view's keys in the online store."""
        parts = urlsplit(self.redis)
        place = parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
        return f"redis://{place}", f"{self.prefix}:{view}:v{version}"

    def offline(self, view: FeatureView) -> tuple[str, str]:
        """Namespace and name of a view's table in the offline store."""
        table = f"{view.name}/v{view.version}"
        root = str(self.delta).rstrip("/")
        if "://" in root and not root.startswith("file://"):
            parts = urlsplit(root)
            return f"{parts.scheme}://{parts.netloc}", f"{parts.path.strip('/')}/{table}".lstrip("/")
        return "file", f"{Path(root.removeprefix('file://')).absolute()}/{table}"


def raw_topics(stores: Stores, view: FeatureView, *, partitions: Sequence[PartitionOffsets]) -> list[InputDataset]:
    """Describe the raw events that a view is computed from; where they come by a repartition topic, that first."""
    described = {source.topic: (source.schema.arrow_schema, source.contract) for source in view.sources}
    if view.input.is_repartitioned:
        described = {view.input.topic: (view.columns, view.input.definition_hash)} | described
    return [
        InputDataset(
            *stores.topic(topic),
            facets={
                "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet("TOPIC"),
                "schema": schema_facet(schema),
                "version": dataset_version_dataset.DatasetVersionDatasetFacet(version),
            },
            inputFacets=_read(partitions) if topic == view.input.topic else {},
        )
        for topic, (schema, version) in described.items()
    ]


def feature_topic(stores: Stores, view: FeatureView, *, partitions: Sequence[PartitionOffsets]) -> InputDataset:
    """Describe the feature rows of a view that were read from its topic."""
    namespace, name = stores.topic(view.topic)
    return InputDataset(namespace, name, facets=_view_facets(view, kind="TOPIC"), inputFacets=_read(partitions))


def looked_up(stores: Stores, name: str, *, version: int) -> InputDataset:
    """Describe the online values of a view that were looked up."""
    return InputDataset(*stores.online(name, version=version))


def feature_output(stores: Stores, view: FeatureView, *, role: str, rows: int) -> OutputDataset:
    """Describe the feature rows of a view that a role has written."""
    match role:
        case "features":
            (namespace, name), kind = stores.topic(view.topic), "TOPIC"
        case "online":
            (namespace, name), kind = stores.online(view.name, version=view.version), "TABLE"
        case "offline":
            (namespace, name), kind = stores.offline(view), "TABLE"
        case _:
            msg = f"role {role!r} writes no feature rows, expected features, online or offline"
            raise ValueError(msg)
    facets = _view_facets(view, kind=kind)
    if role == "offline":
        facets["storage"] = storage_dataset.StorageDatasetFacet("delta", fileFormat="parquet")
    return OutputDataset(namespace, name, facets=facets, outputFacets=_written(rows))


def score_output(stores: Stores, model: ModelSpec, *, model_version: str, rows: int) -> OutputDataset:
    """Describe the scores that a model has given."""
    namespace, name = stores.topic(model.topic)
    facets: dict[str, DatasetFacet] = {
        "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet("TOPIC"),
        "schema": schema_facet(score_row_schema(model)),
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(f"{model.reference}, model {model_version}"),
    }
    return OutputDataset(namespace, name, facets=facets, outputFacets=_written(rows))


def schema_facet(schema: pa.Schema) -> schema_dataset.SchemaDatasetFacet:
    """Describe columns, those of structs within them."""
    return schema_dataset.SchemaDatasetFacet(fields=_fields(schema))


def _fields(fields: Any) -> list[schema_dataset.SchemaDatasetFacetFields]:
    return [
        schema_dataset.SchemaDatasetFacetFields(
            name=field.name,
            type="struct" if pa.types.is_struct(field.type) else str(field.type),
            ordinal_position=position,
            fields=_fields(field.type) if pa.types.is_struct(field.type) else [],
        )
        for position, field in enumerate(fields, start=1)
    ]


def _view_facets(view: FeatureView, *, kind: str) -> dict[str, DatasetFacet]:
    facets: dict[str, DatasetFacet] = {
        "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet(kind),
        "schema": schema_facet(view.row_schema),
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(f"v{view.version}@{view.definition_hash}"),
        FEATURE_VIEW_FACET: FeatureViewDatasetFacet(
            view=view.name,
            version=view.version,
            definitionHash=view.definition_hash,
            entityKey=view.entity.key,
            windows=view.describe_windows(),
        ),
    }
    if view.owner:
        facets["ownership"] = ownership_dataset.OwnershipDatasetFacet(owners=[ownership_dataset.Owner(view.owner)])
    return facets


def _read(partitions: Sequence[PartitionOffsets]) -> dict[str, InputDatasetFacet]:
    rows = sum(offsets.rowCount for offsets in partitions)
    return {
        "inputStatistics": input_statistics_input_dataset.InputStatisticsInputDatasetFacet(rowCount=rows),
        OFFSETS_FACET: KafkaOffsetsInputDatasetFacet(partitions=list(partitions)),
    }


def _written(rows: int) -> dict[str, Any]:
    return {"outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=rows)}
