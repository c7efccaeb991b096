"""Where an online store is: one server, a cluster, or a master that sentinels name. Pure: nothing is connected here.

============================================================================  ========================================
``redis://user:password@host:port/0``                                         one server
``unix:///path/to/socket``                                                    one server on this machine
``redis+cluster://user:password@host:port``                                   a cluster, by any of its nodes
``redis+sentinel://user:password@host:port,host:port/master/0``               the master of that name
============================================================================  ========================================

``rediss`` in place of ``redis`` is TLS, with the options of the client library after ``?``, such as ``ssl_ca_certs``.
Sentinels that want a login take ``sentinel_username`` and ``sentinel_password`` there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.connection import parse_url

from schemas.errors import ConfigError

_EXAMPLE: Final = (
    "redis://127.0.0.1:6379/0, redis+cluster://host:6379, redis+sentinel://host:26379,host:26379/master/0, with rediss "
    "in place of redis for TLS, or unix:///path"
)
_SENTINEL_PORT: Final = 26_379
_SENTINEL_LOGIN: Final = {"sentinel_username": "username", "sentinel_password": "password"}


class RedisKind(StrEnum):
    """What an address leads to."""

    SERVER = "server"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """A parsed address.

    Attributes:
        kind: What it leads to.
        shown: Host and port, or path, for messages.
        url: What the client library makes a connection of; not for sentinels.
        options: Arguments of connections to the master that sentinels name.
        sentinels: Host and port of each sentinel.
        sentinel_options: Arguments of connections to sentinels.
        master: Name of the master that the sentinels watch.
        wait_replicas: How many replicas must have a write before it counts.
    """

    kind: RedisKind
    shown: str
    url: str = field(default="", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    master: str = ""
    wait_replicas: int = 0

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read an address.

        Raises:
            ConfigError: It is none of those that the module describes.
        """
        try:
            return cls._parse(url)
        except ValueError as exc:
            msg = f"Redis address of {_place(url)!r} cannot be used ({exc}), expected one such as {_EXAMPLE}"
            raise ConfigError(msg) from exc

    @classmethod
    def _parse(cls, url: str) -> Self:
        scheme, separator, rest = url.partition("://")
        if not separator:
            msg = "it has no scheme"
            raise ValueError(msg)
        transport, _, suffix = scheme.partition("+")
        if transport == "unix" and not suffix:
            kind = RedisKind.SERVER
        elif transport in ("redis", "rediss") and suffix in ("", RedisKind.CLUSTER, RedisKind.SENTINEL):
            kind = RedisKind(suffix or RedisKind.SERVER)
        else:
            msg = f"its scheme is {scheme!r}"
            raise ValueError(msg)
        place, _, query = rest.partition("?")
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
        wait_replicas = _whole(options.pop("wait_replicas", "0"), "wait_replicas")
        if wait_replicas and kind is RedisKind.CLUSTER:
            msg = "`wait_replicas` is for one master; a cluster has `min-replicas-to-write`"
            raise ValueError(msg)
        shown = _place(url)
        if kind is RedisKind.SENTINEL:
            return cls._sentinel(transport, place, options, shown=shown, wait_replicas=wait_replicas)
        plain = f"{transport}://{place}" + (f"?{urlencode(options)}" if options else "")
        parsed = parse_url(plain)  # type: ignore[no-untyped-call]
        if not parsed.get("path" if transport == "unix" else "host"):
            msg = "it names no place"
            raise ValueError(msg)
        _check_database(urlsplit(plain).path if transport != "unix" else "")
        return cls(kind=kind, shown=shown, url=plain, wait_replicas=wait_replicas)

    @classmethod
    def _sentinel(cls, transport: str, place: str, options: dict[str, str], *, shown: str, wait_replicas: int) -> Self:
        authority, _, path = place.partition("/")
        login, _, hosts = authority.rpartition("@")
        master, _, database = path.partition("/")
        if not master:
            msg = "it names no master after the sentinels"
            raise ValueError(msg)
        _check_database(database)
        own = {ours: options.pop(name) for name, ours in _SENTINEL_LOGIN.items() if name in options}
        at = f"{login}@" if login else ""
        query = f"?{urlencode(options)}" if options else ""
        parsed = parse_url(f"{transport}://{at}master/{database or 0}{query}")  # type: ignore[no-untyped-call]
        parsed.pop("host")
        if parsed.pop("connection_class", None) is not None:
            parsed["ssl"] = True
        ssl = {name: value for name, value in parsed.items() if name.startswith("ssl")}
        return cls(
            kind=RedisKind.SENTINEL,
            shown=shown,
            options=parsed,
            sentinels=tuple(_host_and_port(text) for text in hosts.split(",")),
            sentinel_options={**ssl, **own},
            master=master,
            wait_replicas=wait_replicas,
        )


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        msg = f"{text!r} is no host and port"
        raise ValueError(msg)
    return parts.hostname, parts.port or _SENTINEL_PORT


def _check_database(text: str) -> None:
    if text.strip("/"):
        _whole(text.strip("/"), "its database")


def _whole(text: str, what: str) -> int:
    if not text.isdecimal():
        msg = f"{what} is {text!r}, no whole number"
        raise ValueError(msg)
    return int(text)


def _place(url: str) -> str:
    """Say where it is, without user, password and options."""
    scheme, separator, rest = url.partition("://")
    place = (rest if separator else url).partition("?")[0]
    if scheme == "unix":
        return place
    authority, _, path = place.partition("/")
    hosts = authority.rpartition("@")[2]
    return f"{hosts}/{path.partition('/')[0]}" if scheme.endswith(RedisKind.SENTINEL) else hosts
