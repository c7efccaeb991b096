"""`headrace train` and `headrace drift` on real Delta tables, written from the flights by the pipeline itself."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs import cli
from jobs.drift import DRIFTED
from jobs.drift_scores import ScoreWindow
from jobs.flights.events import plan_events
from jobs.flights.model import LATE_ARRIVAL
from jobs.flights.views import VIEWS
from offline.card import ModelCard, load_card, read_profile
from offline.drift import judge_inputs
from schemas.model import ModelSpec
from schemas.time import parse_rfc3339_us
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline
from streams.sinks.offline import OfflineWriter
from tests.support.routing import as_read

Run = Callable[..., int]


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Offline features of four days."""
    root = tmp_path_factory.mktemp("delta")
    start_us, end_us = (parse_rfc3339_us(f"2013-01-0{day}T00:00:00Z") for day in (1, 5))
    events = plan_events(start_us=start_us, end_us=end_us).table()
    writer = OfflineWriter(root)
    for view in VIEWS:
        records = events.filter(events["topic"].cast(str) == view.sources[0].topic)
        known_us = records["known_us"].to_numpy()
        batch = RawBatch(
            topic=view.sources[0].topic,
            partition=0,
            offsets=np.arange(records.height),
            broker_time_us=known_us,
            keys=records["key"].to_list(),
            values=records["value"].to_list(),
            headers=[None] * records.height,
            next_offset=records.height,
        )
        source = view.input if view.input.is_repartitioned else view.sources[0]
        pipeline = PartitionPipeline(source, [view], partition=0)
        processed = pipeline.process(
            as_read(view, batch), processing_time_us=int(known_us[-1]), computed_time_us=int(known_us[-1]), epoch=1
        )
        rows: pa.Table = processed.rows[view.name]
        writer.write(rows, view=view, partition=0, offsets=range(rows.num_rows))
    return root


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, delta: Path) -> Run:
    """Run ``headrace …`` in this process and return its exit code."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADRACE_DELTA", str(delta))
    monkeypatch.setenv("HEADRACE_MODEL_REPOSITORY", str(tmp_path / "models"))

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return call


def test_it_writes_a_version_that_serves_and_prints_how_good_it_is(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("train", "--json") == 0

    printed = json.loads(capsys.readouterr().out)
    card = load_card(tmp_path / "models", "late_arrival")
    card.check(LATE_ARRIVAL)
    assert (printed["version"], printed["sha256"]) == (card.version, card.sha256) == (1, card.sha256)
    assert printed["directory"] == str(tmp_path / "models" / "late_arrival" / "1")
    assert printed["evaluation"]["auc"] == card.evaluation["auc"] > 0.85
    assert printed["training"]["rows"] + printed["evaluation"]["rows"] < 3_600
    # Whether it was late at departure tells most; the features of the pipeline must reach the model, too.
    alone = card.evaluation["auc_of_inputs"]
    assert alone["airport_departures.departure_delay"] > 0.8
    assert alone["carrier_departures.mean_departure_delay_1h"] > 0.6
    assert alone["aircraft_landings.last_landing_delay"] > 0.52


def test_it_says_the_same_in_a_table_and_trains_until_a_date(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("train", "--until", "2013-01-04", "--version", "5") == 0

    card = load_card(tmp_path / "models", "late_arrival")
    assert card.version == 5
    assert card.evaluation["until"] < "2013-01-04"
    printed = capsys.readouterr().out
    assert f"{card.evaluation['auc']:.4f}" in printed
    assert f"{card.training['rows']:,}" in printed
    assert "late_arrival/5 written in" in printed
    assert printed.rstrip().endswith(": 1.0.0")


def test_what_came_after_training_is_compared_with_it(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("train", "--until", "2013-01-03") == 0
    card = load_card(tmp_path / "models", "late_arrival")
    profile = read_profile(tmp_path / "models", card)
    assert profile.features["airport_departures.distance"].rows == card.training_set["rows"]
    assert profile.until == card.evaluation["until"]
    capsys.readouterr()

    metrics = tmp_path / "drift.prom"
    options = ("--from", "2013-01-03", "--to", "2013-01-05")
    assert run("drift", "late_arrival", *options, "--json", "--metrics-file", str(metrics)) == DRIFTED
    windows = json.loads(capsys.readouterr().out)["windows"]
    assert [window["start"][:10] for window in windows] == ["2013-01-03", "2013-01-04"]
    for window in windows:
        assert window["rows"] > 800
        # Flights went where they always go. But at first there was no earlier landing of most aircraft.
        distance, landing = (
            window["inputs"][name] for name in ("airport_departures.distance", "aircraft_landings.last_landing_delay")
        )
        assert (distance["verdict"], distance["missing_share"], distance["default_share"]) == ("steady", 0, 0)
        assert distance["p_value"] > 0.05
        assert landing["verdict"] == "drift"
        assert landing["missing_share"] < 0.4 < profile.features["aircraft_landings.last_landing_delay"].missing_share
    said = metrics.read_text()
    assert 'headrace_drift_drifted{input="airport_departures.distance",model="late_arrival",version="1"} 0.0' in said
    assert f'headrace_drift_window_rows{{model="late_arrival",version="1"}} {windows[-1]["rows"]}.0' in said

    # From after training on: whole windows alone, the newest of which is not over yet.
    assert run("drift", "late_arrival") == DRIFTED
    assert "late_arrival version 1, " in capsys.readouterr().out
    starts = []
    for options in ((), ("--to", "2014-01-01")):
        assert run("drift", "late_arrival", *options, "--json") == DRIFTED
        starts.append([window["start"][:10] for window in json.loads(capsys.readouterr().out)["windows"]])
    whole, all_there_is = starts
    assert whole == all_there_is[:-1]
    assert min(whole) > profile.until[:10]
    for options, code, message in (
        (("--from", "2013-02-01"), 1, "Nothing was judged: 0 rows in 0 windows from 2013-02-01"),
        (("--window", "2s"), 1, "expected some hundred in a window"),
        (("--version", "3"), 2, "model late_arrival has no version 3"),
        (("--window", "soon"), 2, "`--window` is 'soon'"),
        (("--from", "2013-01-04", "--to", "2013-01-04"), 2, "expected the earlier one first"),
    ):
        assert run("drift", "late_arrival", *options) == code
        assert message in capsys.readouterr().err
    assert run("drift", "early_arrival") == 2
    assert "model 'early_arrival' is not defined" in capsys.readouterr().err


def test_scores_are_compared_with_the_answers_in_training(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run("train", "--until", "2013-01-03") == 0
    capsys.readouterr()
    asked: list[tuple[Any, ...]] = []

    def read_score_windows(brokers: str, spec: ModelSpec, card: ModelCard, profiles: Any, **bounds: Any) -> Any:
        asked.append((spec.name, card.version, bounds["since_us"], bounds["until_us"], bounds["confidence"]))
        (kept,) = profiles.values()
        assert kept.rows == card.evaluation["rows"]
        start_us = bounds["since_us"]
        return [
            ScoreWindow(
                start_us=start_us,
                end_us=start_us + bounds["width_us"],
                rows=500,
                judged_rows=400,
                fallback_share=0.2,
                incomplete_share=0.125,
                outputs=judge_inputs(profiles, np.full((400, 1), 0.5)),
                low_confidence_shares={"late_probability": 1.0},
            )
        ]

    monkeypatch.setenv("HEADRACE_KAFKA", "127.0.0.1:1")
    monkeypatch.setattr("jobs.drift.reach_kafka", lambda brokers: None)
    monkeypatch.setattr("jobs.drift.read_score_windows", read_score_windows)
    metrics = tmp_path / "drift.prom"
    options = ("--from", "2013-01-03", "--to", "2013-01-05", "--scores")
    assert run("drift", "late_arrival", *options, "--json", "--metrics-file", str(metrics)) == DRIFTED
    (scores,) = json.loads(capsys.readouterr().out)["scores"]
    assert (scores["start"][:10], scores["rows"], scores["fallback_share"]) == ("2013-01-03", 500, 0.2)
    assert scores["outputs"]["late_probability"]["verdict"] == "drift"
    low = 'headrace_drift_low_confidence_ratio{model="late_arrival",output="late_probability",version="1"} 1.0'
    assert low in metrics.read_text()
    assert run("drift", "late_arrival", *options, "--confidence", "0.7") == DRIFTED
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("late_probability"))
    assert line.split()[-4] == "100.0%"
    assert line.split()[-2:] == ["20.0%", "12.5%"]
    bounds = tuple(parse_rfc3339_us(f"2013-01-0{day}T00:00:00Z") for day in (3, 5))
    assert asked == [("late_arrival", 1, *bounds, confidence) for confidence in (0.6, 0.7)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--delta", "nowhere"], 1, "there is no table nowhere/airport_departures/v1"),
        (
            ["--until", "2013-01-02"],
            2,
            "rows with a label (aircraft_landings.arrival_delay > 15), expected at least 1000",
        ),
        (["--until", "yesterday"], 2, "`--until` is 'yesterday', expected a date such as 2013-03-01"),
        (["--until", "2013-02-30"], 2, "`--until` is '2013-02-30'"),
        (["--repository", "/proc/models"], 2, "model repository is '/proc/models', which cannot be written to ("),
        (["--repository", __file__], 2, "which cannot be written to (Not a directory), expected a directory of your"),
    ],
)
def test_it_says_what_is_wrong_and_writes_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, arguments: list[str], code: int, message: str
):
    assert run("train", *arguments) == code

    assert message in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
