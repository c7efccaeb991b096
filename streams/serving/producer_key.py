"""Keys of producers: what each may send, and how they are kept so that who reads the store cannot send. Pure.

A key is 32 random bytes, shown once; kept is its SHA-256. A hash made to be slow, or a salt, protects what people
choose and repeat; there is nothing to guess here. A key is found by its hash, so that what a caller sends is compared
with nothing secret, byte by byte or otherwise.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import orjson

from schemas.errors import ConfigError, SinkRejectedError
from schemas.event_rate import MAX_EVENT_RATE

PREFIX: Final = "hrk_"
"""What each key begins with, by which scanners of repositories and logs tell them."""
ALL_SOURCES: Final = "*"
MAX_KEYS: Final = 2_000
"""All of them are read at once. Where there are more, the oldest revoked one is forgotten."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION_DIGITS: Final = 20


@dataclass(frozen=True)
class Rate:
    """Events that may be sent.

    Attributes:
        per_s: In the long run, per second.
        burst: At once, after a pause.
    """

    per_s: int
    burst: int

    def __post_init__(self) -> None:
        for name, given in (("rate", self.per_s), ("burst", self.burst)):
            if not 1 <= given <= MAX_EVENT_RATE:
                msg = f"the {name} is {given} events, expected 1 to {MAX_EVENT_RATE}"
                raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class ProducerKey:
    """A key, and what it is good for.

    Attributes:
        name: Who has it; of keys that are not revoked each has a name of its own.
        digest: SHA-256 of the key, in hex.
        sources: Topics of the sources that it may send to; ``*`` for all.
        rate: How much it may send.
        created_at: When it was made, RFC 3339.
        revoked_at: When it was revoked; None while it is good.
    """

    name: str
    digest: str
    sources: tuple[str, ...]
    rate: Rate
    created_at: str
    revoked_at: str | None = None

    def may_send_to(self, source: str) -> bool:
        """Tell whether it is good for a source."""
        return source in self.sources or ALL_SOURCES in self.sources


def make_secret() -> str:
    """Make what its holder sends: as hard to guess as a key of 256 bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """Hash a key as it is kept."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class KeyRing:
    """All keys, as one value of the store.

    Attributes:
        version: Goes up by one with each change; 0: nothing is stored.
        keys: The keys, oldest first.
    """

    version: int = 0
    keys: tuple[ProducerKey, ...] = ()

    @cached_property
    def by_digest(self) -> Mapping[str, ProducerKey]:
        """The keys by their hash."""
        return {key.digest: key for key in self.keys}

    def with_key(self, key: ProducerKey) -> Self:
        """Add a key.

        Raises:
            ConfigError: Its name is none, or taken, or there are too many.
        """
        if not _NAME.fullmatch(key.name):
            msg = f"a key cannot be called {key.name!r}, expected 1 to 64 of letters, digits, `.`, `_`, `-`"
            raise ConfigError(msg)
        if any(other.name == key.name and other.revoked_at is None for other in self.keys):
            msg = f"there is a key {key.name!r} already, expected another name; or revoke that one first"
            raise ConfigError(msg)
        kept = list(self.keys)
        if len(kept) >= MAX_KEYS:
            oldest_revoked = next((other for other in kept if other.revoked_at is not None), None)
            if oldest_revoked is None:
                msg = f"there are {MAX_KEYS} keys, expected fewer; revoke one that is not used"
                raise ConfigError(msg)
            kept.remove(oldest_revoked)
        return replace(self, version=self.version + 1, keys=(*kept, key))

    def with_revoked(self, name: str, *, at: str) -> Self:
        """Revoke the key of a name.

        Raises:
            ConfigError: None of that name is good.
        """
        good = sorted(key.name for key in self.keys if key.revoked_at is None)
        if name not in good:
            msg = f"there is no key {name!r} to revoke, expected one of {good}"
            raise ConfigError(msg)
        keys = (
            replace(key, revoked_at=at) if key.name == name and key.revoked_at is None else key for key in self.keys
        )
        return replace(self, version=self.version + 1, keys=tuple(keys))

    def packed(self) -> bytes:
        """Write it: its version, so that a change is seen without reading all of it, then the keys."""
        return f"{self.version:0{VERSION_DIGITS}}".encode() + orjson.dumps([asdict(key) for key in self.keys])

    @classmethod
    def unpacked(cls, packed: bytes | None) -> Self:
        """Read what :meth:`packed` wrote; None is a store without keys.

        Raises:
            SinkRejectedError: It is something else.
        """
        if packed is None:
            return cls()
        try:
            rows: Iterable[dict[str, Any]] = orjson.loads(packed[VERSION_DIGITS:])
            keys = [
                ProducerKey(**{**row, "sources": tuple(row["sources"]), "rate": Rate(**row["rate"])}) for row in rows
            ]
            return cls(version_of(packed), tuple(keys))
        except (ValueError, TypeError, KeyError, ConfigError) as exc:
            raise _unreadable(exc) from exc


def version_of(packed: bytes) -> int:
    """Read the version of packed keys off their beginning; 0 of nothing.

    Raises:
        SinkRejectedError: It is something else.
    """
    try:
        return int(packed[:VERSION_DIGITS] or b"0")
    except ValueError as exc:
        raise _unreadable(exc) from exc


def _unreadable(exc: Exception) -> SinkRejectedError:
    msg = f"the keys of producers cannot be read ({exc}), expected what `headrace keys` writes; restore them"
    return SinkRejectedError(msg)
