"""A worker's follower on a real Kafka, over fakes of model servers: what it does where something cannot be had."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from infra.local.services import LocalServices
from jobs.topics import ensure_topics, plan_topics
from schemas.errors import ConfigError, InferenceUnavailableError
from schemas.model import ModelSpec, ServedVersion
from streams.inference.follower import RolloutFollower
from streams.inference.guard import GuardedModel
from streams.inference.rollout import Limits, Rollout, Stage, promote, start_canary
from streams.inference.rollout_log import Entry, RolloutLog
from streams.inference.scorer import Scorer
from streams.inference.vector import VectorReader
from streams.inference.versions import OpenVersion, Versions
from tests.support.feature_rows import T0_US
from tests.support.kafka import TIMEOUT_S
from tests.support.model_versions import FAILING, GOOD, by
from tests.support.scoring import VIEWS, FakeModel, FakeReader, make_spec, make_triggers

NAMES = iter(f"faked_{number}" for number in range(100))
OLD, NEW = (ServedVersion(version=number, sha256=number * 64) for number in ("1", "2"))


class Rig:
    """A rollout on Kafka, with version 1 the champion, and a worker that follows it.

    Args:
        kafka: Bootstrap servers.
    """

    def __init__(self, kafka: str) -> None:
        self.kafka = kafka
        self.spec: ModelSpec = make_spec(name=next(NAMES))
        ensure_topics(kafka, plan_topics(list(VIEWS.values()), [self.spec]), partitions=1)
        with self.log() as log:
            entry = log.begin(lambda: OLD, now_us=1)
        self.refused: Exception | None = None
        self.away: Exception | None = None
        self.asked_while_away = asyncio.Semaphore(0)
        versions = Versions(self.spec, open_version=self._open)
        vectors = VectorReader(self.spec, views=VIEWS, reader=FakeReader())
        self.scorer = Scorer(versions.arms(entry), vectors=vectors)
        self.follower = RolloutFollower(self.log(), scorer=self.scorer, versions=versions, worker="here")

    def log(self) -> RolloutLog:
        return RolloutLog(self.kafka, self.spec)

    def change(self, change: Callable[[Rollout], Rollout], limits: Limits | None = None) -> None:
        with self.log() as log:
            log.change(lambda view: Entry(generation=0, state=change(view.entry.state), limits=limits or Limits()))

    async def entry(self) -> Entry:
        def read() -> Entry | None:
            with self.log() as log:
                return log.read().entry

        entry = await asyncio.to_thread(read)
        assert entry is not None
        return entry

    async def score(self, n_rows: int = 100) -> set[str]:
        rows = make_triggers(*({"distance": 100.0 + 5 * number} for number in range(n_rows)))
        scored = await self.scorer.score(rows, now_us=T0_US)
        assert scored.scores.num_rows == n_rows
        return set(scored.scores["model_version"].to_pylist())

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for what nothing tells of but looking."""
        async with asyncio.timeout(2 * TIMEOUT_S):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def _open(self, served: ServedVersion) -> OpenVersion:
        async def connect() -> None:
            if served == NEW and self.away is not None:
                self.asked_while_away.release()
                raise self.away

        async def close() -> None:
            pass

        if served == NEW and self.refused is not None:
            raise self.refused
        server = FakeModel(by(GOOD if served == OLD else FAILING))
        probe = np.zeros((1, 5), dtype=np.float32)
        return OpenVersion(
            model=GuardedModel("faked", server, probe=probe, timeout_s=5.0), connect=connect, close=close
        )


@asynccontextmanager
async def following(rig: Rig, *, decides: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
    task = asyncio.create_task(rig.follower.run(decides))
    try:
        yield
    finally:
        assert not task.done(), task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def promoted(state: Rollout) -> Rollout:
    return promote(start_canary(state, NEW, now_us=1), now_us=1)


async def test_a_worker_that_cannot_have_a_new_champion_takes_the_promotion_back(kafka: str) -> None:
    rig = Rig(kafka)
    rig.refused = ConfigError("no such version here")
    rig.change(promoted)
    async with following(rig):

        async def is_back() -> bool:
            entry = await rig.entry()
            return entry.state.stage is Stage.STABLE and rig.scorer.arms.entry == entry

        await rig.until(is_back)
        assert await rig.score() == {"1"}
    state = (await rig.entry()).state
    assert state.champion == OLD
    assert state.reason == "rolled back: worker here cannot score with version 2: no such version here"


async def test_a_server_that_is_away_takes_nothing_back_and_is_waited_for(kafka: str) -> None:
    rig = Rig(kafka)
    rig.away = InferenceUnavailableError("Triton is away")
    rig.change(promoted)
    async with following(rig, decides=lambda: False):
        for _ in range(2):
            await asyncio.wait_for(rig.asked_while_away.acquire(), TIMEOUT_S)
            assert await rig.score() == {"1"}
        assert (await rig.entry()).state.stage is Stage.WATCH
        rig.away = None

        async def is_followed() -> bool:
            return rig.scorer.arms.entry.state.champion == NEW

        await rig.until(is_followed)
        assert await rig.score(10) == {"2"}


async def test_only_who_decides_judges_what_all_have_seen(kafka: str) -> None:
    rig = Rig(kafka)
    rig.change(lambda state: start_canary(state, NEW, now_us=1, shares=[0.5]), Limits(min_rows=10))
    is_judge = threading.Event()
    async with following(rig, decides=is_judge.is_set):

        async def is_posted() -> bool:
            await rig.score()
            with rig.log() as log:
                view = await asyncio.to_thread(log.read)
            return view.tally(NEW).failures > 50

        await rig.until(is_posted)
        assert (await rig.entry()).state.stage is Stage.CANARY
        is_judge.set()

        async def is_back() -> bool:
            return (await rig.entry()).state.stage is Stage.STABLE

        await rig.until(is_back)
    assert "of its rows failed" in (await rig.entry()).state.reason


async def test_a_broker_that_is_away_stops_no_scoring_and_what_has_changed_is_followed_once_it_is_back(
    make_services: Callable[..., LocalServices],
) -> None:
    services = make_services()
    kafka = services.up(["kafka"]).kafka
    assert kafka is not None
    rig = Rig(kafka)
    rig.change(lambda state: start_canary(state, NEW, now_us=1, shares=[0.5]), Limits(window_us=10**15))

    async def is_followed() -> bool:
        return rig.scorer.arms.entry == await rig.entry()

    async with following(rig, decides=lambda: False):
        await rig.until(is_followed)
        await asyncio.to_thread(services.kill, "kafka")
        for _ in range(5):
            assert await rig.score() == {"1", "2"}
        await asyncio.to_thread(services.up, ["kafka"])
        await asyncio.to_thread(rig.change, lambda state: promote(state, now_us=2))
        await rig.until(is_followed)
        assert await rig.score(10) == {"2"}
