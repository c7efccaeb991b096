from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from offline.card import MODEL_FILE, ModelCard, described_inputs, read_card, render_card, write_version
from offline.model_store import ModelStore
from offline.release import next_release
from offline.verify import verify_models
from schemas.errors import ConfigError, SinkError, SinkUnavailableError
from schemas.model import ModelInput
from tests.support.scoring import CARRIERS, VIEWS, make_carrier_view, make_spec
from tests.unit.offline.test_card import SHA256, make_card


def card(**changes: object) -> ModelCard:
    made = replace(make_card(), training={"label": "late", "parameters": {"trees": 3}, "framework": "lightgbm 4"})
    return replace(made, semver="1.4.2", **changes)  # type: ignore[arg-type]


def test_the_first_version_is_1_0_0():
    assert next_release(card(), None).semver == "1.0.0"


@pytest.mark.parametrize(
    ("changes", "semver", "changed"),
    [
        ({}, "1.4.2", ()),
        ({"training": card().training | {"parameters": {"trees": 4}}}, "1.4.3", ("parameters",)),
        ({"training": card().training | {"framework": "lightgbm 5"}}, "1.4.3", ("framework",)),
        ({"sha256": "0" * 64}, "1.4.3", ("file",)),
        ({"training_set": {"sha256": "other"}}, "1.5.0", ("training set",)),
        (
            {"training_set": {"sha256": "other"}, "training": card().training | {"parameters": {"trees": 4}}},
            "1.5.0",
            ("training set",),
        ),
        ({"inputs": card().inputs[:4]}, "2.0.0", ("inputs",)),
        ({"contract": "delay@2"}, "2.0.0", ("contract",)),
        ({"training": card().training | {"label": "very late"}}, "2.0.0", ("label",)),
    ],
)
def test_the_next_version_is_decided_by_what_changed(changes: dict, semver: str, changed: tuple[str, ...]):
    release = next_release(card(**changes), card())

    assert (release.semver, release.changed) == (semver, changed)


def test_a_file_goes_to_the_store_and_comes_back_by_its_hash(tmp_path: Path):
    store = ModelStore(f"file://{tmp_path}/store")
    write_version(tmp_path / "models", spec=make_spec(), card=make_card(), model=b"test")
    file = tmp_path / "models" / "delay" / "1" / MODEL_FILE
    store.publish(make_card(), b"test")
    store.publish(make_card(), b"test")
    assert not store.fetch(tmp_path / "models", make_card())
    file.unlink()

    assert ModelStore(str(tmp_path / "store")).fetch(tmp_path / "models", make_card())

    assert file.read_bytes() == b"test"
    assert [path.name for path in (tmp_path / "store" / "delay").iterdir()] == [f"{SHA256}.onnx"]


def test_another_file_in_the_store_is_refused_and_leaves_nothing(tmp_path: Path):
    store = ModelStore(str(tmp_path / "store"))
    store.publish(make_card(), b"other")
    (tmp_path / "models" / "delay" / "1").mkdir(parents=True)

    with pytest.raises(SinkError, match=rf"has SHA-256 d9298a10.*, expected {SHA256}; restore it there"):
        store.fetch(tmp_path / "models", make_card())

    assert list((tmp_path / "models" / "delay" / "1").iterdir()) == []


def test_a_file_that_the_store_lacks_is_told(tmp_path: Path):
    (tmp_path / "delay" / "1").mkdir(parents=True)
    with pytest.raises(SinkUnavailableError, match=r"does not give .*expected the file of delay 1.0.0"):
        ModelStore(str(tmp_path / "store")).fetch(tmp_path, make_card())


def test_a_store_of_no_known_kind_is_refused():
    with pytest.raises(ConfigError, match=r"model store 'ftp://there' is none that can be used"):
        ModelStore("ftp://there")


def verified(repository: Path, *, views: dict = VIEWS) -> list[str]:
    models = {"delay": make_spec()}
    return [fault for each in verify_models(repository, models=models, views=views) for fault in each.faults]


def write(repository: Path, **changes: object) -> Path:
    complete = replace(make_card(), evaluation={"auc": 0.9}, **changes)  # type: ignore[arg-type]
    return write_version(repository, spec=make_spec(), card=complete, model=b"test")


def test_a_model_as_its_card_says_has_no_faults(tmp_path: Path):
    write(tmp_path)

    assert verified(tmp_path) == []


def test_a_wrong_hash_is_a_fault(tmp_path: Path):
    (write(tmp_path) / MODEL_FILE).write_bytes(b"other")

    (fault,) = verified(tmp_path)
    assert "has SHA-256 d9298a10" in fault
    assert f"expected {SHA256} as its card says; restore it or train it anew" in fault


def test_a_missing_file_is_a_fault_unless_cards_alone_are_asked_for(tmp_path: Path):
    (write(tmp_path) / MODEL_FILE).unlink()

    assert "get it from the model store (`headrace models fetch`)" in verified(tmp_path)[0]
    found = verify_models(tmp_path, models={"delay": make_spec()}, views=VIEWS, needs_files=False)
    assert [each.faults for each in found] == [()]


def test_a_feature_that_no_view_makes_is_a_fault(tmp_path: Path):
    write(tmp_path)
    changed = make_carrier_view(slide="10m")

    faults = verified(tmp_path, views={**VIEWS, "carrier_trips": changed})

    assert len(faults) == 2
    assert f"reads carrier_trips.last_delay of v1 {CARRIERS.definition_hash}, which no view makes" in faults[0]
    assert f"got v1 {changed.definition_hash}" in faults[0]


def test_a_card_that_lacks_something_is_a_fault(tmp_path: Path):
    write(tmp_path, training_set={"rows": 5}, license="", golden=[])

    (fault,) = verified(tmp_path)
    assert "has nothing in ['license', 'golden', 'training_set.sha256', 'training_set.views']" in fault


@pytest.mark.parametrize("changes", [{"semver": "1.0"}, {"version": 2}, {"name": "other"}, {"golden": {}}])
def test_a_card_with_wrong_fields_is_refused(tmp_path: Path, changes: dict):
    directory = write(tmp_path)
    document = yaml.safe_load(render_card(make_card())) | changes
    (directory / "model.yaml").write_text(yaml.safe_dump(document))

    with pytest.raises(ConfigError, match=r"expected name 'delay', version 1, a version such as 1.0.0"):
        read_card(tmp_path, "delay", 1)


def test_an_older_version_may_be_of_older_definitions(tmp_path: Path):
    write(tmp_path)
    changed = make_carrier_view(slide="10m")
    inputs = tuple(
        ModelInput.of(changed, item.feature, key=item.key, default=item.default)
        if item.view.name == CARRIERS.name
        else item
        for item in make_spec().inputs
    )
    spec = make_spec(inputs=inputs)
    write(tmp_path, version=2, semver="2.0.0", inputs=described_inputs(spec))

    found = verify_models(tmp_path, models={"delay": spec}, views={**VIEWS, "carrier_trips": changed})

    assert [(each.version, each.semver, each.faults) for each in found] == [(1, "1.0.0", ()), (2, "2.0.0", ())]
