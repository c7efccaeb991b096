import builtins
import hashlib
from typing import Any

import lightgbm
import numpy as np
import onnx
import onnxruntime
import pytest

from offline.export import PROBABILITIES, check_export, export_classifier, run_classifier
from schemas.errors import ConfigError, InferenceError

N_FEATURES = 4


def fit(features: np.ndarray, labels: np.ndarray, **parameters: Any) -> lightgbm.Booster:
    settings = {"objective": "binary", "verbosity": -1, "num_threads": 1, "num_leaves": 8, "min_data_in_leaf": 5}
    return lightgbm.train(settings | parameters, lightgbm.Dataset(features, labels.astype(int)), 20)


def export(booster: lightgbm.Booster) -> bytes:
    return export_classifier(booster, name="delay@1", input_tensor="inputs", n_features=N_FEATURES)


@pytest.fixture(scope="module")
def features() -> np.ndarray:
    random = np.random.default_rng(3)
    values = random.normal(size=(2_000, N_FEATURES)).astype(np.float32)
    values[random.random(values.shape) < 0.1] = np.nan
    return values


@pytest.fixture(scope="module")
def booster(features: np.ndarray) -> lightgbm.Booster:
    return fit(features, np.nan_to_num(features[:, 0]) + np.nan_to_num(features[:, 1]) > 0.3)


def test_the_exported_model_answers_as_the_trained_one_also_where_values_are_missing(
    features: np.ndarray, booster: lightgbm.Booster
):
    model = export(booster)

    answered = check_export(model, booster, features=features)
    np.testing.assert_allclose(answered, booster.predict(features), atol=1e-6)
    every_hole = np.full((1, N_FEATURES), np.nan, dtype=np.float32)
    np.testing.assert_allclose(run_classifier(model, every_hole), booster.predict(every_hole), atol=1e-6)


def test_it_has_one_float32_input_and_answers_probabilities_alone(booster: lightgbm.Booster):
    session = onnxruntime.InferenceSession(export(booster))

    (given,), (answered,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape[1:]) == ("inputs", "tensor(float)", [N_FEATURES])
    assert (answered.name, answered.type, answered.shape[1:]) == (PROBABILITIES, "tensor(float)", [2])
    assert not isinstance(given.shape[0], int)
    for n_rows in (0, 1, 7):
        (answer,) = session.run(None, {"inputs": np.zeros((n_rows, N_FEATURES), dtype=np.float32)})
        assert answer.shape == (n_rows, 2)
        np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)


def test_the_same_booster_gives_the_same_bytes(booster: lightgbm.Booster):
    first, second = (hashlib.sha256(export(booster)).hexdigest() for _ in range(2))

    assert first == second


def test_it_runs_on_the_operators_that_the_server_of_the_container_knows(booster: lightgbm.Booster):
    opsets = {entry.domain: entry.version for entry in onnx.load_from_string(export(booster)).opset_import}

    assert opsets[""] <= 15
    assert opsets["ai.onnx.ml"] <= 3


def test_rows_whose_values_are_neighbouring_float32_do_not_change_sides():
    # A split between two neighbours has a float64 threshold that no float32 equals; the nearest may be the upper one.
    random = np.random.default_rng(5)
    steps = random.integers(0, 60, size=3_000)
    values = np.zeros((3_000, N_FEATURES), dtype=np.float32)
    values[:, 0] = (np.float32(3.0).view(np.int32) + steps.astype(np.int32)).view(np.float32)
    booster = fit(values, random.random(3_000) < (steps * 7 % 11) / 11, num_leaves=31)

    check_export(export(booster), booster, features=values)


def test_a_model_that_answers_otherwise_is_refused(features: np.ndarray, booster: lightgbm.Booster):
    other = fit(features, np.nan_to_num(features[:, 2]) > 0)

    with pytest.raises(InferenceError, match=r"is off by .* on 2000 rows, expected at most 1e-05; it was not written"):
        check_export(export(other), booster, features=features)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, booster: lightgbm.Booster):
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "onnxmltools":
            msg = "No module named 'onnxmltools'"
            raise ImportError(msg, name=name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"the package onnxmltools, .* pip install 'headrace\[demo,local\]'"):
        export(booster)
