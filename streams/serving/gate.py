"""Who may send events, and how many: asked at each request, before anything of it goes on.

Keys are held by this process. One that is not among them makes it read them again; and each request learns, by the
round trip that takes its events from the limits, whether the keys have changed since: from the next request on a
revoked key is refused.

While Redis does not answer, keys that were read in the last ten minutes go on to hold, and the limits are those of each
process by itself: events wait for no store that they do not go to. A key that is not known then is not one that is
wrong: the answer is 503.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from schemas.errors import SinkUnavailableError
from streams.serving.edge import RefusedError
from streams.serving.producer_key import ALL_SOURCES, KeyRing, ProducerKey, Rate, digest_of, version_of
from streams.serving.producer_store import ProducerStore
from streams.serving.rate import TAKE, Limit, LocalLimits, interval_us, limit_argument

logger = logging.getLogger(__name__)

KEPT_S: Final = 600.0
"""How long keys hold after Redis last said that they are those that there are."""
OPEN: Final = "-open"
"""Name of whoever sends without a key, where that is allowed; no key can be called so."""


class Gate:
    """Tells who sends, and takes their events from the limits; belongs to the event loop of the API.

    Args:
        store: Where keys and limits are.
        global_rate: What all may send together.
        is_open: Whether events without a key are taken.
        store_unavailable: Told of each call that found the store away.
        timer_us: Monotonic clock.
    """

    def __init__(
        self,
        store: ProducerStore,
        *,
        global_rate: Rate,
        is_open: bool = False,
        store_unavailable: Callable[[str], None] = lambda store: None,
        timer_us: Callable[[], int] = lambda: time.monotonic_ns() // 1_000,
    ) -> None:
        self._store = store
        self._global_rate = global_rate
        self._open = ProducerKey(name=OPEN, digest="", sources=(ALL_SOURCES,), rate=global_rate, created_at="")
        self._is_open = is_open
        self._store_unavailable = store_unavailable
        self._timer_us = timer_us
        self._ring = KeyRing()
        self._checked_us: int | None = None
        self._reading = asyncio.Lock()
        self._read_from_us = -1
        self._local = LocalLimits()
        self._is_local = False

    async def identify(self, authorization: str | None, *, source: str) -> ProducerKey:
        """Tell whose key it is.

        Args:
            authorization: The header of that name.
            source: What events are sent to.

        Raises:
            RefusedError: There is no key, or it is none, or revoked (401), or not good for this source (403).
            SinkUnavailableError: Redis does not answer, and the key is not known here.
        """
        if authorization is None and self._is_open:
            return self._open
        scheme, _, secret = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            got = "no key was given" if authorization is None else "the header Authorization is no bearer token"
            text = f"{got}, expected `Authorization: Bearer KEY` with a key that `headrace keys create` made"
            raise _unauthenticated(text)
        digest = digest_of(secret.strip())
        known_for_us = None if self._checked_us is None else self._timer_us() - self._checked_us
        if known_for_us is None or known_for_us > KEPT_S * 1e6 or digest not in self._ring.by_digest:
            await self._read()
        key = self._good(digest)
        if not key.may_send_to(source):
            text = (
                f"the key of {key.name} is not good for source {source!r}, expected one of {list(key.sources)}; ask "
                "for a key that is"
            )
            raise RefusedError(403, "forbidden", text)
        return key

    async def take(self, key: ProducerKey, *, events: int) -> list[Limit]:
        """Take events of a producer from the limits.

        Args:
            key: Whose events they are.
            events: How many, at least 1.

        Returns:
            The limits: the producer's own, then the global one.

        Raises:
            RefusedError: They are too many now (429), or in one request (413); or the key was revoked (401).
            SinkRejectedError: What stands where keys are kept are none.
        """
        if events > (most := min(key.rate.burst, self._global_rate.burst)):
            text = f"the batch has {events} events, expected at most the {most} that may be sent at once; split it"
            raise RefusedError(413, "too_large", text)
        limits = [
            (self._store.rate_key(key.name), "client", key.rate),
            (self._store.rate_key(""), "global", self._global_rate),
        ]
        is_taken, ahead_us = await self._take(key, limits, events)
        found = [Limit(name, rate, us) for (_, name, rate), us in zip(limits, ahead_us, strict=True)]
        if is_taken:
            return found
        slowest = max(found, key=lambda limit: limit.wait_us(events))
        wait_s = max(1, -int(-slowest.wait_us(events) // 1e6))
        whose = f"the key of {key.name}" if slowest.name == "client" else "all producers together"
        text = (
            f"{events} events are more than may be sent now: {slowest.remaining} of {slowest.rate.burst} are left, at "
            f"{slowest.rate.per_s} a second for {whose}; send them again in {wait_s} s"
        )
        headers = limit_headers(found) | {"Retry-After": str(wait_s)}
        raise RefusedError(429, "rate_limited", text, headers=headers)

    async def _take(
        self, key: ProducerKey, limits: list[tuple[str, str, Rate]], events: int
    ) -> tuple[bool, list[float]]:
        keys = [name for name, *_ in limits]
        values = [limit_argument(rate) for *_, rate in limits]
        try:
            reply = await self._store.run(
                TAKE, keys=[*keys, self._store.ring_key], values=[*values, b""], arguments=[str(events)]
            )
        except SinkUnavailableError as exc:
            self._store_unavailable("redis")
            if not self._is_local:
                logger.warning("limits of events are those of this process alone: %s", exc)
            self._is_local = True
            given = [(name, rate) for name, _, rate in limits]
            return self._local.take(given, events=events, now_us=self._timer_us())
        if self._is_local:
            logger.info("limits of events are those of all processes again")
        self._is_local = False
        is_taken, *ahead, version = reply
        if key is not self._open:
            if version_of(version) == self._ring.version:
                self._checked_us = self._timer_us()
            else:
                await self._read()
                self._good(key.digest)
        return is_taken == b"1", [float(us) for us in ahead]

    async def _read(self) -> None:
        """Read the keys, unless a read that began after this was called has just ended."""
        asked_us = self._timer_us()
        async with self._reading:
            if self._read_from_us > asked_us:
                return
            from_us = self._timer_us()
            try:
                self._ring = await self._store.read_ring()
            except SinkUnavailableError as exc:
                self._store_unavailable("redis")
                msg = f"whether the key is a good one cannot be told now: {exc}"
                raise SinkUnavailableError(msg, retry_after_ms=exc.retry_after_ms) from exc
            self._read_from_us, self._checked_us = from_us, self._timer_us()

    def _good(self, digest: str) -> ProducerKey:
        key = self._ring.by_digest.get(digest)
        if key is None:
            text = (
                "the key is none that is known here, expected one that `headrace keys create` made; see that all of it "
                "was sent"
            )
            raise _unauthenticated(text)
        if key.revoked_at is not None:
            text = f"the key of {key.name} was revoked at {key.revoked_at}, expected one that is good; ask for another"
            raise _unauthenticated(text)
        return key


def limit_headers(limits: list[Limit]) -> dict[str, str]:
    """Tell the limits as draft-ietf-httpapi-ratelimit-headers has it: q a burst, w its seconds, r left, t till full."""
    policies = [
        f'"{limit.name}";q={limit.rate.burst};w={max(1, round(limit.rate.burst * interval_us(limit.rate) / 1e6))}'
        for limit in limits
    ]
    states = [f'"{limit.name}";r={limit.remaining};t={limit.full_in_s}' for limit in limits]
    return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(states)}


def _unauthenticated(text: str) -> RefusedError:
    return RefusedError(401, "unauthenticated", text, headers={"WWW-Authenticate": 'Bearer realm="headrace"'})
