"""``headrace bench online`` at a small size, against the Valkey that it starts for itself."""

import pytest

from jobs.bench import online
from schemas.errors import SinkError
from streams.sinks.online import OnlineWriter


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_ROWS": 300,
        "_HSET_ROWS": 100,
        "_READS": 20,
        "_MANY": 5,
        "_ROUNDS": 2,
        "_QUICK_ROUNDS": 1,
    }.items():
        monkeypatch.setattr(online, name, value)


@pytest.mark.parametrize("quick", [True, False])
def test_writes_reads_and_memory_are_measured_with_their_bars(quick: bool) -> None:
    told: list[str] = []
    figures = {figure.name: figure for figure in online.run(quick=quick, tell=told.append)}
    assert told[-1] == "admission"
    assert told[-2] == ("round 1 of 1" if quick else "round 2 of 2")
    assert {name: figure.bar for name, figure in figures.items() if figure.bar is not None} == {
        "online.write.5_features": 100_000,
        "online.write_by_hset.5_features": 1.5,
        "online.write_by_hset.50_features": 1.5,
        "online.read_1.p99": 3.0,
        "online.read_1_sync.p99": 3.0,
        "online.read_100.round_trips": 1,
        "online.admission": 0.15,
    }
    assert figures["online.read_100.round_trips"].value == 1
    # Processor time of so few rows may be less than a tick of its clock.
    assert all(figure.value >= 0 for figure in figures.values())
    assert all(figure.value > 0 for figure in figures.values() if figure.unit != "us of cpu/row")
    for features in ("5", "50"):
        hash_bytes = figures[f"online.memory_of_hash.{features}_features"].value
        assert hash_bytes > 80
        assert figures[f"online.memory.{features}_features"].ratio == pytest.approx(
            figures[f"online.memory.{features}_features"].value / hash_bytes
        )


def test_no_time_counts_where_less_is_stored_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OnlineWriter.write

    async def forgetful(self, rows, *, view):  # type: ignore[no-untyped-def]
        result = await original(self, rows.slice(1), view=view)
        return type(result)(written=result.written + 1, superseded=result.superseded)

    monkeypatch.setattr(OnlineWriter, "write", forgetful)
    with pytest.raises(SinkError, match="count for nothing"):
        online.run(quick=True, tell=lambda _: None)


def test_no_time_counts_where_other_values_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OnlineWriter.write

    async def wrong(self, rows, *, view):  # type: ignore[no-untyped-def]
        at = rows.column_names.index("sum_5m")
        doubled = rows.set_column(at, rows.schema.field(at), [[value.as_py() * 2 for value in rows["sum_5m"]]])
        return await original(self, doubled, view=view)

    monkeypatch.setattr(OnlineWriter, "write", wrong)
    with pytest.raises(SinkError, match="what was read is not what was written; its times count for nothing"):
        online.run(quick=True, tell=lambda _: None)
