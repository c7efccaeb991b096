"""``headrace bench live`` at a small size, against the Kafka that it starts for itself."""

import pytest

from jobs.bench import live


def test_each_round_is_checked_and_figures_stand_beside_the_ceiling_and_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_QUICK", live.Size(events=300_000, peer_events=300, rounds=1))
    told: list[str] = []

    figures = {figure.name: figure for figure in live.run(quick=True, tell=told.append)}

    assert list(figures) == [
        "live.ceiling",
        "live.stock_faust",
        "live.exactly_once",
        "live.exactly_once.cpu",
        "live.times_stock_faust",
    ]
    assert figures["live.exactly_once"].bar == 250_000
    assert figures["live.exactly_once"].compared_with == "live.ceiling"
    assert all(figure.value > 0 for figure in figures.values())
    assert told[-1].endswith("rows are what polars computes")
