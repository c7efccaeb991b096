"""What a features worker knows of a view, on a Kafka topic per view with one partition per source partition.

Six kinds of records, each keyed by the definition it belongs to, so that the topic can be compacted and two versions
of a view never read each other's state:

``changes``   what has changed in the engine's state since the changes before, by number (``WindowEngine.changes``);
``whole``     all of the state, as of some changes (``WindowEngine.snapshot``);
``bucket``    all of the state of one bucket of keys, as of some changes (``WindowEngine.bucket``);
``marker``    a step of the watermark that no row made (an idle partition), at its place among the rows;
``begin``     the source offset that the view began at, where that is not the first one; written once.
``position``  the source offset up to which the view's rows have gone out. It ends what one epoch wrote: what no
              position follows was never committed.

They are written inside the epoch that commits the source offsets, so that state, rows and offsets never disagree.

A small state is written whole whenever changes have come to as many bytes as it has; the changes so far are then taken
back. A large one is written in buckets: for every byte of changes a byte of them, one bucket after the other, and once
all of them have been, changes older than the oldest bucket are taken back. So a compacted topic holds the state and at
most about as much again, and no single write holds up the rows for long. (The scheme of incremental checkpoints with a
bounded log: a log-structured store's changes over a base that is rewritten in the background.)
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, IsolationLevel, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from schemas.errors import StateVersionError
from schemas.view import FeatureView
from streams.ports import EpochWriter
from streams.windowing.bucket import N_BUCKETS
from streams.windowing.engine import WindowEngine
from streams.windowing.result import WatermarkMarker
from streams.windowing.snapshot import PartKind, read_header

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 900_000
_READ_TIMEOUT_S: Final = 60.0
_ASK_TIMEOUT_S: Final = 15.0
_PROGRESS_S: Final = 2.0
_MAX_ROWS: Final = 10_000
_RETRY_S: Final = 0.1
_NOT_YET: Final = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
_KINDS: Final = "changes, whole, bucket, marker, begin or position"
_WHOLE_BYTES: Final = 1_000_000
"""Largest state that is written whole; a bucket alone costs as much time as the state of many keys."""


@dataclass(frozen=True, kw_only=True)
class ViewState:
    """What the changelog holds of one view for one source partition.

    Attributes:
        begin: Source offset that the view began at.
        emitted_to: Source offset up to which the view's rows have gone out.
        parts: The newest whole and of each bucket, and changes, as ``WindowEngine.restore_parts`` takes them.
        markers: Steps of the watermark since the newest changes, and maybe some before, in order.
    """

    begin: int = 0
    emitted_to: int = 0
    parts: Sequence[bytes] = ()
    markers: Sequence[WatermarkMarker] = ()


@dataclass(frozen=True)
class _Full:
    """A full copy of the state, of one bucket or of all, as it was written.

    Attributes:
        number: Number of the changes that it follows.
        n_chunks: How many records it is.
        size_bytes: How large it is.
    """

    number: int
    n_chunks: int
    size_bytes: int


def state_topic(view: str) -> str:
    """Name of a view's state changelog."""
    return f"state.{view}"


class Changelog:
    """Writes what becomes of one view in one source partition into the open epoch.

    Args:
        epoch: The epoch.
        view: The view.
        partition: The source partition.
        state: What the changelog holds already.

    Attributes:
        emitted_to: Source offset up to which the view's rows have gone out.
    """

    def __init__(self, epoch: EpochWriter, view: FeatureView, *, partition: int, state: ViewState) -> None:
        self.emitted_to = state.emitted_to
        self._epoch = epoch
        self._partition = partition
        self._topic = state_topic(view.name)
        self._prefix = _prefix(view)
        self._markers = list(state.markers)
        self._n_chunks: dict[int, int] = {}
        self._fulls: dict[int | None, _Full] = {}
        self._debt_bytes = 0
        for part in state.parts:
            header, n_chunks = read_header(part), len(_chunks(part))
            if header.kind is PartKind.CHANGES:
                self._n_chunks[header.number] = n_chunks
            else:
                self._fulls[header.bucket] = _Full(header.number, n_chunks, len(part))
        # Buckets were paid for as the changes were written, the whole is when they have come to as much.
        if None in self._fulls:
            self._debt_bytes = sum(len(part) for part in state.parts if read_header(part).kind is PartKind.CHANGES)

    async def write_state(self, engine: WindowEngine) -> None:
        """Write what has changed, and as many bytes of what there is; take back what is not needed any more."""
        changes = engine.changes()
        number = read_header(changes).number
        self._n_chunks[number] = await self._write_part(f"changes/{number}", changes)
        self._debt_bytes += len(changes)
        if self._is_large(len(changes)):
            for _ in range(N_BUCKETS):
                if self._debt_bytes <= 0:
                    break
                oldest = min(range(N_BUCKETS), key=self._written_at)
                await self._write_full(oldest, number, engine.bucket(oldest))
            if len(self._fulls) > N_BUCKETS:
                await self._take_back_full(None)
        elif None not in self._fulls or self._debt_bytes >= self._fulls[None].size_bytes:
            self._debt_bytes = 0
            await self._write_full(None, number, engine.snapshot())
            for bucket in [bucket for bucket in self._fulls if bucket is not None]:
                await self._take_back_full(bucket)
        await self._take_back_changes(up_to=min(map(self._written_at, range(N_BUCKETS))))

    def _is_large(self, changed_bytes: int) -> bool:
        n_buckets = len(self._fulls) - (None in self._fulls)
        # Where all buckets are there, the whole is gone; as long as some are, they are on the way to it.
        size_bytes = sum(full.size_bytes for full in self._fulls.values())
        return 0 < n_buckets < N_BUCKETS or max(changed_bytes, size_bytes) > _WHOLE_BYTES

    def _written_at(self, bucket: int) -> int:
        """Number of the changes that the newest full copy of a bucket's state follows."""
        fulls = self._fulls.get(bucket), self._fulls.get(None)
        return max((full.number for full in fulls if full is not None), default=0)

    async def _write_full(self, bucket: int | None, number: int, part: bytes) -> None:
        name = _full_name(bucket)
        n_chunks = await self._write_part(name, part)
        if (before := self._fulls.get(bucket)) is not None:
            await self._take_back(name, range(n_chunks, before.n_chunks))
        self._fulls[bucket] = _Full(number, n_chunks, len(part))
        self._debt_bytes -= len(part)

    async def _take_back_full(self, bucket: int | None) -> None:
        await self._take_back(_full_name(bucket), range(self._fulls.pop(bucket).n_chunks))

    async def _take_back_changes(self, *, up_to: int) -> None:
        for marker in self._markers:
            await self._write(_marker_key(marker), None)
        self._markers = []
        for number in [number for number in self._n_chunks if number <= up_to]:
            await self._take_back(f"changes/{number}", range(self._n_chunks.pop(number)))

    async def _take_back(self, name: str, chunks: range) -> None:
        for chunk in chunks:
            await self._write(f"{name}/{chunk}", None)

    async def write_marker(self, marker: WatermarkMarker) -> None:
        """Write a step of the watermark."""
        self._markers.append(marker)
        content = {"after_offset": marker.after_offset, "watermark_us": marker.watermark_us}
        await self._write(_marker_key(marker), json.dumps(content).encode())

    async def write_begin(self, offset: int) -> None:
        """Write where the view began, with its first position."""
        await self._write("begin", str(offset).encode())

    async def write_position(self, next_offset: int) -> None:
        """Write how far the view's rows have gone out; the last thing that an epoch writes of a view.

        Args:
            next_offset: Source offset that is processed next. Rows go out again up to ``emitted_to``, never.
        """
        self.emitted_to = max(self.emitted_to, next_offset)
        await self._write("position", str(self.emitted_to).encode())

    async def _write_part(self, name: str, part: bytes) -> int:
        chunks = _chunks(part)
        headers = [("number", str(read_header(part).number).encode()), ("chunks", str(len(chunks)).encode())]
        for number, chunk in enumerate(chunks):
            await self._write(f"{name}/{number}", chunk, headers=headers)
        return len(chunks)

    async def _write(self, key: str, value: bytes | None, *, headers: list[tuple[str, bytes]] | None = None) -> None:
        await self._epoch.write(
            self._topic, key=f"{self._prefix}/{key}".encode(), value=value, headers=headers, partition=self._partition
        )


def _full_name(bucket: int | None) -> str:
    return "whole" if bucket is None else f"bucket/{bucket}"


def _chunks(part: bytes) -> list[bytes]:
    return [part[at : at + _CHUNK_BYTES] for at in range(0, len(part), _CHUNK_BYTES)]


def _prefix(view: FeatureView) -> str:
    return f"{view.version}-{view.definition_hash[:16]}"


def _marker_key(marker: WatermarkMarker) -> str:
    return f"marker/{marker.after_offset}/{marker.watermark_us}"


def read_states(
    kafka: Mapping[str, Any],
    wanted: Sequence[tuple[FeatureView, int]],
    *,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[tuple[str, int], ViewState]:
    """Read what was committed of views. Blocks.

    What another worker has in an open transaction is waited for: it may yet be committed.

    Args:
        kafka: librdkafka configuration of the client (``bootstrap.servers`` and the like).
        wanted: Views, each with a source partition.
        on_progress: Told now and then of each view and partition how many of its records are still to be read, and at
            the end that there are none.

    Returns:
        By view name and partition; a view of which nothing was committed is not in it.

    Raises:
        StateVersionError: A topic holds only some records of a part of a state, or something else.
        KafkaException: The broker cannot be read.
    """
    records = {(state_topic(view.name), partition): _Records(view, partition) for view, partition in wanted}
    read_committed(kafka, records, on_progress=lambda tp, left: on_progress(records[tp].view.name, tp[1], left))
    return {(found.view.name, found.partition): state for found in records.values() if (state := found.to_state())}


class Records(Protocol):
    """Takes the records of a partition as they are read."""

    def add(self, message: Message) -> None:
        """Take the next record."""


def read_committed(
    kafka: Mapping[str, Any],
    records: Mapping[tuple[str, int], Records],
    *,
    on_progress: Callable[[tuple[str, int], int], None] = lambda *_: None,
) -> None:
    """Read all that was committed of some partitions. Blocks.

    What another worker has in an open transaction is waited for: it may yet be committed.

    Args:
        kafka: librdkafka configuration of the client (``bootstrap.servers`` and the like).
        records: What takes the records, by topic and partition.
        on_progress: Told now and then of each of these how many records are still to be read, and at the end none.

    Raises:
        KafkaException: The broker cannot be read.
    """
    if not records:
        return
    ends = _end_offsets(kafka, list(records))
    consumer = Consumer(
        {
            **kafka,
            "group.id": "headrace-restore",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            "fetch.queue.backoff.ms": 10,  # the default, a second, would let a fast reader run dry
        }
    )
    try:
        consumer.assign([KafkaPartition(*tp, OFFSET_BEGINNING) for tp in records])
        _read(consumer, records, ends, on_progress)
    finally:
        consumer.close()


def _end_offsets(kafka: Mapping[str, Any], partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """End offsets with what is in open transactions, which a reader of committed data does not see."""
    asked = {KafkaPartition(*tp): OffsetSpec.latest() for tp in partitions}  # type: ignore[no-untyped-call]  # its gap
    admin = AdminClient(dict(kafka))  # held to the end: without it the answers never come
    deadline = time.monotonic() + _ASK_TIMEOUT_S
    while True:
        answers = admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK_TIMEOUT_S
        )
        try:
            return {
                (tp.topic, tp.partition): answer.result(2 * _ASK_TIMEOUT_S).offset for tp, answer in answers.items()
            }
        except KafkaException as exc:
            # A topic that has just been made, or moved, has a leader soon.
            if exc.args[0].code() not in _NOT_YET or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _read(
    consumer: Consumer,
    records: Mapping[tuple[str, int], Records],
    ends: Mapping[tuple[str, int], int],
    on_progress: Callable[[tuple[str, int], int], None],
) -> None:
    unread = {tp for tp, end in ends.items() if end > 0}
    # A topic that was compacted begins where it was cut: what is before its first record is not to be read.
    firsts: dict[tuple[str, int], int] = {}
    nexts: dict[tuple[str, int], int] = {}
    n_bytes, told_at = 0, time.monotonic()
    while unread:
        messages = consumer.consume(1, _READ_TIMEOUT_S)
        messages += consumer.consume(_MAX_ROWS, 0) if messages else []
        if not messages:
            msg = f"no answer from {sorted(unread)} within {_READ_TIMEOUT_S:.0f} s; a transaction may be open there"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, msg))
        for message in messages:
            tp = (message.topic() or "", message.partition() or 0)
            if (error := message.error()) is None:
                records[tp].add(message)
                n_bytes += len(message.value() or b"")
                nexts[tp] = (message.offset() or 0) + 1
                firsts.setdefault(tp, nexts[tp] - 1)
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            elif (message.offset() or 0) >= ends[tp]:
                unread.discard(tp)
        if unread and time.monotonic() - told_at >= _PROGRESS_S:
            told_at = time.monotonic()
            remaining = {tp: end - nexts.get(tp, 0) if tp in unread else 0 for tp, end in ends.items()}
            total = sum(end - firsts.get(tp, 0) for tp, end in ends.items())
            for tp, left in remaining.items():
                on_progress(tp, left)
            logger.info(
                "restoring: %.0f MB of state read, %.0f %%, %d of %d partitions done",
                n_bytes / 1e6,
                100 * (1 - sum(remaining.values()) / total),
                len(ends) - len(unread),
                len(ends),
            )
    for tp in records:
        on_progress(tp, 0)


@dataclass
class _Records:
    """Records of one view in one partition, as they are read."""

    view: FeatureView
    partition: int
    committed: "_Content | None" = None
    pending: list[tuple[str, Message]] = field(default_factory=list)

    def add(self, message: Message) -> None:
        key = message.key()
        if not isinstance(key, bytes) or b"/" not in key:
            msg = f"{_place(message)} with key {key!r} is not state of a view; {_remedy(self.view)}"
            raise StateVersionError(msg)
        prefix, _, rest = key.decode().partition("/")
        if prefix != _prefix(self.view):
            return
        self.pending.append((rest, message))
        if rest == "position":
            self.committed = self.committed or _Content()
            for name, written in self.pending:
                self.committed.add(name, written)
            self.pending = []

    def to_state(self) -> ViewState | None:
        if self.committed is None:
            return None
        return ViewState(
            begin=self.committed.begin,
            emitted_to=self.committed.emitted_to,
            parts=tuple(self.committed.parts(self.view, self.partition)),
            markers=tuple(self.committed.markers.values()),
        )


@dataclass
class _Content:
    begin: int = 0
    emitted_to: int = 0
    chunks: dict[str, dict[int, Message]] = field(default_factory=dict)
    markers: dict[str, WatermarkMarker] = field(default_factory=dict)

    def add(self, name: str, message: Message) -> None:
        kind, _, rest = name.partition("/")
        value = message.value()
        match kind:
            case "position":
                self.emitted_to = int(value or 0)
            case "begin":
                self.begin = int(value or 0)
            case "marker" if value is not None:
                self.markers[rest] = WatermarkMarker(**json.loads(value))
            case "marker":
                self.markers.pop(rest, None)
            case PartKind.CHANGES | PartKind.BUCKET | PartKind.WHOLE:
                part, _, chunk = name.rpartition("/")
                self._add_chunk(part, int(chunk), message)
            case _:
                msg = f"{_place(message)} holds {kind!r}, expected {_KINDS}: a newer Headrace wrote it"
                raise StateVersionError(msg)

    def _add_chunk(self, part: str, chunk: int, message: Message) -> None:
        chunks = self.chunks.setdefault(part, {})
        if message.value() is None:
            chunks.pop(chunk, None)
            if not chunks:
                del self.chunks[part]
            return
        # What is written anew comes chunk by chunk, and its first one ends what was there.
        if chunks and _header(next(iter(chunks.values())), "number") != _header(message, "number"):
            chunks.clear()
        chunks[chunk] = message

    def parts(self, view: FeatureView, partition: int) -> Iterator[bytes]:
        for name, chunks in self.chunks.items():
            expected = int(_header(next(iter(chunks.values())), "chunks"))
            if sorted(chunks) != list(range(expected)):
                msg = (
                    f"state of view {view.name} partition {partition} has chunks {sorted(chunks)} of {expected} of "
                    f"{name}; its topic was truncated: {_remedy(view)}"
                )
                raise StateVersionError(msg)
            yield b"".join(chunks[number].value() or b"" for number in range(expected))


def _remedy(view: FeatureView) -> str:
    return (
        f"delete {state_topic(view.name)} to compute the view again from the start of {view.input.topic}, which sends "
        "its rows again"
    )


def _place(message: Message) -> str:
    return f"record at {message.topic()}-{message.partition()}@{message.offset()}"


def _header(message: Message, name: str) -> bytes:
    value = dict(message.headers() or ()).get(name)
    if isinstance(value, bytes):
        return value
    msg = f"{_place(message)} has no header {name!r}: not a part of a state"
    raise StateVersionError(msg)
