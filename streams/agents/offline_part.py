"""What the offline role gathers of each topic, and where it puts it: feature rows, or records as they came."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from schemas.view import FeatureView
from streams.agents.feature_topic import decode_feature_rows
from streams.batch import RawBatch
from streams.observability.metrics import Metrics
from streams.sinks.archive import ArchiveWriter
from streams.sinks.offline import CommitResult, OfflineWriter


class Destination(Protocol):
    """The table of one topic.

    Attributes:
        name: What metrics call it.
        view: The view whose rows it holds; None of an archive.
    """

    name: str
    view: FeatureView | None

    def take(self, batch: RawBatch) -> tuple[Any, int]:
        """Make of a batch what is gathered, and tell how many rows that is."""

    def write(self, parts: Sequence[Any], *, partition: int) -> CommitResult:
        """Store what was gathered of a partition; safe to repeat."""


class ViewTable:
    """The table of a view."""

    def __init__(self, view: FeatureView, writer: OfflineWriter, metrics: Metrics) -> None:
        self.name = view.name
        self.view: FeatureView | None = view
        self._of = view
        self._writer = writer
        self._metrics = metrics

    def take(self, batch: RawBatch) -> tuple[Any, int]:
        """Decode the rows of the view's own definition."""
        found = decode_feature_rows(batch, self._of)
        self._metrics.rows_of_other_definitions("offline", self.name, found.of_other_definitions)
        return (found.rows, found.batch.offsets[: found.rows.num_rows]), found.rows.num_rows

    def write(self, parts: Sequence[Any], *, partition: int) -> CommitResult:
        """Append the rows that are new."""
        rows = pa.concat_tables([rows for rows, _ in parts])
        offsets = pa.array(np.concatenate([offsets for _, offsets in parts]))
        return self._writer.write(rows, view=self._of, partition=partition, offsets=offsets)


class TopicArchive:
    """The archive of a topic of events."""

    view: FeatureView | None = None

    def __init__(self, topic: str, writer: ArchiveWriter) -> None:
        self.name = f"raw.{topic}"
        self._writer = writer

    def take(self, batch: RawBatch) -> tuple[Any, int]:
        """Keep the records as they are."""
        return batch, len(batch)

    def write(self, parts: Sequence[Any], *, partition: int) -> CommitResult:
        """Append the records that are new."""
        return self._writer.write(RawBatch.join(parts))
