import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from jobs.bench import ceiling, engine, kind
from jobs.bench.figure import Figure, print_figures
from jobs.bench.job import OUT_OF_ORDERNESS_MS, SLIDE_MS, EventStream, make_view, to_json
from jobs.bench.witness import Witness
from jobs.commands import app
from schemas.errors import ConfigError, WindowingError
from streams.windowing.engine import WindowEngine

FIGURES = [
    Figure(
        name="engine.latest", value=1_200_000.4, unit="events/s", bar=1e6, compared_with="engine.ceiling", ratio=0.6
    ),
    Figure(name="engine.memory", value=1_500.0, unit="bytes/key", bar=1_000, is_lower_better=True),
    Figure(name="engine.ceiling", value=0.25, unit="events/s"),
]


# The job


def test_an_event_of_the_job_takes_about_132_bytes() -> None:
    payload = to_json(EventStream(20_000).batch(2_000))

    assert len(payload.splitlines()) == 2_000
    assert 130 <= len(payload) / 2_000 <= 134


def test_no_event_of_the_job_is_rejected_and_all_users_have_full_windows_after_filling() -> None:
    stream, eng = EventStream(50), WindowEngine(make_view("every_event"))
    batches = [*stream.fill(20), stream.batch(500), stream.batch(500)]

    results = [eng.step(batch, processing_time_us=0) for batch in batches]

    assert sum(result.dead_letters.num_rows for result in results) == 0
    assert sum(result.counts.on_time for result in results) == 0
    offsets = np.concatenate([batch["_offset"].to_numpy() for batch in batches])
    assert offsets.tolist() == list(range(5 * 50 + 1_000))
    last_of_window = eng.close().rows.filter(pc.field("pane") == "ON_TIME").group_by("window_end").aggregate([])
    assert last_of_window.num_rows == 6  # the end they are full at, and those of the five minutes after it
    counts = results[-1].rows["count_5m"].to_pylist()
    assert min(counts) >= 1


def test_the_ceiling_reads_the_events_and_groups_all_of_them() -> None:
    grouped = ceiling.group(ceiling.decode(to_json(EventStream(20).batch(1_000))))

    assert grouped["len"].sum() == 1_000


# The witness


def observe(*, emit: str = "every_event") -> tuple[list[pa.Table], list[pa.Table]]:
    stream, eng = EventStream(5), WindowEngine(make_view(emit))
    batches = [*stream.fill(3), *(stream.batch(40) for _ in range(5))]
    stream.time_ms += SLIDE_MS + OUT_OF_ORDERNESS_MS
    batches += [stream.batch(40), stream.batch(40)]
    return batches, [eng.step(batch, processing_time_us=0).rows for batch in batches]


def witness(batches: list[pa.Table], rows: list[pa.Table], *, emit: str = "every_event") -> Witness:
    users = EventStream(5).users.to_pylist()[:3]
    seen = Witness(
        users, out_of_orderness_us=OUT_OF_ORDERNESS_MS * 1_000, as_of="last_in_batch" if emit == "latest" else "all"
    )
    for batch, made in zip(batches, rows, strict=True):
        seen.see(batch, made)
    return seen


@pytest.mark.parametrize("emit", ["latest", "every_event"])
def test_the_witness_finds_the_engine_right(emit: str) -> None:
    batches, rows = observe(emit=emit)

    assert witness(batches, rows, emit=emit).check() > 20


def test_where_batches_are_not_known_the_witness_wants_some_as_of_rows_and_the_last() -> None:
    batches, rows = observe()
    users = EventStream(5).users.to_pylist()[:3]
    is_last = pc.equal(
        rows[-1]["source_offset"], pc.max(rows[-1].filter(pc.equal(rows[-1]["user_id"], users[0]))["source_offset"])
    )

    def check(made: list[pa.Table]) -> int:
        seen = Witness(users, out_of_orderness_us=OUT_OF_ORDERNESS_MS * 1_000, as_of="some")
        for batch, some in zip(batches, made, strict=True):
            seen.see(batch, some)
        return seen.check()

    assert check(rows) > 20
    first = rows[0].filter(pc.not_equal(rows[0]["pane"], "EARLY"))
    assert check([first, *rows[1:]]) < check(rows)
    with pytest.raises(WindowingError, match=r"as-of rows, expected .* absent"):
        check([*rows[:-1], rows[-1].filter(pc.invert(is_last))])


@pytest.mark.parametrize("feature", ["count_5m", "sum_5m", "mean_5m", "max_5m", "entropy_3"])
def test_the_witness_finds_a_wrong_value(feature: str) -> None:
    batches, rows = observe()
    made = rows[-1].column(feature)
    wrong = pc.add(made, pa.scalar(1, made.type))
    rows[-1] = rows[-1].set_column(rows[-1].column_names.index(feature), feature, wrong)

    with pytest.raises(WindowingError, match=f"{feature}: .* count for nothing"):
        witness(batches, rows).check()


def test_the_witness_finds_a_null_where_there_is_a_value() -> None:
    batches, rows = observe()
    nulls = pa.nulls(rows[-1].num_rows, pa.float64())
    rows[-1] = rows[-1].set_column(rows[-1].column_names.index("sum_5m"), "sum_5m", nulls)

    with pytest.raises(WindowingError, match="sum_5m"):
        witness(batches, rows).check()


@pytest.mark.parametrize(("pane", "what"), [("EARLY", "as-of rows"), ("ON_TIME", "closing panes")])
def test_the_witness_misses_a_row_and_finds_a_spare_one(pane: str, what: str) -> None:
    batches, rows = observe()
    user = EventStream(5).users[0]
    at = next(
        n
        for n, made in enumerate(rows)
        if pc.any(pc.and_(pc.equal(made["pane"], pane), pc.equal(made["user_id"], user))).as_py()
    )
    is_it = pc.and_(pc.equal(rows[at]["pane"], pane), pc.equal(rows[at]["user_id"], user))

    with pytest.raises(WindowingError, match=f"{what}, expected .* absent \\[{{"):
        witness(batches, [*rows[:at], rows[at].filter(pc.invert(is_it)), *rows[at + 1 :]]).check()
    twice = pa.concat_tables([rows[at], rows[at].filter(is_it)])
    with pytest.raises(WindowingError, match=f"{what}, expected"):
        witness(batches, [*rows[:at], twice, *rows[at + 1 :]]).check()


# The run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_BATCH_ROWS", 100)
    monkeypatch.setattr(engine, "_FILL_ROWS", 100)
    monkeypatch.setattr(engine, "_MANY", 300)
    monkeypatch.setattr(engine, "_KEY_COUNTS", (100, 200, 300))
    monkeypatch.setattr(engine, "_NAMES", {100: "10k", 200: "100k", 300: "1m"})
    monkeypatch.setattr(engine, "KEYS", 150)
    monkeypatch.setattr(kind, "KEYS", 150)
    monkeypatch.setattr(kind, "_BATCH_ROWS", 200)


STATE = ["snapshot", "snapshot_time", "changes_of_1_percent", "largest_bucket", "restore"]


def with_rows_out(*names: str) -> list[str]:
    return [named for name in names for named in (name, name.replace(".keys", ".rows_out.keys"))]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("quick", [True, False])
def test_the_engine_is_measured_in_both_modes_at_all_key_counts(quick: bool) -> None:
    told: list[str] = []

    figures = {figure.name: figure for figure in engine.run(quick=quick, tell=told.append)}

    most = "100k" if quick else "1m"
    every_event = ["engine.every_event.keys_10k", "engine.every_event.keys_100k", "engine.every_event.keys_1m"]
    assert list(figures) == [
        *("engine.ceiling", "engine.latest"),
        *with_rows_out("engine.latest.keys_10k", "engine.latest.keys_100k", "engine.latest.keys_1m"),
        *("engine.latest.growth_to_1m", "engine.latest.growth_above_floor_to_1m"),
        "engine.latest.growth_at_equal_rows_to_1m",
        "engine.every_event",
        *with_rows_out(*every_event[: 2 if quick else 3]),
        f"engine.every_event.growth_to_{most}",
        *([] if quick else ["engine.every_event.growth_above_floor_to_1m"]),
        *("engine.floor.keys_10k", "engine.floor.keys_1m"),
        *("engine.closing_panes", "engine.closing_panes.keys_10k", "engine.closing_panes.keys_100k"),
        *([] if quick else ["engine.closing_panes.keys_1m"]),
        *("engine.sessions", "engine.approx_distinct", "engine.quantile"),
        "engine.memory.keys_1m",
        *([] if quick else [f"engine.{name}.keys_1m" for name in STATE]),
    ]
    assert figures["engine.every_event.rows_out.keys_10k"].value == 1
    assert 0 < figures["engine.latest.rows_out.keys_10k"].value < figures["engine.latest.rows_out.keys_1m"].value < 1
    latest = figures["engine.latest"]
    assert (latest.bar, latest.compared_with) == (1_000_000, "engine.ceiling")
    assert latest.ratio == pytest.approx(latest.value / figures["engine.ceiling"].value)
    assert told[-1].endswith("rows of output are what polars computes")
    assert f"round {5 if quick else 11} of {5 if quick else 11}" in told


@pytest.mark.usefixtures("small")
def test_a_quick_run_that_is_late_makes_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_QUICK_S", 0.0)
    told: list[str] = []

    engine.run(quick=True, tell=told.append)

    assert [line for line in told if line.startswith("round")] == [f"round {n} of 5" for n in (1, 2, 3)]


@pytest.mark.usefixtures("small")
def test_no_time_counts_where_a_row_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(WindowEngine):
        def step(self, batch, *, processing_time_us):  # type: ignore[no-untyped-def]
            result = super().step(batch, processing_time_us=processing_time_us)
            frame = pl.from_arrow(result.rows).with_columns(pl.col("max_5m") * 2)
            object.__setattr__(result, "rows", frame.to_arrow())
            return result

    monkeypatch.setattr(engine, "WindowEngine", Wrong)

    with pytest.raises(WindowingError, match="max_5m"):
        engine.run(quick=True, tell=lambda _: None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["sessions", "approx_distinct", "quantile"])
def test_no_time_of_a_kind_counts_where_a_row_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(WindowEngine):
        def step(self, batch, *, processing_time_us):  # type: ignore[no-untyped-def]
            result = super().step(batch, processing_time_us=processing_time_us)
            first = next(iter(self.view.definitions))
            frame = pl.from_arrow(result.rows).with_columns(pl.col(first) * 2)
            object.__setattr__(result, "rows", frame.to_arrow())
            return result

    def checked() -> int:
        (rig,) = [rig for rig in kind.make_rigs() if rig.name == name]
        for _ in range(3):
            rig.round()
        return rig.check()

    assert checked() > 0
    monkeypatch.setattr(kind, "WindowEngine", Wrong)
    with pytest.raises(WindowingError, match=f"engine.{name}: .* is not what polars computes"):
        checked()


# The command


def test_figures_are_printed_and_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run", lambda *, quick, tell: FIGURES if quick else [])

    result = CliRunner().invoke(app, ["bench", "engine", "--quick", "--json", str(tmp_path / "figures.json")])

    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["figure", "value", "bar", "met", "ratio", "to"]
    assert lines[1] == ["engine.latest", "1,200,000", "events/s", "≥", "1,000,000", "yes", "0.60", "engine.ceiling"]
    assert lines[2] == ["engine.memory", "1,500", "bytes/key", "≤", "1,000", "no"]
    assert lines[3] == ["engine.ceiling", "0.25", "events/s"]
    assert json.loads((tmp_path / "figures.json").read_text()) == [
        {
            "name": "engine.latest",
            "value": 1_200_000.4,
            "unit": "events/s",
            "bar": 1e6,
            "met": True,
            "compared_with": "engine.ceiling",
            "ratio": 0.6,
        },
        {
            "name": "engine.memory",
            "value": 1_500.0,
            "unit": "bytes/key",
            "bar": 1_000,
            "met": False,
            "compared_with": None,
            "ratio": None,
        },
        {
            "name": "engine.ceiling",
            "value": 0.25,
            "unit": "events/s",
            "bar": None,
            "met": None,
            "compared_with": None,
            "ratio": None,
        },
    ]


@pytest.mark.parametrize("name", ["peers", "nothing"])
def test_a_benchmark_that_is_not_there_is_refused(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name])

    assert isinstance(result.exception, ConfigError)
    names = ["engine", "live", "offline", "online", "producers", "scoring", "soak"]
    assert str(result.exception) == f"benchmark '{name}' is not there, expected one of {names}"


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "figures.json", tmp_path):
        result = CliRunner().invoke(app, ["bench", "engine", "--json", str(path)])
        assert isinstance(result.exception, ConfigError)
        assert "expected a file in a directory that exists" in str(result.exception)


def test_a_narrow_terminal_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    print_figures(FIGURES)

    assert "engine.ceiling" in capsys.readouterr().out.splitlines()[1]
