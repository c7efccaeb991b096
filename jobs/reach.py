"""Asks a service whether it is there, before a client library tries for long and tells about each try."""

from infra.local.health import check_kafka, check_redis
from infra.local.port import accepts_connections, without_login
from infra.local.process import wait_until
from schemas.errors import ServiceError

_TIMEOUT_S = 5.0


def reach_kafka(brokers: str, *, patience_s: float = 0.0) -> None:
    """See that a Kafka answers.

    Args:
        brokers: Kafka bootstrap servers.
        patience_s: How long to wait for one that accepts no connections, since it is just starting.

    Raises:
        ServiceError: None does.
    """
    wait_until(
        lambda: any(accepts_connections(broker, service="Kafka") for broker in brokers.split(",")),
        timeout_s=patience_s,
        poll_s=0.1,
    )
    try:
        check_kafka(brokers, timeout_s=_TIMEOUT_S)
    except ServiceError as exc:
        msg = (
            f"no Kafka answers at {brokers}: {exc}; `headrace services up` starts one, HEADRACE_KAFKA names another "
            "one, `headrace services status` shows what runs"
        )
        raise ServiceError(msg) from exc


def reach_redis(url: str) -> None:
    """See that a Redis answers.

    Raises:
        ServiceError: None does.
    """
    try:
        check_redis(url, timeout_s=_TIMEOUT_S)
    except ServiceError as exc:
        msg = (
            f"no Redis answers at {without_login(url)}: {exc}; `headrace services up` starts one, HEADRACE_REDIS names "
            "another one, `headrace services status` shows what runs"
        )
        raise ServiceError(msg) from exc
