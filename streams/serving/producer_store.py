"""Where keys of producers, their limits and their idempotency keys are kept: a few values of the online store."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from schemas.errors import SinkConflictError
from streams.breaker import Breaker
from streams.serving.producer_key import VERSION_DIGITS, KeyRing
from streams.sinks.redis_client import RedisClient

_TRIES: Final = 10

REPLACE: Final = """
-- KEYS: the keys of producers. ARGV: the version that is to be there, '' for none; the value.
local value = ARGV[2]
if redis.call('GETRANGE', KEYS[1], 0, 19) == ARGV[1] then
  redis.call('SET', KEYS[1], value)
  return 1
end
return redis.call('GET', KEYS[1]) == value and 1 or 0
"""


class ProducerStore:
    """Calls to the store; belongs to one event loop.

    In a cluster the keys of producers are in one slot with the limits, which one script looks at; each idempotency key
    has a slot of its own.

    Args:
        redis_url: As for :class:`streams.sinks.online.OnlineWriter`.
        prefix: As there.
        timeout_s: As there.
    """

    def __init__(self, redis_url: str, prefix: str = "headrace", *, timeout_s: float = 0.25) -> None:
        self._client = RedisClient(redis_url, timeout_s=timeout_s)
        self._breaker = Breaker("Redis")
        self._prefix = prefix
        self.ring_key = f"{prefix}:{{producers}}:keys"

    def rate_key(self, name: str) -> str:
        """Name the limit of a producer; without a name, of all together."""
        return f"{self._prefix}:{{producers}}:rate:{name}"

    def once_key(self, tag: str) -> str:
        """Name what is kept of an idempotency key."""
        return f"{self._prefix}:producers:once:{{{tag}}}"

    async def run(self, script: str, *, keys: Sequence[str], values: Sequence[bytes], arguments: Sequence[str]) -> Any:
        """Run a script once; its ARGV are the arguments, then the values.

        Raises:
            SinkUnavailableError: Redis does not answer; it may have run.
            SinkRejectedError: Redis refuses it.
        """
        (reply,) = await self._breaker.call(
            lambda: self._client.run_script(
                script, keys=keys, values=values, arguments=arguments, keys_per_call=len(keys)
            )
        )
        return reply

    async def read_ring(self) -> KeyRing:
        """Read the keys of producers.

        Raises:
            SinkUnavailableError: Redis does not answer.
            SinkRejectedError: Redis refuses it, or what is there are no keys.
        """
        (packed,) = await self._breaker.call(lambda: self._client.get_many([self.ring_key]))
        return KeyRing.unpacked(packed)

    async def change_ring(self, make: Callable[[KeyRing], KeyRing]) -> KeyRing:
        """Put keys made of those that are there in their place; made again where another one was faster.

        Raises:
            ConfigError: What ``make`` raises.
            SinkConflictError: Others were faster each time.
            SinkUnavailableError: Redis does not answer; the change may have been made.
            SinkRejectedError: As for :meth:`read_ring`.
        """
        for _ in range(_TRIES):
            old = await self.read_ring()
            new = make(old)
            expected = old.packed()[:VERSION_DIGITS].decode() if old.version else ""
            if await self.run(REPLACE, keys=[self.ring_key], values=[new.packed()], arguments=[expected]):
                return new
        msg = f"the keys of producers were changed by others {_TRIES} times in between; try again"
        raise SinkConflictError(msg)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
