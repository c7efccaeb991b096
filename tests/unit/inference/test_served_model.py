"""A model with its ladder: every row is answered, by the highest rung that can."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from schemas.errors import ConfigError, InferenceTimeoutError, InferenceUnavailableError, TensorMismatchError
from schemas.ladder import Ladder, LightModel, RecentAnswers, Rule
from schemas.model import ModelSpec
from streams.inference.answer import SERVED_BY, Answers
from streams.inference.guard import FAILURES, GuardedModel
from streams.inference.served_model import LightRung, ServedModel
from streams.inference.vector import FeatureVectors, VectorReader
from streams.ports import Inference
from tests.support.scoring import SERVED, VIEWS, FakeModel, FakeReader, by_distance, make_spec, make_triggers

RULES = (
    Rule("distance > 300 and carrier_trips__last_delay is null", {"probability": 0.9}),
    Rule("true", {"probability": 0.2}),
)
LADDER = Ladder(cache=RecentAnswers(), light_model=LightModel(name="delay_light"), rules=RULES)
AWAY = InferenceUnavailableError("gone")


def with_light(features: NDArray[np.float32]) -> Inference:
    """Answer one half to everything."""
    return Inference(outputs={"probabilities": np.full((len(features), 2), 0.5, dtype=np.float32)})


class Bench:
    """A served model over fakes, whose pauses end when the test says so."""

    def __init__(self, ladder: Ladder = LADDER, *, answer: Callable[..., Inference] = by_distance) -> None:
        self.spec: ModelSpec = make_spec(ladder=ladder)
        self.model, self.light, self.local = FakeModel(answer), FakeModel(with_light), FakeModel(with_light)
        self.pause_over = asyncio.Event()
        self.now_us = 0
        self.failed = 0
        probe = np.zeros((1, 5), dtype=np.float32)
        self.guard = GuardedModel("delay", self.model, probe=probe, timeout_s=5.0, pause_s=1.0, sleep=self._sleep)
        rungs = [
            LightRung(
                model=GuardedModel("light", fake, probe=probe, timeout_s=1.0, failures=1, sleep=self._sleep),
                is_local=is_local,
            )
            for fake, is_local in ((self.light, False), (self.local, True))
        ]
        self.served = ServedModel(
            self.spec,
            SERVED,
            model=self.guard,
            light=rungs if ladder.light_model else (),
            clock_us=lambda: self.now_us,
        )

    async def _sleep(self, seconds: float) -> None:
        if seconds >= 0.5:
            await self.pause_over.wait()
            self.pause_over.clear()

    async def vectors(self, *distances: float, carrier: str = "AA") -> FeatureVectors:
        rows = make_triggers(*({"distance": distance, "carrier": carrier} for distance in distances))
        return await VectorReader(self.spec, views=VIEWS, reader=FakeReader()).read(rows)

    async def answer(self, *distances: float, shed: Sequence[bool] | None = None) -> Answers:
        def count() -> None:
            self.failed += 1

        is_shed = None if shed is None else np.array(shed)
        return await self.served.answer(await self.vectors(*distances), is_shed=is_shed, failed=count)


@pytest.fixture
async def bench():
    made = Bench()
    yield made
    await made.served.close()


def by_whom(answers: Answers) -> list[str]:
    return [str(SERVED_BY[by]) for by in answers.served_by]


def values(answers: Answers) -> list[float]:
    return [round(float(value), 6) for value in answers.columns["probability"]]


async def test_a_model_that_answers_serves_every_row(bench: Bench):
    answers = await bench.answer(100.0, 300.0)

    assert (by_whom(answers), values(answers)) == (["model", "model"], [0.5, 0.25])
    assert not answers.fallen


async def test_a_model_that_fails_twice_leaves_its_rows_to_the_next_rungs(bench: Bench):
    await bench.answer(300.0)
    bench.model.failures = [AWAY] * 3
    answers = await bench.answer(300.0, 900.0)

    assert (by_whom(answers), values(answers)) == (["cache", "light_model"], [0.25, 0.5])
    assert answers.fallen == {("error", "cache"): 1, ("error", "light_model"): 1}
    assert bench.failed == 2


async def test_a_model_that_is_too_slow_is_not_asked_again(bench: Bench):
    bench.model.failures = [InferenceTimeoutError("slow")]
    answers = await bench.answer(300.0)

    assert len(bench.model.batches) == 1
    assert answers.fallen == {("timeout", "light_model"): 1}


async def test_a_light_model_that_is_away_leaves_rows_to_the_worker_and_then_to_rules(bench: Bench):
    bench.model.failures = [AWAY] * 9
    bench.light.failures = [AWAY] * 9
    assert by_whom(await bench.answer(100.0)) == ["light_model"]
    assert bench.local.batches
    bench.local.failures = [AWAY] * 9
    answers = await bench.answer(100.0, 900.0)

    assert (by_whom(answers), values(answers)) == (["rules", "rules"], [0.2, 0.9])


async def test_recent_answers_are_given_for_the_same_inputs_and_not_when_they_are_old(bench: Bench):
    await bench.answer(300.0, 400.0)
    bench.model.failures = [AWAY] * 99
    bench.now_us = LADDER.cache.max_age_us
    assert by_whom(await bench.answer(400.0, 300.0, 500.0)) == ["cache", "cache", "light_model"]
    bench.now_us += 1
    assert by_whom(await bench.answer(400.0)) == ["light_model"]


async def test_after_several_failures_in_a_row_no_row_waits_for_the_model(bench: Bench):
    bench.model.failures = [AWAY] * 99
    for _ in range(FAILURES):
        await bench.answer(100.0)
    asked = len(bench.model.batches)
    answers = await bench.answer(100.0)

    assert answers.fallen == {("breaker", "light_model"): 1}
    assert len(bench.model.batches) == asked


async def test_rows_are_no_probe_once_the_pause_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    clock_s = 1_000.0
    monkeypatch.setattr("circuitbreaker.monotonic", lambda: clock_s)
    bench.model.failures = [AWAY] * 99
    for _ in range(FAILURES):
        await bench.answer(300.0)
    clock_s += 5.0
    bench.model.batches.clear()
    answers = await bench.answer(300.0, 400.0)

    assert answers.fallen == {("breaker", "light_model"): 2}
    assert all(len(batch) == 1 for batch in bench.model.batches), "the probe alone asks"
    assert bench.guard.is_open


async def test_a_probe_finds_the_model_back_without_any_row(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    now_s = 100.0
    monkeypatch.setattr("circuitbreaker.monotonic", lambda: now_s)
    bench.model.failures = [AWAY] * 99
    for _ in range(FAILURES):
        await bench.answer(100.0)
    assert bench.guard.is_open
    await asyncio.sleep(0)  # the first look brings the model back, if that is possible
    assert bench.model.recoveries == 1
    bench.model.failures = []
    now_s += 1.1
    bench.pause_over.set()
    async with asyncio.timeout(5):
        await bench.guard._probing

    assert not bench.guard.is_open
    assert by_whom(await bench.answer(100.0)) == ["model"]


async def test_a_row_that_the_model_fails_on_costs_no_other_row(bench: Bench):
    def answer(features: NDArray[np.float32]) -> Inference:
        if (features[:, 0] == 666).any():
            raise InferenceUnavailableError("INTERNAL: division by zero")
        return by_distance(features)

    bench.model.answer = answer
    answers = await bench.answer(*[100.0] * 5, 666.0, *[300.0] * 6)

    assert by_whom(answers) == ["model"] * 5 + ["light_model"] + ["model"] * 6
    assert values(answers)[6:] == [0.25] * 6
    assert answers.fallen == {("invalid_output", "light_model"): 1}
    assert not bench.guard.is_open
    assert "fails on this row: INTERNAL: division by zero" in answers.faults[5]


async def test_many_rows_that_the_model_fails_on_are_not_told_apart_for_ever(bench: Bench):
    def answer(features: NDArray[np.float32]) -> Inference:
        if (features[:, 0] == 666).any():
            raise InferenceUnavailableError("INTERNAL")
        return by_distance(features)

    bench.model.answer = answer
    answers = await bench.answer(*[666.0, 100.0] * 200)

    assert len(bench.model.batches) <= 131
    assert set(by_whom(answers)[0::2]) == {"light_model"}
    assert set(by_whom(answers)) == {"light_model", "model"}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1.5])
async def test_an_answer_that_is_no_score_goes_down_the_ladder_alone(bench: Bench, wrong: float):
    def answer(features: NDArray[np.float32]) -> Inference:
        inference = by_distance(features)
        inference.outputs["probabilities"][1, 1] = wrong
        return inference

    bench.model.answer = answer
    answers = await bench.answer(100.0, 100.0, 300.0)

    assert by_whom(answers) == ["model", "light_model", "model"]
    assert list(answers.faults) == [1]


async def test_rows_that_are_shed_go_down_in_the_worker_alone_and_the_others_are_served(bench: Bench):
    await bench.answer(1.0)
    asked = len(bench.light.batches)  # the light model has been looked at, to be ready
    answers = await bench.answer(100.0, 300.0, 900.0, shed=[True, False, True])

    assert by_whom(answers) == ["light_model", "model", "light_model"]
    assert answers.fallen == {("overload", "light_model"): 2}
    assert len(bench.light.batches) == asked
    assert bench.model.batches[-1][:, 0].tolist() == [300.0]


async def test_what_is_shed_and_nobody_answers_waits_for_the_model():
    bench = Bench(Ladder(cache=RecentAnswers(), waived=("light_model", "rules"), shed_after="1s"))
    answers = await bench.answer(100.0, 300.0, shed=[True, True])

    assert by_whom(answers) == ["model", "model"]


async def test_with_rungs_waived_rows_that_nobody_answers_are_kept():
    bench = Bench(Ladder(cache=RecentAnswers(), waived=("light_model", "rules")))
    await bench.answer(100.0)
    bench.model.failures = [AWAY] * 9
    assert by_whom(await bench.answer(100.0)) == ["cache"]
    with pytest.raises(InferenceUnavailableError):
        await bench.answer(100.0, 200.0)
    await bench.served.close()


async def test_a_server_that_refuses_whatever_it_gets_is_another_model(bench: Bench):
    bench.model.failures = [TensorMismatchError("wants 6")] * 9
    with pytest.raises(TensorMismatchError, match="wants 6"):
        await bench.answer(100.0)


async def test_a_model_that_comes_back_as_another_one_ends_scoring(bench: Bench):
    async def recover() -> None:
        msg = "another file than the card describes"
        raise ConfigError(msg)

    bench.model.recover = recover
    bench.model.failures = [AWAY] * 99
    for _ in range(FAILURES):
        await bench.answer(100.0)
    await asyncio.wait_for(bench.guard._probing, 5)
    with pytest.raises(ConfigError, match="another file"):
        await bench.answer(100.0)


async def test_rules_read_trigger_features_by_their_names_and_others_by_view_and_name():
    spec = make_spec(ladder=LADDER)
    columns = {"trips.distance": pa.array([400, 400, None]), "carrier_trips.last_delay": pa.array([None, 3.0, None])}

    assert spec.rules.first_hits(columns, n_rows=3).tolist() == [0, 1, 1]


def test_rules_over_inputs_of_every_type_see_numbers():
    spec = make_spec(
        ladder=Ladder(rules=(Rule("distance == 1", {"probability": 1}), RULES[1]), waived=("cache", "light_model"))
    )

    assert spec.rules.first_hits({"trips.distance": pa.array([True, False, None])}, n_rows=3).tolist() == [0, 1, 1]
    assert spec.rules.first_hits({"trips.distance": pa.array([1.0, float("nan")])}, n_rows=2).tolist() == [0, 1]
