"""``headrace schemas``, and what workers check when they start."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.application import load_recorded_application
from jobs.commands import app
from schemas.errors import ConfigError

APPLICATION = """
from schemas.aggregation import count
from schemas.entity import Entity
from schemas.source import EventSource
from schemas.view import FeatureView

orders = EventSource("orders", contract="schemas_order@{version}")
VIEWS = [FeatureView("orders", version={version}, entity=Entity("shop", key="shop"), source=orders, slide="1m",
                     features={{"n": count().over("5m")}})]
"""


def define(directory: Path, *, version: int, maximum: int) -> str:
    (directory / "schemas" / "events").mkdir(parents=True, exist_ok=True)
    fields = {
        "shop": {"type": "string"},
        "event_time": {"type": "string"},
        "n": {"type": "integer", "maximum": maximum},
    }
    contract = {"type": "object", "properties": fields, "x-compatibility": "FULL"}
    (directory / "schemas" / "events" / f"schemas_order@{version}.json").write_text(json.dumps(contract))
    path = directory / f"shop{version}.py"
    path.write_text(APPLICATION.format(version=version))
    return str(path)


def test_the_published_schema_of_the_scores_is_printed() -> None:
    published = Path(__file__).parents[3] / "schemas" / "scores" / "late_arrival@1"
    shown = CliRunner().invoke(app, ["schemas", "show", "scores.late_arrival"])
    assert shown.stdout == published.with_name("late_arrival@1.json").read_text()
    shown = CliRunner().invoke(app, ["schemas", "show", "scores.late_arrival", "--avro"])
    assert shown.stdout == published.with_name("late_arrival@1.avsc").read_text()


def test_a_topic_that_has_no_generated_contract_is_refused() -> None:
    refused = CliRunner().invoke(app, ["schemas", "show", "scores.other"])
    assert isinstance(refused.exception, ConfigError)
    assert "topic is 'scores.other', expected one of ['features.aircraft_landings'," in str(refused.exception)


def test_an_integer_that_grew_upstream_is_caught_in_ci_and_when_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_APP", define(tmp_path, version=1, maximum=2**31 - 1))
    assert (
        "not recorded: schemas_order@1, features/orders@1.json" in CliRunner().invoke(app, ["schemas", "check"]).stdout
    )
    recorded = CliRunner().invoke(app, ["schemas", "record"])
    assert recorded.stdout.count("recorded ") == 3
    checked = CliRunner().invoke(app, ["schemas", "check"])
    assert checked.stdout == "2 contracts are as recorded and fit those before them\n"

    grown = define(tmp_path, version=2, maximum=2**63 - 1)
    monkeypatch.setenv("HEADRACE_APP", grown)
    refused = CliRunner().invoke(app, ["schemas", "check"])
    assert isinstance(refused.exception, ConfigError)
    message = (
        "contract schemas_order@2 does not fit schemas_order@1, expected FULL: not FORWARD: `n` has maximum "
        "9223372036854775807, expected 2147483647."
    )
    assert str(refused.exception).startswith(message)
    with pytest.raises(ConfigError, match="does not fit schemas_order@1"):
        load_recorded_application(grown)
