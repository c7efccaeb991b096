"""Through a repartition topic: rows of a source that is not keyed by the entity, or of several sources of one entity.

A :class:`Router` reads one partition of a source. It decides what a row alone decides (contract, key, time, future) and
sends the admitted ones on, keyed by the entity key. A :class:`RepartitionReader` makes of what stands on the topic what
the engine takes. Whether a row is late, a copy or an overflow is decided there, where its windows are.

A record on the topic is one line of JSON that says where the row comes from and how far the watermark of its partition
was before it and is after it, then the payload as it came. Its key is the entity key as text: whoever writes to a topic
of as many partitions by Kafka's default partitioner agrees on where an entity is. A record without a key and a payload
is a heartbeat: the watermark of a partition that has nothing to say to this one, and whether it is idle. Records say on
whose account they are there: the application's, and by which definition of the sources. Those of another one are passed
over, so that a changed source is routed anew, and two applications that read one topic do not see each other's rows.

Pure but for the routers' state: no I/O and no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.errors import DecodeError
from schemas.row import INPUT_COLUMNS, RECORD_COLUMNS
from schemas.source import EventSource
from schemas.time import MINUS_INFINITY_US
from schemas.view_input import ViewInput
from streams.batch import Headers, RawBatch
from streams.dead_letter import find_addressed, find_late
from streams.decoded import arrival_times_us
from streams.decoding import decode
from streams.windowing.admission import Rejections, Screen
from streams.windowing.idleness import IdleClock
from streams.wire import decode_rows, encode_keys, encode_rows

_ENVELOPE: Final = pa.schema(
    [
        pa.field("route", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int64()),
        pa.field("partitions", pa.int64()),
        pa.field("offset", pa.int64()),
        pa.field("broker_time_us", pa.int64()),
        pa.field("time_us", pa.int64()),
        pa.field("watermark_us", pa.int64()),
        pa.field("after_us", pa.int64()),
        pa.field("is_idle", pa.bool_()),
        pa.field("key", pa.string()),
        pa.field("headers", pa.list_(pa.list_(pa.string()))),
    ]
)
"""What stands before a payload. Bytes of keys and headers are written as the text that Latin-1 makes of them."""
_BYTES: Final = "latin-1"


@dataclass(frozen=True, kw_only=True)
class RouteState:
    """How far the rows of a partition of a source have gone to a repartition topic.

    Attributes:
        next_offset: Source offset that is routed next.
        watermark_us: Watermark of the partition.
        broker_time_us: When its newest row came to the broker; 0: it has had none.
        is_idle: Whether it was idle.
        told_us: The watermark that every partition of the repartition topic has been told.
        is_told_idle: Whether they have been told that it is idle; None where they have been told nothing.
    """

    next_offset: int = 0
    watermark_us: int = MINUS_INFINITY_US
    broker_time_us: int = 0
    is_idle: bool = False
    told_us: int = MINUS_INFINITY_US
    is_told_idle: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What a router made of a batch.

    Attributes:
        keys: Keys of the records for the repartition topic.
        values: Their values.
        rejected: :data:`schemas.row.REJECTED_COLUMNS`, in offset order.
    """

    keys: Sequence[bytes | None]
    values: Sequence[bytes]
    rejected: pa.Table


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """Rows of a partition of a source that may go on.

    Attributes:
        at: ``(n_admitted,)`` their positions.
        time_us: Event times.
        watermark_us: Watermark of the partition before each.
        after_us: Watermark after it.
        rejected: :data:`schemas.row.REJECTED_COLUMNS` of the others, in offset order.
    """

    at: NDArray[np.int64]
    time_us: NDArray[np.int64]
    watermark_us: NDArray[np.int64]
    after_us: NDArray[np.int64]
    rejected: pa.Table


class SourceAdmission:
    """Decides what each row of one partition of a source decides alone, and follows its watermark.

    Attributes:
        watermark_us: Watermark after all rows so far.
    """

    def __init__(self, source: EventSource, *, key: str, watermark_us: int = MINUS_INFINITY_US) -> None:
        self.watermark_us = watermark_us
        self._out_of_orderness_us = source.max_out_of_orderness_us
        self._screen = Screen(source, key=key)

    def admit(self, rows: pa.Table) -> Admitted:
        """Take decoded rows in offset order."""
        rejections = Rejections()
        if not rows.num_rows:
            nothing = np.empty(0, dtype=np.int64)
            rejected = rejections.to_table(nothing)
            return Admitted(at=nothing, time_us=nothing, watermark_us=nothing, after_us=nothing, rejected=rejected)
        screened = self._screen.check(rows.combine_chunks(), rejections)
        at = np.flatnonzero(screened.is_admissible)
        time_us = screened.time_us[at]
        own_us = np.concatenate([[self.watermark_us], time_us - self._out_of_orderness_us])
        edges_us = np.maximum.accumulate(own_us)
        self.watermark_us = int(edges_us[-1])
        rejected = rejections.to_table(rows.column("_offset").to_numpy())
        return Admitted(at=at, time_us=time_us, watermark_us=edges_us[:-1], after_us=edges_us[1:], rejected=rejected)


class Router:
    """Sends the rows of one partition of a source on to a repartition topic.

    Args:
        source: The source.
        view_input: What is read from the topic; the source is one of its sources.
        partition: The partition.
        n_partitions: How many partitions the source has.
        application: Name of the application that they are sent on for.
        state: Where to go on.
    """

    def __init__(
        self,
        source: EventSource,
        view_input: ViewInput,
        *,
        partition: int,
        n_partitions: int,
        application: str = "",
        state: RouteState | None = None,
    ) -> None:
        state = state or RouteState()
        self.topic = view_input.topic
        self.view_input = view_input
        self.next_offset = state.next_offset
        self._key = view_input.entity.key
        self._route = route_name(view_input, application)
        self._source = source
        self._place = {"partition": partition, "partitions": n_partitions}
        self._admission = SourceAdmission(source, key=self._key, watermark_us=state.watermark_us)
        self._broker_time_us = state.broker_time_us
        self._is_idle = state.is_idle
        self._told = state.told_us, state.is_told_idle
        self._clock = IdleClock(timeout_us=source.idle_timeout_us, is_advancing=source.idle_advance)

    @property
    def state(self) -> RouteState:
        """Where to go on after a restart."""
        return RouteState(
            next_offset=self.next_offset,
            watermark_us=self._admission.watermark_us,
            broker_time_us=self._broker_time_us,
            is_idle=self._is_idle,
            told_us=self._told[0],
            is_told_idle=self._told[1],
        )

    def route(self, batch: RawBatch, rows: pa.Table, *, processing_time_us: int) -> Routed:
        """Route the rows of a batch that pass the contract; what was routed before is left out.

        Args:
            batch: The records.
            rows: What was decoded of them.
            processing_time_us: Now; only idleness depends on it.
        """
        if rows.num_rows and rows.column("_offset")[0].as_py() < self.next_offset:
            rows = rows.filter(pc.greater_equal(rows.column("_offset"), self.next_offset))
        admitted = self._admission.admit(rows)
        values: list[bytes] = []
        if len(admitted.at):
            positions = np.searchsorted(batch.offsets, rows.column("_offset").to_numpy()[admitted.at])
            values = self._seal(batch, positions, admitted)
            self._broker_time_us = int(arrival_times_us(batch.take(positions[-1:]))[0])
        keys = encode_keys(rows.column(self._key).take(pa.array(admitted.at)))
        self._pass(batch, processing_time_us=processing_time_us)
        return Routed(keys=keys, values=values, rejected=admitted.rejected)

    def _pass(self, batch: RawBatch, *, processing_time_us: int) -> None:
        if batch.next_offset <= self.next_offset:
            return
        self.next_offset = batch.next_offset
        self._is_idle = False
        self._clock.note_rows(processing_time_us=processing_time_us, watermark_us=self._admission.watermark_us)

    def _seal(self, batch: RawBatch, positions: NDArray[np.int64], admitted: Admitted) -> list[bytes]:
        at = positions.tolist()
        headers = [_headers_as_text(batch.headers[position]) for position in at] if batch.has_headers else None
        envelopes = self._envelopes(
            len(at),
            offset=batch.offsets[positions],
            broker_time_us=batch.broker_time_us[positions],
            time_us=admitted.time_us,
            watermark_us=pa.array(admitted.watermark_us, mask=admitted.watermark_us <= MINUS_INFINITY_US),
            after_us=admitted.after_us,
            key=[None if (key := batch.keys[position]) is None else key.decode(_BYTES) for position in at],
            headers=headers,
        )
        return [b"%b\n%b" % (line, batch.values[position]) for line, position in zip(envelopes, at, strict=True)]

    def _envelopes(self, n_rows: int, **columns: Any) -> list[bytes]:
        fixed = {"route": self._route, "topic": self._source.topic, "is_idle": False, **self._place}
        arrays = []
        for field in _ENVELOPE:
            if (values := columns.get(field.name)) is not None:
                arrays.append(pa.array(values, field.type))
            else:
                arrays.append(pa.repeat(pa.scalar(fixed.get(field.name), field.type), n_rows))
        return encode_rows(pa.Table.from_arrays(arrays, schema=_ENVELOPE))

    def poll_idle(self, *, processing_time_us: int, is_caught_up: bool) -> None:
        """Say that no rows have come: the partition may be idle, and its watermark move on with the clock.

        Args:
            processing_time_us: Now.
            is_caught_up: Whether all that is on the partition has been routed: a backlog is never idleness.
        """
        moved_us = self._clock.poll(
            processing_time_us=processing_time_us, is_caught_up=is_caught_up, watermark_us=self._admission.watermark_us
        )
        self._is_idle = self._is_idle or self._clock.is_idle
        if moved_us is not None:
            self._admission.watermark_us = max(self._admission.watermark_us, moved_us)

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell that has not been told."""
        return self._told != (self._admission.watermark_us, self._is_idle)

    def heartbeat(self) -> bytes | None:
        """Make the record that tells every partition of the repartition topic how far this one is; None: no news.

        It says when the row came that moved the watermark so far; null where none did: the partition is silent, or was
        from the start. It must be written, and :attr:`state` with it.
        """
        if not self.has_news:
            return None
        self._told = self._admission.watermark_us, self._is_idle
        is_known = self._admission.watermark_us > MINUS_INFINITY_US
        is_made_by_row = self._broker_time_us and not self._is_idle
        (value,) = self._envelopes(
            1,
            offset=[self.next_offset - 1],
            broker_time_us=[self._broker_time_us if is_made_by_row else None],
            watermark_us=[self._admission.watermark_us if is_known else None],
            is_idle=[self._is_idle],
        )
        return value


class ReadRows(Protocol):
    """What a reader makes of a batch.

    Attributes:
        rows: What the engines take, in offset order.
        rejected: :data:`schemas.row.REJECTED_COLUMNS` of the rows that are in none.
        addressed: By offset, the names of the views that a row sent again is meant for alone.
        late_for: By offset, the names of the views for whose lateness a row was sent again.
    """

    rows: pa.Table
    rejected: pa.Table
    addressed: dict[int, frozenset[str]]
    late_for: dict[int, frozenset[str]]

    def arrived_us(self, offsets: NDArray[np.int64]) -> pa.Array:
        """When the records at these offsets of the topic that was read came to the broker; null where none did."""

    def record(self, offset: int) -> tuple[RawBatch, int]:
        """The record of a source behind an offset of the topic that was read: a batch, and its position there."""

    def origins(self, offsets: NDArray[np.int64]) -> dict[str, pa.Array]:
        """:data:`schemas.row.ORIGIN_COLUMNS` for these offsets; nothing where the source itself was read."""


class SourceRows:
    """Rows of a batch of a source."""

    def __init__(self, batch: RawBatch, source: EventSource) -> None:
        decoded = decode(batch, source.schema)
        self.rows, self.rejected = decoded.rows, decoded.rejected
        self.addressed = find_addressed(batch.offsets, batch.headers) if batch.has_headers else {}
        self.late_for = find_late(batch.offsets, batch.headers) if batch.has_headers else {}
        self._batch = batch
        self._arrived_us = arrival_times_us(batch)

    def arrived_us(self, offsets: NDArray[np.int64]) -> pa.Array:
        """When the records at these offsets came to the broker."""
        return pa.array(self._arrived_us[np.searchsorted(self._batch.offsets, offsets)])

    def record(self, offset: int) -> tuple[RawBatch, int]:
        """The record at an offset: the batch, and its position there."""
        return self._batch, int(np.searchsorted(self._batch.offsets, offset))

    def origins(self, offsets: NDArray[np.int64]) -> dict[str, pa.Array]:
        """Nothing: a row's source columns name its record."""
        return {}


class RepartitionedRows:
    """Rows of a batch of a repartition topic.

    Raises:
        DecodeError: A record is none of a router; only Headrace writes to these topics, so the worker must stop.
    """

    def __init__(self, batch: RawBatch, view_input: ViewInput, *, application: str = "") -> None:
        place = f"{batch.topic}-{batch.partition} from offset {batch.next_offset - len(batch)}"
        parts = [(value or b"").partition(b"\n") for value in batch.values]
        try:
            envelopes = decode_rows([envelope for envelope, _, _ in parts], _ENVELOPE)
        except DecodeError as exc:
            msg = f"{place}: {exc}; only Headrace may write to a repartition topic"
            raise DecodeError(msg) from exc
        own = np.flatnonzero(
            pc.fill_null(pc.equal(envelopes.column("route"), route_name(view_input, application)), False).to_numpy()
        )
        self._envelopes = envelopes.take(pa.array(own)).combine_chunks()
        self._offsets = batch.offsets[own]
        self._payloads = [parts[at][2] if parts[at][1] else None for at in own.tolist()]
        self._headers = [_headers_of_text(headers) for headers in self._envelopes.column("headers").to_pylist()]
        self.addressed = find_addressed(self._offsets, self._headers)
        self.late_for = find_late(self._offsets, self._headers)
        arrived_us = self._envelopes.column("broker_time_us")
        self._arrived_us = arrived_us.fill_null(0).to_numpy().copy()
        self._is_arrival_unknown = arrived_us.is_null().to_numpy()
        self._place = place
        schema = record_schema(view_input)
        topic = self._envelopes.column("topic")
        is_event = np.array([payload is not None for payload in self._payloads], dtype=np.bool_)
        tables = [self._records(np.flatnonzero(~is_event), pa.table({}), schema)]
        for source in view_input.sources:
            mine = np.flatnonzero(pc.equal(topic, source.topic).to_numpy() & is_event)
            if len(mine):
                tables.append(self._events(mine, source, schema))
        self.rows = pa.concat_tables(tables).sort_by("_offset")
        self.rejected = Rejections().to_table(np.empty(0, dtype=np.int64))

    def _events(self, at: NDArray[np.int64], source: EventSource, schema: pa.Schema) -> pa.Table:
        batch = RawBatch(
            topic=source.topic,
            partition=-1,
            offsets=self._offsets[at],
            broker_time_us=self._arrived_us[at],
            keys=[None] * len(at),
            values=[self._payloads[position] for position in at.tolist()],
            headers=[self._headers[position] for position in at.tolist()],
            next_offset=int(self._offsets[at[-1]]) + 1,
        )
        decoded = decode(batch, source.schema)
        if decoded.rejected.num_rows:
            reject = decoded.rejected.to_pylist()[0]
            msg = (
                f"{self._place}: offset {reject['_offset']} holds an event of {source.topic} that {source.contract} "
                f"does not let pass ({reject['detail']}), expected one that was admitted before; only Headrace may "
                "write to a repartition topic"
            )
            raise DecodeError(msg)
        self._arrived_us[at] = arrival_times_us(batch)
        return self._records(at, with_event_ids(decoded.rows, source), schema)

    def _records(self, at: NDArray[np.int64], events: pa.Table, schema: pa.Schema) -> pa.Table:
        """Lay out records; ``events`` are their columns in the input, none of heartbeats."""
        envelopes = self._envelopes.take(pa.array(at))
        place = (envelopes.column(name).cast(pa.string()) for name in ("topic", "partition", "offset"))
        named = pc.binary_join_element_wise(*place, "-")
        columns: dict[str, Any] = {name: events.column(name) for name in events.column_names}
        own = columns.get("_request_id")
        columns |= {
            "_offset": pa.array(self._offsets[at]),
            "_broker_time": envelopes.column("broker_time_us"),
            "_request_id": named if own is None else pc.coalesce(own, named),
            "_source": envelopes.column("topic"),
            "_source_partition": envelopes.column("partition"),
            "_source_partitions": envelopes.column("partitions"),
            "_is_event": pa.array(np.full(len(at), bool(events.num_columns))),
            "_is_idle": envelopes.column("is_idle"),
            "_watermark": envelopes.column("watermark_us"),
            "_watermark_after": envelopes.column("after_us"),
            "_time": envelopes.column("time_us"),
        }
        arrays = [columns.get(field.name, pa.nulls(len(at), field.type)) for field in schema]
        return pa.table(arrays, schema=schema)

    def _at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        at: NDArray[np.int64] = np.searchsorted(self._offsets, offsets)
        return at

    def arrived_us(self, offsets: NDArray[np.int64]) -> pa.Array:
        """When the records behind these offsets came to the broker from their producers; null of silence."""
        at = self._at(offsets)
        return pa.array(self._arrived_us[at], mask=self._is_arrival_unknown[at])

    def record(self, offset: int) -> tuple[RawBatch, int]:
        """The record of a source behind an offset: a batch, and its position there."""
        at = int(self._at(np.array([offset]))[0])
        envelope = self._envelopes.slice(at, 1).to_pylist()[0]
        batch = RawBatch(
            topic=envelope["topic"],
            partition=envelope["partition"],
            offsets=np.array([envelope["offset"]]),
            broker_time_us=np.array([envelope["broker_time_us"]]),
            keys=[None if envelope["key"] is None else envelope["key"].encode(_BYTES)],
            values=[self._payloads[at]],
            headers=[self._headers[at]],
            next_offset=envelope["offset"] + 1,
        )
        return batch, 0

    def origins(self, offsets: NDArray[np.int64]) -> dict[str, pa.Array]:
        """Topic, partition and offset of the records behind these offsets."""
        at = pa.array(self._at(offsets))
        return {
            f"origin_{name}": self._envelopes.column(name).take(at).combine_chunks()
            for name in ("topic", "partition", "offset")
        }


def route_name(view_input: ViewInput, application: str) -> str:
    """Say on whose account rows are on a repartition topic."""
    return f"{view_input.definition_hash}/{application}"


def record_schema(view_input: ViewInput) -> pa.Schema:
    """Columns of records as the engine takes them."""
    fields = {field.name: field for field in (*view_input.columns, *INPUT_COLUMNS, *RECORD_COLUMNS)}
    return pa.schema(fields.values())


def with_event_ids(events: pa.Table, source: EventSource) -> pa.Table:
    """Add the ids by which copies are told, each within its source."""
    if source.event_id is None:
        return events
    ids = pc.cast(events.column(source.event_id), pa.string())
    return events.append_column("_event_id", pc.binary_join_element_wise(source.topic, ids, "/"))


def _headers_as_text(headers: Headers) -> list[list[str | None]] | None:
    if headers is None:
        return None
    return [[name, None if value is None else value.decode(_BYTES)] for name, value in headers]


def _headers_of_text(headers: list[list[str | None]] | None) -> Headers:
    if headers is None:
        return None
    return [(name or "", value.encode(_BYTES) if value is not None else None) for name, value in headers]  # type: ignore[misc]
