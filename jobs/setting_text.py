"""Reads the text of an environment variable: ``ValueError`` where it is not of its kind, ``ConfigError`` says more."""

import json
from pathlib import Path
from typing import Final

from infra.local.port import split_address
from jobs.role import Role
from schemas.errors import ConfigError, ServiceError
from schemas.event_rate import MAX_EVENT_RATE
from schemas.time import parse_duration_us

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_PORTS: Final = 65_536


def read_path(text: str) -> Path:
    """Read a path, made absolute."""
    return Path(text).expanduser().absolute()


def read_host_and_port(text: str) -> str | None:
    """Read ``host:port``, or nothing."""
    if text:
        try:
            split_address(text, service="it")
        except ServiceError as exc:
            raise ValueError(text) from exc
    return text or None


def read_brokers(text: str) -> str | None:
    """Read addresses of brokers, or nothing."""
    for address in text.split(",") if text else ():
        if read_host_and_port(address) is None:
            raise ValueError(text)
    return text or None


def read_redis_url(text: str) -> str | None:
    """Read the URL of a Redis, or nothing."""
    if text:
        # It loads the client library, which a setting that is not there must not cost.
        from streams.sinks.redis_address import RedisAddress  # noqa: PLC0415

        try:
            RedisAddress.parse(text)
        except ConfigError as exc:
            msg = f"HEADRACE_REDIS: {exc}"  # without user and password, which the text may hold
            raise ConfigError(msg) from exc
    return text or None


def read_registry_url(text: str) -> str | None:
    """Read the URL of a schema registry, or nothing."""
    if text:
        # It loads the client library, which a setting that is not there must not cost.
        from streams.transport.schema_registry import registry_config  # noqa: PLC0415

        try:
            registry_config(text)
        except ConfigError as exc:
            msg = f"HEADRACE_SCHEMA_REGISTRY: {exc}"  # without user and password, which the text may hold
            raise ConfigError(msg) from exc
    return text or None


def read_flag(text: str) -> bool:
    """Read a yes or no."""
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def read_port(text: str) -> int:
    """Read a port that leaves room for those of all roles."""
    if not text.isdecimal() or not 0 <= int(text) <= _PORTS - len(Role):
        raise ValueError(text)
    return int(text)


def read_duration_s(text: str) -> float:
    """Read a duration of a second or more, in seconds."""
    try:
        duration_s = parse_duration_us(text, field="it") / 1e6
    except ConfigError as exc:
        raise ValueError(text) from exc
    if duration_s < 1:
        raise ValueError(text)
    return duration_s


def read_http_port(text: str) -> int:
    """Read a port."""
    if not text.isdecimal() or not 0 <= int(text) < _PORTS:
        raise ValueError(text)
    return int(text)


def read_delta_options(text: str) -> dict[str, str] | None:
    """Read options of an object store, or nothing."""
    if not text:
        return None
    # What is wrong is not shown: the text may hold keys.
    msg = 'HEADRACE_DELTA_OPTIONS is not a JSON object of texts, expected one such as {"AWS_ENDPOINT_URL": "http://…"}'
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise ConfigError(msg) from exc
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(msg)
    return found


def read_pseudonym_key(text: str) -> str | None:
    """Read a secret that will do as a key, or nothing."""
    if text:
        # It loads pyarrow, which a setting that is not there must not cost.
        from streams.sinks.pseudonym import Pseudonyms  # noqa: PLC0415

        try:
            Pseudonyms(text.encode())
        except ConfigError as exc:
            msg = f"HEADRACE_PSEUDONYM_KEY: {exc}"
            raise ConfigError(msg) from exc
    return text or None


def read_event_rate(text: str) -> int:
    """Read events a second."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_EVENT_RATE:
        raise ValueError(text)
    return int(text)


def read_words(text: str) -> tuple[str, ...]:
    """Read words with spaces between."""
    return tuple(text.split())
