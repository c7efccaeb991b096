"""Idempotency keys: a request that is repeated gets the answer of the first, and nothing of it is put on Kafka twice.

    1. A request claims its key in Redis for :data:`LEASE_S`, before anything of it is sent; who holds the same key then
       waits for the answer.
    2. Its records carry the claim and their number in a header.
    3. The answer is stored in place of the claim and given to all who ask again, for :data:`KEEP_S`.

Where the first ended between 1 and 3 (its process died, Kafka did not say what became of a record, Redis was away
when the answer was to be stored), the next request with the key takes the claim over once the lease is up. By then
nothing of the first is under way any more: it sends only while so much of the lease is left that Kafka has each
record or has given it up, and its replicas have caught up, before the end. So what of the request is on the topic is
found there, by the header, and only what is missing is sent; the answer tells of both.

What this does not cover: a process that is stopped for longer than the lease between looking at it and sending, a
broker that is stopped for as long with a record that it has received and not written, and a Redis that forgets what it
acknowledged (evicted, or lost in a failover or a power cut).
"""

import asyncio
import hashlib
import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from schemas.errors import SinkError, SinkRejectedError, SinkUnavailableError
from streams.serving.edge import RefusedError
from streams.serving.producer_store import ProducerStore
from streams.transport.event_producer import DELIVERY_TIMEOUT_S

logger = logging.getLogger(__name__)

KEEP_S: Final = 3_600.0
LEASE_S: Final = 60.0
"""Sending may begin in the first 15 s; then there are 10 s in which Kafka acknowledges, and 30 s in which a replica
that does not follow holds back what readers see (``replica.lag.time.max.ms``)."""
_REPLICA_LAG_S: Final = 35.0
_ANSWER_S: Final = 2.0
"""How long a repeated request waits for the answer, beyond what Kafka may take."""
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.25
_THREAD_BYTES: Final = 65_536

CLAIM: Final = """
-- KEYS: the key. ARGV: milliseconds to keep it, microseconds of a lease, fingerprint, owner; the time of its records
-- and the request id, with a space between. A claim is 'R fingerprint owner end-of-lease whether-taken-over
-- time-of-records request-id', an answer 'D fingerprint owner', a line's end and the answer. An empty value is none.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local stored = redis.call('GET', KEYS[1])
local first, is_taken_over = ARGV[5], '0'
if stored and stored ~= '' then
  local state, fingerprint, owner, rest = string.match(stored, '^(%u) (%x+) (%x+)[ \\n](.*)$')
  if not state then return {'broken', ''} end
  if fingerprint ~= ARGV[3] then return {'other', ''} end
  if state == 'D' then return {'done', rest} end
  local ends, before, begun = string.match(rest, '^(%d+) ([01]) (.*)$')
  if owner ~= ARGV[4] and tonumber(ends) > now then
    return {'running', string.format('%.0f', tonumber(ends) - now)}
  end
  is_taken_over = owner ~= ARGV[4] and '1' or before
  first = begun
end
local ends = string.format('%.0f', now + tonumber(ARGV[2]))
redis.call('SET', KEYS[1], table.concat({'R', ARGV[3], ARGV[4], ends, is_taken_over, first}, ' '), 'PX', ARGV[1])
return {is_taken_over == '1' and 'taken_over' or 'claimed', first}
"""
SETTLE: Final = """
-- KEYS: the key. ARGV: milliseconds to keep it, fingerprint, owner; the answer after 'D', or 'R': the lease is up now,
-- or 'F': the key is free. Nothing is done where another one has taken the claim over.
local stored = redis.call('GET', KEYS[1])
local mark = 'R ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' '
if not stored or string.sub(stored, 1, #mark) ~= mark then return 0 end
local what = string.sub(ARGV[4], 1, 1)
if what == 'D' then
  redis.call('SET', KEYS[1], 'D ' .. ARGV[2] .. ' ' .. ARGV[3] .. '\\n' .. string.sub(ARGV[4], 2), 'PX', ARGV[1])
elseif what == 'R' then
  redis.call('SET', KEYS[1], mark .. string.gsub(string.sub(stored, #mark + 1), '^%d+', '0'), 'PX', ARGV[1])
else
  redis.call('SET', KEYS[1], '', 'PX', 1)
end
return 1
"""


async def fingerprint_of(source: str, kind: str, body: bytes) -> str:
    """Hash what makes a request; a large body in a thread, so that others need not wait."""

    def digest() -> str:
        return hashlib.sha256(b"\n".join((source.encode(), kind.encode(), body))).hexdigest()

    return digest() if len(body) < _THREAD_BYTES else await asyncio.to_thread(digest)


@dataclass(frozen=True)
class StoredAnswer:
    """What the first request was answered with."""

    status: int
    body: bytes


@dataclass(kw_only=True)
class Claim:
    """A key that is this request's to answer.

    Attributes:
        key: Where it is stored.
        fingerprint: Hash of what is asked for.
        owner: Whose it is now.
        tag: What records carry.
        since_ms: Time of the first record that may carry it.
        request_id: Of the request that came first.
        is_taken_over: Whether another request may have sent some of it.
        send_before_s: Monotonic time before which sending has to begin.
        timer_s: The clock of that.
        has_sent: Whether Kafka may have any of it.
        is_in_doubt: Whether Kafka may have some of it without having said so.
        is_complete: Whether nothing of it is left to be sent.
    """

    key: str
    fingerprint: str
    owner: str
    tag: str
    since_ms: int
    request_id: str
    is_taken_over: bool
    send_before_s: float
    timer_s: Callable[[], float]
    has_sent: bool = False
    is_in_doubt: bool = False
    is_complete: bool = False

    def check_lease(self) -> None:
        """See that there is time to send.

        Raises:
            SinkUnavailableError: There is not; nothing was sent.
        """
        if self.timer_s() >= self.send_before_s:
            msg = "the request was held up for too long to be sent under its Idempotency-Key; send it again"
            raise SinkUnavailableError(msg)


@dataclass(frozen=True)
class Running:
    """Another request with the key is being worked on, or died; it has so many seconds."""

    left_s: float


class Once:
    """Keeps claims and answers in Redis; belongs to the event loop of the API.

    Args:
        store: Where claims and answers are.
        lease_s: How long a request has its key for itself; beyond the two times below by what a request may take.
        keep_s: How long an answer is kept.
        delivery_timeout_s: How long a record may wait for Kafka.
        replica_lag_s: How long a record may be there without being seen.
        timer_s: Monotonic clock.
    """

    def __init__(
        self,
        store: ProducerStore,
        *,
        lease_s: float = LEASE_S,
        keep_s: float = KEEP_S,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        replica_lag_s: float = _REPLICA_LAG_S,
        timer_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._keep_ms = int(keep_s * 1_000)
        self._send_within_s = lease_s - delivery_timeout_s - replica_lag_s
        self._wait_s = delivery_timeout_s + _ANSWER_S
        self._timer_s = timer_s

    async def wait(
        self, key: str, *, client: str, fingerprint: str, request_id: str, now_ms: int
    ) -> Claim | StoredAnswer:
        """Claim a key, or wait for the answer of the request that has it; see :meth:`claim`.

        Raises:
            RefusedError: That request has no answer yet (409), or was another one (422).
            SinkUnavailableError: Redis does not answer.
        """
        until_s, pause_s = self._timer_s() + self._wait_s, _FIRST_PAUSE_S
        while True:
            found = await self.claim(key, client=client, fingerprint=fingerprint, request_id=request_id, now_ms=now_ms)
            if not isinstance(found, Running):
                return found
            if self._timer_s() >= until_s:
                wait_s = max(1, -int(-found.left_s // 1))
                text = (
                    f"the first request with the Idempotency-Key {key!r} has no answer yet, expected it within "
                    f"{wait_s} s; then send this again, and it gets that answer or goes on in its place"
                )
                raise RefusedError(409, "in_progress", text, headers={"Retry-After": str(wait_s)})
            await asyncio.sleep(pause_s)  # Redis tells nobody who may use scripts and values alone
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def claim(
        self, key: str, *, client: str, fingerprint: str, request_id: str, now_ms: int
    ) -> Claim | StoredAnswer | Running:
        """Claim a key for a request, or tell what became of the one that has it.

        Args:
            key: As the producer sent it.
            client: Name of the producer: keys of others are other keys.
            fingerprint: Hash of all that makes the request, in hex.
            request_id: Its id.
            now_ms: Time of records that are sent from now on.

        Raises:
            RefusedError: The key was sent with another request (422).
            SinkUnavailableError: Redis does not answer.
        """
        tag = hashlib.blake2b(f"{client}\n{key}".encode(), digest_size=16).hexdigest()
        stored_at, owner = self._store.once_key(tag), uuid4().hex
        send_before_s = self._timer_s() + self._send_within_s
        lease_us = int(self._lease_s * 1e6)
        state, told = await self._run(
            CLAIM,
            stored_at,
            value=f"{now_ms} {request_id}".encode(),
            arguments=[str(self._keep_ms), str(lease_us), fingerprint, owner],
        )
        if state == b"other":
            text = (
                f"the Idempotency-Key {key!r} was sent with another request in the last {self._keep_ms // 60_000} min, "
                "expected the same; make a new key for each request"
            )
            raise RefusedError(422, "idempotency_key_reused", text)
        if state == b"broken":
            msg = f"what stands at {stored_at} is no claim, expected none or one; another program may use the same keys"
            raise SinkRejectedError(msg)
        if state == b"running":
            return Running(int(told) / 1e6)
        if state == b"done":
            return StoredAnswer(int(told[:3]), zlib.decompress(told[3:]))
        since_ms, first_id = told.decode().split(" ", 1)
        return Claim(
            key=stored_at,
            fingerprint=fingerprint,
            owner=owner,
            tag=tag,
            since_ms=int(since_ms),
            request_id=first_id,
            is_taken_over=state == b"taken_over",
            send_before_s=send_before_s,
            timer_s=self._timer_s,
        )

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        """Store the answer of a request of which nothing is left to be done."""
        await self._settle(claim, b"D" + str(answer.status).encode() + zlib.compress(answer.body, 1))

    async def leave(self, claim: Claim) -> None:
        """Let the next request with the key go on, as soon as it may."""
        if not claim.has_sent and not claim.is_taken_over:
            await self._settle(claim, b"F")
        elif not claim.is_in_doubt:
            await self._settle(claim, b"R")

    async def _settle(self, claim: Claim, what: bytes) -> None:
        """Settle a claim; where that fails its lease runs out, and the next request finds what was sent."""
        try:
            await self._run(
                SETTLE, claim.key, value=what, arguments=[str(self._keep_ms), claim.fingerprint, claim.owner]
            )
        except SinkError as exc:
            logger.warning("the answer of request %s is not stored: %s", claim.request_id, exc)

    async def _run(self, script: str, key: str, *, value: bytes, arguments: list[str]) -> Any:
        return await self._store.run(script, keys=[key], values=[value], arguments=arguments)
