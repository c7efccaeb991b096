"""How a view's values are read online, and how fresh they have to be.

None of it decides which rows there are, so none of it is part of a view's definition hash: it may change under a
version.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError
from schemas.time import format_duration, parse_duration_us

CACHE_US: Final = 10_000_000
"""How long a process serves a value it has read, where a view does not say."""
FALLBACKS: Final = ("delta",)
PERSONAL: Final = ("plain", "hash")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How values are read, and how fresh they have to be.

    Attributes:
        defaults: Values, by feature name, that stand in where there is none that may be used.
        cache: How long a process may serve a value that it has read; "0s": not at all. Left out, it is 10 s, and not at
            all for a view whose ``ttl`` or ``freshness`` is shorter than that.
        fallback: ``"delta"``: where the online store has no value, or does not answer, the newest row in the offline
            store is read, which takes long. None: it is not.
        freshness: Within what time after an event came to the broker its features must be readable online; None: there
            is no such objective.
        freshness_share: Share of the rows for which that must hold.
        personal: What the online store holds of text, and of an entity key, that a contract marks as personal: the
            value (``plain``), or its keyed hash (``hash``), by which it can be told from others and looked up, but not
            read. Numbers made of personal fields stay numbers.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    fallback: str | None = None
    freshness: str | None = None
    freshness_share: float = 0.99
    personal: str = "plain"

    def __post_init__(self) -> None:
        if self.fallback is not None and self.fallback not in FALLBACKS:
            msg = f"`Serving` has `fallback` {self.fallback!r}, expected one of {list(FALLBACKS)}, or None for none"
            raise ConfigError(msg)
        if self.personal not in PERSONAL:
            msg = f"`Serving` has `personal` {self.personal!r}, expected one of {list(PERSONAL)}"
            raise ConfigError(msg)
        if self.cache is not None:
            parse_duration_us(self.cache, field="cache")
        if self.freshness is not None and parse_duration_us(self.freshness, field="freshness") == 0:
            msg = f"`Serving` has `freshness` {self.freshness!r}, expected more than 0; leave it out for no objective"
            raise ConfigError(msg)
        if isinstance(self.freshness_share, bool) or not 0 < self.freshness_share <= 1:
            msg = f"`Serving` has `freshness_share` {self.freshness_share!r}, expected more than 0 and at most 1"
            raise ConfigError(msg)

    @property
    def freshness_us(self) -> int | None:
        """The freshness objective in microseconds; None where there is none."""
        return None if self.freshness is None else parse_duration_us(self.freshness, field="freshness")

    def cache_us(self, *, ttl_us: int | None) -> int:
        """For how many microseconds a process may serve a value of a view with this ``ttl``; 0: not at all."""
        if self.cache is not None:
            return parse_duration_us(self.cache, field="cache")
        limits = [limit for limit in (ttl_us, self.freshness_us) if limit is not None]
        return CACHE_US if min(limits, default=CACHE_US) >= CACHE_US else 0

    def check(self, view: str, *, types: pa.Schema, ttl_us: int | None, copies: Collection[str]) -> None:
        """Make sure that it fits a view.

        Args:
            view: Name of the view.
            types: Type of each feature.
            ttl_us: The view's ``ttl``.
            copies: Features that are personal values as they stood in events.

        Raises:
            ConfigError: A default is of no feature or of another type, the cache would outlive what must be fresh, or
                what is to be hashed is no text.
        """
        for name in sorted(copies) if self.personal == "hash" else ():
            if not is_text(types.field(name).type):
                msg = (
                    f"view {view}: feature {name!r} is a personal {types.field(name).type}, expected text where "
                    "`personal` is 'hash', for a hash is no number; make the field text in its contract, or leave the "
                    "feature out"
                )
                raise ConfigError(msg)
        for name, value in self.defaults.items():
            if name not in types.names:
                msg = f"view {view}: `defaults` has {name!r}, expected features of the view, of {sorted(types.names)}"
                raise ConfigError(msg)
            if not _fits(value, types.field(name).type):
                msg = f"view {view}: default of {name!r} is {value!r}, expected a finite {types.field(name).type}"
                raise ConfigError(msg)
        for name, limit_us in (("ttl", ttl_us), ("freshness", self.freshness_us)):
            if limit_us is not None and self.cache_us(ttl_us=ttl_us) > limit_us:
                msg = (
                    f"view {view}: `cache` is {self.cache} and `{name}` {format_duration(limit_us)}, expected a cache "
                    "that is no longer; shorten it, or leave it out"
                )
                raise ConfigError(msg)


def is_text(arrow: pa.DataType) -> bool:
    """Tell whether values of a type are text or lists of text."""
    return bool(pa.types.is_string(arrow.value_type if pa.types.is_list(arrow) else arrow))


def _fits(value: Any, arrow: pa.DataType) -> bool:
    if pa.types.is_list(arrow):
        return isinstance(value, list) and all(_fits(item, arrow.value_type) for item in value)
    if pa.types.is_boolean(arrow) or isinstance(value, bool):
        return pa.types.is_boolean(arrow) and isinstance(value, bool)
    if pa.types.is_floating(arrow):
        return isinstance(value, int | float) and math.isfinite(value)
    if pa.types.is_integer(arrow):
        return isinstance(value, int) and -(2**63) <= value < 2**63
    return pa.types.is_string(arrow) and isinstance(value, str)
