import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jobs.commands import app
from schemas.errors import ConfigError

DEFINITION = """\
from streams import Entity, EventSource, FeatureView, count, entropy

user = Entity("user", key="user_id")
shop = EventSource("shop.events", contract="shop_event@1", max_out_of_orderness="5s")
activity = FeatureView("activity", version=1, entity=user, source=shop, slide="1m", owner="growth",
                       features={"n_5m": count().over("5m"), "kinds": entropy("category").over(last=3)})
visits = FeatureView("visits", version=2, entity=user, source=shop, gap="30m", features={"n": count()})
"""


@pytest.fixture(autouse=True)
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_APP", "defs.py")
    path = tmp_path / "defs.py"
    path.write_text(DEFINITION)
    return path


def views(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["views", *arguments])


def test_each_view_is_listed_with_version_hash_owner_windows_and_columns() -> None:
    lines = views().stdout.splitlines()

    assert lines[0].startswith("activity v1  ")
    assert lines[0].endswith("  owner growth  not recorded")
    assert lines[1:5] == [
        "  user (key user_id), from shop.events",
        "  sliding 5m every 1m, emits latest",
        "    n_5m   int64",
        "    kinds  double",
    ]
    assert lines[5].startswith("visits v2  ")
    assert "no owner" in lines[5]
    assert lines[6:8] == ["  user (key user_id), from shop.events", "  session, gap 30m, emits latest"]


def test_json_says_whether_a_view_is_recorded() -> None:
    def listed() -> list[tuple[str, bool, str | None]]:
        return [(view["view"], view["recorded"], view["recorded_hash"]) for view in json.loads(views("--json").stdout)]

    assert listed() == [("activity", False, None), ("visits", False, None)]
    assert views("--record").exit_code == 0
    hashes = {view["view"]: view["definition_hash"] for view in json.loads(views("--json").stdout)}
    assert listed() == [("activity", True, hashes["activity"]), ("visits", True, hashes["visits"])]


def test_what_was_recorded_is_checked(application: Path) -> None:
    assert (
        views("--check").stdout
        == "0 of 2 views are as recorded; not recorded: activity, visits (`headrace views --record`)\n"
    )

    recorded = views("--record").stdout.splitlines()
    assert [Path(line.removeprefix("recorded ")).name for line in recorded[:2]] == ["activity@1.json", "visits@2.json"]
    assert recorded[2:] == ["2 of 2 views are as recorded"]
    assert views("--check").stdout == views("--record").stdout == "2 of 2 views are as recorded\n"

    application.write_text(DEFINITION.replace('gap="30m"', 'gap="20m"'))
    for option in ("--check", "--record"):
        result = views(option)
        assert isinstance(result.exception, ConfigError)
        assert "view visits version 2 has the definition" in str(result.exception)
        assert "Raise the version to 3, or restore the definition" in str(result.exception)
    assert "changed, recorded as" in views().stdout

    application.write_text(DEFINITION.replace('gap="30m"', 'gap="20m"').replace("version=2", "version=3"))
    assert views("--check").stdout == "1 of 2 views are as recorded; not recorded: visits (`headrace views --record`)\n"


def test_checking_and_recording_are_two_things() -> None:
    result = views("--check", "--record")

    assert isinstance(result.exception, ConfigError)
    assert "expected one of them" in str(result.exception)


@pytest.mark.parametrize("command", [["worker", "--role", "features"], ["topics", "apply"], ["topics", "doc"], ["up"]])
def test_nothing_starts_with_a_definition_that_changed_under_its_version(application: Path, command: list[str]) -> None:
    views("--record")
    application.write_text(DEFINITION.replace('over("5m")', 'over("6m")'))

    result = CliRunner().invoke(app, command)

    assert isinstance(result.exception, ConfigError)
    assert "features.n_5m.size_us from 300000000 to 360000000" in str(result.exception)
