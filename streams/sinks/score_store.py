"""The newest score of each entity in the online store, for use cases that are answered with one.

A value is packed as feature values are: its order, a tag, and then the score as it stands on its topic. The newest is
that of the newest event, and among those of one event the one that was written last.
"""

import random
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import orjson
import pyarrow as pa

from schemas.errors import DecodeError
from schemas.model import ModelSpec
from schemas.row import TIMESTAMP
from schemas.score import Arm
from streams.sinks.online import GUARDED_SET, ROWS_PER_CALL, WriteResult
from streams.sinks.packing import ORDER_END, TAG_END, pack_order
from streams.sinks.redis_client import RedisClient
from streams.wire import decode_rows

_READ: Final = pa.schema([("entity", pa.string()), ("event_time", TIMESTAMP), ("arm", pa.string())])


def score_key(model: ModelSpec, entity: str, *, prefix: str = "headrace") -> str:
    """Name the Redis key of an entity's score, e.g. ``headrace:scores:late_arrival:v1:{UA1545}``."""
    return f"{prefix}:scores:{model.name}:v{model.version}:{{{entity}}}"


def score_tag(model: ModelSpec) -> str:
    """Tag of a model's values: format, and what tells the model's contracts apart."""
    return f"1:{sha256(model.reference.encode()).hexdigest()[:16]}"


def unpack_score(value: bytes, *, model: ModelSpec) -> dict[str, Any] | None:
    """Unpack a score, or return None when something else is stored."""
    if value[ORDER_END:TAG_END] != score_tag(model).encode():
        return None
    score: dict[str, Any] = orjson.loads(value[TAG_END:])
    return score


class ScoreWriter:
    """Writes scores to the online store; each write is safe to repeat.

    Args:
        redis_url: See :mod:`streams.sinks.redis_address`.
        prefix: First part of every key.
        timeout_s: Seconds after which an unanswered call counts as the store being down.
    """

    def __init__(self, redis_url: str, prefix: str = "headrace", *, timeout_s: float = 2.0) -> None:
        self._client = RedisClient(redis_url, timeout_s=timeout_s)
        self._prefix = prefix

    async def write(
        self, scores: Sequence[bytes | None], *, offsets: Sequence[int], model: ModelSpec, keep_us: int
    ) -> WriteResult:
        """Store the newest score of each entity, be it a canary's: it has no other. Shadow scores answer nobody.

        Args:
            scores: Scores as they stand on the model's topic.
            offsets: Offset of each on its partition; all scores of an entity are on one.
            model: The model.
            keep_us: How long a score stays.

        Raises:
            DecodeError: A record is no score; only Headrace writes to that topic, so the worker must stop.
            SinkRejectedError: Redis refused the write.
            SinkUnavailableError: Redis does not answer; the same write may be repeated.
        """
        rows = decode_rows(scores, _READ)
        newest: dict[str, tuple[int, int, bytes]] = {}
        columns = (rows["entity"].to_pylist(), rows["event_time"].cast(pa.int64()).to_pylist(), rows["arm"].to_pylist())
        for entity, time_us, arm, offset, score in zip(*columns, offsets, scores, strict=True):
            if entity is None or time_us is None or score is None:
                msg = f"offset {offset} of {model.topic} has no `entity` or `event_time`, expected a score"
                raise DecodeError(msg)
            if arm != Arm.SHADOW:
                newest[entity] = max(newest.get(entity, (time_us, -1, b"")), (time_us, offset, score))
        if not newest:
            return WriteResult(written=0, superseded=len(scores))
        tag = score_tag(model)
        replies = await self._client.run_script(
            GUARDED_SET,
            keys=[score_key(model, entity, prefix=self._prefix) for entity in newest],
            values=[
                pack_order(time_us, 0, offset) + tag.encode() + score for time_us, offset, score in newest.values()
            ],
            arguments=(str(max(1, keep_us // 1_000)), repr(random.random()), tag),  # noqa: S311  # spreads expiry
            keys_per_call=ROWS_PER_CALL,
        )
        return WriteResult(written=sum(replies), superseded=len(scores) - sum(replies))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
