"""``headrace compute`` as a user runs it: exit codes, messages, pipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "unit" / "jobs" / "golden_compute"
HEADRACE = str(Path(sys.executable).with_name("headrace"))
DEFINITION = """\
from streams import Entity, EventSource, FeatureView, count

view = FeatureView("clicks", version=1, entity=Entity("user", key="user_id"), slide="1m",
                   source=EventSource("shop.events", contract="shop_event@1", max_out_of_orderness="5s"),
                   features={"n_5m": count().over("5m")})
"""


def run(*arguments: str | Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [HEADRACE, "compute", *map(str, arguments)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)


def event(**fields: object) -> str:
    defaults = {"event_id": "e", "user_id": "ann", "event_time": 1_357_034_400_000, "event_type": "click"}
    return json.dumps(defaults | fields) + "\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "defs.py").write_text(DEFINITION)
    (tmp_path / "in.ndjson").write_text(event() + event(event_time=1_357_034_520_000))
    return tmp_path


def test_a_definition_in_the_working_directory_runs_over_a_file(directory: Path) -> None:
    ran = run("defs:clicks", "--input", "in.ndjson", "--output", "out.ndjson", directory=directory)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "2 feature rows, 0 dead letters\n")
    rows = [json.loads(line) for line in (directory / "out.ndjson").read_text().splitlines()]
    assert [(row["pane"], row["window_end"]) for row in rows] == [
        ("ON_TIME", "2013-01-01T10:01:00.000000Z"),
        ("EARLY", "2013-01-01T10:03:00.000000Z"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["defs:clicks", "--input", "none.ndjson"], "input none.ndjson cannot be read: there is no such file"),
        (["defs:other", "--input", "in.ndjson"], "view 'other' is not defined in defs, expected one of ['clicks']"),
        (["defs", "--input", "in.ndjson", "--output", "none/out"], "none/out cannot be written: No such file"),
        (["defs", "--input", "in.ndjson", "--batch-rows", "0"], "Invalid value for '--batch-rows'"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2(directory: Path, arguments: list[str], message: str) -> None:
    ran = run(*arguments, directory=directory)

    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (event(_offset=2) + event(_offset=2), "row 2: offset 2 of partition 0 comes after 2, expected rising offsets"),
        (event(_partition="one"), "row 1: `_partition` is 'one', expected a whole number of 0 or more"),
    ],
)
def test_an_input_that_is_wrong_inside_ends_with_1(directory: Path, content: str, message: str) -> None:
    (directory / "bad.ndjson").write_text(content)

    ran = run("defs", "--input", "bad.ndjson", directory=directory)

    assert ran.returncode == 1
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_it_reads_from_a_pipe_and_a_reader_that_leaves_early_is_no_error(directory: Path) -> None:
    (directory / "many.ndjson").write_text("".join(event(user_id=f"u{n}") for n in range(20_000)))
    script = f"cat many.ndjson | '{HEADRACE}' compute defs --emit every_event --input /dev/stdin | head -n 1"

    ran = subprocess.run(
        ["/bin/sh", "-c", script], cwd=directory, capture_output=True, text=True, timeout=60, check=True
    )

    assert json.loads(ran.stdout)["user_id"] == "u0"
    assert ran.stderr == ""


def test_the_golden_files_come_out_of_the_command(tmp_path: Path) -> None:
    outputs = ["--output", tmp_path / "rows.ndjson", "--dead-letters", tmp_path / "dead.ndjson"]
    given = ["shop_activity.py:user_activity", "--input", "events.ndjson", "--emit", "every_event", "--close"]

    assert run(*given, *outputs, directory=GOLDEN).returncode == 0
    assert (tmp_path / "rows.ndjson").read_bytes() == (GOLDEN / "rows.ndjson").read_bytes()
    assert (tmp_path / "dead.ndjson").read_bytes() == (GOLDEN / "dead_letters.ndjson").read_bytes()
