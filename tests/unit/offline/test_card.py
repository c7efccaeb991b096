from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from offline.card import (
    ModelCard,
    described_inputs,
    described_outputs,
    load_card,
    model_sha256,
    read_profile,
    render_config,
    versions,
    write_version,
)
from offline.profile import TrainingProfile, profile_inputs
from schemas.errors import ConfigError
from schemas.model import ModelInput
from schemas.output import ModelOutput
from tests.support.scoring import CARRIERS, make_carrier_view, make_spec

SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of b"test"


def make_card(version: int = 1) -> ModelCard:
    spec = make_spec()
    return ModelCard(
        name="delay",
        version=version,
        semver="1.0.0",
        contract=spec.reference,
        sha256=SHA256,
        license="Apache-2.0",
        description="Überfällig?",
        created="2013-01-01T00:00:00.000000Z",
        inputs=described_inputs(spec),
        outputs=described_outputs(spec),
        training={"rows": 5},
        training_set={"sha256": "00", "rows": 5, "views": []},
        evaluation={"auc": 0.9},
        golden=[{"inputs": [None, 1.5, 2.0, 0.10000000149011612, -1.0], "outputs": {"probability": 0.25}}],
    )


def write(repository: Path, version: int = 1) -> Path:
    return write_version(repository, spec=make_spec(), card=make_card(version), model=b"test")


def test_a_card_is_read_as_it_was_written(tmp_path: Path):
    directory = write(tmp_path)

    assert directory == tmp_path / "delay" / "1"
    assert sorted(path.name for path in directory.iterdir()) == ["model.onnx", "model.yaml"]
    assert load_card(tmp_path, "delay") == make_card()
    assert model_sha256(directory / "model.onnx") == SHA256
    assert make_card().served_version.version == "1"


def test_a_profile_stands_beside_the_card_that_names_it(tmp_path: Path):
    for n_rows in (30, 40):  # the second one takes the place of the first
        features = profile_inputs(["v.x"], np.arange(n_rows)[:, np.newaxis].astype(np.float32))
        profile = TrainingProfile(since="2013-01-01", until="2013-01-02", features=features)
        card = replace(make_card(), profile_sha256=profile.sha256)
        directory = write_version(tmp_path, spec=make_spec(), card=card, model=b"test", profile=profile)
        assert read_profile(tmp_path, load_card(tmp_path, "delay")) == profile

    (directory / "profile.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"profile\.json has SHA-256 44136fa3.*, expected .* as its card says"):
        read_profile(tmp_path, card)
    (directory / "profile.json").unlink()
    with pytest.raises(ConfigError, match="is not readable"):
        read_profile(tmp_path, card)
    with pytest.raises(ConfigError, match=r"names no training profile, .*`headrace train --version 1`"):
        read_profile(tmp_path, make_card())


def test_golden_rows_come_as_arrays_with_nan_for_what_is_missing():
    golden = make_card().golden_rows

    expected = np.array([[np.nan, 1.5, 2.0, 0.1, -1.0]], dtype=np.float32)
    np.testing.assert_array_equal(golden.features, expected)
    assert golden.features.dtype == np.float32
    assert {name: values.tolist() for name, values in golden.outputs.items()} == {"probability": [0.25]}
    assert replace(make_card(), golden=[]).golden_rows.features.shape == (0, 5)


def test_a_calibration_is_read_with_the_card_and_checked_with_it(tmp_path: Path):
    points = {"probability": [[0.0, 0.1], [1.0, 0.9]]}
    write_version(tmp_path, spec=make_spec(), card=replace(make_card(), calibration=points), model=b"test")
    card = load_card(tmp_path, "delay")

    assert card.calibrations(make_spec())["probability"].apply(np.array([0.5])).tolist() == [0.5]
    assert make_card().calibrations(make_spec()) == {}
    with pytest.raises(ConfigError, match=r"model delay version 1, calibration of probability: got 5, expected two or"):
        replace(card, calibration={"probability": 5}).check(make_spec())


def test_the_newest_version_is_read_unless_told_which(tmp_path: Path):
    for version in (1, 10, 9):
        write(tmp_path, version)

    assert versions(tmp_path, "delay") == [1, 9, 10]
    assert load_card(tmp_path, "delay").version == 10
    assert load_card(tmp_path, "delay", 9).version == 9


def test_a_version_can_be_written_again(tmp_path: Path):
    write(tmp_path)
    changed = replace(make_card(), description="again")
    write_version(tmp_path, spec=make_spec(), card=changed, model=b"test")

    assert load_card(tmp_path, "delay").description == "again"
    assert sorted(path.name for path in (tmp_path / "delay").iterdir()) == ["1", "config.pbtxt"]


def test_a_file_that_is_not_the_one_of_the_card_is_refused(tmp_path: Path):
    (write(tmp_path) / "model.onnx").write_bytes(b"other")
    with pytest.raises(ConfigError, match=rf"has SHA-256 d9298a10.*, expected {SHA256} as its card says"):
        load_card(tmp_path, "delay")


def test_a_missing_file_is_refused(tmp_path: Path):
    (write(tmp_path) / "model.onnx").unlink()
    with pytest.raises(ConfigError, match="has SHA-256 no file, expected 9f86"):
        load_card(tmp_path, "delay")


@pytest.mark.parametrize("text", ["name: delay", "[", "- 1"])
def test_an_unreadable_card_is_refused(tmp_path: Path, text: str):
    (write(tmp_path) / "model.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"model.yaml is not readable \(.*train it anew"):
        load_card(tmp_path, "delay")


def test_a_repository_without_the_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no model delay, expected delay/1/model.onnx in it; train it"):
        load_card(tmp_path, "delay")


def test_a_card_of_the_same_definitions_passes():
    make_card().check(make_spec())


def test_a_model_trained_on_another_definition_is_refused():
    changed = make_carrier_view(slide="10m")
    inputs = tuple(
        ModelInput.of(changed, item.feature, key=item.key, default=item.default)
        if item.view.name == CARRIERS.name
        else item
        for item in make_spec().inputs
    )
    with pytest.raises(
        ConfigError, match=r"was trained with input .*expected .*carrier_trips.last_delay.*; train it anew"
    ):
        make_card().check(make_spec(inputs=inputs))


def test_a_model_trained_for_another_contract_is_refused():
    with pytest.raises(ConfigError, match="was trained for delay@1, expected delay@2"):
        make_card().check(make_spec(version="2"))


def test_a_model_with_fewer_inputs_or_other_outputs_is_refused():
    with pytest.raises(ConfigError, match=r"has 5 inputs .*, expected 4 inputs"):
        make_card().check(make_spec(inputs=make_spec().inputs[:4]))
    outputs = (ModelOutput(column="other", tensor="probabilities", width=2),)
    with pytest.raises(ConfigError, match=r"and outputs .*'other'"):
        make_card().check(make_spec(outputs=outputs))


def test_the_configuration_is_one_that_triton_reads(tmp_path: Path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    text = (tmp_path / "delay" / "config.pbtxt").read_text()

    config = text_format.Parse(text, model_config_pb2.ModelConfig())

    assert (config.name, config.backend, config.max_batch_size) == ("delay", "onnxruntime", 1_024)
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.input] == [
        ("features", model_config_pb2.TYPE_FP32, [5])
    ]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.output] == [
        ("probabilities", model_config_pb2.TYPE_FP32, [2])
    ]
    assert {name: config.parameters[name].string_value for name in ("sha256_1", "sha256_2")} == {
        "sha256_1": SHA256,
        "sha256_2": SHA256,
    }
    assert list(config.version_policy.specific.versions) == [1, 2]
    assert config.model_warmup[0].inputs["features"].dims == [5]
    assert text == render_config(make_spec(), checksums={1: SHA256, 2: SHA256}, loaded=[1, 2])


def test_a_card_is_plain_yaml(tmp_path: Path):
    document = yaml.safe_load((write(tmp_path) / "model.yaml").read_text())

    assert document["inputs"][1] == {
        "feature": "carrier_trips.last_delay",
        "view_version": 1,
        "definition_hash": CARRIERS.definition_hash,
        "key": "carrier",
        "default": None,
    }
    assert document["description"] == "Überfällig?"
