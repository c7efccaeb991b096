from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offline.card import load_card, read_profile
from offline.export import run_classifier
from offline.training import MIN_ROWS, TrainingSet, build_training_set, read_tables, train_model, write_model
from schemas.errors import ConfigError, SinkError, SinkUnavailableError
from schemas.model import ModelInput
from schemas.output import ModelOutput
from streams.sinks.offline import OfflineWriter
from tests.support.feature_rows import T0_US, make_rows
from tests.support.scoring import (
    AIRCRAFT,
    CARRIERS,
    LABEL,
    MINUTE_US,
    VIEWS,
    make_carrier_view,
    make_flights,
    make_spec,
    make_triggers,
)

NAN = float("nan")


def known(minute: int, **values: Any) -> dict[str, Any]:
    """A row of a view to look up that is known from ``minute`` on."""
    time_us = T0_US + minute * MINUTE_US
    return {
        "event_time": time_us,
        "window_end": time_us,
        "watermark": time_us - 2 * MINUTE_US,
        "source_offset": minute,
    } | values


def landed(minute: int, flight_id: str, delay: float | None, **values: Any) -> dict[str, Any]:
    return known(minute, flight_id=flight_id, arrival_delay=delay, last_delay=delay, **{"tail_number": "N1"} | values)


def build(
    triggers: pa.Table, *, carriers: list[dict[str, Any]] = (), landings: list[dict[str, Any]] = ()
) -> TrainingSet:
    tables = {
        "trips": triggers,
        "carrier_trips": make_rows(CARRIERS, carriers),
        "aircraft_trips": make_rows(AIRCRAFT, landings),
    }
    return build_training_set(make_spec(), LABEL, views=VIEWS, tables=tables)


def test_a_row_holds_what_was_known_when_it_was_scored_and_what_came_true_later():
    rows = build(
        make_triggers({}, {}, {}),
        carriers=[
            known(0, carrier="AA", last_delay=1.0, trips_1h=5),
            known(2, carrier="AA", last_delay=3.0, trips_1h=7),
        ],
        landings=[landed(1, "before", 40.0), landed(30, "f0", 16.0), landed(31, "f1", 15.0), landed(32, "f2", -9.0)],
    )

    np.testing.assert_array_equal(
        rows.features, np.array([[100, 1, 4, 5, NAN], [100, 1, 4, 5, 40], [100, 3, 4, 7, 40]], dtype=np.float32)
    )
    assert rows.labels.tolist() == [True, False, False]
    assert rows.time_us.tolist() == [T0_US, T0_US + MINUTE_US, T0_US + 2 * MINUTE_US]
    assert rows.labelled_us.tolist() == [T0_US + minute * MINUTE_US for minute in (30, 31, 32)]


def test_nothing_of_the_outcome_itself_gets_into_a_row():
    # The aircraft's own landing of the flight that is scored is in the view that is looked up.
    rows = build(make_triggers({}), landings=[landed(1, "f0", 500.0), landed(0, "other", 2.0)])

    assert rows.features[0, 4] == 2.0


def test_closing_panes_are_neither_scored_nor_outcomes():
    rows = build(
        make_triggers({}, {"pane": "ON_TIME"}, {"pane": "LATE"}),
        landings=[landed(30, "f0", 16.0), landed(31, "f1", 16.0), landed(40, "f0", 0.0, pane="ON_TIME")],
    )

    assert rows.labels.tolist() == [True]


def test_rows_without_an_outcome_are_left_out_and_the_last_outcome_counts():
    rows = build(
        make_triggers({}, {}, {}, {"flight_id": None}),
        landings=[landed(30, "f1", 16.0), landed(50, "f1", 3.0), landed(31, "f2", None)],
    )

    assert (rows.time_us.tolist(), rows.labels.tolist()) == ([T0_US + MINUTE_US], [False])


def test_rows_come_by_event_time_whatever_the_order_of_the_tables():
    triggers = make_triggers({}, {}, {})
    landings = [landed(30 + number, f"f{number}", 16.0 * number) for number in range(3)]
    shuffled = build(triggers.take([2, 0, 1]), landings=landings[::-1])

    assert shuffled.time_us.tolist() == build(triggers, landings=landings).time_us.tolist()
    assert shuffled.labels.tolist() == [False, True, True]


@pytest.fixture(scope="module")
def training_set() -> TrainingSet:
    return build_training_set(make_spec(), LABEL, views=VIEWS, tables=make_flights(3_000))


def test_a_model_is_trained_on_the_earlier_rows_and_measured_on_the_later_ones(training_set: TrainingSet):
    trained = train_model(make_spec(), training_set, label=LABEL)

    # 120 minutes lie between the last row that is trained on and the split: its outcome was known before it.
    split_us = training_set.time_us[2_250]
    assert trained.evaluation["rows"] == 750
    assert trained.evaluation["from"] == "2023-11-16T11:43:20.000000Z"
    assert 2_250 - 120 <= trained.training["rows"] < 2_250
    assert trained.training["rows"] == int((training_set.labelled_us < split_us).sum())
    assert trained.evaluation["auc"] > 0.8
    assert trained.evaluation["brier"] < 0.9 * trained.evaluation["brier_of_base_rate"]
    assert trained.evaluation["auc_of_inputs"]["trips.trips_1h"] == pytest.approx(0.5, abs=0.06)
    assert trained.training["label"] == "aircraft_trips.arrival_delay > 15"


def test_the_card_s_golden_rows_are_what_the_file_answers(training_set: TrainingSet):
    trained = train_model(make_spec(), training_set, label=LABEL)

    features = np.array([row["inputs"] for row in trained.golden], dtype=np.float32)
    assert features.shape == (8, 5)
    expected = [row["outputs"]["probability"] for row in trained.golden]
    # In a batch of another size the runtime may add the trees in another order.
    np.testing.assert_allclose(run_classifier(trained.onnx, features), expected, atol=1e-6)


def test_a_calibrated_model_keeps_rows_out_of_its_training_and_its_card_tells(
    training_set: TrainingSet, tmp_path: Path
):
    trained = train_model(make_spec(), training_set, label=LABEL, is_calibrated=True)
    card = write_model(tmp_path, trained, created_us=T0_US)

    table = load_card(tmp_path, "delay").calibrations(make_spec())["probability"]
    assert card.training["until"] < card.training["calibrated_on"]["from"]
    assert card.training["calibrated_on"]["until"] < card.evaluation["from"]
    assert card.evaluation["brier"] <= card.evaluation["brier_uncalibrated"] + 0.01
    assert table.calibrated.shape == (35,)
    features = np.array([row["inputs"] for row in card.golden], dtype=np.float32)
    raw = [row["outputs"]["probability"] for row in card.golden]
    np.testing.assert_allclose(run_classifier(trained.onnx, features), raw, atol=1e-6)
    # What drift of scores is measured against is what scores have: calibrated answers to the later rows.
    later = training_set.features[-card.evaluation["rows"] :]
    answers = read_profile(tmp_path, card).outputs["probability"]
    assert answers.median == pytest.approx(np.median(table.apply(run_classifier(trained.onnx, later))), abs=0.02)
    assert answers.rows == len(later)
    rounded = replace(make_spec().outputs[0], rounded_to=0.25)
    kept = train_model(make_spec(outputs=(rounded,)), training_set, label=LABEL).profile
    assert kept is not None
    assert kept.outputs["probability"].values == (0.0, 0.25, 0.5, 0.75, 1.0)
    plain = write_model(tmp_path, train_model(make_spec(), training_set, label=LABEL), created_us=T0_US)
    assert (plain.semver, plain.calibration) == ("1.0.1", None)


def test_the_same_rows_give_the_same_file(training_set: TrainingSet):
    first, second = (train_model(make_spec(), training_set, label=LABEL).onnx for _ in range(2))

    assert first == second


def test_a_default_stands_in_where_values_are_made_missing(training_set: TrainingSet):
    inputs = tuple(replace(item, default=0.0) for item in make_spec().inputs)
    filled = replace(training_set, features=np.nan_to_num(training_set.features))

    assert train_model(make_spec(inputs=inputs), filled, label=LABEL).evaluation["auc"] > 0.7


def test_too_few_rows_are_refused(training_set: TrainingSet):
    few = training_set.where(np.arange(len(training_set)) < MIN_ROWS - 1)

    with pytest.raises(ConfigError, match=r"got 999 rows with a label \(aircraft_trips.arrival_delay > 15\), .* 1000"):
        train_model(make_spec(), few, label=LABEL)


@pytest.mark.parametrize(
    ("late", "part", "classes"),
    [(False, "training", "only .* = false"), (True, "training", "only .* = true")],
)
def test_one_class_alone_is_refused(training_set: TrainingSet, late: bool, part: str, classes: str):
    one = replace(training_set, labels=np.full(len(training_set), late))

    with pytest.raises(ConfigError, match=rf"the {part} part \(split at 2023-11-16.*\) has {classes} in \d+ rows"):
        train_model(make_spec(), one, label=LABEL)


def test_one_class_alone_in_the_later_part_is_refused(training_set: TrainingSet):
    labels = training_set.labels.copy()
    labels[2_250:] = False

    with pytest.raises(ConfigError, match=r"the evaluation part .* expected both classes; train on a longer range"):
        train_model(make_spec(), replace(training_set, labels=labels), label=LABEL)


def test_outputs_that_no_classifier_answers_are_refused(training_set: TrainingSet):
    spec = make_spec(outputs=(ModelOutput(column="minutes", tensor="minutes"),))

    with pytest.raises(
        ConfigError, match=r"declares outputs .*'minutes'.*, expected 'probabilities' as FP32 of width 2"
    ):
        train_model(spec, training_set, label=LABEL)


def test_each_training_is_a_version_of_its_own(tmp_path: Path, training_set: TrainingSet):
    trained = [train_model(make_spec(), training_set, label=LABEL, seed=seed) for seed in (0, 1, 2)]

    asked = [(trained[0], None), (trained[1], None), (trained[1], 7), (trained[2], None)]
    cards = [write_model(tmp_path, model, created_us=T0_US, version=version) for model, version in asked]

    assert [card.version for card in cards] == [1, 2, 7, 8]
    assert [card.semver for card in cards] == ["1.0.0", "1.0.1", "1.0.1", "1.0.2"]
    assert sorted(path.name for path in (tmp_path / "delay").iterdir()) == ["1", "2", "7", "8", "config.pbtxt"]
    assert cards[0].created == "2023-11-14T22:13:20.000000Z"


def test_a_training_that_changes_nothing_is_the_version_that_is_there(training_set: TrainingSet, tmp_path: Path):
    trained = train_model(make_spec(), training_set, label=LABEL)
    first = write_model(tmp_path, trained, created_us=T0_US)

    assert write_model(tmp_path, trained, created_us=T0_US + 1) == first
    assert [path.name for path in (tmp_path / "delay").iterdir() if path.is_dir()] == ["1"]


def test_other_rows_are_a_minor_version_with_their_own_manifest(training_set: TrainingSet, tmp_path: Path):
    fewer = training_set.where(np.arange(len(training_set)) < len(training_set) - 100)
    cards = [
        write_model(tmp_path, train_model(make_spec(), rows, label=LABEL), created_us=T0_US)
        for rows in (training_set, fewer)
    ]

    assert [card.semver for card in cards] == ["1.0.0", "1.1.0"]
    assert [card.training_set["rows"] for card in cards] == [len(training_set), len(training_set) - 100]
    assert [view["view"] for view in cards[0].training_set["views"]] == ["trips", "carrier_trips", "aircraft_trips"]


def test_a_version_that_cannot_be_written_is_an_error_of_the_store(tmp_path: Path, training_set: TrainingSet):
    trained = train_model(make_spec(), training_set, label=LABEL)
    (tmp_path / "delay").touch()

    with pytest.raises(SinkError, match=r"version 3 of model delay cannot be written to .*; make room, or write to"):
        write_model(tmp_path, trained, created_us=T0_US, version=3)


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    writer = OfflineWriter(tmp_path)
    for name, rows in make_flights(40).items():
        writer.write(rows, view=VIEWS[name], partition=0, offsets=range(rows.num_rows))
    return tmp_path


def test_tables_are_read_up_to_a_moment(delta: Path):
    until_us = T0_US + 30 * MINUTE_US
    tables = read_tables(delta, make_spec(), LABEL, views=VIEWS, until_us=until_us)

    assert tables["trips"].num_rows == 30
    assert all(
        time_us < until_us for table in tables.values() for time_us in table["event_time"].cast(pa.int64()).to_pylist()
    )
    assert read_tables(delta, make_spec(), LABEL, views=VIEWS)["trips"].num_rows == 40


def test_a_table_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(SinkUnavailableError, match=r"there is no table .*/trips/v2"):
        read_tables(tmp_path, make_spec(), LABEL, views=VIEWS)


def test_views_other_than_the_pinned_ones_are_refused(delta: Path):
    views = VIEWS | {"carrier_trips": make_carrier_view(slide="10m")}
    with pytest.raises(ConfigError, match="got view carrier_trips@1"):
        read_tables(delta, make_spec(), LABEL, views=views)


def test_an_input_of_another_view_than_the_label_s_needs_no_label_view(training_set: TrainingSet):
    # The label's view need not be among the inputs.
    spec = make_spec(inputs=make_spec().inputs[:3])
    tables = make_flights(30)
    rows = build_training_set(spec, LABEL, views=VIEWS, tables=tables)

    assert rows.features.shape == (30, 3)
    assert isinstance(spec.inputs[0], ModelInput)
