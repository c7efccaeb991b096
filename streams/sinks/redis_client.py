"""Calls to Redis, one round trip each, with its errors put into Headrace's tree."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any, Final
from urllib.parse import urlsplit

from redis import asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from schemas.errors import ConfigError, SinkRejectedError, SinkUnavailableError

CLUSTER_SCHEME: Final = "redis+cluster"
_SCHEMES: Final = ("redis", "rediss", "unix", CLUSTER_SCHEME)
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
    """A lazily connected client of one Redis server or cluster.

    Belongs to the event loop that first uses it. A call that meets a broken connection is repeated once on a new one:
    all calls made here are safe to repeat.

    Args:
        url: ``redis://``, ``rediss://`` (TLS), ``unix://``, or ``redis+cluster://`` with any node of a cluster.
        timeout_s: Seconds to wait for a connection and for an answer.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            msg = f"Redis address has scheme {parts.scheme!r}, expected one of {list(_SCHEMES)}, e.g. redis://127.0.0.1:6379/0"
            raise ConfigError(msg)
        self._is_cluster = parts.scheme == CLUSTER_SCHEME
        # Without user and password, for messages.
        self._address = parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
        options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        try:
            if self._is_cluster:
                self._client: Any = redis.RedisCluster.from_url("redis" + url.removeprefix(CLUSTER_SCHEME), **options)
            else:
                self._client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 1), **options)
        except ValueError as exc:
            msg = f"Redis address of {self._address} is malformed ({exc}), expected e.g. redis://127.0.0.1:6379/0"
            raise ConfigError(msg) from exc

    async def run_script(
        self,
        script: str,
        *,
        keys: Sequence[str],
        values: Sequence[bytes],
        arguments: Sequence[str],
        keys_per_call: int,
    ) -> list[int]:
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
        for _ in range(2):
            with self._mapped_errors():
                pipeline = self._pipeline()
                for call in calls:
                    parts: list[str | bytes] = [keys[i] for i in call]
                    pipeline.execute_command("EVALSHA", sha, len(call), *parts, *arguments, *(values[i] for i in call))
                replies = await pipeline.execute(raise_on_error=False)
                if not any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                    for reply in replies:
                        if isinstance(reply, Exception):
                            raise reply
                    return list(replies)
                # A server that was restarted, failed over or joined knows no script yet.
                await self._client.script_load(script)
        msg = f"Redis at {self._address} forgets scripts as soon as they are loaded, expected SCRIPT LOAD to last"
        raise SinkUnavailableError(msg)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Get the values of keys, in one round trip to each server."""
        if not keys:
            return []
        with self._mapped_errors():
            if not self._is_cluster:
                values: list[bytes | None] = await self._client.mget(keys)
                return values
            pipeline = self._pipeline()
            for key in keys:
                pipeline.get(key)
            return list(await pipeline.execute())

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

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
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as exc:
            msg = f"Redis at {self._address} refused the login: {exc}; give user and password in its address"
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
