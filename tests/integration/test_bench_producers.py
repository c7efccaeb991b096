"""``headrace bench producers`` at a small size, with the services and the server that it starts for itself."""

from collections.abc import Sequence

import pytest

from jobs.bench import producers
from schemas.errors import SinkError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"_ALONE": 20, "_TOGETHER": 320, "_BATCHES": 20, "_BATCH_EVENTS": 50, "_ROUNDS": 2, "_QUICK_ROUNDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(producers, name, value)


@pytest.mark.parametrize("quick", [True, False])
def test_waits_rates_and_processor_time_are_measured(quick: bool) -> None:
    told: list[str] = []
    figures = {figure.name: figure for figure in producers.run(quick=quick, tell=told.append)}
    assert told[-1] == ("round 1 of 1" if quick else "round 2 of 2")
    for name in ("one", "one_once", "many", "many_once", "batches"):
        waits = [figures[f"producers.{name}.{label}"].value for label in ("p50", "p99")]
        assert 0 < waits[0] <= waits[1]
    for name, other in (("many_once", "many"), ("batches", "direct")):
        figure = figures[f"producers.{name}"]
        assert figure.ratio == pytest.approx(figure.value / figures[f"producers.{other}"].value)
    assert all(figure.bar is None for figure in figures.values())


def test_no_time_counts_where_less_is_on_the_topic_than_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = producers._Rig._send

    async def overstated(self, name: str, bodies: Sequence[bytes], **options) -> None:  # type: ignore[no-untyped-def]
        await original(self, name, bodies, **options)
        self.n_sent += 1

    monkeypatch.setattr(producers._Rig, "_send", overstated)
    with pytest.raises(SinkError, match="events are on the topic, expected the"):
        producers.run(quick=True, tell=lambda _: None)


def test_no_time_counts_where_an_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers._Rig, "_events", lambda _, count: [b"{}"] * count)
    with pytest.raises(SinkError, match=r"an answer is HTTP/1.1 422 .*expected 200; no time counts"):
        producers.run(quick=True, tell=lambda _: None)
