"""``headrace bench live`` and ``soak`` at a small size, against the services that they start for themselves."""

import pytest

from jobs.bench import latency, live, soak


def test_each_round_is_checked_and_figures_stand_beside_the_ceiling_and_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_QUICK", live.Size(events=200_000, peer_events=300, rounds=1, latency_s=4.0))
    monkeypatch.setattr(latency, "EVENTS_PER_S", 1_000)
    monkeypatch.setattr(latency, "KEYS", 1_000)
    told: list[str] = []

    figures = {figure.name: figure for figure in live.run(quick=True, tell=told.append)}

    assert list(figures) == [
        "live.ceiling",
        "live.stock_faust",
        "live.exactly_once",
        "live.exactly_once.cpu",
        "live.at_least_once",
        "live.at_least_once.cpu",
        "live.times_at_least_once",
        "live.times_stock_faust",
        "live.event_to_redis.p99",
        "live.event_to_score.p99",
    ]
    assert figures["live.exactly_once"].bar == 250_000
    assert figures["live.exactly_once"].compared_with == "live.ceiling"
    assert all(figure.value > 0 for figure in figures.values())
    assert any(line.endswith("rows are what polars computes") for line in told)


def test_a_soak_samples_the_worker_and_checks_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_QUICK_SECONDS", 6.0)
    monkeypatch.setattr(soak, "_SAMPLE_S", 0.5)
    told: list[str] = []

    figures = {figure.name: figure for figure in soak.run(quick=True, tell=told.append)}

    assert list(figures) == ["soak.events", "soak.duration", "soak.memory", "soak.memory_growth", "soak.lag.p99"]
    assert figures["soak.memory"].value > 50
    assert told[-1].endswith("rows are what polars computes")
