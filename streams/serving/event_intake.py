"""Takes events: judges them, puts what may go on Kafka, and tells what became of each once Kafka has acknowledged it.

    1. each event is judged by what it alone decides (:mod:`streams.serving.event_admission`);
    2. those that may go are sent to the partitions of their keys, with one timestamp, by which they were judged;
    3. when all of them have been acknowledged, or given up, the answer tells of each.

Nothing is answered before step 3: what was accepted is on all replicas, and what is not accepted is said to be so. Of a
request whose idempotency key was taken over, what is there already is left out of steps 1 and 2.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Protocol, Self

from schemas.errors import SinkUnavailableError
from schemas.row import REQUEST_ID_HEADER
from streams.breaker import Breaker
from streams.observability.serving import ServingMetrics
from streams.serving.edge import RefusedError
from streams.serving.event_admission import AdmittedEvent, EventAdmission, Refusal
from streams.serving.gate import Gate
from streams.serving.joint_admission import JointAdmission
from streams.serving.once import Claim, Once
from streams.serving.producer_store import ProducerStore
from streams.serving.sent import ONCE_HEADER
from streams.transport.event_producer import Delivered, EventProducer, EventRecord, Undelivered

MAX_BATCH_BYTES: Final = 8 * 2**20
MAX_BATCH_EVENTS: Final = 10_000
MAX_REQUESTS: Final = 256
"""Requests with events that are worked on at a time, whatever they wait for: Kafka, the answer of the first with their
idempotency key, the rest of their body. They must not keep readers out."""
MAX_SEARCHES: Final = 2
"""Searches for what was sent under an idempotency key that go on at a time."""
_RETRY_MS: Final = 1_000

Outcome = Delivered | Undelivered | Refusal
"""What became of an event."""


class FindSent(Protocol):
    """Finds what of a claim is on a topic already, see :func:`streams.serving.sent.find_sent`."""

    def __call__(self, topic: str, *, tag: str, since_ms: int) -> Mapping[int, Delivered]:
        """Give the place of each record by its number."""
        ...


class EventIntake:
    """Takes events of all sources; belongs to the event loop of the API.

    Args:
        admissions: Admission of each source that takes events, by topic.
        without: Why other sources take none, by topic.
        store: What ``gate`` and ``once`` are kept in; closed with this.
        gate: Tells who may send.
        once: Keeps idempotency keys.
        make_producer: Makes the producer, in the event loop.
        find_sent: Finds what of a claim is on a topic, of its tag and time; in a thread.
        metrics: Where events are counted.
        clock_us: The time of records.
    """

    def __init__(
        self,
        admissions: Mapping[str, EventAdmission],
        *,
        without: Mapping[str, str] | None = None,
        store: ProducerStore,
        gate: Gate,
        once: Once,
        make_producer: Callable[[], EventProducer],
        find_sent: FindSent,
        metrics: ServingMetrics,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self.admissions = admissions
        self._without = without or {}
        self.gate = gate
        self.once = once
        self._store = store
        self._make_producer = make_producer
        self._find_sent = find_sent
        self._joint = {topic: JointAdmission(admission, now_us=self.now_us) for topic, admission in admissions.items()}
        self._searching = asyncio.Semaphore(MAX_SEARCHES)
        self._metrics = metrics
        self._clock_us = clock_us
        # A topic that is gone, or may not be written, says nothing of the others.
        self._breakers = {topic: Breaker(f"Kafka's topic {topic}") for topic in admissions}
        self._stack = AsyncExitStack()
        self._n_requests = 0

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._store)
        self._producer = await self._stack.enter_async_context(self._make_producer())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def find(self, source: str) -> EventAdmission:
        """Find the admission of a source.

        Raises:
            RefusedError: It takes no events here.
        """
        if source in self._without:
            raise RefusedError(415, "unsupported_source", self._without[source])
        if source not in self.admissions:
            text = f"there is no source {source!r}, expected one of {sorted(self.admissions)}"
            raise RefusedError(404, "not_found", text)
        return self.admissions[source]

    def now_us(self) -> int:
        """Tell the time that records get: Kafka's have milliseconds."""
        return self._clock_us() // 1_000 * 1_000

    def refused(self, source: str, code: str, *, events: int) -> None:
        """Take note of events that were not let in."""
        self._metrics.events_taken(source, {code: events})

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request with events for as long as it is worked on.

        Raises:
            SinkUnavailableError: There are too many.
        """
        if self._n_requests >= MAX_REQUESTS:
            text = f"{MAX_REQUESTS} requests with events are being worked on, expected fewer; try again"
            raise SinkUnavailableError(text, retry_after_ms=_RETRY_MS)
        self._n_requests += 1
        try:
            yield
        finally:
            self._n_requests -= 1

    async def take(
        self,
        admission: EventAdmission,
        values: Sequence[bytes],
        *,
        request_ids: Sequence[str],
        claim: Claim | None = None,
    ) -> list[Outcome]:
        """Take events, and wait for Kafka.

        Args:
            admission: Of their source.
            values: Their payloads.
            request_ids: The request id of each, which travels with it to its features and scores.
            claim: The claim of their idempotency key, which learns whether any of them was sent.

        Returns:
            What became of each, in order.

        Raises:
            SinkUnavailableError: None of those that may go was acknowledged.
        """
        topic = admission.source.topic
        known: Mapping[int, Delivered] = {}
        if claim is not None and claim.is_taken_over:
            async with self._searching:
                known = await asyncio.to_thread(self._find_sent, topic, tag=claim.tag, since_ms=claim.since_ms)
        judged = await self._joint[topic].admit(values)
        to_send: dict[int, EventRecord] = {}
        for index, (event, request_id) in enumerate(zip(judged.events, request_ids, strict=True)):
            if isinstance(event, AdmittedEvent) and index not in known:
                headers = [(REQUEST_ID_HEADER, request_id.encode())]
                if claim is not None:
                    headers.append((ONCE_HEADER, f"{claim.tag}:{index}".encode()))
                to_send[index] = EventRecord(key=event.key, value=event.value, headers=headers)
        try:
            sent = await self._send(topic, list(to_send.values()), timestamp_ms=judged.now_us // 1_000, claim=claim)
        except SinkUnavailableError:
            self._metrics.events_taken(topic, {"unavailable": len(to_send)})
            raise
        found: dict[int, Outcome] = {**known, **dict(zip(to_send, sent, strict=True))}
        for index, event in enumerate(judged.events):
            if not isinstance(event, AdmittedEvent):
                found.setdefault(index, event)
        outcomes = [found[index] for index in range(len(values))]
        if claim is not None:
            claim.is_complete = all(outcome_code(outcome) != "unavailable" for outcome in outcomes)
        self._metrics.events_taken(topic, Counter(map(outcome_code, outcomes)))
        return outcomes

    async def _send(
        self, topic: str, records: Sequence[EventRecord], *, timestamp_ms: int, claim: Claim | None
    ) -> list[Delivered | Undelivered]:
        if not records:
            return []

        async def send() -> list[Delivered | Undelivered]:
            if claim is not None:
                claim.has_sent = claim.is_in_doubt = True
            found = await self._producer.send(topic, records, timestamp_ms=timestamp_ms)
            if claim is not None:
                claim.has_sent = not all(map(_is_unsent, found))
                claim.is_in_doubt = not all(isinstance(each, Delivered) or _is_unsent(each) for each in found)
            if not all(map(_is_unsent, found)):  # else they were not even handed over, and Kafka was not asked
                _check_acknowledged(found)
            return found

        if claim is not None:
            claim.check_lease()
        found = await self._breakers[topic].call(send)
        _check_acknowledged(found)
        return found


def _check_acknowledged(found: Sequence[Delivered | Undelivered]) -> None:
    """See that Kafka has acknowledged a record, if it may take any.

    Raises:
        SinkUnavailableError: It has not.
    """
    away = [outcome for outcome in found if isinstance(outcome, Undelivered) and not outcome.is_too_large]
    if away and not any(isinstance(outcome, Delivered) for outcome in found):
        raise SinkUnavailableError(unavailable_text(away), retry_after_ms=_RETRY_MS)


def _is_unsent(outcome: Delivered | Undelivered) -> bool:
    """Tell whether it is certain that a record is not on the topic."""
    return isinstance(outcome, Undelivered) and (outcome.is_unsent or outcome.is_too_large)


def outcome_code(outcome: Outcome) -> str:
    """Name what became of an event: ``accepted``, a reason, ``too_large`` or ``unavailable``."""
    if isinstance(outcome, Delivered):
        return "accepted"
    if isinstance(outcome, Refusal):
        return outcome.reason
    return "too_large" if outcome.is_too_large else "unavailable"


def unavailable_text(away: Sequence[Undelivered]) -> str:
    """Say that Kafka has not acknowledged events, and whether some of them may be there all the same."""
    is_certain = all(outcome.is_unsent for outcome in away)
    doubt = "" if is_certain else "; it may have some of them all the same, which `event_id` of a source tells apart"
    return f"Kafka has not acknowledged {len(away)} events ({away[0].cause}){doubt}. Send them again"


def row_document(index: int, outcome: Outcome) -> dict[str, Any]:
    """Write an outcome as :class:`streams.serving.document.RowDocument` says."""
    if isinstance(outcome, Delivered):
        return {"index": index, "status": "accepted", "partition": outcome.partition, "offset": outcome.offset}
    if isinstance(outcome, Refusal):
        told = {"reason": outcome.reason, "detail": outcome.detail, "remedy": outcome.remedy}
        return {"index": index, "status": "refused", **told}
    if outcome.is_too_large:
        remedy = "send less in one event, or raise `max.message.bytes` of the topic"
        return {"index": index, "status": "refused", "reason": "too_large", "detail": outcome.cause, "remedy": remedy}
    remedy = "send it again" if outcome.is_unsent else "send it again; it may be there all the same"
    return {
        "index": index,
        "status": "unavailable",
        "reason": "unavailable",
        "detail": outcome.cause,
        "remedy": remedy,
    }
