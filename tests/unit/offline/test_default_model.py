"""The model that a clone comes with: the one its card describes, for the contract and the definitions of today."""

from pathlib import Path

import numpy as np
import pytest

from jobs.flights.model import MODELS
from offline.card import MODEL_FILE, load_card, read_profile, render_config, versions
from offline.export import run_classifier
from schemas.model import ModelSpec

REPOSITORY = Path(__file__).parents[3] / "model_repository"


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_the_default_model_is_the_one_of_its_card_and_of_today_s_definitions(spec: ModelSpec):
    card = load_card(REPOSITORY, spec.name)
    card.check(spec)

    model = (REPOSITORY / spec.name / str(card.version) / MODEL_FILE).read_bytes()
    golden = card.golden_rows
    (column,) = golden.outputs
    np.testing.assert_allclose(run_classifier(model, golden.features), golden.outputs[column], atol=1e-6)
    assert len(model) < 1_000_000
    profile = read_profile(REPOSITORY, card)
    assert [*profile.features] == [item.name for item in spec.inputs]
    assert profile.outputs[column].rows == card.evaluation["rows"]
    assert card.evaluation["auc"] > 0.85
    assert card.evaluation["brier"] < card.evaluation["brier_of_base_rate"]


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_its_configuration_is_the_one_that_training_writes(spec: ModelSpec):
    checksums = {number: load_card(REPOSITORY, spec.name, number).sha256 for number in versions(REPOSITORY, spec.name)}

    assert (REPOSITORY / spec.name / "config.pbtxt").read_text() == render_config(
        spec, checksums=checksums, loaded=checksums
    )
