"""The newest score of each entity in a real Valkey."""

import json
from typing import Any
from uuid import uuid4

import pytest
from redis import asyncio as redis

from jobs.flights.model import LATE_ARRIVAL
from schemas.errors import DecodeError, SinkUnavailableError
from schemas.time import format_rfc3339
from streams.serving.store import AsyncOnlineStore
from streams.sinks.online import Status, WriteResult
from streams.sinks.score_store import ScoreWriter, score_key, unpack_score
from tests.support.feature_rows import T0_US

SECOND_US = 1_000_000


def score(entity: str = "UA1", *, time_us: int = T0_US, probability: float = 0.5, arm: str = "champion") -> bytes:
    document: dict[str, Any] = {
        "request_id": "r",
        "entity": entity,
        "model": "late_arrival",
        "model_version": "3",
        "arm": arm,
        "late_probability": probability,
        "event_time": format_rfc3339(time_us),
        "complete": True,
    }
    return json.dumps(document).encode()


@pytest.fixture
def prefix() -> str:
    return f"test{uuid4().hex}"


async def write(
    url: str, prefix: str, scores: list[bytes], *, first: int = 0, keep_us: int = 60 * SECOND_US
) -> WriteResult:
    writer = ScoreWriter(url, prefix)
    try:
        offsets = range(first, first + len(scores))
        return await writer.write(scores, offsets=offsets, model=LATE_ARRIVAL, keep_us=keep_us)
    finally:
        await writer.close()


async def read(url: str, prefix: str, entity: str = "UA1", *, ttl_us: int | None = None, now_us: int = T0_US) -> Any:
    async with AsyncOnlineStore(url, prefix=prefix, clock_us=lambda: now_us, timeout_s=10.0) as store:
        (value,) = await store.read_scores(LATE_ARRIVAL, [entity], ttl_us=ttl_us)
    return value


async def test_the_newest_event_of_an_entity_is_its_score_and_a_repeat_or_rewind_changes_nothing(
    redis_url: str, prefix: str
) -> None:
    scores = [score(time_us=T0_US + 1, probability=0.2), score(probability=0.1), score("UA2", probability=0.9)]
    assert await write(redis_url, prefix, scores) == WriteResult(written=2, superseded=1)
    assert await write(redis_url, prefix, scores) == WriteResult(written=0, superseded=3)
    assert await write(redis_url, prefix, [score(probability=0.3)], first=9) == WriteResult(written=0, superseded=1)
    value = await read(redis_url, prefix)
    assert (value.status, value.score["late_probability"], value.event_time_us) == (Status.PRESENT, 0.2, T0_US + 1)


async def test_of_two_scores_of_one_event_the_later_one_stands(redis_url: str, prefix: str) -> None:
    await write(redis_url, prefix, [score(probability=0.1), score(probability=0.2)])
    assert (await write(redis_url, prefix, [score(probability=0.3)], first=2)).written == 1
    assert (await read(redis_url, prefix)).score["late_probability"] == 0.3


async def test_a_shadow_answers_nobody_and_a_canary_those_that_it_scores(redis_url: str, prefix: str) -> None:
    result = await write(redis_url, prefix, [score(arm="shadow"), score("UA2", arm="canary", probability=0.7)])
    assert result == WriteResult(written=1, superseded=1)
    assert (await read(redis_url, prefix)).status is Status.MISSING
    assert (await read(redis_url, prefix, "UA2")).score["late_probability"] == 0.7


async def test_age_is_judged_at_the_read(redis_url: str, prefix: str) -> None:
    await write(redis_url, prefix, [score()])
    for age_us, status in ((SECOND_US, Status.PRESENT), (SECOND_US + 1, Status.STALE)):
        value = await read(redis_url, prefix, ttl_us=SECOND_US, now_us=T0_US + age_us)
        assert (value.status, value.age_ms) == (status, 1_000)


async def test_scores_go_after_their_time(redis_url: str, prefix: str) -> None:
    await write(redis_url, prefix, [score()], keep_us=100 * SECOND_US)
    async with redis.Redis.from_url(redis_url) as raw:
        left_ms = await raw.pttl(score_key(LATE_ARRIVAL, "UA1", prefix=prefix))
    assert 95_000 < left_ms <= 110_000


async def test_another_programs_value_is_no_score(redis_url: str, prefix: str) -> None:
    async with redis.Redis.from_url(redis_url) as raw:
        await raw.set(score_key(LATE_ARRIVAL, "UA1", prefix=prefix), b"x" * 100)
    assert (await read(redis_url, prefix)).status is Status.MISSING
    assert unpack_score(b"", model=LATE_ARRIVAL) is None


@pytest.mark.parametrize("record", [b"{}", b"[]", b"", None, b'{"entity": "UA1", "event_time": null}'])
async def test_what_is_no_score_stops_the_worker(redis_url: str, prefix: str, record: Any) -> None:
    with pytest.raises(DecodeError):
        await write(redis_url, prefix, [score(), record])


async def test_while_redis_is_away_no_score_is_said_to_be_missing() -> None:
    with pytest.raises(SinkUnavailableError):
        await read("redis://127.0.0.1:1/0", "p")
