"""The online store: the newest feature row of each entity in Redis, Valkey or anything that speaks their protocol.

A value never goes back in time. The guard is a Lua script on the server, so it holds however many writers there are,
and whatever they repeat, reverse or rewind: a row replaces what is stored only if it is newer by (window_end,
pane_index, source_offset). Values of a view with a ``ttl`` expire some time after it, so that memory is bounded by the
entities that are active; those of a view without one stay. See ``infra/adr/0003-online-store-layout.md`` for the layout
and the measurements behind it.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from schemas.row import Pane
from schemas.view import FeatureView
from streams.ports import OnlineColumns
from streams.sinks.packing import UnpackedValue, pack_rows, packing_of, unpack_columns, unpack_value
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms
from streams.sinks.redis_client import RedisClient
from streams.sinks.rows import check_rows, newest_rows

ROWS_PER_CALL: Final = 500
"""Rows in one script call: the server answers nobody else meanwhile, about 2 ms."""
KEEP_TTLS: Final = 2
"""Redis drops a value that has not been replaced for this many times its view's ``ttl``, plus up to a tenth, so that
values written together do not expire together. More than 1, so that a reader sees ``stale`` before ``missing``."""

_ROWS_PER_SEND: Final = 4 * ROWS_PER_CALL
"""Rows that are packed and sent at a time: the server works on them while the next ones are packed."""

GUARDED_SET: Final = """
-- KEYS: one per row.
-- ARGV: milliseconds to keep a value (0: for good), start of the jitter in [0, 1), the tag of all rows, then one value
-- per row. A value begins with its order, 60 digits, and the tag; digits alone, so that no locale's collation can
-- reorder them. Numbers would not do: Lua's are doubles, exact to 2^53 only.
local keep = tonumber(ARGV[1])
local jitter = tonumber(ARGV[2])
local tag = ARGV[3]
local written = 0
for i = 1, #KEYS do
  local value = ARGV[i + 3]
  local stored = redis.pcall('GETRANGE', KEYS[i], 0, 77)
  if type(stored) == 'table' then
    return redis.error_reply(stored['err'] .. ' (key ' .. KEYS[i] .. ')')
  end
  if stored < string.sub(value, 1, 78) or string.sub(stored, 61, 78) ~= tag then
    if keep > 0 then
      jitter = (jitter + 0.6180339887) % 1
      redis.call('SET', KEYS[i], value, 'PX', string.format('%.0f', keep * (1 + 0.1 * jitter)))
    else
      redis.call('SET', KEYS[i], value)
    end
    written = written + 1
  end
end
return written
"""


class Status(StrEnum):
    """What a reader may make of an online value."""

    PRESENT = "present"
    """Stored, by this definition, and young enough."""
    STALE = "stale"
    """Stored, but its event time is more than the view's ``ttl`` ago."""
    EMPTY = "empty"
    """The entity has had no row in any window of the view since: counts are 0. It does not go stale."""
    MISSING = "missing"
    """Nothing is stored (any more, see :data:`KEEP_TTLS`), or another definition stored it."""


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """What became of a batch: ``written + superseded`` is its number of rows.

    Attributes:
        written: Rows that are now the stored ones.
        superseded: Rows that were not newer than the stored one, or than another one of the batch.
    """

    written: int
    superseded: int


@dataclass(frozen=True, kw_only=True)
class OnlineValue:
    """The online features of one entity, and how far they can be trusted.

    Attributes:
        view: Name of the view.
        version: Version of the view.
        definition_hash: Hash of the view's definition.
        entity: Entity key that was asked for.
        status: What a reader may make of it.
        features: Feature values by name, in the view's order; empty when missing.
        event_time_us: Event time of the row; None when missing, as are all that follow.
        age_ms: ``now_us`` of the read minus the event time, rounded down; below 0 where the event lies ahead.
        window_end_us: End of the row's windows.
        pane: Why the row was made.
        pane_index: Which firing of the pane it was.
        source_offset: Offset of the event that made the row.
        watermark_us: Watermark at the row; None also while it is minus infinity.
        broker_time_us: Kafka's record timestamp of the event that made the row; None also when unknown.
    """

    view: str
    version: int
    definition_hash: str
    entity: str | int
    status: Status
    features: dict[str, Any]
    event_time_us: int | None = None
    age_ms: int | None = None
    window_end_us: int | None = None
    pane: Pane | None = None
    pane_index: int | None = None
    source_offset: int | None = None
    watermark_us: int | None = None
    broker_time_us: int | None = None


def online_keys(view: FeatureView, entities: Sequence[str | int], *, prefix: str, pseudonyms: Pseudonyms) -> list[str]:
    """Name the Redis keys of entities, personal ones by their pseudonyms."""
    return [online_key(view, entity, prefix=prefix) for entity in pseudonyms.entities(view, entities)]


def online_key(view: FeatureView, entity_key: str | int, *, prefix: str = "headrace") -> str:
    """Name the Redis key of an entity, e.g. ``headrace:user_activity:v1:{u17}``.

    The braces are a hash tag: in a cluster all views of an entity lie in one slot.
    """
    return f"{prefix}:{view.name}:v{view.version}:{{{entity_key}}}"


class _Connected:
    """Connections to the online store, closed by its end as a context manager."""

    def __init__(
        self,
        redis_url: str,
        prefix: str = "headrace",
        *,
        timeout_s: float = 2.0,
        pseudonyms: Pseudonyms = NO_PSEUDONYMS,
    ) -> None:
        self._client = RedisClient(redis_url, timeout_s=timeout_s)
        self._prefix = prefix
        self._pseudonyms = pseudonyms

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _keys(self, view: FeatureView, entities: Sequence[str | int]) -> list[str]:
        return online_keys(view, entities, prefix=self._prefix, pseudonyms=self._pseudonyms)


class OnlineWriter(_Connected):
    """Writes feature rows to the online store; each write is safe to repeat.

    Args:
        redis_url: E.g. ``redis://127.0.0.1:6379/0``; ``redis+cluster://`` for a cluster.
        prefix: First part of every key.
        timeout_s: Seconds after which an unanswered call counts as the store being down.
        pseudonyms: What stands there for personal values of views that ask for it.
    """

    async def forget(self, view_name: str) -> int:
        """Delete all values of a view of this name, in any version; returns how many there were.

        Args:
            view_name: Its name; `*` in it stands for anything, so that one look at the store finds several views.

        Raises:
            SinkRejectedError: The user may not: it takes ``+scan +unlink``.
            SinkUnavailableError: Redis does not answer; it may be called again.
        """
        return await self._client.delete_matching(f"{self._prefix}:{view_name}:*")

    async def write(self, rows: pa.Table, *, view: FeatureView) -> WriteResult:
        """Store the newest row of each entity, in one round trip.

        Args:
            rows: Feature rows of ``view.row_schema`` in any order. Further columns are ignored.
            view: The view that the rows belong to.

        Returns:
            How many rows are now stored and how many were not newer than what was.

        Raises:
            SchemaMismatchError: The rows are not rows of this view, version and definition.
            SinkRejectedError: Redis refused the write, or a row has no entity key or order; trying again cannot help.
            SinkUnavailableError: Redis does not answer; the same write may be repeated, some rows may have been stored.
        """
        check_rows(rows, view=view)
        if rows.num_rows == 0:
            return WriteResult(written=0, superseded=0)
        newest = newest_rows(rows, view=view)
        keep_ms = 0 if view.ttl_us is None else max(1, KEEP_TTLS * view.ttl_us // 1_000)
        tag = packing_of(view).tag.decode()
        sent: list[asyncio.Task[list[int]]] = []
        for start in range(0, newest.num_rows, _ROWS_PER_SEND):
            part = self._pseudonyms.rows(view, newest.slice(start, _ROWS_PER_SEND))
            entities = part[view.entity.key].to_pylist()
            call = self._client.run_script(
                GUARDED_SET,
                keys=self._keys(view, entities),
                values=pack_rows(part, view=view),
                arguments=(str(keep_ms), repr(random.random()), tag),  # noqa: S311  # spreads expiry, hides nothing
                keys_per_call=ROWS_PER_CALL,
            )
            sent.append(asyncio.create_task(call))
            await asyncio.sleep(0)  # it goes out now
        # All of them end before an error is raised: nothing of this write goes on behind the next one.
        answers = await asyncio.gather(*sent, return_exceptions=True)
        written = 0
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            written += sum(answer)
        return WriteResult(written=written, superseded=rows.num_rows - written)


class OnlineReader(_Connected):
    """Reads feature values from the online store.

    Args:
        redis_url: As for :class:`OnlineWriter`.
        prefix: As for :class:`OnlineWriter`.
        timeout_s: Seconds after which an unanswered call counts as the store being down.
        pseudonyms: What stands there for personal values of views that ask for it.
    """

    async def read(self, view: FeatureView, entity_keys: Sequence[str | int], *, now_us: int) -> list[OnlineValue]:
        """Read one view's values of several entities, in one round trip and in the order asked for.

        Raises:
            SinkRejectedError: Redis refused the read.
            SinkUnavailableError: Redis does not answer.
        """
        (values,) = await self.read_many([(view, entity_keys)], now_us=now_us)
        return values

    async def read_many(
        self, requests: Iterable[tuple[FeatureView, Sequence[str | int]]], *, now_us: int
    ) -> list[list[OnlineValue]]:
        """Read several views' values, all in one round trip.

        Args:
            requests: Views, each with the entity keys to read.
            now_us: The time that ages are counted to: the clock's, or in a replay the watermark.

        Returns:
            For each request its values, in the order of its keys.

        Raises:
            SinkRejectedError: Redis refused the read.
            SinkUnavailableError: Redis does not answer.
        """
        asked = [(view, list(entities)) for view, entities in requests]
        keys = [key for view, entities in asked for key in self._keys(view, entities)]
        stored = iter(await self._client.get_many(keys))
        return [
            [_online_value(next(stored), view=view, entity=entity, now_us=now_us) for entity in entities]
            for view, entities in asked
        ]

    async def read_columns(self, requests: Sequence[tuple[FeatureView, Sequence[str | int]]]) -> list[OnlineColumns]:
        """Read several views' values as columns, all in one round trip; see :class:`streams.ports.OnlineReader`.

        Raises:
            SinkRejectedError: Redis refused the read.
            SinkUnavailableError: Redis does not answer.
        """
        asked = [(view, self._keys(view, entities)) for view, entities in requests]
        stored = iter(await self._client.get_many([key for _, keys in asked for key in keys]))
        return [unpack_columns(list(islice(stored, len(keys))), view=view) for view, keys in asked]


def status_of(value: UnpackedValue, *, ttl_us: int | None, now_us: int) -> Status:
    """Judge a value of the right definition by the time of the read.

    Args:
        value: The value.
        ttl_us: Age after which it is stale; None means never.
        now_us: Time of the read.
    """
    if value.pane is Pane.EMPTY:
        return Status.EMPTY
    is_stale = ttl_us is not None and now_us - value.event_time_us > ttl_us
    return Status.STALE if is_stale else Status.PRESENT


def _online_value(packed: bytes | None, *, view: FeatureView, entity: str | int, now_us: int) -> OnlineValue:
    value = None if packed is None else unpack_value(packed, view=view)
    if value is None:
        return OnlineValue(
            view=view.name,
            version=view.version,
            definition_hash=view.definition_hash,
            entity=entity,
            status=Status.MISSING,
            features={},
        )
    return OnlineValue(
        view=view.name,
        version=view.version,
        definition_hash=view.definition_hash,
        entity=entity,
        status=status_of(value, ttl_us=view.ttl_us, now_us=now_us),
        features=value.features,
        event_time_us=value.event_time_us,
        age_ms=(now_us - value.event_time_us) // 1_000,
        window_end_us=value.window_end_us,
        pane=value.pane,
        pane_index=value.pane_index,
        source_offset=value.source_offset,
        watermark_us=value.watermark_us,
        broker_time_us=value.broker_time_us,
    )
