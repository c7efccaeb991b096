"""Health checks of the services, Headrace's own or anyone's: each asks the service something only it can answer."""

# The clients load for a while, each: only in the check that asks by it, so that most commands start fast.
# ruff: noqa: PLC0415

import logging
from contextlib import ExitStack
from typing import Final

from infra.local.port import accepts_connections
from schemas.errors import ServiceError

_SILENT: Final = logging.getLogger("headrace.local.health.silent")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


def check_kafka(address: str, *, timeout_s: float) -> str:
    """Ask a Kafka cluster for its metadata.

    Args:
        address: ``host:port``, several with commas between.
        timeout_s: How long to wait for the answer.

    Returns:
        What answered, for people.

    Raises:
        ServiceError: Nothing answers, or it is not Kafka.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    brokers = address.split(",")
    if not any(accepts_connections(broker, service="Kafka", timeout_s=timeout_s) for broker in brokers):
        msg = f"Nothing accepts connections at {address}"
        raise ServiceError(msg)
    admin = AdminClient(
        {"bootstrap.servers": address, "socket.timeout.ms": max(10, int(timeout_s * 1_000))}, logger=_SILENT
    )
    try:
        metadata = admin.list_topics(timeout=timeout_s)
    except KafkaException as exc:
        msg = f"{address} does not answer a Kafka metadata request: {exc.args[0].str()}"
        raise ServiceError(msg) from exc
    if not metadata.brokers:
        msg = f"The Kafka cluster at {address} has no broker ready"
        raise ServiceError(msg)
    count = len(metadata.brokers)
    return f"Kafka with {count} broker{'s' if count > 1 else ''}"


def check_redis(url: str, *, timeout_s: float) -> str:
    """Send PING, and ask which server and version it is.

    Raises:
        ServiceError: Nothing answers, it is not Redis, it is still loading its data, or it wants other credentials.
    """
    import redis
    from redis.exceptions import RedisClusterException
    from redis.sentinel import Sentinel

    from streams.sinks.redis_address import RedisAddress, RedisKind

    address = RedisAddress.parse(url)
    options = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    try:
        with ExitStack() as stack:
            if address.kind is RedisKind.SENTINEL:
                sentinels = Sentinel(  # type: ignore[no-untyped-call]
                    address.sentinels,
                    sentinel_kwargs={**address.sentinel_options, **options},
                    **address.options,
                    **options,
                )
                for sentinel in sentinels.sentinels:
                    stack.enter_context(sentinel)
                client = stack.enter_context(sentinels.master_for(address.master))  # type: ignore[no-untyped-call]
            else:
                kind = redis.RedisCluster if address.kind is RedisKind.CLUSTER else redis.Redis
                client = stack.enter_context(kind.from_url(address.url, **options))
            client.ping()
            server = client.info("server")
    except (redis.RedisError, RedisClusterException, ValueError, OSError) as exc:
        msg = f"Redis at {address.shown} does not answer PING: {exc}"
        raise ServiceError(msg) from exc
    if "valkey_version" in server:
        return f"Valkey {server['valkey_version']}"
    return f"Redis {server.get('redis_version', 'of unknown version')}"


def check_triton(address: str, *, timeout_s: float) -> str:
    """Ask over gRPC whether the inference server is ready, and which server and version it is.

    Raises:
        ServiceError: Nothing answers, it is no inference server, or it is not ready yet.
    """
    import grpc
    import tritonclient.grpc as triton_grpc
    from tritonclient.utils import InferenceServerException

    if not accepts_connections(address, service="Triton", timeout_s=timeout_s):
        msg = f"Nothing accepts connections at {address}"
        raise ServiceError(msg)
    client = triton_grpc.InferenceServerClient(address)
    try:
        if not client.is_server_ready(client_timeout=timeout_s):
            msg = f"The inference server at {address} says that it is not ready"
            raise ServiceError(msg)
        server = client.get_server_metadata(client_timeout=timeout_s)
    except (InferenceServerException, grpc.RpcError) as exc:
        msg = f"{address} does not answer a KServe v2 readiness request: {exc}"
        raise ServiceError(msg) from exc
    finally:
        client.close()
    name = "NVIDIA Triton" if server.name == "triton" else server.name
    return f"{name} {server.version}"
