import asyncio

import numpy as np
import pytest

from schemas.errors import (
    ConfigError,
    InferenceTimeoutError,
    InferenceUnavailableError,
    TensorMismatchError,
)
from streams.inference.guard import GuardedModel
from streams.ports import Recovery
from tests.support.scoring import FakeModel

DEAD = InferenceUnavailableError("stub process is not healthy")
PROBE = np.full((1, 5), 100.0, dtype=np.float32)


class Bench:
    """A guarded fake, and what was told of it."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.model.recovery = Recovery.HEALED
        self.failures: list[str] = []
        self.heals = 0
        self.guard = GuardedModel(
            "delay",
            self.model,
            probe=PROBE,
            timeout_s=5.0,
            probe_failed=self.failures.append,
            healed=self._healed,
            sleep=lambda _: asyncio.sleep(0),
        )

    def _healed(self) -> None:
        self.heals += 1

    async def check(self, *failures: Exception) -> None:
        for failure in failures:
            self.model.failures = [failure]
            await self.guard.check()


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_model_that_answers_its_checks_is_left_alone(bench: Bench):
    for _ in range(3):
        await bench.guard.check()

    assert [batch.tolist() for batch in bench.model.batches] == [PROBE.tolist()] * 3
    assert (bench.model.recoveries, bench.failures) == (0, [])


async def test_a_dead_model_is_brought_back_before_a_row_finds_it_dead(bench: Bench):
    await bench.check(DEAD)
    assert bench.model.recoveries == 0
    await bench.check(DEAD)

    assert (bench.model.recoveries, bench.heals, bench.failures) == (1, 1, ["failed"] * 2)
    assert not bench.guard.is_open, "rows go on asking it"


async def test_a_model_that_was_not_healed_is_not_counted_and_not_tried_at_once_again(bench: Bench):
    bench.model.recovery = Recovery.FAILED
    await bench.check(*[DEAD] * 5)

    assert (bench.model.recoveries, bench.heals) == (1, 0)


async def test_slow_and_wrong_answers_are_told_and_heal_nothing(bench: Bench):
    await bench.check(*[InferenceTimeoutError("busy")] * 3, *[TensorMismatchError("wants 6")] * 3)

    assert bench.failures == ["late"] * 3 + ["refused"] * 3
    assert bench.model.recoveries == 0


async def test_a_model_that_comes_back_as_another_is_not_asked_any_more(bench: Bench):
    async def recover() -> Recovery:
        msg = "another file than the card describes"
        raise ConfigError(msg)

    bench.model.recover = recover  # type: ignore[method-assign]  # a fake
    await bench.check(DEAD, DEAD)
    bench.model.failures, bench.model.batches = [], []
    await bench.guard.check()

    assert bench.model.batches == []
    with pytest.raises(ConfigError, match="another file"):
        await bench.guard.infer(PROBE)
