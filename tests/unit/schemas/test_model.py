from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.aggregation import from_event
from schemas.errors import ConfigError, SchemaMismatchError
from schemas.model import ModelInput, ServedVersion, ViewReference
from schemas.output import ModelOutput
from tests.support.scoring import AIRCRAFT, CARRIERS, TRIPS, VIEWS, make_carrier_view, make_spec, make_trigger_view

NAN = float("nan")
OUTPUT = ModelOutput(column="probability", tensor="probabilities")


def test_a_spec_is_frozen_and_names_its_topic_and_contract():
    spec = make_spec()

    assert (spec.topic, spec.reference) == ("scores.delay", "delay@1")
    with pytest.raises(FrozenInstanceError):
        spec.version = "2"


def test_a_spec_pins_each_view_once_and_knows_by_which_column_to_look_it_up():
    spec = make_spec()

    assert spec.lookups == {ViewReference.of(CARRIERS): "carrier", ViewReference.of(AIRCRAFT): "tail_number"}
    assert spec.views == (ViewReference.of(TRIPS), *spec.lookups)
    assert [item.name for item in spec.inputs_of(ViewReference.of(CARRIERS))] == [
        "carrier_trips.last_delay",
        "carrier_trips.trips_1h",
    ]
    assert str(spec.trigger) == f"trips@2 ({TRIPS.definition_hash})"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Delay"}, r"name is 'Delay', expected lower-case"),
        ({"version": 1}, r"`version` is 1, expected digits"),
        ({"version": "v1"}, r"`version` is 'v1', expected digits"),
        ({"max_age": "soon"}, r"`max_age` is 'soon', expected a duration"),
        ({"hold_for": "0s"}, r"`hold_for` is 0s, expected more than 0 and at most 1m"),
        ({"hold_for": "61s"}, r"`hold_for` is 61s, expected more than 0 and at most 1m"),
        ({"hold_for": "long"}, r"`hold_for` is 'long', expected a duration"),
        ({"freshness": "0s"}, r"`freshness` is 0s, expected more than 0 and at most 30s"),
        ({"freshness": "31s"}, r"`freshness` is 31s, expected more than 0 and at most 30s"),
        ({"on_incomplete": "guess"}, r"`on_incomplete` is 'guess', expected one of \('score', 'reject'\)"),
        ({"max_age": "0s"}, r"`max_age` is 0s, expected more than 0; leave it out for no limit"),
        ({"inputs": ()}, r"`inputs` is empty, expected at least one"),
        (
            {"inputs": (ModelInput.of(TRIPS, "distance"), ModelInput.of(TRIPS, "distance"))},
            r"inputs \['trips.distance'\] stand there more than once",
        ),
        (
            {"inputs": (ModelInput.of(TRIPS, "distance", key="carrier"),)},
            r"trips.distance: `key` is 'carrier', expected none: it is in the trigger row",
        ),
        (
            {"inputs": (ModelInput.of(CARRIERS, "last_delay"),)},
            r"carrier_trips.last_delay: `key` is None, expected the trigger column to look it up by",
        ),
        (
            {
                "inputs": (
                    ModelInput.of(CARRIERS, "last_delay", key="carrier"),
                    ModelInput.of(CARRIERS, "trips_1h", key="origin"),
                )
            },
            r"carrier_trips.trips_1h: got carrier_trips@1 \(.*\) by 'origin', expected .* by 'carrier'",
        ),
        (
            {
                "inputs": (
                    ModelInput.of(CARRIERS, "last_delay", key="carrier"),
                    ModelInput.of(make_carrier_view(version=2), "trips_1h", key="carrier"),
                )
            },
            r"got carrier_trips@2 .*, expected carrier_trips@1 .*; a model reads a view under one version",
        ),
        (
            {"inputs": (ModelInput.of(make_trigger_view(version=3), "distance"),)},
            r"got trips@3 .*, expected trips@2",
        ),
        ({"outputs": ()}, r"`outputs` is empty"),
        (
            {"outputs": (ModelOutput(column="entity", tensor="x"),)},
            r"output column 'entity', expected a lower-case name",
        ),
        ({"outputs": (ModelOutput(column="P", tensor="x"),)}, r"output column 'P', expected a lower-case name"),
        ({"outputs": (OUTPUT, OUTPUT)}, r"output column 'probability', expected a lower-case name, used once"),
        (
            {"outputs": (ModelOutput(column="p", tensor="x", type="text"),)},
            r"got type 'text' from datatype 'FP32', expected one of \['boolean', 'integer', 'number'\]",
        ),
        ({"outputs": (ModelOutput(column="p", tensor="x", datatype="BYTES"),)}, r"from datatype 'BYTES'"),
        ({"outputs": (ModelOutput(column="p", tensor="x", index=1),)}, r"`index` is 1, expected 0 to 0"),
        (
            {"outputs": (ModelOutput(column="p", tensor="x"), ModelOutput(column="q", tensor="x", width=2))},
            r"output tensor 'x' is \[\('FP32', 1\), \('FP32', 2\)\], expected one datatype and width",
        ),
    ],
)
def test_a_wrong_spec_is_refused_and_told_what_is_expected(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_spec(**changes)


def test_an_input_that_is_no_feature_or_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"model input trips.speed: no such feature, expected one of \['carrier',"):
        ModelInput.of(TRIPS, "speed")
    with pytest.raises(ConfigError, match=r"model input trips.carrier is string, expected a number or boolean"):
        ModelInput.of(TRIPS, "carrier")


def test_views_are_checked_against_what_is_pinned():
    spec = make_spec()
    spec.check_views(VIEWS)

    with pytest.raises(
        ConfigError, match=r"reads view carrier_trips, which is not among \['aircraft_trips', 'trips'\]"
    ):
        spec.check_views({name: view for name, view in VIEWS.items() if name != "carrier_trips"})
    with pytest.raises(ConfigError, match=r"got view carrier_trips@2 .*, expected carrier_trips@1"):
        spec.check_views(VIEWS | {"carrier_trips": make_carrier_view(version=2)})


def test_the_trigger_rows_must_carry_entity_and_keys():
    narrow = make_trigger_view(features={"distance": from_event("distance")})
    spec = make_spec(
        trigger=ViewReference.of(narrow),
        inputs=(ModelInput.of(narrow, "distance"), ModelInput.of(CARRIERS, "last_delay", key="carrier")),
    )
    with pytest.raises(
        ConfigError, match=r"columns \['carrier', 'flight_id'\] are not in the rows of trigger view trips"
    ):
        spec.check_views(VIEWS | {"trips": narrow})


def test_an_input_that_its_view_lost_is_found_even_if_it_was_pinned_by_hand():
    by_hand = ModelInput(view=ViewReference.of(CARRIERS), feature="speed", key="carrier")
    with pytest.raises(
        ConfigError, match=r"inputs \['carrier_trips.speed'\], expected among \['last_delay', 'trips_1h'\]"
    ):
        make_spec(inputs=(by_hand,)).check_views(VIEWS)


def test_the_matrix_has_the_inputs_as_float32_columns_in_order():
    matrix, is_complete = make_spec().matrix(
        {
            "trips.trips_1h": pa.array([1, 2, None]),
            "trips.distance": pa.chunked_array([[1.5, None], [2.5]]),
            "carrier_trips.last_delay": pa.array([True, False, None]),
            "carrier_trips.trips_1h": pa.array([5, None, 7]),
            "aircraft_trips.last_delay": pa.array([1e300, NAN, -0.1]),
        },
        n_rows=3,
    )

    assert matrix.dtype == np.float32
    expected = [[1.5, 1, 1, 5, np.inf], [NAN, 0, 2, -1, NAN], [2.5, NAN, NAN, 7, np.float32(-0.1)]]
    np.testing.assert_array_equal(matrix, np.array(expected, dtype=np.float32))
    assert is_complete.tolist() == [True, False, False]


def test_an_absent_input_is_missing_in_every_row():
    matrix, is_complete = make_spec().matrix({"trips.distance": pa.array([1.0])}, n_rows=1)

    np.testing.assert_array_equal(matrix, np.array([[1, NAN, NAN, -1, NAN]], dtype=np.float32))
    assert not is_complete.any()


def test_a_matrix_of_no_rows_has_its_columns_too():
    assert make_spec().matrix({}, n_rows=0)[0].shape == (0, 5)


def test_a_column_of_another_length_is_refused():
    with pytest.raises(SchemaMismatchError, match=r"input trips.distance has 2 values, expected 3"):
        make_spec().matrix({"trips.distance": pa.array([1.0, 2.0])}, n_rows=3)


@pytest.mark.parametrize(("version", "sha256"), [("0", "ab" * 32), ("x", "ab" * 32), ("1", "ab"), ("1", "AB" * 32)])
def test_a_served_version_is_digits_and_a_checksum(version: str, sha256: str):
    with pytest.raises(
        ConfigError, match=r"expected digits and 64 hexadecimal digits; take both from the model's card"
    ):
        ServedVersion(version=version, sha256=sha256)
