"""A Faust transport that delivers one columnar batch per partition and poll instead of one message per record.

Registered under the URL scheme ``headrace`` (entry-point group ``faust.transports``). Faust keeps what it is good at
(agents, supervision, web); rows, offsets and commits go by :class:`PollThread` and a committer. Offsets are committed
per batch: a first-in, first-out queue per partition tells up to where everything delivered has been acknowledged.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import confluent_kafka
import faust
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from faust.transport.base import Transport as FaustTransport
from faust.transport.consumer import Consumer as FaustConsumer
from faust.types import TP, ConsumerMessage
from mode import Service

from streams.batch import RawBatch
from streams.transport.options import ConsumerOptions, Partition
from streams.transport.poller import PollThread
from streams.transport.positions import Positions

logger = logging.getLogger(__name__)

_MAX_ROWS = 50_000
_GATHER_S = 0.005
_DRAIN_TIMEOUT_S = 10.0


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


class _NoReadOffsets(dict[TP, int | None]):
    """What Faust has read so far: nothing.

    Faust drops rows that lie before where it has read to, which after a rebalance is where it was before it.
    """

    def __getitem__(self, _: TP) -> None:
        return None

    def __setitem__(self, _: TP, __: int | None) -> None:
        return None


class ColumnarConsumer(FaustConsumer):  # type: ignore[misc]
    """Faust's consumer on top of a :class:`PollThread`.

    Takes its :class:`ConsumerOptions` from ``app.headrace``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: ConsumerOptions = self.app.headrace
        self._generation = 0
        self._is_drained = False
        self._starting = asyncio.Lock()
        self._read_offset = _NoReadOffsets()
        self._ready: dict[TP, deque[RawBatch]] = defaultdict(deque)
        self._arrived = asyncio.Event()
        self._delivered: dict[TP, deque[_Delivered]] = defaultdict(deque)
        # One counter per writing thread: their difference is what is held.
        self._received_bytes = 0
        self._released_bytes = 0
        # When the next round is due, and whether all of this one is acknowledged.
        self._round_due_s = 0.0
        self._is_settled = asyncio.Event()
        self._main_loop: asyncio.AbstractEventLoop | None = None
        # Since when no rows flow on account of partitions that come or go, and how long that was before.
        self._moving_since_s: float | None = time.monotonic()
        self._moving_s = 0.0
        self.ends: dict[Partition, int] = {}
        """End offsets as somebody else than this consumer was told them; told to it by whoever watches it."""
        self.poller = PollThread(
            self.options.kafka, application=self, revoke_timeout_s=self.app.conf.broker_session_timeout * 0.8
        )

    # -- life -----------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Start polling."""
        self._main_loop = asyncio.get_running_loop()
        self.poller.start()

    async def drain(self) -> None:
        """Finish what is under way and commit for the last time; called before Faust ends the agents."""
        if self._is_drained:
            return
        try:
            if not self.options.has_failed:
                await asyncio.wait_for(self._finish(self.poller.assignment, lost=False), _DRAIN_TIMEOUT_S)
            elif self.options.abandon is not None:
                await asyncio.wait_for(self.options.abandon(), _DRAIN_TIMEOUT_S)
        except Exception:
            logger.exception("the last commit failed: what it would have held is done again")
            self.options.has_failed = True
        self._is_drained = True

    async def on_stop(self) -> None:
        """Leave the group, after the last commit."""
        await self.drain()
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
            end = max(self.poller.highwater.get(tp, 0), self.ends.get(tp, 0))
            lags[tp] = 0 if self.is_caught_up(tp) else max(0, end - (self._committed_offset[TP(*tp)] or 0))
        return lags

    def is_caught_up(self, tp: Partition) -> bool:
        """Tell whether everything that was on a partition, as of the last poll, is acknowledged and committed."""
        return self._end_reached(tp) >= self.ends.get(tp, 0)

    def done(self) -> dict[Partition, int]:
        """Up to where each started partition is acknowledged and committed."""
        return {tp: max(self._end_reached(tp), self._committed_offset[TP(*tp)] or 0) for tp in self.poller.flowing}

    def _end_reached(self, tp: Partition) -> int:
        """Where the partition ended as its last record was fetched, if nothing of it is under way; else -1."""
        faust_tp = TP(*tp)
        return -1 if self._delivered[faust_tp] or self._ready[faust_tp] else self.poller.at_end.get(tp, -1)

    @property
    def _positions(self) -> Positions:
        return Positions(self.poller, self.options)

    @property
    def is_joining(self) -> bool:
        """Whether the group is to give partitions, none of which are being started yet."""
        return self._moving_since_s is not None and not self._starting.locked()

    def paused_s(self) -> dict[str, float]:
        """Seconds for which no rows were fetched, by why: ``memory`` (too much is held) or ``rebalance``."""
        moving_s = 0.0 if self._moving_since_s is None else time.monotonic() - self._moving_since_s
        return {"memory": self.poller.held_back_s, "rebalance": self._moving_s + moving_s}

    # -- called from the poll thread ---------------------------------------------------------------------------------

    def deliver(self, batches: list[RawBatch], *, generation: int) -> None:
        """Hand batches over to the event loop."""
        self._received_bytes += sum(batch.size_bytes for batch in batches)
        self._event_loop().call_soon_threadsafe(self._take, batches, generation)

    def is_over_budget(self) -> bool:
        """Tell whether unacknowledged batches have reached the byte budget; half of it must be free to go on."""
        budget = self.options.max_held_bytes
        return self.held_bytes > (budget // 2 if self.poller.is_held_back else budget)

    def assigned(self, partitions: set[tuple[str, int]], *, generation: int) -> None:
        """Let Faust set up the new partitions on its own loop."""
        starting = asyncio.run_coroutine_threadsafe(
            self._after_assignment(partitions, generation=generation), self._event_loop()
        )
        starting.add_done_callback(self._fail_with)

    def revoked(self, partitions: set[tuple[str, int]], *, lost: bool) -> "Future[None]":
        """Let Faust finish and commit on its own loop; lost partitions have nothing left to commit."""
        return asyncio.run_coroutine_threadsafe(self._before_revocation(partitions, lost=lost), self._event_loop())

    def failed(self, error: BaseException) -> None:
        """Bring the worker down: a consumer that has stopped must never look alive."""
        self.options.has_failed = True
        asyncio.run_coroutine_threadsafe(self.app.crash(error), self._event_loop())

    def _fail_with(self, done: "Future[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self.failed(error)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._main_loop is None:
            msg = "the consumer polls before it was started"
            raise RuntimeError(msg)
        return self._main_loop

    # -- rows ---------------------------------------------------------------------------------------------------------

    def is_current(self, event: Any) -> bool:
        """Tell whether an event came under the present assignment; one that did not is void."""
        return bool(event.message.generation_id == self._generation)

    def _take(self, batches: list[RawBatch], generation: int) -> None:
        if generation != self._generation:
            return  # their bytes were let go with the partitions
        for batch in batches:
            self._ready[TP(batch.topic, batch.partition)].append(batch)
        self._arrived.set()

    def on_buffer_drop(self, tp: TP) -> None:
        """Go on with a partition whose stream has room again."""
        super().on_buffer_drop(tp)
        self._arrived.set()

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:  # noqa: ASYNC109 - Faust's signature
        """Yield one batch of each partition that has one, waiting for the first at most ``timeout`` seconds."""
        if not self.flow_active:
            await self.wait(self.can_resume_flow)
        records = await self._getmany(self._active_partitions, timeout)
        for tp, record in records.items():
            # Flow stops when partitions go or the worker ends: what is not delivered by then will come again.
            if self.should_stop or not self.flow_active:
                return
            yield tp, self._to_message(tp, record)

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> dict[TP, RawBatch]:  # noqa: ASYNC109 - Faust's signature
        if not any(batches and _is_in(tp, active_partitions) for tp, batches in self._ready.items()):
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout)
            except TimeoutError:
                return {}
        if self.options.commit is not None:
            # A step costs the same for one row as for hundreds, and no reader sees its rows before the commit: each
            # partition has one step an epoch. What comes to several of them at one moment makes one round.
            await asyncio.sleep(max(_GATHER_S, self._round_due_s - time.monotonic()))
            self._round_due_s = time.monotonic() + self.commit_interval
        records = {}
        for tp, batches in self._ready.items():
            if not batches or not _is_in(tp, active_partitions):
                continue
            parts = _pop(batches, max_rows=_MAX_ROWS)
            records[tp] = record = RawBatch.join(parts)
            size_bytes = sum(part.size_bytes for part in parts)
            self._delivered[tp].append(_Delivered(int(record.offsets[0]), record.next_offset, size_bytes))
            if self.options.arriving is not None:
                self.options.arriving(record)
        return records

    def _to_message(self, tp: TP, record: RawBatch) -> ConsumerMessage:
        return ConsumerMessage(
            topic=record.topic,
            partition=record.partition,
            offset=int(record.offsets[0]),
            timestamp=float(record.broker_time_us[0]) / 1e6,
            timestamp_type=0,
            headers=[],
            key=None,
            value=record,
            checksum=None,
            serialized_key_size=0,
            tp=tp,
            generation_id=self._generation,
        )

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Offsets between batches need no record: the queue of delivered batches knows what comes next."""

    # -- offsets ------------------------------------------------------------------------------------------------------

    def ack(self, message: ConsumerMessage) -> bool:
        """Take a batch for done, unless its partition has gone since: then it is done again, here or elsewhere.

        Faust's own does not count what lies before the committed offset; a replay from a snapshot starts there.
        """
        if message.acked or message.generation_id != self._generation:
            return False
        message.acked = True
        self._unacked_messages.discard(message)
        self._acked_index[message.tp].add(message.offset)
        self._acked[message.tp].append(message.offset)
        if self._is_round_done():
            self._is_settled.set()
        return True

    def _is_round_done(self) -> bool:
        if self.options.commit is None:
            return False
        return all(
            delivered.first_offset in self._acked_index[tp]
            for tp, queue in self._delivered.items()
            for delivered in queue
        )

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
            if self.options.has_failed or self._is_drained:
                return False
            return bool(await super().force_commit(*args, **kwargs))

    @Service.task  # type: ignore[untyped-decorator]
    async def _commit_handler(self) -> None:
        """Commit at each interval; where readers see rows by the commit alone, also when a round is done."""
        while not self.should_stop:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_settled.wait(), self.commit_interval)
            self._is_settled.clear()
            await self.commit()

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

    def _begin(self, generation: int) -> None:
        """Void all that was delivered under an earlier assignment."""
        self._generation = generation
        self.app.consumer_generation_id = generation
        self._ready.clear()
        self._delivered.clear()
        self._released_bytes = self._received_bytes

    async def _after_assignment(self, partitions: set[Partition], *, generation: int) -> None:
        self._begin(generation)
        self.app.on_rebalance_start()
        await self.on_partitions_assigned({TP(*tp) for tp in partitions}, generation)
        async with self._starting:
            if generation == self._generation:
                await self._start(partitions, generation=generation)

    async def _start(self, partitions: set[Partition], *, generation: int) -> None:
        if self.options.prepare is not None:
            await self.options.prepare()
        committed = await self._positions.committed(partitions)
        begun = await self._positions.begin_new(committed)
        starts = {tp: found.offset for tp, found in committed.items() if found.offset is not None} | begun
        if self.options.start_offsets is not None:
            starts.update(await self.options.start_offsets(committed))
        if generation == self._generation:
            starts = await self._positions.within_bounds(starts)
            # Where a new view goes over rows that others are through with, the group's offset goes back to there.
            self._committed_offset.update({TP(*tp): starts.get(tp) for tp in partitions})
            seeks = {tp: starts.get(tp, OFFSET_BEGINNING) for tp in partitions}
            if begun := {TP(*tp): offset for tp, offset in starts.items() if tp in begun}:
                async with self.options.lock:
                    await self._commit_offsets(begun)
            await asyncio.wrap_future(self.poller.seek(seeks, generation=generation))
            self._moving_s += 0.0 if self._moving_since_s is None else time.monotonic() - self._moving_since_s
            self._moving_since_s = None

    async def _before_revocation(self, partitions: set[Partition], *, lost: bool) -> None:
        # Faust's own callback forgets acknowledgements before it commits: stop the flow and commit first.
        self.stop_flow()
        if self._moving_since_s is None:
            self._moving_since_s = time.monotonic()
        self.app.flow_control.suspend()
        await self._finish(partitions, lost=lost)
        self._begin(self._generation + 1)
        await self.on_partitions_revoked({TP(*tp) for tp in partitions})

    async def _finish(self, partitions: set[Partition], *, lost: bool) -> None:
        if self.options.has_failed or self._is_drained:
            return
        may_commit = not lost
        if self.options.release is not None:
            may_commit = await self.options.release(partitions, lost) and may_commit
        if may_commit:
            # Not `commit`, which leaves it to a commit that is under way and knows nothing of what came since.
            await self.force_commit()

    async def perform_seek(self) -> None:
        """Faust seeks once it has set up its side, and gives up after a while; `_start` does, and takes its time."""

    async def seek_to_committed(self) -> dict[TP, int]:
        """Faust asks this for its own `perform_seek` alone."""
        return {}

    async def _seek(self, partition: TP, offset: int) -> None:
        await self.seek_wait({partition: offset})

    async def seek_wait(self, partitions: Mapping[TP, int]) -> None:
        """Seek several partitions."""
        starts = {(tp.topic, tp.partition): offset for tp, offset in partitions.items()}
        await asyncio.wrap_future(self.poller.seek(starts, generation=self._generation))

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
        return {TP(*tp): end for tp, (_, end) in (await self._positions.bounds(partitions)).items()}

    async def earliest_offsets(self, *partitions: TP) -> dict[TP, int]:
        """First offsets of partitions, asked from the broker."""
        return {TP(*tp): first for tp, (first, _) in (await self._positions.bounds(partitions)).items()}

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


def _is_in(tp: TP, active_partitions: set[TP] | None) -> bool:
    return active_partitions is None or tp in active_partitions


def _pop(batches: deque[RawBatch], *, max_rows: int) -> list[RawBatch]:
    """Take what has gathered while earlier rows were worked on: the further behind, the larger the batch."""
    taken = [batches.popleft()]
    n_rows = len(taken[0])
    while batches and n_rows + len(batches[0]) <= max_rows:
        n_rows += len(batches[0])
        taken.append(batches.popleft())
    return taken


class Transport(FaustTransport):  # type: ignore[misc]
    """Faust transport for ``headrace://host:port`` broker URLs."""

    Consumer = ColumnarConsumer
    default_port = 9092
    driver_version = f"confluent-kafka={confluent_kafka.__version__}"
