"""Calls to Redis, one round trip each, with its errors put into Headrace's tree."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any, Final

from redis import asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot

from schemas.errors import ConfigError, SinkRejectedError, SinkUnavailableError
from streams.sinks.redis_address import RedisAddress, RedisKind

REQUIRED_RIGHTS: Final = "~headrace:* +evalsha +script|load +get +mget +getrange +set +time +wait"
"""What a user of the online store needs, as Redis spells rights, beside ``+@connection`` for the client library's
greeting; a reader needs no more of these than ``+get +mget``."""
_DELETING_RIGHTS: Final = "+scan +unlink"
"""What a user needs besides who may delete all values of a view."""
CLUSTER_RIGHTS: Final = "+cluster|slots +cluster|shards +cluster|keyslot +command"
"""What the client library asks of a cluster besides."""
_PASSING: Final = (
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
)
"""First words of refusals that pass once the server has recovered, failed over or got memory."""
_PASSING_ERRORS: Final = (
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.RedisClusterException,  # no node of the cluster answers, or slots are without a node
    asyncio.TimeoutError,
    OSError,
)


class RedisClient:
    """A lazily connected client of one Redis server, of a cluster, or of the master that sentinels name.

    Belongs to the event loop that first uses it. A call that meets a broken connection is repeated once on a new one:
    all calls made here are safe to repeat.

    Args:
        url: See :mod:`streams.sinks.redis_address`.
        timeout_s: Seconds to wait for a connection and for an answer.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        address = RedisAddress.parse(url)
        self._is_cluster = address.kind is RedisKind.CLUSTER
        self._address = address.shown
        self._wait_replicas = address.wait_replicas
        self._wait_ms = max(1, int(timeout_s * 500))  # half of it: the answer must come before the connection gives up
        self._sentinels: list[Any] = []
        options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        try:
            if self._is_cluster:
                self._client: Any = redis.RedisCluster.from_url(address.url, **options)
            elif address.kind is RedisKind.SENTINEL:
                sentinel = Sentinel(  # type: ignore[no-untyped-call]
                    list(address.sentinels),
                    sentinel_kwargs={**address.sentinel_options, **options},
                    retry=Retry(NoBackoff(), 1),
                    **address.options,
                    **options,
                )
                self._sentinels = sentinel.sentinels
                self._client = sentinel.master_for(address.master)
            else:
                self._client = redis.Redis.from_url(address.url, retry=Retry(NoBackoff(), 1), **options)
            if not self._is_cluster:
                # Else an option that there is not would show at the first call.
                pool = self._client.connection_pool
                pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError, exceptions.RedisError) as exc:
            msg = f"Redis address {address.shown} has options that cannot be used ({exc}); see those of redis-py"
            raise ConfigError(msg) from exc

    async def run_script(
        self,
        script: str,
        *,
        keys: Sequence[str],
        values: Sequence[bytes],
        arguments: Sequence[str],
        keys_per_call: int,
    ) -> list[Any]:
        """Run a Lua script over keys, in one round trip to each server.

        Args:
            script: The script; its ARGV are ``arguments``, then the values of its KEYS.
            keys: The keys.
            values: As many values.
            arguments: Arguments before the values, the same in each call.
            keys_per_call: How many keys one call takes at most; in a cluster also only keys of one slot.

        Returns:
            The reply of each call.
        """
        sha = sha1(script.encode(), usedforsecurity=False).hexdigest()
        calls = self._split(keys, size=keys_per_call)

        async def send() -> list[Any]:
            pipeline = self._pipeline()
            for call in calls:
                parts: list[str | bytes] = [keys[i] for i in call]
                pipeline.execute_command("EVALSHA", sha, len(call), *parts, *arguments, *(values[i] for i in call))
            if self._wait_replicas:
                pipeline.execute_command("WAIT", self._wait_replicas, self._wait_ms)
            return list(await pipeline.execute(raise_on_error=False))

        for _ in range(2):
            with self._mapped_errors():
                replies = await self._repeated(send)
                if not any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                    for reply in replies:
                        if isinstance(reply, Exception):
                            raise reply
                    if self._wait_replicas:
                        self._check_replicas(replies.pop())
                    return replies
                # A server that was restarted, failed over or joined knows no script yet.
                await self._client.script_load(script)
        msg = f"Redis at {self._address} forgets scripts as soon as they are loaded, expected SCRIPT LOAD to last"
        raise SinkUnavailableError(msg)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Get the values of keys, in one round trip to each server."""
        if not keys:
            return []

        async def send() -> list[bytes | None]:
            if not self._is_cluster:
                values: list[bytes | None] = await self._client.mget(keys)
                return values
            pipeline = self._pipeline()
            for key in keys:
                pipeline.get(key)
            return list(await pipeline.execute())

        with self._mapped_errors():
            return await self._repeated(send)

    async def delete_matching(self, pattern: str) -> int:
        """Delete the keys of a pattern, which takes a look at every key there is; returns how many there were.

        The user needs ``+scan +unlink`` for it, which no other call does; that is told too where there is no such key.
        """
        with self._mapped_errors(rights=f"{REQUIRED_RIGHTS} {_DELETING_RIGHTS}"):
            n_deleted = int(await self._client.unlink(pattern))  # a key of this name would be one of the pattern
            async for key in self._client.scan_iter(match=pattern, count=1_000):
                n_deleted += await self._client.unlink(key)
        return n_deleted

    async def _repeated(self, send: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
        """Send, and once more after a failover: only a new connection asks the sentinels who the master is."""
        try:
            return await send()
        except exceptions.ConnectionError:
            if not self._sentinels:
                raise
        return await send()

    async def close(self) -> None:
        """Close all connections."""
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _check_replicas(self, replicas: int) -> None:
        if replicas < self._wait_replicas:
            msg = (
                f"Redis at {self._address} has the write on {replicas} replicas, expected `wait_replicas`="
                f"{self._wait_replicas} within {self._wait_ms} ms; see that they run"
            )
            raise SinkUnavailableError(msg)

    def _pipeline(self) -> Any:
        return self._client.pipeline() if self._is_cluster else self._client.pipeline(transaction=False)

    def _split(self, keys: Sequence[str], *, size: int) -> list[Sequence[int]]:
        if not self._is_cluster:
            return [range(start, min(start + size, len(keys))) for start in range(0, len(keys), size)]
        by_slot: dict[int, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            by_slot[key_slot(key.encode())].append(i)
        return [slot[start : start + size] for slot in by_slot.values() for start in range(0, len(slot), size)]

    @contextmanager
    def _mapped_errors(self, *, rights: str = REQUIRED_RIGHTS) -> Iterator[None]:
        try:
            yield
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as exc:
            msg = f"Redis at {self._address} refused the login: {exc}; give user and password in its address"
            raise SinkRejectedError(msg) from exc
        except exceptions.NoPermissionError as exc:
            msg = (
                f"Redis at {self._address} does not let this user do it ({exc}), expected a user who may "
                f"{rights}; see its ACL"
            )
            raise SinkRejectedError(msg) from exc
        except (exceptions.ConnectionError, *_PASSING_ERRORS) as exc:
            msg = f"Redis at {self._address} is not available ({exc or type(exc).__name__}); see that it runs"
            raise SinkUnavailableError(msg) from exc
        except exceptions.RedisError as exc:
            if str(exc).startswith(_PASSING):
                msg = f"Redis at {self._address} is not ready: {exc}"
                raise SinkUnavailableError(msg) from exc
            msg = f"Redis at {self._address} refused the call: {exc}; another program may use the same keys"
            raise SinkRejectedError(msg) from exc
