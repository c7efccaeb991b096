"""The breaker and the ladder as a state machine: whatever fails when, each row is answered once, by who is said to."""

import asyncio
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from schemas.errors import InferenceTimeoutError, InferenceUnavailableError
from schemas.ladder import Ladder, LightModel, RecentAnswers, Rule
from streams.inference.answer import SERVED_BY
from streams.inference.guard import FAILURES, GuardedModel
from streams.inference.served_model import LightRung, ServedModel
from streams.inference.vector import FeatureVectors, VectorReader
from streams.ports import Inference
from tests.support.scoring import SERVED, VIEWS, FakeModel, FakeReader, make_spec, make_triggers

POISON = 666.0
PAUSE_S = 1.0
LADDER = Ladder(
    cache=RecentAnswers(rows=50),
    light_model=LightModel(name="delay_light"),
    rules=(Rule("true", {"probability": 0.125}),),
    shed_after="1s",
)
SPEC = make_spec(ladder=LADDER)
STATES = {"up": None, "away": InferenceUnavailableError("gone"), "hung": InferenceTimeoutError("slow")}
DISTANCES = st.lists(st.sampled_from([100.0, 300.0, 900.0, POISON]), min_size=1, max_size=12)


class Server(FakeModel):
    """A model that is up, away or hung, and fails whenever it sees a poisonous row."""

    state = "up"

    async def infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        self.batches.append(features)
        await asyncio.sleep(0)
        if (error := STATES[self.state]) is not None:
            raise error
        if (features[:, 0] == POISON).any():
            msg = "INTERNAL: poison"
            raise InferenceUnavailableError(msg)
        return self.answer(features)


def half(features: NDArray[np.float32]) -> Inference:
    return Inference(outputs={"probabilities": np.full((len(features), 2), 0.5, dtype=np.float32)})


class LadderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_s = 1_000.0
        self.clock = mock.patch("circuitbreaker.monotonic", self.read_clock)
        self.clock.start()
        self.model, self.light = Server(), Server(half)
        self.pauses: list[asyncio.Future[None]] = []
        self.failures_in_a_row = 0
        probe = np.zeros((1, 5), dtype=np.float32)
        self.guard = GuardedModel("delay", self.model, probe=probe, timeout_s=5.0, pause_s=PAUSE_S, sleep=self.sleep)
        light = GuardedModel("light", self.light, probe=probe, timeout_s=1.0, sleep=self.sleep)
        self.served = ServedModel(
            SPEC,
            SERVED,
            model=self.guard,
            light=[LightRung(model=light, is_local=False)],
            clock_us=lambda: int(self.now_s * 1e6),
        )

    def read_clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        if seconds < PAUSE_S / 2:
            return
        pause = self.loop.create_future()
        self.pauses.append(pause)
        await pause

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def vectors(self, distances: list[float]) -> FeatureVectors:
        rows = make_triggers(*({"distance": distance} for distance in distances))
        return await VectorReader(SPEC, views=VIEWS, reader=FakeReader()).read(rows)

    @rule(state=st.sampled_from(sorted(STATES)))
    def the_model_changes(self, state: str) -> None:
        self.model.state = state

    @rule(state=st.sampled_from(sorted(STATES)))
    def the_light_model_changes(self, state: str) -> None:
        self.light.state = state

    @rule(distances=DISTANCES, shed=st.booleans())
    def rows_come(self, distances: list[float], shed: bool) -> None:
        was_open = self.guard.is_open
        asked_before = len(self.model.batches)
        is_shed = np.array([shed and at % 2 == 0 for at in range(len(distances))])
        answers = self.run(self._answer(distances, is_shed))
        by = [str(SERVED_BY[index]) if index >= 0 else None for index in answers.served_by]
        assert None not in by, "a row is left without an answer"
        expected = {"light_model": 0.5, "rules": 0.125}
        for distance, who, value in zip(distances, by, answers.columns["probability"], strict=True):
            if who in ("model", "cache"):
                assert distance != POISON
                assert abs(value - 1 / (1 + distance / 100)) < 1e-6
            else:
                assert value == expected[str(who)]
        assert answers.fallen.total() == sum(who != "model" for who in by)
        to_ask = [d for d, is_old in zip(distances, is_shed, strict=True) if not is_old]
        not_shed = [who for who, is_old in zip(by, is_shed, strict=True) if not is_old]
        if was_open:
            assert "model" not in not_shed
            assert len(self.model.batches) == asked_before, "a row waited for a model that is left alone"
        elif self.model.state == "up":
            assert not_shed == ["model" if d != POISON else not_shed[at] for at, d in enumerate(to_ask)]

        self._see_breaker(was_open=was_open, has_asked=bool(to_ask))

    def _see_breaker(self, *, was_open: bool, has_asked: bool) -> None:
        """It opens at the third batch in a row that the model fails as a whole, and at no other."""
        if was_open or not has_asked:
            return
        if self.failures_in_a_row == FAILURES:  # a probe has closed it since
            self.failures_in_a_row = 0
        self.failures_in_a_row = 0 if self.model.state == "up" else self.failures_in_a_row + 1
        assert self.guard.is_open == (self.failures_in_a_row == FAILURES)

    async def _answer(self, distances: list[float], is_shed: NDArray[np.bool_]) -> Any:
        return await self.served.answer(await self.vectors(distances), is_shed=is_shed)

    @rule()
    def time_passes(self) -> None:
        self.run(self.settle())
        self.now_s += PAUSE_S + 0.1
        for pause in self.pauses:
            if not pause.done():
                pause.set_result(None)
        self.pauses.clear()
        self.run(self.settle())

    @precondition(lambda self: self.model.state == "up")
    @rule()
    def a_model_that_is_up_comes_back_by_itself(self) -> None:
        self.time_passes()
        self.time_passes()
        assert not self.guard.is_open

    @invariant()
    def a_probe_goes_on_while_the_model_is_left_alone(self) -> None:
        if self.guard.is_open:
            assert self.guard._probing is not None
            assert not self.guard._probing.done()

    def teardown(self) -> None:
        self.run(self.served.close())
        self.loop.close()
        self.clock.stop()


LadderMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLadder = LadderMachine.TestCase
