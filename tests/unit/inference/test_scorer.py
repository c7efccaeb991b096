import json
import logging
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from jsonschema import Draft202012Validator

from schemas.errors import (
    ConfigError,
    InferenceUnavailableError,
    SchemaMismatchError,
    SinkUnavailableError,
    TensorMismatchError,
)
from schemas.ladder import Ladder, Rule
from schemas.model import ModelInput, ModelSpec, ViewReference
from schemas.output import Decision, ModelOutput
from schemas.score import score_json_schema, score_row_schema
from schemas.text_time import with_text_times
from schemas.view import FeatureView
from streams.inference.arms import Arms
from streams.inference.guard import GuardedModel
from streams.inference.score_table import encode_scores, with_total_latency
from streams.inference.scorer import Scored, Scorer
from streams.inference.served_model import ServedModel
from streams.inference.vector import VectorReader
from streams.ports import Inference
from tests.support.feature_rows import T0_US
from tests.support.scoring import (
    AIRCRAFT,
    CARRIERS,
    MINUTE_US,
    SERVED,
    TRIPS,
    VIEWS,
    FakeFeatures,
    FakeModel,
    FakeReader,
    by_distance,
    make_aircraft_view,
    make_carrier_view,
    make_spec,
    make_trigger_view,
    make_triggers,
)

NOW_US = T0_US + 10_000
PROBE = np.zeros((1, 5), dtype=np.float32)
STORED = {
    ("carrier_trips", "AA"): FakeFeatures(features={"last_delay": 7.0, "trips_1h": 3}),
    ("carrier_trips", "UA"): FakeFeatures(features={"last_delay": 9.0, "trips_1h": 5}),
    ("aircraft_trips", "N1"): FakeFeatures(features={"last_delay": -2.0}),
}


def make_scorer(
    *,
    spec: ModelSpec | None = None,
    reader: FakeReader | None = None,
    model: FakeModel | None = None,
    views: Mapping[str, FeatureView] = VIEWS,
    on_sleep: Callable[[], None] | None = None,
) -> Scorer:
    ticks = iter(range(0, 10**12, 2_000_000))  # every look at the clock is 2 ms later
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if on_sleep is not None:
            on_sleep()

    spec, model = spec or make_spec(), model or FakeModel()
    guard = GuardedModel(spec.name, model, probe=PROBE, timeout_s=5.0, sleep=sleep)
    served = ServedModel(spec, SERVED, model=guard)
    vectors = VectorReader(
        spec,
        views=views,
        reader=reader or FakeReader(STORED),
        sleep=sleep,
        clock_us=lambda: NOW_US + round(sum(waits) * 1e6),
    )
    scorer = Scorer(Arms.of(served), vectors=vectors, clock_ns=lambda: next(ticks))
    scorer.waits = waits
    return scorer


def check_documents(scored: Scored, spec: ModelSpec) -> list[dict]:
    """Each score must be valid as it goes onto its topic."""
    validator = Draft202012Validator(score_json_schema(spec), format_checker=Draft202012Validator.FORMAT_CHECKER)
    documents = with_text_times(scored.scores).to_pylist()
    for document in documents:
        validator.validate(json.loads(json.dumps(document)))
    return documents


async def test_a_score_says_what_was_scored_by_what_from_what():
    spec = make_spec()
    scored = await make_scorer(spec=spec).score(make_triggers({"distance": 300.0, "watermark": None}), now_us=NOW_US)

    assert scored.scores.schema == score_row_schema(spec)
    (document,) = check_documents(scored, spec)
    assert document == {
        "request_id": "flights.departed-0-0",
        "entity": "f0",
        "model": "delay",
        "model_version": "3",
        "model_sha256": "ab" * 32,
        "arm": "champion",
        "served_by": "model",
        "probability": 0.25,
        "event_time": "2023-11-14T22:13:20.000000Z",
        "features": {
            "trips": {
                "version": 2,
                "hash": TRIPS.definition_hash,
                "event_time": "2023-11-14T22:13:20.000000Z",
                "age_ms": 0,
                "status": "present",
            },
            "carrier_trips": {
                "version": 1,
                "hash": CARRIERS.definition_hash,
                "event_time": "2023-11-14T22:13:20.000000Z",
                "age_ms": 0,
                "status": "present",
            },
            "aircraft_trips": {
                "version": 1,
                "hash": AIRCRAFT.definition_hash,
                "event_time": "2023-11-14T22:13:20.000000Z",
                "age_ms": 0,
                "status": "present",
            },
        },
        "complete": True,
        "watermark": None,
        "supersedes": None,
        # The row: in the broker at 1 ms, computed at 2 ms, scored from 10 ms on; the clock is looked at three times.
        "latency_ms": {"features": 1.0, "queue": 8.0, "lookup": 2.0, "inference": 2.0, "total": 13.0},
    }


async def test_the_matrix_holds_trigger_and_looked_up_values_in_the_order_of_the_spec():
    model = FakeModel()
    await make_scorer(model=model).score(make_triggers({}, {"carrier": "UA", "distance": 50.0}), now_us=NOW_US)

    (matrix,) = model.batches
    assert matrix.dtype == np.float32
    assert matrix.tolist() == [[100, 7, 4, 3, -2], [50, 9, 4, 5, -2]]


async def test_all_views_of_a_batch_are_read_in_one_round_trip_each_key_once():
    reader = FakeReader(STORED)
    await make_scorer(reader=reader).score(
        make_triggers({}, {"carrier": "UA"}, {"tail_number": None}, {}), now_us=NOW_US
    )

    assert reader.calls == [[("carrier_trips", ["AA", "UA"]), ("aircraft_trips", ["N1"])]]


async def test_only_as_of_rows_of_the_pinned_definition_are_scored_and_the_others_are_counted():
    triggers = make_triggers(
        {"pane": "ON_TIME", "flight_id": None},
        {},
        {"pane": "EMPTY", "flight_id": None},
        {"definition_hash": "0" * 16},
        {"view_version": 1},
    )
    scored = await make_scorer().score(triggers, now_us=NOW_US)

    assert scored.scores["entity"].to_pylist() == ["f1"]
    assert scored.ignored == {"closing_pane": 2, "other_definition": 2}
    assert scored.dead_letters.num_rows == 0


async def test_nothing_is_asked_of_anyone_where_no_row_is_to_be_scored():
    reader, model = FakeReader(), FakeModel()
    scorer = make_scorer(reader=reader, model=model)

    for triggers in (make_triggers({"pane": "LATE"}), make_triggers()):
        scored = await scorer.score(triggers, now_us=NOW_US)
        assert (scored.scores.num_rows, scored.dead_letters.num_rows) == (0, 0)
        assert scored.scores.schema == score_row_schema(make_spec())
        assert encode_scores(scored.scores) == []
    assert (reader.calls, model.batches) == ([], [])


async def test_what_is_missing_is_nan_or_its_default_and_the_score_is_not_complete():
    spec, model = make_spec(), FakeModel()
    triggers = make_triggers({}, {"carrier": "ZZ"}, {"carrier": None}, {"tail_number": None}, {"distance": None})
    scored = await make_scorer(spec=spec, model=model).score(triggers, now_us=NOW_US)

    nan = float("nan")
    np.testing.assert_array_equal(
        model.batches[0],
        np.array(
            [[100, 7, 4, 3, -2], [100, nan, 4, -1, -2], [100, nan, 4, -1, -2], [100, 7, 4, 3, nan], [nan, 7, 4, 3, -2]]
        ),
    )
    documents = check_documents(scored, spec)
    assert [document["complete"] for document in documents] == [True, False, False, False, False]
    carriers = [document["features"]["carrier_trips"] for document in documents]
    assert [carrier["status"] for carrier in carriers] == ["present", "missing", "missing", "present", "present"]
    assert (carriers[1]["event_time"], carriers[1]["age_ms"]) == (None, None)
    assert documents[3]["features"]["aircraft_trips"]["status"] == "missing"


async def test_a_value_from_after_the_event_that_is_scored_is_not_used():
    stored = STORED | {("aircraft_trips", "N1"): FakeFeatures(features={"last_delay": 99.0}, event_time_us=T0_US + 1)}
    spec, model = make_spec(), FakeModel()
    scored = await make_scorer(spec=spec, reader=FakeReader(stored), model=model).score(
        make_triggers({}, {}), now_us=NOW_US
    )

    before, after = check_documents(scored, spec)
    assert np.isnan(model.batches[0][0, 4])
    assert before["features"]["aircraft_trips"] | {"hash": "", "version": 0} == {
        "version": 0,
        "hash": "",
        "event_time": "2023-11-14T22:13:20.000001Z",
        "age_ms": -1,
        "status": "ahead",
    }
    assert not before["complete"]
    assert model.batches[0][1, 4] == 99.0
    assert (after["features"]["aircraft_trips"]["status"], after["complete"]) == ("present", True)


@pytest.mark.parametrize(
    ("max_age", "ttl", "status"),
    [
        (None, None, "present"),
        ("90s", None, "stale"),
        (None, "90s", "stale"),
        ("2m", "90s", "stale"),
        ("2m", "3m", "present"),
    ],
)
async def test_a_value_older_than_the_model_or_its_view_accepts_is_not_used(
    max_age: str | None, ttl: str | None, status: str
):
    aircraft = make_aircraft_view(ttl=ttl)
    spec = make_spec(max_age=max_age)
    model = FakeModel()
    scored = await make_scorer(spec=spec, model=model, views=VIEWS | {"aircraft_trips": aircraft}).score(
        make_triggers({"event_time": T0_US + 2 * MINUTE_US}), now_us=NOW_US
    )

    (document,) = check_documents(scored, spec)
    assert document["features"]["aircraft_trips"]["status"] == status
    assert document["features"]["aircraft_trips"]["age_ms"] == 120_000
    assert np.isnan(model.batches[0][0, 4]) == (status == "stale")


async def test_an_entity_whose_windows_have_run_empty_counts_as_read_however_old():
    stored = STORED | {
        ("carrier_trips", "AA"): FakeFeatures(
            is_empty=True, features={"last_delay": 5.0, "trips_1h": 0}, event_time_us=T0_US - 10 * MINUTE_US
        )
    }
    spec, model = make_spec(max_age="1m"), FakeModel()
    scored = await make_scorer(spec=spec, reader=FakeReader(stored), model=model).score(
        make_triggers({}), now_us=NOW_US
    )

    (document,) = check_documents(scored, spec)
    assert document["features"]["carrier_trips"]["status"] == "empty"
    assert model.batches[0][0].tolist() == [100, 5, 4, 0, -2]
    assert document["complete"]


async def test_a_row_is_held_for_what_has_not_come_yet_and_scored_once_it_has():
    reader, model = FakeReader(STORED), FakeModel()
    landed = reader.stored.pop(("aircraft_trips", "N1"))

    def land() -> None:
        if len(reader.calls) == 3:
            reader.stored["aircraft_trips", "N1"] = landed

    scorer = make_scorer(spec=make_spec(hold_for="1s"), reader=reader, model=model, on_sleep=land)
    scored = await scorer.score(make_triggers({}), now_us=NOW_US)

    assert len(reader.calls) == 4
    assert scored.scores["complete"].to_pylist() == [True]
    assert model.batches[0][0, 4] == -2


@pytest.mark.parametrize(("hold_for", "polls", "held_s"), [("90ms", 5, 0.081), ("10ms", 1, 0.001)])
async def test_a_row_is_held_no_longer_than_until_its_deadline_and_scored_without(
    hold_for: str, polls: int, held_s: float
):
    reader = FakeReader({key: row for key, row in STORED.items() if key[0] != "aircraft_trips"})
    scorer = make_scorer(spec=make_spec(hold_for=hold_for), reader=reader)
    # Their events came to the broker 9 ms and a minute before: only the first is held.
    old = {"broker_time": NOW_US - MINUTE_US}
    scored = await scorer.score(make_triggers({}, old), now_us=NOW_US)

    assert len(scorer.waits) == polls
    assert sum(scorer.waits) == pytest.approx(held_s)
    assert scored.scores["complete"].to_pylist() == [False, False]


async def test_what_was_found_stays_while_a_row_is_held_for_the_rest():
    """Read again, it may be of after the event: then it would be withheld."""
    reader, model = FakeReader(STORED), FakeModel()
    landed = reader.stored.pop(("aircraft_trips", "N1"))

    def go_on() -> None:
        later = FakeFeatures(features={"last_delay": 99.0, "trips_1h": 99}, event_time_us=T0_US + MINUTE_US)
        reader.stored |= {("carrier_trips", "AA"): later, ("carrier_trips", "UA"): later}
        reader.stored["aircraft_trips", "N1"] = landed

    scorer = make_scorer(spec=make_spec(hold_for="1s"), reader=reader, model=model, on_sleep=go_on)
    rows = make_triggers({}, {"carrier": "UA", "tail_number": None}, {"carrier": "XX"})
    scored = await scorer.score(rows, now_us=NOW_US)

    assert model.batches[0][:2, 1].tolist() == [7, 9]
    assert model.batches[0][0, 4] == -2
    assert scored.scores["complete"].to_pylist() == [True, False, False]
    carriers = [features["carrier_trips"]["status"] for features in scored.scores["features"].to_pylist()]
    assert carriers == ["present", "present", "missing"]
    again = [dict(call) for call in reader.calls[1:]]
    assert set(again[0]["carrier_trips"]) == {"AA", "XX"}, "a row that nothing can come for is not read again"
    assert all(call["carrier_trips"] == ["XX"] for call in again[1:]), "nor is one that is complete"


async def test_an_event_that_says_it_is_to_come_holds_nobody_up_for_longer():
    reader = FakeReader({key: row for key, row in STORED.items() if key[0] != "aircraft_trips"})
    scorer = make_scorer(spec=make_spec(hold_for="90ms"), reader=reader)
    await scorer.score(make_triggers({"broker_time": NOW_US + 60 * MINUTE_US}), now_us=NOW_US)
    assert sum(scorer.waits) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("row", "stored"),
    [
        ({"tail_number": None}, {}),
        ({}, {("aircraft_trips", "N1"): FakeFeatures(is_empty=True, features={"last_delay": None})}),
        ({}, {("aircraft_trips", "N1"): FakeFeatures(features={"last_delay": 1.0}, event_time_us=T0_US + MINUTE_US)}),
        ({"broker_time": NOW_US - MINUTE_US, "tail_number": "N2"}, {}),
    ],
    ids=["asks for nothing", "empty", "ahead", "its deadline is over"],
)
async def test_a_row_that_nothing_can_come_for_is_not_held(row: dict, stored: dict):
    scorer = make_scorer(spec=make_spec(hold_for="30s"), reader=FakeReader(STORED | stored))
    scored = await scorer.score(make_triggers(row), now_us=NOW_US)
    assert scorer.waits == []
    assert scored.scores["complete"].to_pylist() == [False]


async def test_a_model_that_rejects_incomplete_rows_scores_the_others():
    stored = {key: row for key, row in STORED.items() if key != ("carrier_trips", "UA")}
    rows = make_triggers({}, {"carrier": "UA"}, {"distance": None, "tail_number": None}, {"flight_id": ""}, {})
    spec, model = make_spec(on_incomplete="reject"), FakeModel()
    scored = await make_scorer(spec=spec, reader=FakeReader(stored), model=model).score(rows, now_us=NOW_US)

    assert scored.scores["entity"].to_pylist() == ["f0", "f4"]
    assert scored.scored_rows.tolist() == [0, 4]
    assert scored.dead_letters.drop_columns("reason").to_pylist() == [
        # A default stands in for what a carrier without flights has done.
        {"_row": 1, "detail": "no value for carrier_trips.last_delay (missing), expected all inputs"},
        {
            "_row": 2,
            "detail": "no value for trips.distance (present), aircraft_trips.last_delay (missing), expected all inputs",
        },
        {"_row": 3, "detail": "`flight_id` is null or empty, expected what is scored"},
    ]
    assert scored.dead_letters["reason"].to_pylist() == ["incomplete_input", "incomplete_input", "missing_key"]
    assert [len(batch) for batch in model.batches] == [2]
    nothing = await make_scorer(spec=spec, model=model).score(make_triggers({"distance": None}), now_us=NOW_US)
    assert (nothing.scores.num_rows, nothing.dead_letters.num_rows, len(model.batches)) == (0, 1, 1)


async def test_a_row_that_names_nothing_to_score_is_a_dead_letter():
    scored = await make_scorer().score(make_triggers({}, {"flight_id": None}, {"flight_id": ""}, {}), now_us=NOW_US)

    assert scored.scores["entity"].to_pylist() == ["f0", "f3"]
    assert scored.dead_letters.to_pylist() == [
        {"_row": row, "reason": "missing_key", "detail": "`flight_id` is null or empty, expected what is scored"}
        for row in (1, 2)
    ]


async def test_an_answer_that_is_no_score_costs_its_own_row_alone():
    def answer(features: np.ndarray) -> Inference:
        outputs = by_distance(features).outputs["probabilities"].copy()
        outputs[:4, 1] = [np.nan, np.inf, 1.5, 0.5]
        return Inference(outputs={"probabilities": outputs})

    spec = make_spec()
    triggers = make_triggers({"pane": "ON_TIME"}, {}, {}, {}, {}, {})
    scored = await make_scorer(spec=spec, model=FakeModel(answer)).score(triggers, now_us=NOW_US)

    assert [document["entity"] for document in check_documents(scored, spec)] == ["f4", "f5"]
    assert scored.scored_rows.tolist() == [4, 5]
    assert scored.dead_letters.to_pylist() == [
        {
            "_row": row,
            "reason": "invalid_output",
            "detail": f"`probability` is {got}, expected a finite number within [0, 1]",
        }
        for row, got in ((1, "nan"), (2, "inf"), (3, "1.5"))
    ]


async def test_an_answer_of_the_wrong_length_costs_the_rows_of_its_request_alone():
    def answer(features: np.ndarray) -> Inference:
        return Inference(outputs=by_distance(features).outputs, rejected=[(range(1, 3), "(1, 2), expected (2, 2)")])

    scored = await make_scorer(model=FakeModel(answer)).score(make_triggers({}, {}, {}, {}), now_us=NOW_US)

    assert scored.scores["entity"].to_pylist() == ["f0", "f3"]
    assert scored.dead_letters["_row"].to_pylist() == [1, 2]
    assert scored.dead_letters["reason"].to_pylist() == ["invalid_output"] * 2


async def test_integer_and_boolean_outputs_must_be_such():
    outputs = (
        ModelOutput(column="grade", tensor="grade", type="integer", minimum=1),
        ModelOutput(column="is_late", tensor="label", datatype="INT64", type="boolean"),
    )

    def answer(features: np.ndarray) -> Inference:
        grades = np.array([[1], [2.5], [0], [3], [4]], dtype=np.float32)
        return Inference(outputs={"grade": grades, "label": np.array([[1], [0], [1], [2], [0]])})

    spec = make_spec(outputs=outputs)
    scored = await make_scorer(spec=spec, model=FakeModel(answer)).score(make_triggers(*[{}] * 5), now_us=NOW_US)

    documents = check_documents(scored, spec)
    assert [(document["grade"], document["is_late"]) for document in documents] == [(1, True), (4, False)]
    assert scored.dead_letters["detail"].to_pylist() == [
        "`grade` is 2.5, expected a finite integer within [1]",
        "`grade` is 0, expected a finite integer within [1]",
        "`is_late` is 2, expected a finite boolean",
    ]


async def test_an_answer_that_is_none_of_the_declared_values_costs_its_own_row_alone():
    def answer(features: np.ndarray) -> Inference:
        return Inference(outputs={"grade": np.array([[1], [2], [3], [1e30]], dtype=np.float32)})

    spec = make_spec(outputs=(ModelOutput(column="grade", tensor="grade", type="integer", values=(1, 3)),))
    scored = await make_scorer(spec=spec, model=FakeModel(answer)).score(make_triggers(*[{}] * 4), now_us=NOW_US)

    assert [document["grade"] for document in check_documents(scored, spec)] == [1, 3]
    assert scored.dead_letters["_row"].to_pylist() == [1, 3]


async def test_a_score_says_what_its_answer_amounts_to_whoever_gave_it():
    def answer(features: np.ndarray) -> Inference:
        positive = np.array([0.7, 0.69999, np.nan, 0.2], dtype=np.float32)[: len(features)]
        return Inference(outputs={"probabilities": np.stack([1 - positive, positive], axis=1)})

    risk = Decision(column="risk", output="probability", below="low", at_least=((0.3, "some"), (0.7, "high")))
    rules = (Rule("true", {"probability": 0.7}),)
    spec = make_spec(decisions=(risk,), ladder=Ladder(rules=rules, waived=("cache", "light_model")))
    scorer = make_scorer(spec=spec, model=FakeModel(answer))
    scored = await scorer.score(make_triggers(*[{}] * 4), now_us=NOW_US)

    documents = check_documents(scored, spec)
    assert [(document["served_by"], document["risk"]) for document in documents] == [
        ("model", "high"),
        ("model", "some"),
        ("rules", "high"),
        ("model", "low"),
    ]
    empty = await scorer.score(make_triggers({"pane": "ON_TIME"}), now_us=NOW_US)
    assert empty.scores.schema == scored.scores.schema


async def test_what_is_masked_is_decided_on_as_it_is_and_told_nowhere(caplog: pytest.LogCaptureFixture):
    def answer(features: np.ndarray) -> Inference:
        positive = np.array([0.52, 0.49, 1.75], dtype=np.float32)
        return Inference(outputs={"probabilities": np.stack([1 - positive, positive], axis=1)})

    outputs = (
        ModelOutput(column="risk", tensor="probabilities", width=2, index=1, maximum=1, is_published=False),
        ModelOutput(column="rough", tensor="probabilities", width=2, index=1, maximum=1, rounded_to=0.1),
    )
    decisions = (Decision(column="word", output="risk", below="low", at_least=((0.5, "high"),)),)
    spec = make_spec(outputs=outputs, decisions=decisions)
    scored = await make_scorer(spec=spec, model=FakeModel(answer)).score(make_triggers(*[{}] * 3), now_us=NOW_US)

    documents = check_documents(scored, spec)
    assert [json.loads(payload)["rough"] for payload in encode_scores(scored.scores)] == [0.5, 0.5]
    assert [document["word"] for document in documents] == ["high", "low"]
    assert "risk" not in scored.scores.column_names
    assert scored.dead_letters["detail"].to_pylist() == ["`risk` is masked, expected a finite number within [1]"]
    assert "1.75" not in caplog.text


async def test_the_stalest_rows_are_shed_and_the_others_are_the_model_s():
    rules = (Rule("true", {"probability": 0.125}),)
    ladder = Ladder(waived=("cache", "light_model"), rules=rules, shed_after="2s")
    model = FakeModel()
    ages_us = [2_000_000, 1_999_999, 60_000_000, 0, None, -5_000_000]
    rows = [
        {"distance": 100.0 * at, "broker_time": None if age_us is None else NOW_US - age_us}
        for at, age_us in enumerate(ages_us)
    ]

    scored = await make_scorer(spec=make_spec(ladder=ladder), model=model).score(make_triggers(*rows), now_us=NOW_US)

    by = ["rules", "model", "rules", "model", "model", "model"]
    assert scored.scores["served_by"].to_pylist() == by, "also a row that does not know its age, or is from the future"
    assert scored.fallen == {("overload", "rules"): 2}
    (asked,) = model.batches
    assert asked[:, 0].tolist() == [100, 300, 400, 500]


async def test_a_model_that_fails_once_is_tried_again(caplog: pytest.LogCaptureFixture):
    model = FakeModel(failures=[InferenceUnavailableError("gone")])
    scorer = make_scorer(model=model)
    failures = []
    with caplog.at_level(logging.WARNING):
        scored = await scorer.score(make_triggers({}), now_us=NOW_US, on_failure=failures.append)

    assert scored.scores.num_rows == 1
    assert failures == ["triton"]
    assert [0.01 <= wait <= 0.03 for wait in scorer.waits] == [True]
    assert [record.message for record in caplog.records] == ["inference: attempt 1 of 2 failed: gone"]


async def test_after_the_last_attempt_the_error_is_raised_so_that_the_rows_are_kept():
    model = FakeModel(failures=[InferenceUnavailableError(f"gone {number}") for number in range(9)])
    reader, failures = FakeReader(STORED, failures=[SinkUnavailableError("gone")]), []
    with pytest.raises(InferenceUnavailableError, match="gone 1"):
        await make_scorer(model=model, reader=reader).score(
            make_triggers({}), now_us=NOW_US, on_failure=failures.append
        )

    assert len(model.batches) == 3  # two attempts, and a look whether the row is to blame
    assert failures == ["redis", "triton", "triton"]


async def test_an_online_store_that_is_away_is_tried_again():
    reader = FakeReader(STORED, failures=[SinkUnavailableError("gone")])
    failures = []
    scored = await make_scorer(reader=reader).score(make_triggers({}), now_us=NOW_US, on_failure=failures.append)

    assert (scored.scores.num_rows, failures, len(reader.calls)) == (1, ["redis"], 2)


async def test_a_model_that_wants_other_inputs_is_not_tried_again():
    model = FakeModel(failures=[TensorMismatchError("wants 6 features")] * 2)
    with pytest.raises(TensorMismatchError):
        await make_scorer(model=model).score(make_triggers({}), now_us=NOW_US)

    assert [len(batch) for batch in model.batches] == [1, 1]  # the row, and one that a working model answers


async def test_scoring_the_same_rows_again_gives_the_same_scores():
    triggers = make_triggers({}, {"carrier": "ZZ"})
    columns = [name for name in score_row_schema(make_spec()).names if name != "latency_ms"]
    first, second = [(await make_scorer().score(triggers, now_us=NOW_US)).scores.select(columns) for _ in range(2)]

    assert first == second


async def test_scores_go_onto_the_wire_as_their_published_schema_says():
    spec = make_spec()
    scored = await make_scorer(spec=spec).score(make_triggers({}, {"carrier": "ZZ"}), now_us=NOW_US)

    validator = Draft202012Validator(score_json_schema(spec), format_checker=Draft202012Validator.FORMAT_CHECKER)
    payloads = encode_scores(scored.scores)
    assert len(payloads) == 2
    for payload, document in zip(payloads, with_text_times(scored.scores).to_pylist(), strict=True):
        validator.validate(json.loads(payload))
        assert json.loads(payload) == document


async def test_clocks_that_disagree_give_no_latency_below_zero_and_unknown_times_none():
    spec = make_spec()
    rows = make_triggers({"computed_time": T0_US + 10**9}, {"broker_time": None})
    scored = await make_scorer(spec=spec).score(rows, now_us=NOW_US)

    ahead, unknown = (document["latency_ms"] for document in check_documents(scored, spec))
    assert (ahead["queue"], unknown["features"], unknown["total"]) == (0, None, None)
    assert unknown["queue"] == 8.0


async def test_the_total_latency_is_up_to_when_the_scores_leave():
    spec = make_spec()
    rows = make_triggers({}, {"broker_time": None}, {"broker_time": NOW_US + 10**9})
    scored = await make_scorer(spec=spec).score(rows, now_us=NOW_US)
    broker_us = rows["broker_time"].cast(pa.int64())[0].as_py()
    leaving = with_total_latency(scored.scores, broker_time=rows["broker_time"], now_us=broker_us + 40_500)

    assert [latency["total"] for latency in leaving["latency_ms"].to_pylist()] == [40.5, None, 0.0]
    assert leaving.drop_columns(["latency_ms"]) == scored.scores.drop_columns(["latency_ms"])
    assert leaving.schema == scored.scores.schema
    stages = [name for name in leaving["latency_ms"].type.names if name != "total"]
    assert stages
    for stage in stages:
        assert pc.struct_field(leaving["latency_ms"], stage) == pc.struct_field(scored.scores["latency_ms"], stage)


async def test_rows_without_the_columns_that_scoring_needs_are_refused():
    with pytest.raises(SchemaMismatchError, match=r"trigger rows lack \['carrier'\]"):
        await make_scorer().score(make_triggers({}).drop_columns(["carrier"]), now_us=NOW_US)


def test_views_other_than_the_pinned_ones_are_refused_before_any_row():
    changed = make_carrier_view(allowed_lateness="7m")
    with pytest.raises(ConfigError, match=r"got view carrier_trips@1 .*, expected carrier_trips@1 .* train the model"):
        make_scorer(views=VIEWS | {"carrier_trips": changed})


def test_a_trigger_view_that_leaves_out_rows_is_refused():
    latest = make_trigger_view(emit="latest")
    spec = make_spec(trigger=ViewReference.of(latest), inputs=(ModelInput.of(latest, "distance"),))
    with pytest.raises(ConfigError, match="`emit` 'latest', expected 'every_event'"):
        make_scorer(spec=spec, views={"trips": latest})


async def test_chunked_rows_are_scored_like_whole_ones():
    whole = make_triggers(*[{"carrier": carrier} for carrier in ("AA", "UA", "ZZ", "AA")])
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2), whole.slice(3)])
    assert chunked["carrier"].num_chunks == 3
    first, second = [(await make_scorer().score(rows, now_us=NOW_US)).scores for rows in (whole, chunked)]

    assert first == second
