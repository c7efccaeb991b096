"""The ``compute`` command: options, files, and the bytes it writes.

The golden files are the format that users rely on. When a change of the format is meant, write them anew with
``headrace compute shop_activity.py --input events.ndjson --output rows.ndjson --dead-letters dead_letters.ndjson --emit
every_event --close`` in their directory, read the difference, and put it into the changelog.
"""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from jobs import row_file
from jobs.commands import app
from jobs.lateness_table import show_wait
from schemas.errors import ConfigError, SchemaMismatchError, SinkError

GOLDEN = Path(__file__).parent / "golden_compute"
DEFINITION = str(GOLDEN / "shop_activity.py")
HEADRACE = Path(sys.executable).with_name("headrace")


def compute(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compute", *map(str, arguments)])


def error(result: Result) -> str:
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


def compute_into(directory: Path, *arguments: object) -> tuple[bytes, bytes]:
    outputs = ["--output", directory / "rows.ndjson", "--dead-letters", directory / "dead.ndjson"]
    result = compute(DEFINITION, *outputs, *arguments)
    assert result.exit_code == 0, result.output
    return (directory / "rows.ndjson").read_bytes(), (directory / "dead.ndjson").read_bytes()


@pytest.fixture(scope="module")
def disordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Events of three partitions, out of order, with rows that are bad in every way."""
    chance = random.Random(7)
    offsets = {0: 3, 1: 0, 9: 500}
    lines = []
    for number in range(90):
        partition = chance.choice(list(offsets))
        offsets[partition] += chance.randint(1, 3)
        at_ms = 1_357_034_400_000 + number * 2_000 + chance.randint(-60_000, 3_000)
        event: dict[str, Any] = {
            "event_id": f"e{number}",
            "user_id": chance.choice(["ann", "bø", "日本", "😀", "a\0b", 'x"y\\', "x\u2028\x85y", ""]),
            "event_time": chance.choice([at_ms] * 20 + [at_ms // 1000, 3, at_ms - 3_600_000, at_ms + 300_000]),
            "event_type": chance.choice(["view", "click", "order", "order", "order"]),
            "category": chance.choice(["a", "b", "c", None]),
            "amount": chance.choice([None, 0.1, 0.2, -2.25, 3, 1e300, 7.0]),
            "_partition": partition,
            "_offset": offsets[partition],
            "_broker_time": chance.choice([None, at_ms * 1_000, "2013-01-01T10:10:00.123456Z"]),
        }
        line = json.dumps(event, ensure_ascii=number % 2 == 0).encode()
        bad = [
            line[:50],
            b"[1,2]",
            b"null",
            b'{"event_id": "\xff"}',
            b"",
            b"  ",
            b" " + line + b"\t",
            b'{"_offset": 1}}',
        ]
        lines.append(chance.choice([*bad, *[line] * 80]))
    path = tmp_path_factory.mktemp("disordered") / "in.ndjson"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    return path


# The bytes


def test_the_bytes_of_rows_and_dead_letters_stay_as_they_are(tmp_path: Path) -> None:
    made = compute_into(tmp_path, "--input", GOLDEN / "events.ndjson", "--emit", "every_event", "--close")

    assert made[0] == (GOLDEN / "rows.ndjson").read_bytes()
    assert made[1] == (GOLDEN / "dead_letters.ndjson").read_bytes()


@pytest.mark.parametrize("emit", ["every_event", "latest", "on_close"])
def test_the_bytes_are_the_same_for_every_batch_size(tmp_path: Path, disordered: Path, emit: str) -> None:
    for close in ((), ("--close",)):
        rows, letters = compute_into(tmp_path, "--input", disordered, "--emit", emit, "--batch-rows", 50_000, *close)
        for size in (1, 7, 64) if close else (7,):
            again = compute_into(tmp_path, "--input", disordered, "--emit", emit, "--batch-rows", size, *close)
            assert again == (rows, letters)
        assert len(letters.splitlines()) > 12
        assert len(rows.splitlines()) > 40


@pytest.mark.parametrize("emit", ["every_event", "latest"])
def test_the_bytes_of_parquet_are_the_same_for_every_batch_size(
    tmp_path: Path, disordered: Path, monkeypatch: pytest.MonkeyPatch, emit: str
) -> None:
    monkeypatch.setattr(row_file, "_ROW_GROUP", 50)
    contents = set()
    for size in (1, 7, 50_000):
        output = tmp_path / "rows.parquet"
        compute(DEFINITION, "--input", disordered, "--output", output, "--emit", emit, "--batch-rows", size, "--close")
        contents.add(output.read_bytes())

    assert len(contents) == 1
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups > 2


def test_parquet_output_holds_the_rows_of_ndjson(tmp_path: Path) -> None:
    given = ["--input", GOLDEN / "events.ndjson", "--emit", "every_event", "--close"]
    outputs = ["--output", tmp_path / "rows.parquet", "--dead-letters", tmp_path / "dead.PARQUET"]

    assert compute(DEFINITION, *given, *outputs).exit_code == 0

    rows, letters = pq.read_table(tmp_path / "rows.parquet"), pq.read_table(tmp_path / "dead.PARQUET")
    lines = [json.loads(line) for line in (GOLDEN / "rows.ndjson").read_text().splitlines()]
    assert rows.column_names == list(lines[0])
    assert rows["clicks_2m"].to_pylist() == [line["clicks_2m"] for line in lines]
    assert [time.strftime("%Y-%m-%dT%H:%M:%S.%fZ") for time in rows["event_time"].to_pylist()] == [
        line["event_time"] for line in lines
    ]
    assert letters.to_pylist() == [
        json.loads(line) for line in (GOLDEN / "dead_letters.ndjson").read_text().splitlines()
    ]


def test_rows_go_to_standard_output_and_counts_beside_it() -> None:
    result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", "--emit", "every_event", "--close")

    assert result.stdout.encode() == (GOLDEN / "rows.ndjson").read_bytes()
    assert result.stderr == (
        "17 feature rows, 6 dead letters (decode_error 1, future_timestamp 1, late 1, schema_violation 2, "
        "timestamp_unit 1)\n"
    )


def test_an_empty_input_makes_empty_files(tmp_path: Path) -> None:
    (tmp_path / "in.ndjson").touch()

    assert compute_into(tmp_path, "--input", tmp_path / "in.ndjson", "--close") == (b"", b"")
    output = tmp_path / "rows.parquet"
    assert compute(DEFINITION, "--input", tmp_path / "in.ndjson", "--output", output).exit_code == 0
    assert pq.read_table(output).num_rows == 0
    assert "clicks_2m" in pq.read_schema(output).names


# What it is told


def test_the_view_may_be_named_by_its_name_or_its_variable(tmp_path: Path) -> None:
    for name in ("user_activity", "activity"):
        assert compute(f"{DEFINITION}:{name}", "--input", GOLDEN / "events.ndjson").exit_code == 0


def test_an_unknown_view_is_refused() -> None:
    result = compute(f"{DEFINITION}:nothing", "--input", GOLDEN / "events.ndjson")

    assert "view 'nothing' is not defined in" in error(result)
    assert "expected one of ['user_activity']" in error(result)


def test_of_several_views_one_must_be_named() -> None:
    result = compute("jobs.flights.views", "--input", GOLDEN / "events.ndjson")

    assert "expected which one, as jobs.flights.views:VIEW" in error(result)


def test_a_module_that_is_not_there_is_refused() -> None:
    assert "cannot be imported" in error(compute("no_such_module", "--input", GOLDEN / "events.ndjson"))
    assert "cannot be imported" in error(compute("no_such_file.py:view", "--input", GOLDEN / "events.ndjson"))


def test_a_colon_without_a_view_after_it_is_refused() -> None:
    refusal = error(compute(f"{DEFINITION}:", "--input", GOLDEN / "events.ndjson"))

    assert "names no view after the colon, expected MODULE:VIEW" in refusal


def test_a_path_may_have_a_colon_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a:b" / "views.py"
    path.parent.mkdir()
    path.write_text(Path(DEFINITION).read_text())

    for named in (path, f"{path}:activity"):
        assert compute(named, "--input", GOLDEN / "events.ndjson").exit_code == 0


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "many", "1000000001", "99999999999999999999"])
def test_a_batch_size_that_is_none_is_refused(size: str) -> None:
    result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", "--batch-rows", size)

    assert result.exit_code == 2
    assert "Invalid value for '--batch-rows'" in result.stderr


def test_an_unknown_emit_mode_is_refused() -> None:
    result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", "--emit", "sometimes")

    assert error(result) == "`--emit` is 'sometimes', expected one of ['on_close', 'every_event', 'latest']"


def test_an_input_that_is_not_there_is_refused_before_the_output_is_touched(tmp_path: Path) -> None:
    output = tmp_path / "rows.ndjson"
    output.write_text("of last time")

    result = compute(DEFINITION, "--input", tmp_path / "none.ndjson", "--output", output)

    assert "none.ndjson cannot be read: there is no such file; expected a file of NDJSON" in error(result)
    assert "it is a directory" in error(compute(DEFINITION, "--input", tmp_path, "--output", output))
    assert output.read_text() == "of last time"


def test_an_output_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for option in ("--output", "--dead-letters"):
        for path in (tmp_path / "none" / "rows.ndjson", tmp_path):
            result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", option, path)
            assert "cannot be written: " in error(result)
            assert "expected a file in a directory that exists" in error(result)


def test_a_full_disk_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", "--output", "/dev/full")

    assert isinstance(result.exception, SinkError)
    assert "writing to /dev/full failed: No space left on device" in str(result.exception)


def test_a_full_disk_behind_standard_output_is_none_either() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [HEADRACE, "compute", DEFINITION, "--input", GOLDEN / "events.ndjson", "--emit", "every_event"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr.startswith("headrace: writing to standard output failed: No space left on device")
    assert len(done.stderr.splitlines()) == 1


REPARTITIONED = """
from streams import Entity, EventSource, FeatureView, count
shop = EventSource("shop.events", contract="shop_event@1", key="event_id")
user = Entity("user", key="user_id")
clicks = FeatureView("clicks", version=1, entity=user, source=shop, slide="1m", features={"n": count().over("1m")})
"""


def test_a_pipe_is_refused_where_the_input_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "views.py").write_text(REPARTITIONED)
    os.mkfifo(tmp_path / "pipe")

    refusal = error(compute(tmp_path / "views.py", "--input", tmp_path / "pipe"))

    assert "it is a pipe or a device, and a view by way of a repartition topic reads its input twice" in refusal
    assert compute(tmp_path / "views.py", "--input", GOLDEN / "events.ndjson").exit_code == 0


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    events = (GOLDEN / "events.ndjson").read_bytes()
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(events,))
    writer.start()

    rows, _ = compute_into(tmp_path, "--input", tmp_path / "pipe", "--emit", "every_event", "--close")
    writer.join()

    assert rows == (GOLDEN / "rows.ndjson").read_bytes()


def test_nothing_is_written_over_the_input(tmp_path: Path) -> None:
    path = tmp_path / "in.ndjson"
    path.write_bytes((GOLDEN / "events.ndjson").read_bytes())
    (tmp_path / "link.ndjson").symlink_to(path)

    for output in (path, tmp_path / "link.ndjson"):
        assert "expected a file for each" in error(compute(DEFINITION, "--input", path, "--output", output))
    same = ["--output", tmp_path / "o", "--dead-letters", tmp_path / "o"]
    assert "expected a file for each" in error(compute(DEFINITION, "--input", path, *same))
    assert path.read_bytes() == (GOLDEN / "events.ndjson").read_bytes()


def test_the_same_device_may_take_rows_and_dead_letters() -> None:
    outputs = ["--output", "/dev/null", "--dead-letters", "/dev/null"]

    assert compute(DEFINITION, "--input", GOLDEN / "events.ndjson", *outputs).exit_code == 0


def test_an_input_that_is_wrong_inside_is_an_error_of_its_own(tmp_path: Path) -> None:
    line = '{"event_id":"e","user_id":"ann","event_time":1357034400000,"event_type":"click","_offset":1}\n'
    (tmp_path / "in.ndjson").write_text(line * 2)

    result = compute(DEFINITION, "--input", tmp_path / "in.ndjson")

    assert isinstance(result.exception, SchemaMismatchError)
    assert "sort the rows, or leave `_offset` out" in str(result.exception)


# The report


def test_a_report_is_a_table_with_the_views_own_setting_marked() -> None:
    result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", "--report")

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "user_activity v3  sliding 1m, 2m every 1m, allowed lateness 30s; 8 rows"
    rejected = "decode_error 1, future_timestamp 1, schema_violation 2, timestamp_unit 1"
    assert lines[1] == f"Not counted, dead letters under any setting: {rejected}"
    assert lines[2].split() == ["setting", "late", "partially", "after", "close", "open", "p50", "p99", "max"]
    settings = [line.split()[0] for line in lines[3:12]]
    assert settings == ["0s", "1s", "2s", "5s", "10s", "30s", "1m", "2m", "5m"]
    assert [line.split()[0] for line in lines if " * " in line[:10]] == ["5s"]
    assert max(map(len, lines[2:12])) <= 80


def test_a_report_has_json_too() -> None:
    result = compute(DEFINITION, "--input", GOLDEN / "events.ndjson", "--report", "--json")

    report = json.loads(result.stdout)
    assert (report["view"], report["version"], report["rows"], report["clock"]) == ("user_activity", 3, 8, "mixed")
    (own,) = (setting for setting in report["settings"] if setting["is_own"])
    assert (own["max_out_of_orderness"], own["late"], own["late_share"]) == ("5s", 1, 0.125)


def test_a_report_makes_no_rows(tmp_path: Path) -> None:
    given = ["--input", GOLDEN / "events.ndjson"]

    for option in (["--output", tmp_path / "o"], ["--dead-letters", tmp_path / "d"], ["--emit", "latest"], ["--close"]):
        assert f"`--report` is given with {option[0]}" in error(compute(DEFINITION, *given, "--report", *option))
    assert "`--json` is given without `--report`" in error(compute(DEFINITION, *given, "--json"))
    assert "no such file" in error(compute(DEFINITION, "--input", tmp_path / "none", "--report"))


@pytest.mark.parametrize(
    ("wait_us", "text"),
    [
        (None, "-"),
        (0, "0.00s"),
        (-1_500_000, "-1.50s"),
        (59_994_000, "59.99s"),
        (60_000_000, "1m 0s"),
        (10_020_000_000, "2h 47m"),
        (90_061_000_000, "1d 1h"),
    ],
)
def test_waits_are_shown_in_the_units_that_matter(wait_us: int | None, text: str) -> None:
    assert show_wait(wait_us) == text
