"""A tiny trained model on a real Triton: scores equal what the trained model predicts."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from offline.card import MODEL_FILE, ModelCard, load_card
from offline.export import run_classifier
from offline.training import TrainingSet, build_training_set, train_model, write_model
from schemas.errors import ConfigError, InferenceTimeoutError, InferenceUnavailableError, TensorMismatchError
from schemas.model import ModelSpec, ServedVersion
from schemas.output import Decision
from schemas.score import score_json_schema
from streams.inference.calibrated import CalibratedModel
from streams.inference.score_table import encode_scores
from streams.inference.triton import TritonModel
from tests.support.feature_rows import T0_US
from tests.support.scoring import (
    LABEL,
    VIEWS,
    FakeFeatures,
    FakeReader,
    make_flights,
    make_scorer,
    make_spec,
    make_triggers,
)

NAMES = iter(f"delay_{number}" for number in range(100))


@pytest.fixture(scope="module")
def training_set() -> TrainingSet:
    return build_training_set(make_spec(), LABEL, views=VIEWS, tables=make_flights(2_000))


@pytest.fixture
def spec() -> ModelSpec:
    """A contract with a name of its own: the server is shared."""
    return make_spec(name=next(NAMES))


@pytest.fixture
def card(model_repository: Path, spec: ModelSpec, training_set: TrainingSet) -> ModelCard:
    write_model(model_repository, train_model(spec, training_set, label=LABEL), created_us=T0_US)
    return load_card(model_repository, spec.name)


@pytest.fixture
async def model(triton: str, spec: ModelSpec, card: ModelCard) -> AsyncIterator[TritonModel]:
    async with TritonModel(spec, card.served_version, url=triton, golden=card.golden_rows) as connected:
        await connected.connect()
        yield connected


def predictions(repository: Path, spec: ModelSpec, features: np.ndarray, *, version: int = 1) -> np.ndarray:
    return run_classifier((repository / spec.name / str(version) / MODEL_FILE).read_bytes(), features)


async def test_triton_answers_what_the_trained_model_does(
    model: TritonModel, spec: ModelSpec, card: ModelCard, model_repository: Path, training_set: TrainingSet
):
    features = np.concatenate([training_set.features] * 2)  # 4,000 rows: several requests at once
    answer = await model.infer(features, timeout_s=10)

    assert model.max_batch_size == 1_024
    assert answer.rejected == []
    expected = predictions(model_repository, spec, features)
    np.testing.assert_allclose(answer.outputs["probabilities"][:, 1], expected, atol=1e-6)
    assert card.golden_rows.features.shape == (8, 5)


async def test_scores_of_real_answers_pass_the_published_schema(
    model: TritonModel, spec: ModelSpec, card: ModelCard, model_repository: Path
):
    stored = {
        ("carrier_trips", "AA"): FakeFeatures(features={"last_delay": 20.0, "trips_1h": 3}),
        ("aircraft_trips", "N1"): FakeFeatures(features={"last_delay": 3.0}),
    }
    scorer = make_scorer(spec, model, served=card.served_version, reader=FakeReader(stored))
    rows = [{"distance": 100.0 * number, "tail_number": "N1" if number % 2 else None} for number in range(1_500)]
    scored = await scorer.score(make_triggers(*rows), now_us=T0_US)

    nan = float("nan")
    matrix = [[100.0 * n, 20, 4, 3, 3 if n % 2 else nan] for n in range(1_500)]
    expected = predictions(model_repository, spec, np.array(matrix, dtype=np.float32))
    np.testing.assert_allclose(scored.scores["probability"].to_numpy(), expected, atol=1e-6)
    assert scored.scores["model_sha256"].unique().to_pylist() == [card.sha256]
    assert scored.scores["complete"].to_pylist() == [bool(number % 2) for number in range(1_500)]
    validator = Draft202012Validator(score_json_schema(spec), format_checker=Draft202012Validator.FORMAT_CHECKER)
    for payload in encode_scores(scored.scores):
        validator.validate(json.loads(payload))


async def test_real_answers_are_calibrated_and_put_into_words(
    model: TritonModel, spec: ModelSpec, card: ModelCard, model_repository: Path
):
    calibration = {"probability": [[0.0, 0.0], [0.5, 0.2], [1.0, 1.0]]}
    risk = Decision(column="risk", output="probability", below="low", at_least=((0.2, "high"),))
    spec = replace(spec, decisions=(risk,))
    calibrations = replace(card, calibration=calibration).calibrations(spec)
    scorer = make_scorer(spec, CalibratedModel(model, spec=spec, calibrations=calibrations))
    rows = [{"distance": 100.0 * number} for number in range(30)]
    scored = await scorer.score(make_triggers(*rows), now_us=T0_US)

    matrix = [[100.0 * n, float("nan"), 4, -1, float("nan")] for n in range(30)]
    answered = predictions(model_repository, spec, np.array(matrix, dtype=np.float32))
    expected = np.interp(answered, [0, 0.5, 1], [0, 0.2, 1])
    np.testing.assert_allclose(scored.scores["probability"].to_numpy(), expected, atol=1e-6)
    words = ["high" if value >= np.float32(0.2) else "low" for value in scored.scores["probability"].to_pylist()]
    assert scored.scores["risk"].to_pylist() == words
    assert {*words} == {"low", "high"}


async def test_a_new_version_is_loaded_beside_the_one_that_scores(
    model: TritonModel, triton: str, spec: ModelSpec, model_repository: Path, training_set: TrainingSet
):
    trained = train_model(spec, training_set, label=LABEL, seed=7)
    newer = write_model(model_repository, trained, created_us=T0_US)
    probe = training_set.features[:50]
    async with TritonModel(spec, newer.served_version, url=triton) as second:
        await second.connect()
        answers = await asyncio.gather(model.infer(probe, timeout_s=10), second.infer(probe, timeout_s=10))

    assert newer.version == 2
    for version, answer in enumerate(answers, start=1):
        expected = predictions(model_repository, spec, probe, version=version)
        np.testing.assert_allclose(answer.outputs["probabilities"][:, 1], expected, atol=1e-6)


async def test_a_contract_that_the_served_model_does_not_keep_is_refused(triton: str, spec: ModelSpec, card: ModelCard):
    wider = make_spec(name=spec.name, inputs=spec.inputs[:4])
    async with TritonModel(wider, card.served_version, url=triton) as other:
        with pytest.raises(TensorMismatchError, match=r"input 'features' is \('FP32', \[-1, 5\]\)"):
            await other.connect()


async def test_a_server_with_another_file_is_refused(triton: str, spec: ModelSpec, card: ModelCard):
    expected = ServedVersion(version="1", sha256="0" * 64)
    async with TritonModel(spec, expected, url=triton) as other:
        with pytest.raises(
            ConfigError, match=rf"has SHA-256 {card.sha256} by the server's configuration, expected 0000"
        ):
            await other.connect()


async def test_a_version_that_is_not_there_is_told(triton: str, spec: ModelSpec, card: ModelCard):
    async with TritonModel(spec, ServedVersion(version="9", sha256=card.sha256), url=triton) as other:
        with pytest.raises(InferenceUnavailableError, match=r"version 9 .* is not loaded"):
            await other.connect()


async def test_a_model_that_is_not_in_the_repository_is_told(triton: str):
    absent = make_spec(name="absent")
    async with TritonModel(absent, ServedVersion(version="1", sha256="0" * 64), url=triton) as other:
        with pytest.raises(InferenceUnavailableError, match="absent"):
            await other.connect()


async def test_an_unloaded_model_is_unavailable_until_it_is_recovered(
    model: TritonModel, triton: str, spec: ModelSpec, card: ModelCard, training_set: TrainingSet
):
    await model._call(lambda client: client.unload_model(spec.name))
    probe = training_set.features[:3]
    with pytest.raises(InferenceUnavailableError, match=spec.name):
        await model.infer(probe, timeout_s=10)

    await model.recover()

    assert (await model.infer(probe, timeout_s=10)).rejected == []


async def test_an_impossible_deadline_is_a_timeout(model: TritonModel, training_set: TrainingSet):
    with pytest.raises(InferenceTimeoutError):
        await model.infer(training_set.features, timeout_s=1e-6)

    assert (await model.infer(training_set.features[:3], timeout_s=10)).rejected == []


async def test_a_server_that_is_not_there_is_told(spec: ModelSpec, unused_tcp_port: int):
    async with TritonModel(
        spec, ServedVersion(version="1", sha256="0" * 64), url=f"127.0.0.1:{unused_tcp_port}"
    ) as away:
        with pytest.raises(
            InferenceUnavailableError, match=r"was not live within 0.3 s: .* see `headrace services up`"
        ):
            await away.connect(timeout_s=0.3)
