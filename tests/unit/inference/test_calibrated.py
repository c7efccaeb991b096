"""A model whose answers are calibrated before anybody else sees them."""

import numpy as np
import pytest

from schemas.errors import InferenceUnavailableError
from schemas.ladder import Ladder, Rule
from schemas.output import Decision, read_calibrations
from streams.inference.calibrated import CalibratedModel
from streams.ports import Inference, Recovery
from tests.support.feature_rows import T0_US
from tests.support.scoring import FakeModel, make_scorer, make_spec, make_triggers

POINTS = {"probability": [[0.0, 0.0], [0.5, 0.2], [1.0, 1.0]]}
RISK = Decision(column="risk", output="probability", below="low", at_least=((0.4, "high"),))
SPEC = make_spec(
    decisions=(RISK,), ladder=Ladder(rules=(Rule("true", {"probability": 0.5}),), waived=("cache", "light_model"))
)


def calibrated(model: FakeModel) -> CalibratedModel:
    return CalibratedModel(model, spec=SPEC, calibrations=read_calibrations(POINTS, SPEC.outputs, where="model delay"))


async def test_scores_and_decisions_are_calibrated_and_answers_of_rules_are_not():
    def answer(features: np.ndarray) -> Inference:
        positive = np.array([0.5, 0.75, np.nan, np.inf, 1.25, -0.25], dtype=np.float32)[: len(features)]
        return Inference(outputs={"probabilities": np.stack([1 - positive, positive], axis=1)})

    model = FakeModel(answer)
    scored = await make_scorer(SPEC, calibrated(model)).score(make_triggers(*[{}] * 6), now_us=T0_US)

    # What is no probability must not become one: it is for the rules.
    assert scored.scores["served_by"].to_pylist() == ["model", "model", "rules", "rules", "rules", "rules"]
    assert scored.scores["probability"].to_pylist() == pytest.approx([0.2, 0.6, 0.5, 0.5, 0.5, 0.5])
    assert scored.scores["risk"].to_pylist() == ["low", *["high"] * 5]


async def test_the_model_s_own_arrays_and_other_columns_stay_as_they_are():
    answered = np.array([[0.5, 0.5]], dtype=np.float32)
    rejected = [(range(1, 2), "wrong shape")]
    model = calibrated(FakeModel(lambda _: Inference(outputs={"probabilities": answered}, rejected=rejected)))
    inference = await model.infer(np.zeros((1, 5), dtype=np.float32), timeout_s=1)

    np.testing.assert_allclose(inference.outputs["probabilities"], [[0.5, 0.2]])
    assert inference.outputs["probabilities"].dtype == np.float32
    assert answered.tolist() == [[0.5, 0.5]]
    assert inference.rejected == rejected


async def test_a_batch_without_any_answer_and_an_empty_one_pass_through():
    rejected = [(range(2), "wrong shape")]
    none = calibrated(FakeModel(lambda _: Inference(outputs={}, rejected=rejected)))
    assert (await none.infer(np.zeros((2, 5), dtype=np.float32), timeout_s=1)).outputs == {}

    empty = calibrated(FakeModel())
    inference = await empty.infer(np.zeros((0, 5), dtype=np.float32), timeout_s=1)
    assert inference.outputs["probabilities"].shape == (0, 2)


async def test_failures_and_recovery_are_the_model_s():
    fake = FakeModel(failures=[InferenceUnavailableError("gone")])
    model = calibrated(fake)
    with pytest.raises(InferenceUnavailableError, match="gone"):
        await model.infer(np.zeros((1, 5), dtype=np.float32), timeout_s=1)

    assert await model.recover() is Recovery.LOADED
    assert fake.recoveries == 1
