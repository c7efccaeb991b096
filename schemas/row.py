"""Columns of feature rows and dead letters, on every wire and in every store."""

from enum import StrEnum
from typing import Final

import pyarrow as pa

REQUEST_ID_HEADER: Final = "request_id"
"""Kafka header of a raw event that names the request; it travels to the score."""
PRODUCED_TIME_HEADER: Final = "produced_time"
"""Kafka header of a raw event whose record timestamp is not the time it was sent, as in a replay: that time, in
microseconds since the epoch as decimal digits. Freshness counts from it; admission keeps to the record timestamp."""
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


class Pane(StrEnum):
    """Why a feature row was made."""

    EARLY = "EARLY"
    """As-of row: the features as of one event."""
    ON_TIME = "ON_TIME"
    """The watermark reached the window's end."""
    LATE = "LATE"
    """A pane that had fired changed."""
    EMPTY = "EMPTY"
    """All windows of the key have run empty (or a session was merged into another)."""


class Reason(StrEnum):
    """Why a row is on the dead-letter topic, in the order the checks are made."""

    DECODE_ERROR = "decode_error"
    SCHEMA_VIOLATION = "schema_violation"
    MISSING_KEY = "missing_key"
    MISSING_EVENT_TIME = "missing_event_time"
    TIMESTAMP_UNIT = "timestamp_unit"
    IMPLAUSIBLE_TIME = "implausible_time"
    FUTURE_TIMESTAMP = "future_timestamp"
    DUPLICATE = "duplicate"
    LATE = "late"
    OVERFLOW = "overflow"
    INCOMPLETE_INPUT = "incomplete_input"
    """An input of a model has no value to use, and the model answers no such rows."""
    INVALID_OUTPUT = "invalid_output"
    """The model answered a feature row with something that is no score."""


ENGINE_COLUMNS: Final = pa.schema(
    [
        pa.field("event_time", TIMESTAMP),
        pa.field("window_end", TIMESTAMP),
        pa.field("pane", pa.string()),
        pa.field("pane_index", pa.int64()),
        pa.field("is_final", pa.bool_()),
        pa.field("watermark", TIMESTAMP),
        pa.field("source_offset", pa.int64()),
        pa.field("broker_time", TIMESTAMP),
        pa.field("request_id", pa.string()),
    ]
)
"""What the engine says of each row besides entity key and features (session views add ``window_start``).

``event_time`` is the event's own on an as-of row and the window end on a closing pane; ``watermark`` is null while it
is minus infinity; ``broker_time`` and ``request_id`` are those of the row that made this one; the pipeline puts the
time of :data:`PRODUCED_TIME_HEADER` in place of ``broker_time`` where a record has it.
"""

CONTEXT_COLUMNS: Final = pa.schema(
    [
        pa.field("view", pa.string()),
        pa.field("view_version", pa.int64()),
        pa.field("definition_hash", pa.string()),
        pa.field("source_topic", pa.string()),
        pa.field("source_partition", pa.int64()),
        pa.field("computed_time", TIMESTAMP),
        pa.field("epoch", pa.int64()),
    ]
)
"""What the pipeline adds to each row the engine made."""

ORIGIN_COLUMNS: Final = pa.schema(
    [
        pa.field("origin_topic", pa.string()),
        pa.field("origin_partition", pa.int64()),
        pa.field("origin_offset", pa.int64()),
    ]
)
"""What it adds behind a repartition topic: the record of a source that made the row. There ``source_*`` is the record
on the repartition topic, by which the rows of an entity are in order."""

MASK: Final = "***"
"""Stands where a personal value would be shown."""

INPUT_COLUMNS: Final = pa.schema(
    [
        pa.field("_offset", pa.int64()),
        pa.field("_broker_time", pa.int64()),
        pa.field("_request_id", pa.string()),
    ]
)
"""What goes into the engine beside the contract's columns: the row's offset, Kafka's record timestamp in microseconds
(null: unknown, the future guard does not apply) and the request id (null: ``topic-partition-offset``)."""

RECORD_COLUMNS: Final = pa.schema(
    [
        pa.field("_source", pa.string()),
        pa.field("_source_partition", pa.int64()),
        pa.field("_source_partitions", pa.int64()),
        pa.field("_is_event", pa.bool_()),
        pa.field("_is_idle", pa.bool_()),
        pa.field("_watermark", pa.int64()),
        pa.field("_watermark_after", pa.int64()),
        pa.field("_time", pa.int64()),
        pa.field("_event_id", pa.string()),
    ]
)
"""What goes into the engine too, behind a repartition topic, where a record is an event or tells a watermark alone:
topic and partition of the source, and how many partitions that has; whether the partition is idle; its watermark before
the event and after it, in microseconds (null: minus infinity); the event's time, and its id for de-duplication (null:
none)."""

REJECTED_COLUMNS: Final = pa.schema(
    [
        pa.field("_offset", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("late_by_us", pa.int64()),
    ]
)
"""Rows that are in no feature: which, why, and by how much they were late (null for other reasons)."""
