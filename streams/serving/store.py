"""The online store as its readers see it: ``OnlineStore``, and ``AsyncOnlineStore`` for asyncio.

    with OnlineStore("redis://127.0.0.1:6379/0") as store:
        (value,) = store.read(user_activity, ["u17"])
        if value.status == "present":
            use(value.features["clicks_5m"])

A read goes through these, and stops at the first that has the value:

1. the cache of this process, for views that may be served from it (``Serving.cache``);
2. Redis, in one round trip for all that is asked for; the same key asked for at the same time goes once;
3. the newest row in the offline store, for views whose ``Serving.fallback`` says so.

Whatever it comes from, it is judged at the moment of the read: a value older than the view's ``ttl`` is ``stale``.
While Redis does not answer, a circuit breaker keeps readers from waiting for it. Then features with a default are given
it, with the status ``missing``; a view without the defaults to do so raises, since ``missing`` would not be true.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from cachetools import TLRUCache

from schemas.errors import ConfigError, SchemaError, SinkError, SinkUnavailableError
from schemas.model import ModelSpec
from schemas.view import FeatureView
from streams.breaker import Breaker
from streams.serving.flight import Flights
from streams.serving.latest import LatestOffline
from streams.serving.score import ScoreValue, resolve_score
from streams.serving.value import FeatureValue, ValueSource, asked_features, resolve_value
from streams.sinks.online import online_keys
from streams.sinks.packing import UnpackedValue, unpack_value
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms
from streams.sinks.redis_client import RedisClient
from streams.sinks.score_store import score_key, unpack_score

logger = logging.getLogger(__name__)

MAX_ENTITIES: Final = 1_000
"""Entities of one query."""
CACHED_VALUES: Final = 100_000
_CLOSE_S: Final = 5.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class FeatureQuery:
    """What is asked for of one view.

    Attributes:
        view: The view.
        entities: 1 to :data:`MAX_ENTITIES` entity keys.
        features: Names of the features; None for all.
    """

    view: FeatureView
    entities: Sequence[str | int]
    features: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.entities) <= MAX_ENTITIES:
            msg = (
                f"{len(self.entities)} entities are asked for of view {self.view.name}, expected 1 to {MAX_ENTITIES}; "
                "split the read"
            )
            raise ConfigError(msg)
        asked_features(self.view, self.features)


class ReadObserver(Protocol):
    """Takes note of what is read; called in the event loop, so it must not wait."""

    def values_read(self, view: str, values: Sequence[FeatureValue], *, now_us: int) -> None:
        """Take note of the values of one query."""
        ...

    def store_unavailable(self, store: str) -> None:
        """Take note of a call that found ``redis`` or ``delta`` unavailable, or was not made as it is."""
        ...


@dataclass(frozen=True)
class _Held:
    """A value as it was read; ``cache_us`` is for how long it may be served."""

    value: UnpackedValue
    cache_us: int


class AsyncOnlineStore:
    """Reads features; belongs to the event loop that first uses it.

    Args:
        redis_url: See :mod:`streams.sinks.redis_address`.
        offline: Root of the offline store, for views with a ``fallback``; None: their fallback is not used.
        offline_options: Options of its object store, as delta-rs takes them.
        prefix: First part of every key.
        timeout_s: Seconds after which an unanswered call counts as Redis being down.
        offline_timeout_s: Seconds after which a look-up in the offline store is given up.
        cached_values: Values kept in this process at most, the least recently used go first.
        observer: Takes note of what is read.
        pseudonyms: What stands in Redis for personal values of views that ask for it.
        clock_us: The time that ages are counted to: the clock's, or in a replay the watermark.
        timer_us: Monotonic clock of the cache.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        offline: str | Path | None = None,
        offline_options: Mapping[str, str] | None = None,
        prefix: str = "headrace",
        timeout_s: float = 0.25,
        offline_timeout_s: float = 10.0,
        cached_values: int = CACHED_VALUES,
        observer: ReadObserver | None = None,
        pseudonyms: Pseudonyms = NO_PSEUDONYMS,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        timer_us: Callable[[], int] = lambda: time.monotonic_ns() // 1_000,
    ) -> None:
        self._client = RedisClient(redis_url, timeout_s=timeout_s)
        self._prefix = prefix
        self._pseudonyms = pseudonyms
        self._offline_timeout_s = offline_timeout_s
        self._observer = observer
        self._clock_us = clock_us
        self._breaker = Breaker("Redis")
        self._flights: Flights[str, bytes | None] = Flights(self._fetch)
        # By key and definition hash.
        self._cache: TLRUCache[tuple[str, str], _Held] = TLRUCache(
            maxsize=cached_values, ttu=lambda _, held, now: now + held.cache_us, timer=timer_us
        )
        self._latest = (
            None
            if offline is None
            else LatestOffline(offline, storage_options=offline_options, timer=lambda: timer_us() / 1_000_000)
        )

    @property
    def is_degraded(self) -> bool:
        """Whether Redis is left alone since it does not answer."""
        return self._breaker.is_open

    async def read(
        self,
        view: FeatureView,
        entities: Sequence[str | int],
        *,
        features: Sequence[str] | None = None,
        is_stale_wanted: bool = False,
    ) -> list[FeatureValue]:
        """Read one view's values of 1 to 1,000 entities, in the order asked for.

        Args:
            view: The view.
            entities: Entity keys.
            features: Names of the features; None for all.
            is_stale_wanted: Whether features of a stale value are given in place of defaults; its status says so.

        Raises:
            ConfigError: There are too many entities, or the view has no such feature.
            SinkUnavailableError: Redis does not answer, and the view has no defaults and no fallback to go on with.
            SinkRejectedError: Redis refuses the read.
        """
        query = FeatureQuery(view=view, entities=entities, features=features)
        (values,) = await self.read_many([query], is_stale_wanted=is_stale_wanted)
        return values

    async def read_many(
        self, queries: Iterable[FeatureQuery], *, is_stale_wanted: bool = False
    ) -> list[list[FeatureValue]]:
        """Read several views' values in one round trip; see :meth:`read`.

        Returns:
            For each query its values, in the order of its entities.
        """
        queries = list(queries)
        keys = [
            online_keys(query.view, query.entities, prefix=self._prefix, pseudonyms=self._pseudonyms)
            for query in queries
        ]
        found: list[dict[str, tuple[UnpackedValue, ValueSource]]] = [
            self._cached(query, its_keys) for query, its_keys in zip(queries, keys, strict=True)
        ]
        wanted = dict.fromkeys(key for i, its_keys in enumerate(keys) for key in its_keys if key not in found[i])
        down: SinkUnavailableError | None = None
        if wanted:
            try:
                packed = await self._flights.get(wanted)
            except SinkUnavailableError as exc:
                down, packed = exc, {}
                self._unavailable("redis")
            for i, query in enumerate(queries):
                self._take(packed, query, keys[i], found[i])
        for i, query in enumerate(queries):
            await self._fall_back(query, keys[i], found[i], down=down)
        now_us = self._clock_us()
        return [
            self._resolve(query, keys[i], found[i], now_us=now_us, is_stale_wanted=is_stale_wanted)
            for i, query in enumerate(queries)
        ]

    async def read_scores(self, model: ModelSpec, entities: Sequence[str], *, ttl_us: int | None) -> list[ScoreValue]:
        """Read the newest scores of entities, which the online role stores for an application's use cases.

        Args:
            model: The model.
            entities: What was scored, in the order wanted.
            ttl_us: Age of the scored event after which a score is stale; None means never.

        Raises:
            SinkUnavailableError: Redis does not answer.
        """
        keys = [score_key(model, entity, prefix=self._prefix) for entity in entities]
        try:
            packed = await self._flights.get(keys)
        except SinkUnavailableError:
            self._unavailable("redis")
            raise
        scores = [None if (value := packed.get(key)) is None else unpack_score(value, model=model) for key in keys]
        now_us = self._clock_us()
        return [
            resolve_score(score, model=model, entity=entity, ttl_us=ttl_us, now_us=now_us)
            for entity, score in zip(entities, scores, strict=True)
        ]

    async def close(self) -> None:
        """Call off what is being read and close the connections."""
        await self._flights.close()
        if self._latest is not None:
            await self._latest.close()
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _fetch(self, keys: Sequence[str]) -> Mapping[str, bytes | None]:
        values = await self._breaker.call(lambda: self._client.get_many(keys))
        return dict(zip(keys, values, strict=True))

    def _cached(self, query: FeatureQuery, keys: Sequence[str]) -> dict[str, tuple[UnpackedValue, ValueSource]]:
        if not _cache_us(query.view):
            return {}
        tag = query.view.definition_hash
        held = ((key, self._cache.get((key, tag))) for key in keys)
        return {key: (value.value, ValueSource.CACHE) for key, value in held if value is not None}

    def _take(
        self,
        packed: Mapping[str, bytes | None],
        query: FeatureQuery,
        keys: Sequence[str],
        found: dict[str, tuple[UnpackedValue, ValueSource]],
    ) -> None:
        cache_us = _cache_us(query.view)
        for key in keys:
            value = packed.get(key)
            if key in found or value is None or (unpacked := unpack_value(value, view=query.view)) is None:
                continue
            found[key] = (unpacked, ValueSource.ONLINE)
            if cache_us:
                self._cache[key, query.view.definition_hash] = _Held(unpacked, cache_us)

    async def _fall_back(
        self,
        query: FeatureQuery,
        keys: Sequence[str],
        found: dict[str, tuple[UnpackedValue, ValueSource]],
        *,
        down: SinkUnavailableError | None,
    ) -> None:
        """Look for what is missing where the view says.

        Raises:
            SinkUnavailableError: A value may be there but cannot be read, and defaults do not cover what is asked for.
        """
        missing = {key: entity for key, entity in zip(keys, query.entities, strict=True) if key not in found}
        if not missing:
            return
        if self._latest is not None and query.view.serving.fallback is not None:
            try:
                look_up = self._latest.get(query.view, list(missing.values()))
                rows = await asyncio.wait_for(look_up, self._offline_timeout_s)
            except (SinkError, SchemaError, TimeoutError) as exc:
                self._unavailable("delta")
                logger.warning(
                    "view %s: no look-up in the offline store (%s)", query.view.name, str(exc) or "it took too long"
                )
            else:
                for key, entity in missing.items():
                    if (row := rows.get(entity)) is not None:
                        features = self._pseudonyms.features(query.view, row.features)
                        found[key] = (replace(row, features=features), ValueSource.OFFLINE)
                return
        uncovered = set(asked_features(query.view, query.features)) - query.view.serving.defaults.keys()
        if down is not None and uncovered:
            msg = (
                f"view {query.view.name} cannot be read: {down}; its features {sorted(uncovered)} have no default that "
                "could stand in"
            )
            raise SinkUnavailableError(msg, retry_after_ms=down.retry_after_ms) from down

    def _resolve(
        self,
        query: FeatureQuery,
        keys: Sequence[str],
        found: Mapping[str, tuple[UnpackedValue, ValueSource]],
        *,
        now_us: int,
        is_stale_wanted: bool,
    ) -> list[FeatureValue]:
        names, ttl_us = asked_features(query.view, query.features), query.view.ttl_us
        values = []
        for key, entity in zip(keys, query.entities, strict=True):
            value, source = found.get(key, (None, ValueSource.NONE))
            values.append(
                resolve_value(
                    value,
                    view=query.view,
                    entity=entity,
                    names=names,
                    ttl_us=ttl_us,
                    source=source,
                    now_us=now_us,
                    is_stale_wanted=is_stale_wanted,
                )
            )
        if self._observer is not None:
            self._observer.values_read(query.view.name, values, now_us=now_us)
        return values

    def _unavailable(self, store: str) -> None:
        if self._observer is not None:
            self._observer.store_unavailable(store)


class OnlineStore:
    """Reads features, for code without an event loop; may be used by several threads.

    Reads run in a thread of its own. See :class:`AsyncOnlineStore` for the arguments and for what is raised.
    """

    def __init__(self, redis_url: str, **options: Any) -> None:
        self._store = AsyncOnlineStore(redis_url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-online-store", daemon=True)
        self._thread.start()

    def read(
        self,
        view: FeatureView,
        entities: Sequence[str | int],
        *,
        features: Sequence[str] | None = None,
        is_stale_wanted: bool = False,
    ) -> list[FeatureValue]:
        """Read one view's values; see :meth:`AsyncOnlineStore.read`."""
        return self._run(self._store.read(view, entities, features=features, is_stale_wanted=is_stale_wanted))

    def read_many(self, queries: Iterable[FeatureQuery], *, is_stale_wanted: bool = False) -> list[list[FeatureValue]]:
        """Read several views' values in one round trip; see :meth:`AsyncOnlineStore.read_many`."""
        return self._run(self._store.read_many(queries, is_stale_wanted=is_stale_wanted))

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result(_CLOSE_S)
        except FutureTimeoutError:
            logger.warning("the online store's connections did not close within %.0f s", _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _cache_us(view: FeatureView) -> int:
    return view.serving.cache_us(ttl_us=view.ttl_us)
