"""``headrace bench offline`` on a few events: all that it measures, and that wrong rows are no figures."""

import polars as pl
import pytest

from jobs.bench import offline
from jobs.bench.by_hand import COLUMNS
from schemas.errors import WindowingError


def test_a_backfill_is_measured_next_to_the_same_by_hand_and_all_have_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offline, "_EVENTS", {True: 6_000})
    monkeypatch.setattr(offline, "_LABELS", {True: 2_000})
    monkeypatch.setattr(offline, "_EVENTS_PER_S", 15)  # windows close, and run empty of none
    monkeypatch.setattr(offline, "KEYS", 20)
    told: list[str] = []

    figures = {figure.name: figure for figure in offline.run(quick=True, tell=told.append)}

    assert list(figures) == [
        *("offline.backfill", "offline.backfill.to_duckdb", "offline.backfill.to_polars", "offline.duckdb"),
        *("offline.polars", "offline.backfill.cpu", "offline.duckdb.cpu", "offline.polars.cpu", "offline.event"),
        *("offline.training_set.labels_2k", "offline.training_set.cpu"),
    ]
    assert figures["offline.backfill"].bar == 500_000
    ratio = figures["offline.backfill.to_polars"].ratio
    assert ratio == pytest.approx(figures["offline.backfill"].value / figures["offline.polars"].value)
    n_rows = next(line for line in told if line.endswith("rows are what duckdb and polars compute"))
    assert int(n_rows.split()[0].replace(",", "")) > 6_000


ROW = dict(zip(COLUMNS, ("u1", 3, "EARLY", 60_000, 2, 3.0, 1.5, 2.0, 1.0), strict=True))


@pytest.mark.parametrize("column", COLUMNS[4:])
def test_a_value_that_differs_is_no_figure(column: str) -> None:
    made = pl.DataFrame([ROW])
    offline.check_same(made, made, name="duckdb")
    with pytest.raises(WindowingError, match=f"{column} of the backfill is not what duckdb computes"):
        offline.check_same(made, made.with_columns(pl.col(column) + 1), name="duckdb")
    with pytest.raises(WindowingError, match=column):
        offline.check_same(made, made.with_columns(pl.lit(None, made[column].dtype).alias(column)), name="duckdb")


def test_a_row_that_one_of_them_has_not_is_no_figure() -> None:
    made = pl.DataFrame([ROW, {**ROW, "source_offset": 4}])
    with pytest.raises(WindowingError, match=r"the backfill has 2 rows, polars 1; without: .*'source_offset': 4"):
        offline.check_same(made, made.head(1), name="polars")
