"""Champion and candidate over fakes of their servers: who answers whom, and what is counted against whom."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, InferenceTimeoutError, InferenceUnavailableError, TensorMismatchError
from schemas.ladder import NO_LADDER, Ladder, Rule
from schemas.model import ServedVersion
from streams.inference.guard import GuardedModel
from streams.inference.rollout import (
    Evidence,
    Limits,
    Rollout,
    belongs_to_candidate,
    observe,
    promote,
    start_canary,
    start_shadow,
)
from streams.inference.rollout_log import Entry
from streams.inference.scorer import Scorer
from streams.inference.tally import Tally
from streams.inference.vector import VectorReader
from streams.inference.versions import OpenVersion, Versions
from streams.ports import Inference
from tests.support.feature_rows import T0_US
from tests.support.model_versions import FAILING, GOOD, SHIFTED, SIMILAR, by, probability
from tests.support.scoring import VIEWS, FakeModel, FakeReader, make_spec, make_triggers

OLD, NEW = (ServedVersion(version=number, sha256=number * 64) for number in ("1", "2"))
LADDER = Ladder(waived=("cache", "light_model"), rules=(Rule("true", {"probability": 0.125}),), shed_after="1s")
SPEC = make_spec(ladder=LADDER)
STABLE = Rollout(model=SPEC.name, champion=OLD)
HALF = start_canary(STABLE, NEW, now_us=0, shares=[0.5])
SHADOW = start_shadow(STABLE, NEW, now_us=0)
WATCH = promote(HALF, now_us=0, baseline=Evidence(rows=1_000))
OTHER = ServedVersion(version="9", sha256="9" * 64)
AWAY = InferenceUnavailableError("gone")
DISTANCES = [100.0 + 10 * number for number in range(40)]
IS_CANARY = belongs_to_candidate(HALF, [f"f{number}" for number in range(len(DISTANCES))])


class Bench:
    """Two versions over fakes, in one generation."""

    def __init__(self, state: Rollout, *, candidate: dict[str, float] = SIMILAR, ladder: Ladder = LADDER) -> None:
        self.spec = make_spec(ladder=ladder)
        self.old, self.new = FakeModel(by(GOOD)), FakeModel(by(candidate))
        self.closed: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.connected: list[str] = []
        self.versions = Versions(self.spec, open_version=self._open)
        self.arms = self.versions.arms(Entry(generation=3, state=state))
        vectors = VectorReader(self.spec, views=VIEWS, reader=FakeReader())
        self.scorer = Scorer(self.arms, vectors=vectors)

    def _open(self, served: ServedVersion) -> OpenVersion:
        async def connect() -> None:
            self.connected.append(served.version)
            if (fault := self.faults.get(served.version)) is not None:
                raise fault

        async def close() -> None:
            self.closed.append(served.version)

        async def sleep(seconds: float) -> None:
            await (asyncio.Event().wait() if seconds >= 0.5 else asyncio.sleep(0))

        server = self.old if served == OLD else self.new
        guard = GuardedModel("delay", server, probe=np.zeros((1, 5), dtype=np.float32), timeout_s=5.0, sleep=sleep)
        return OpenVersion(model=guard, connect=connect, close=close)

    async def score(self, distances: Sequence[float] = DISTANCES, *, age_us: int = 0) -> list[dict[str, Any]]:
        rows = make_triggers(*({"distance": distance, "broker_time": T0_US} for distance in distances))
        scored = await self.scorer.score(rows, now_us=T0_US + age_us)
        assert scored.dead_letters.num_rows == 0
        scores: list[dict[str, Any]] = scored.scores.to_pylist()
        assert [score["entity"] for score in scores] == [f"f{number}" for number in range(len(distances))]
        return scores

    async def close(self) -> None:
        await self.arms.close()
        await self.versions.close_unused(Entry(generation=4, state=Rollout(model="none", champion=OTHER)))


def by_version(scores: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(score["arm"], score["model_version"]) for score in scores]


@pytest.fixture
async def benches() -> AsyncIterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        await bench.close()


async def test_a_canary_scores_its_entities_and_each_score_says_who_made_it(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    scores = await bench.score()

    assert 5 < IS_CANARY.sum() < 35
    assert by_version(scores) == [("canary", "2") if is_canary else ("champion", "1") for is_canary in IS_CANARY]
    factors = [0.99 if is_canary else 1.0 for is_canary in IS_CANARY]
    expected = [probability(d, factor=factor) for d, factor in zip(DISTANCES, factors, strict=True)]
    assert [score["probability"] for score in scores] == pytest.approx(expected)
    assert {score["model_sha256"] for score, is_canary in zip(scores, IS_CANARY, strict=True) if is_canary} == {
        "2" * 64
    }
    tallies = bench.arms.tallies
    assert {version: (tally.rows, tally.failures) for version, tally in tallies.items()} == {
        "1": (int((~IS_CANARY).sum()), 0),
        "2": (int(IS_CANARY.sum()), 0),
    }
    assert tallies["2"].scores.sum() == IS_CANARY.sum()


async def test_what_a_candidate_fails_is_scored_by_the_champion_and_counts_against_it(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF, candidate=FAILING))
    scores = await bench.score()

    fails = IS_CANARY & (np.array(DISTANCES) > FAILING["fails_above"])
    assert 0 < fails.sum() < IS_CANARY.sum()
    expected = [
        ("champion", "1") if not is_canary else ("canary", "1" if is_failed else "2")
        for is_canary, is_failed in zip(IS_CANARY, fails, strict=True)
    ]
    assert by_version(scores) == expected
    assert {score["served_by"] for score in scores} == {"model"}
    assert [score["probability"] for score in scores] == pytest.approx([probability(d) for d in DISTANCES])
    assert (bench.arms.tallies["2"].rows, bench.arms.tallies["2"].failures) == (IS_CANARY.sum(), fails.sum())
    assert (bench.arms.tallies["1"].rows, bench.arms.tallies["1"].failures) == ((~IS_CANARY).sum(), 0)


@pytest.mark.parametrize("error", [AWAY, InferenceTimeoutError("slow"), TensorMismatchError("another")])
async def test_a_candidate_that_does_not_answer_costs_no_row_its_score(benches: list[Bench], error: Exception) -> None:
    benches.append(bench := Bench(HALF))
    bench.new.failures = [error] * 20
    scores = await bench.score()

    assert {score["model_version"] for score in scores} == {"1"}
    assert [score["arm"] == "canary" for score in scores] == IS_CANARY.tolist()
    assert bench.arms.tallies["2"].failures == bench.arms.tallies["2"].rows == IS_CANARY.sum()


async def test_where_both_fail_the_ladder_of_the_champion_answers_and_the_server_is_to_blame(
    benches: list[Bench],
) -> None:
    benches.append(bench := Bench(HALF))
    bench.old.failures, bench.new.failures = [AWAY] * 20, [AWAY] * 20
    scores = await bench.score()

    assert {(score["served_by"], score["probability"]) for score in scores} == {("rules", 0.125)}
    assert [(tally.rows, tally.failures) for tally in bench.arms.tallies.values()] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("ladder", [LADDER, NO_LADDER])
@pytest.mark.parametrize("is_previous_away", [True, False])
async def test_a_watched_champion_is_blamed_for_what_the_one_before_it_answers(
    benches: list[Bench], ladder: Ladder, is_previous_away: bool
) -> None:
    benches.append(bench := Bench(WATCH, ladder=ladder))
    bench.new.failures, bench.old.failures = [AWAY] * 20, [AWAY] * (20 * is_previous_away)
    for _ in range(2):
        if ladder is NO_LADDER:
            with pytest.raises(InferenceUnavailableError):
                await bench.score()
        else:
            assert {score["served_by"] for score in await bench.score()} == {"rules"}
    n_failed = 0 if is_previous_away else 2 * len(DISTANCES)
    tally = bench.arms.tallies["2"]
    assert (tally.rows, tally.failures) == (n_failed, n_failed)
    judged = observe(WATCH, champion=tally.evidence, candidate=Tally().evidence, now_us=1, limits=Limits(min_rows=20))
    assert judged.champion == (NEW if is_previous_away else OLD)


async def test_a_watched_champion_without_one_before_it_is_not_blamed_for_the_server(benches: list[Bench]) -> None:
    benches.append(bench := Bench(replace(WATCH, previous=None)))
    bench.new.failures = [AWAY] * 20
    await bench.score()
    assert bench.arms.tallies["2"].rows == 0


async def test_without_a_ladder_rows_wait_for_the_champion_and_none_is_lost(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF, ladder=NO_LADDER))
    bench.old.failures = [AWAY] * 3
    with pytest.raises(InferenceUnavailableError, match="gone"):
        await bench.score()
    assert len(await bench.score()) == len(DISTANCES)
    assert bench.arms.tallies["1"].failures == (~IS_CANARY).sum()


async def test_what_is_shed_is_nobody_s_failure_and_goes_down_the_ladder(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    scores = await bench.score(age_us=2_000_000)

    assert {score["served_by"] for score in scores} == {"rules"}
    assert [score["arm"] == "canary" for score in scores] == IS_CANARY.tolist()
    assert [tally.rows for tally in bench.arms.tallies.values()] == [0, 0]
    assert bench.old.batches == bench.new.batches == []


async def test_a_shadow_is_compared_and_never_published(benches: list[Bench]) -> None:
    benches.append(bench := Bench(SHADOW, candidate=SHIFTED))
    scores = await bench.score()
    await asyncio.wait({bench.arms._shadowing})

    assert set(by_version(scores)) == {("champion", "1")}
    assert [score["probability"] for score in scores] == pytest.approx([probability(d) for d in DISTANCES])
    tally = bench.arms.tallies["2"]
    assert (tally.rows, tally.failures, tally.compared) == (len(DISTANCES), 0, len(DISTANCES))
    assert tally.difference_max == pytest.approx(0.7 * probability(100.0), rel=1e-6)
    assert tally.difference_sum == pytest.approx(0.7 * sum(probability(d) for d in DISTANCES), rel=1e-6)
    assert bench.arms.tallies["1"].rows == len(DISTANCES)


async def test_a_shadow_is_asked_for_one_batch_at_a_time_and_nobody_waits_for_it(benches: list[Bench]) -> None:
    benches.append(bench := Bench(SHADOW))
    is_let, asked = asyncio.Event(), 0

    async def hang(features: Any, *, timeout_s: float) -> Any:
        nonlocal asked
        asked += 1
        await is_let.wait()
        return bench.new.answer(features)

    bench.new.infer = hang  # type: ignore[method-assign]  # answers when it is let
    for _ in range(3):
        assert len(await asyncio.wait_for(bench.score(), 10)) == len(DISTANCES)
        await asyncio.sleep(0)
    assert asked == 1
    is_let.set()
    await asyncio.wait({bench.arms._shadowing})
    assert bench.arms.tallies["2"].compared == len(DISTANCES)
    assert bench.arms.tallies["1"].rows == 3 * len(DISTANCES)


async def test_of_a_shadow_that_fails_rows_that_are_not_answered_are_counted(benches: list[Bench]) -> None:
    benches.append(bench := Bench(SHADOW, candidate=FAILING))
    await bench.score()
    await asyncio.wait({bench.arms._shadowing})

    n_failed = sum(distance > FAILING["fails_above"] for distance in DISTANCES)
    tally = bench.arms.tallies["2"]
    assert (tally.failures, tally.compared, tally.difference_max) == (n_failed, len(DISTANCES) - n_failed, 0.0)


async def test_nothing_is_counted_while_nothing_is_decided(benches: list[Bench]) -> None:
    benches.append(bench := Bench(STABLE))
    await bench.score()
    assert {version: tally.rows for version, tally in bench.arms.tallies.items()} == {"1": 0}


async def test_a_worker_that_was_started_anew_counts_on(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    seen = {"2": Tally(rows=7, failures=2)}
    arms = bench.versions.arms(Entry(generation=3, state=HALF), seen=seen)
    bench.scorer.use(arms)
    await bench.score()
    assert (arms.tallies["2"].rows, arms.tallies["2"].failures) == (7 + IS_CANARY.sum(), 2)
    assert seen["2"].rows == 7


async def test_what_is_under_way_ends_on_the_arms_that_it_began_on(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    is_asked, is_let = asyncio.Event(), asyncio.Event()
    infer = bench.old.infer

    async def wait(features: Any, *, timeout_s: float) -> Any:
        is_asked.set()
        await is_let.wait()
        return await infer(features, timeout_s=timeout_s)

    bench.old.infer = wait  # type: ignore[method-assign]  # answers when it is let
    under_way = asyncio.create_task(bench.score())
    await is_asked.wait()
    promoted = Entry(generation=4, state=Rollout(model=SPEC.name, champion=NEW))
    bench.scorer.use(bench.versions.arms(promoted))
    closing = asyncio.create_task(bench.arms.close())
    assert set(by_version(await bench.score())) == {("champion", "2")}
    assert not closing.done()
    is_let.set()
    assert set(by_version(await under_way)) == {("champion", "1"), ("canary", "2")}
    await closing
    await bench.versions.close_unused(promoted)
    assert bench.closed == ["1"]


async def test_versions_are_connected_once_and_a_candidate_that_cannot_be_holds_nobody_up(
    benches: list[Bench],
) -> None:
    benches.append(bench := Bench(HALF))
    bench.faults["2"] = AWAY
    await bench.versions.connect(bench.arms)
    await bench.versions.connect(bench.arms)
    assert bench.connected == ["1", "2", "2"]
    bench.faults = {"1": AWAY}
    await bench.versions.connect(bench.arms)
    assert bench.connected == ["1", "2", "2", "2"]


async def test_a_check_under_way_ends_with_its_version_and_the_others_go_on(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    is_asked: dict[str, asyncio.Event] = {"old": asyncio.Event(), "new": asyncio.Event()}

    async def answer(*_: Any, **__: Any) -> Inference:
        is_asked["old"].set()
        return by(GOOD)(np.zeros((1, 5), dtype=np.float32))

    async def hang(*_: Any, **__: Any) -> Inference:
        is_asked["new"].set()
        return await asyncio.get_running_loop().create_future()

    bench.old.infer, bench.new.infer = answer, hang  # type: ignore[method-assign]
    watch = asyncio.create_task(bench.versions.watch(0.001))
    async with asyncio.timeout(30):
        await is_asked["new"].wait()
        for _ in range(3):  # one that hangs keeps none of the others from its checks
            is_asked["old"].clear()
            await is_asked["old"].wait()
        await bench.versions.close_unused(Entry(generation=4, state=STABLE))
        assert bench.closed == ["2"]
        is_asked["old"].clear()
        await is_asked["old"].wait()
    assert not watch.done()
    watch.cancel()
    await asyncio.wait({watch})
    assert watch.cancelled()


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("the channel is closed")])
async def test_what_a_check_meets_ends_no_watch(benches: list[Bench], error: BaseException) -> None:
    benches.append(bench := Bench(STABLE))
    times: asyncio.Queue[None] = asyncio.Queue()

    async def fail(*_: Any, **__: Any) -> Inference:
        times.put_nowait(None)
        raise error

    bench.old.infer = fail  # type: ignore[method-assign]
    watch = asyncio.create_task(bench.versions.watch(0.001))
    async with asyncio.timeout(30):
        for _ in range(3):
            await times.get()
    assert not watch.done()
    watch.cancel()
    await asyncio.wait({watch})


async def test_a_version_that_is_being_connected_is_not_checked_meanwhile(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    is_connecting, may_go_on = asyncio.Event(), asyncio.Event()

    async def connect() -> None:
        is_connecting.set()
        await may_go_on.wait()

    held = bench.versions._held[NEW]
    held.version = replace(held.version, connect=connect)
    connecting = asyncio.create_task(bench.versions.connect(bench.arms))
    watch = asyncio.create_task(bench.versions.watch(0.001))
    is_asked: asyncio.Queue[None] = asyncio.Queue()

    async def answer(*_: Any, **__: Any) -> Inference:
        is_asked.put_nowait(None)
        return by(GOOD)(np.zeros((1, 5), dtype=np.float32))

    async with asyncio.timeout(30):
        await is_connecting.wait()
        bench.old.infer = answer  # type: ignore[method-assign]
        for _ in range(3):
            await is_asked.get()
        assert bench.new.batches == []
        may_go_on.set()
        await connecting
        bench.new.infer = answer  # type: ignore[method-assign]
        assert held.is_connected
    watch.cancel()
    await asyncio.wait({watch})


async def test_a_champion_that_cannot_be_connected_is_told(benches: list[Bench]) -> None:
    benches.append(bench := Bench(HALF))
    bench.faults["1"] = AWAY
    with pytest.raises(InferenceUnavailableError, match="gone"):
        await bench.versions.connect(bench.arms)


async def test_a_candidate_that_is_not_to_be_had_here_is_the_champion_s_share_and_its_own_failure(
    benches: list[Bench],
) -> None:
    benches.append(bench := Bench(STABLE))

    def refuse(_: ServedVersion) -> OpenVersion:
        msg = "no version 2 here"
        raise ConfigError(msg)

    bench.versions._open_version = refuse
    arms = bench.versions.arms(Entry(generation=4, state=HALF))
    await bench.versions.connect(arms)
    bench.scorer.use(arms)
    scores = await bench.score()
    assert {score["model_version"] for score in scores} == {"1"}
    assert (arms.tallies["2"].rows, arms.tallies["2"].failures) == (IS_CANARY.sum(), IS_CANARY.sum())
    with pytest.raises(ConfigError, match="no version 2 here"):
        bench.versions.arms(Entry(generation=5, state=Rollout(model=SPEC.name, champion=NEW)))
