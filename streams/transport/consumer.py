"""A Faust transport that delivers one columnar batch per partition and poll instead of one message per record.

Registered under the URL scheme ``headrace`` (entry-point group ``faust.transports``). Faust keeps what it is good at
(agents, supervision, web); rows, offsets and commits go by :class:`PollThread` and a committer. Offsets are committed
per batch: a first-in, first-out queue per partition tells up to where everything delivered has been acknowledged.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import confluent_kafka
import faust
from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer
from faust.transport.base import Transport as FaustTransport
from faust.transport.consumer import Consumer as FaustConsumer
from faust.types import TP, ConsumerMessage

from streams.batch import RawBatch
from streams.transport.poller import PollThread

Partition = tuple[str, int]
_TIMEOUT_S = 15.0


@dataclass(kw_only=True)
class ConsumerOptions:
    """What the application decides about its consumer; set as ``app.headrace`` before the app starts.

    Attributes:
        kafka: librdkafka configuration of the consumer.
        max_held_bytes: Bytes that may be unacknowledged before fetching pauses.
        lock: Held while rows are written and their batch acknowledged, and during a commit, so that a commit never
            cuts between the two.
        commit: Commits offsets (next offset by partition) with everything written since the last commit; None commits
            them to the group alone.
        start_offsets: Given the committed offset of each assigned partition (None: none yet), returns where to start;
            partitions it leaves out start where committed, else at the beginning.
        release: Called before the last commit when partitions go; ``lost`` ones have nothing left to commit.
        has_failed: Set once a batch has failed half-way: nothing may be committed any more, the worker must end.
    """

    kafka: dict[str, Any]
    max_held_bytes: int = 64 * 2**20
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    commit: Callable[[Mapping[Partition, int]], Awaitable[None]] | None = None
    start_offsets: Callable[[Mapping[Partition, int | None]], Awaitable[Mapping[Partition, int]]] | None = None
    release: Callable[[set[Partition], bool], Awaitable[None]] | None = None
    has_failed: bool = False


class ColumnarSchema(faust.Schema):  # type: ignore[misc]  # Faust has no type information
    """Hands a message's value on as it is: the transport has made columns of it already."""

    def compile(self, app: Any, **_: Any) -> Any:
        """Make the decode hook of a Faust topic."""
        create_event = app.create_event

        async def decode(message: Any, *, propagate: bool = False) -> Any:
            return create_event(None, message.value, None, message)

        return decode


@dataclass
class _Delivered:
    first_offset: int
    next_offset: int
    size_bytes: int


class ColumnarConsumer(FaustConsumer):  # type: ignore[misc]
    """Faust's consumer on top of a :class:`PollThread`.

    Takes its :class:`ConsumerOptions` from ``app.headrace``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: ConsumerOptions = self.app.headrace
        self._generation = 0
        self._ready: dict[TP, deque[RawBatch]] = defaultdict(deque)
        self._arrived = asyncio.Event()
        self._delivered: dict[TP, deque[_Delivered]] = defaultdict(deque)
        # One counter per writing thread: their difference is what is held.
        self._received_bytes = 0
        self._released_bytes = 0
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self.poller = PollThread(
            self.options.kafka, application=self, revoke_timeout_s=self.app.conf.broker_session_timeout * 0.8
        )

    # -- life -----------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Start polling."""
        self._main_loop = asyncio.get_running_loop()
        self.poller.start()

    async def on_stop(self) -> None:
        """Commit what is acknowledged, then leave the group."""
        if self.options.release is not None and not self.options.has_failed:
            await self.options.release(self.poller.assignment, False)
        await self.commit()
        await asyncio.to_thread(self.poller.stop, 10.0)

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Join the group."""
        await asyncio.wrap_future(self.poller.subscribe(sorted(topics)))

    @property
    def held_bytes(self) -> int:
        """Bytes fetched and not yet acknowledged."""
        return self._received_bytes - self._released_bytes

    def lags(self) -> dict[Partition, int]:
        """Records of each assigned partition that are not yet acknowledged and committed."""
        lags = {}
        for tp in self.poller.assignment:
            faust_tp = TP(*tp)
            is_idle = tp in self.poller.at_end and not self._delivered[faust_tp] and not self._ready[faust_tp]
            lag = self.poller.highwater.get(tp, 0) - (self._committed_offset[faust_tp] or 0)
            lags[tp] = 0 if is_idle else max(0, lag)
        return lags

    # -- called from the poll thread ---------------------------------------------------------------------------------

    def deliver(self, batches: list[RawBatch]) -> None:
        """Hand batches over to the event loop."""
        self._received_bytes += sum(batch.size_bytes for batch in batches)
        self._event_loop().call_soon_threadsafe(self._take, batches, self._generation)

    def is_over_budget(self) -> bool:
        """Tell whether unacknowledged batches have reached the byte budget; half of it must be free to go on."""
        budget = self.options.max_held_bytes
        return self.held_bytes > (budget // 2 if self.poller.is_held_back else budget)

    def assigned(self, partitions: set[tuple[str, int]]) -> None:
        """Let Faust set up the new partitions on its own loop."""
        asyncio.run_coroutine_threadsafe(self._after_assignment(partitions), self._event_loop())

    def revoked(self, partitions: set[tuple[str, int]], *, lost: bool) -> "Future[None]":
        """Let Faust finish and commit on its own loop; lost partitions have nothing left to commit."""
        return asyncio.run_coroutine_threadsafe(self._before_revocation(partitions, lost=lost), self._event_loop())

    def failed(self, error: BaseException) -> None:
        """Bring the worker down: a consumer that has stopped must never look alive."""
        asyncio.run_coroutine_threadsafe(self.app.crash(error), self._event_loop())

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._main_loop is None:
            msg = "the consumer polls before it was started"
            raise RuntimeError(msg)
        return self._main_loop

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _take(self, batches: list[RawBatch], generation: int) -> None:
        for batch in batches:
            if generation != self._generation:
                self._released_bytes += batch.size_bytes
                continue
            self._ready[TP(batch.topic, batch.partition)].append(batch)
        self._arrived.set()

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> dict[TP, list[RawBatch]]:  # noqa: ASYNC109 - Faust's signature
        records = self._pop_ready(active_partitions)
        if not records:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout)
            except TimeoutError:
                return {}
            records = self._pop_ready(active_partitions)
        return records

    def _pop_ready(self, active_partitions: set[TP] | None) -> dict[TP, list[RawBatch]]:
        records = {}
        for tp, batches in self._ready.items():
            if batches and (active_partitions is None or tp in active_partitions):
                records[tp] = list(batches)
                batches.clear()
        return records

    def _to_message(self, tp: TP, record: RawBatch) -> ConsumerMessage:
        first_offset = int(record.offsets[0])
        self._delivered[tp].append(_Delivered(first_offset, record.next_offset, record.size_bytes))
        return ConsumerMessage(
            topic=record.topic,
            partition=record.partition,
            offset=first_offset,
            timestamp=float(record.broker_time_us[0]) / 1e6,
            timestamp_type=0,
            headers=[],
            key=None,
            value=record,
            checksum=None,
            serialized_key_size=0,
            serialized_value_size=record.size_bytes,
            tp=tp,
            generation_id=self.app.consumer_generation_id,
        )

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Offsets between batches need no record: the queue of delivered batches knows what comes next."""

    # -- offsets ------------------------------------------------------------------------------------------------------

    def _new_offset(self, tp: TP) -> int | None:
        delivered, acked = self._delivered[tp], self._acked_index[tp]
        new_offset = None
        while delivered and delivered[0].first_offset in acked:
            done = delivered.popleft()
            acked.discard(done.first_offset)
            self._released_bytes += done.size_bytes
            new_offset = done.next_offset
        self._acked[tp] = sorted(acked)
        return new_offset

    async def force_commit(self, *args: Any, **kwargs: Any) -> bool:
        """Commit everything acknowledged, with no agent between its rows and its acknowledgement."""
        async with self.options.lock:
            if self.options.has_failed:
                return False
            return bool(await super().force_commit(*args, **kwargs))

    async def _commit_offsets(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:
        mine = self.poller.assignment
        committable = {tp: offset for tp, offset in offsets.items() if (tp.topic, tp.partition) in mine}
        if not committable:
            return False
        commit = self.options.commit or self._commit_to_group
        try:
            await commit({(tp.topic, tp.partition): offset for tp, offset in committable.items()})
        except Exception as exc:
            # Faust must not believe in an offset that Kafka does not hold, nor may rows go on past it.
            self.options.has_failed = True
            await self.app.crash(exc)
            raise
        self._committed_offset.update(committable)
        return True

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        return await self._commit_offsets(offsets)

    async def _after_assignment(self, partitions: set[tuple[str, int]]) -> None:
        self._generation += 1
        self.app.consumer_generation_id = self._generation
        self.app.on_rebalance_start()
        await self.on_partitions_assigned({TP(*tp) for tp in partitions}, self._generation)

    async def _before_revocation(self, partitions: set[tuple[str, int]], *, lost: bool) -> None:
        # Faust's own callback forgets acknowledgements before it commits: stop the flow and commit first.
        self.stop_flow()
        self.app.flow_control.suspend()
        if self.options.release is not None:
            await self.options.release(partitions, lost)
        if not lost:
            await self.commit()
        self._generation += 1
        self.app.consumer_generation_id = self._generation
        for topic_partition in partitions:
            tp = TP(*topic_partition)
            for held in (self._ready.pop(tp, ()), self._delivered.pop(tp, ())):
                self._released_bytes += sum(part.size_bytes for part in held)
        await self.on_partitions_revoked({TP(*tp) for tp in partitions})

    async def seek_to_committed(self) -> dict[TP, int]:
        """Start every assigned partition where the application says, given what is committed."""
        assigned = self.poller.assignment
        if not assigned:
            return {}
        committed = await asyncio.wrap_future(self.poller.call(lambda consumer: _committed(consumer, assigned)))
        starts = {tp: OFFSET_BEGINNING if offset is None else offset for tp, offset in committed.items()}
        if self.options.start_offsets is not None:
            starts.update(await self.options.start_offsets(committed))
        await asyncio.wrap_future(self.poller.seek(starts))
        return {TP(*tp): offset for tp, offset in committed.items() if offset is not None}

    async def perform_seek(self) -> None:
        """Seek, and forget how far was read before."""
        committed = await self.seek_to_committed()
        for tp in self.poller.assignment:
            self._read_offset[TP(*tp)] = None
        self._committed_offset.update(committed)

    async def _seek(self, partition: TP, offset: int) -> None:
        await asyncio.wrap_future(self.poller.seek({(partition.topic, partition.partition): offset}))

    async def seek_wait(self, partitions: Mapping[TP, int]) -> None:
        """Seek several partitions."""
        starts = {(tp.topic, tp.partition): offset for tp, offset in partitions.items()}
        await asyncio.wrap_future(self.poller.seek(starts))

    async def _commit_to_group(self, offsets: Mapping[Partition, int]) -> None:
        positions = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
        await asyncio.wrap_future(
            self.poller.call(lambda consumer: consumer.commit(offsets=positions, asynchronous=False))
        )

    # -- what Faust asks of a consumer --------------------------------------------------------------------------------

    def assignment(self) -> set[TP]:
        """Partitions held now."""
        return {TP(*tp) for tp in self.poller.assignment}

    def highwater(self, tp: TP) -> int:
        """End offset of a partition, as of the last fetch from it."""
        return self.poller.highwater.get((tp.topic, tp.partition), 0)

    async def highwaters(self, *partitions: TP) -> dict[TP, int]:
        """End offsets of partitions, asked from the broker."""
        return {tp: bounds[1] for tp, bounds in (await self._bounds(partitions)).items()}

    async def earliest_offsets(self, *partitions: TP) -> dict[TP, int]:
        """First offsets of partitions, asked from the broker."""
        return {tp: bounds[0] for tp, bounds in (await self._bounds(partitions)).items()}

    async def position(self, tp: TP) -> int | None:
        """Offset that is read next."""
        found = await asyncio.wrap_future(
            self.poller.call(lambda consumer: consumer.position([TopicPartition(tp.topic, tp.partition)]))
        )
        return found[0].offset if found[0].offset >= 0 else None

    def topic_partitions(self, topic: str) -> int | None:
        """Faust asks this for its tables, which Headrace does not use."""
        return None

    def key_partition(self, topic: str, key: bytes | None, partition: int | None = None) -> int | None:
        """Faust asks this for sends to a partition of its choice, which Headrace does not use."""
        return partition

    def _new_topicpartition(self, topic: str, partition: int) -> TP:
        return TP(topic, partition)

    async def create_topic(self, topic: str, *_: Any, **__: Any) -> None:
        """Topics are made from the definitions (``jobs.topics``), never by Faust."""

    async def _bounds(self, partitions: Iterable[TP]) -> dict[TP, tuple[int, int]]:
        def ask(consumer: KafkaConsumer) -> dict[TP, tuple[int, int]]:
            return {
                tp: consumer.get_watermark_offsets(TopicPartition(tp.topic, tp.partition), timeout=_TIMEOUT_S)
                for tp in partitions
            }

        return await asyncio.wrap_future(self.poller.call(ask))


def _committed(consumer: KafkaConsumer, partitions: set[Partition]) -> dict[Partition, int | None]:
    found = consumer.committed([TopicPartition(*tp) for tp in partitions], timeout=_TIMEOUT_S)
    for tp in found:
        if tp.error is not None:
            raise KafkaException(tp.error)
    return {(tp.topic, tp.partition): tp.offset if tp.offset >= 0 else None for tp in found}


class Transport(FaustTransport):  # type: ignore[misc]
    """Faust transport for ``headrace://host:port`` broker URLs."""

    Consumer = ColumnarConsumer
    default_port = 9092
    driver_version = f"confluent-kafka={confluent_kafka.__version__}"
