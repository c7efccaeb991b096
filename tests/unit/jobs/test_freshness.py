"""What `headrace freshness` makes of rows that are not readable."""

import time
from typing import Any

import pytest

from jobs import freshness
from jobs.scrape import Samples, scrape
from schemas.serving import Serving
from streams import Entity, FeatureView, count
from streams.sinks.online import OnlineValue, Status
from tests.support.builders import make_source

VIEW = FeatureView(
    "seen",
    version=1,
    entity=Entity("key", key="key"),
    source=make_source(),
    slide="1m",
    serving=Serving(freshness="10s"),
    features={"n_1m": count().over("1m")},
)
EMPTY: Samples = scrape([])


class Missing:
    """A store that has no row."""

    async def read(self, view: FeatureView, entities: Any, *, now_us: int) -> list[OnlineValue]:
        named: Any = {"view": view.name, "version": view.version, "definition_hash": view.definition_hash}
        return [OnlineValue(**named, entity=key, features={}, status=Status.MISSING) for key in entities]


def row(*, broker_time: int | None, computed_time: int) -> dict[str, Any]:
    order = {"window_end": 60_000_000, "pane_index": 0, "source_offset": 1}
    return {"key": "a", "broker_time": broker_time, "computed_time": computed_time, **order}


@pytest.mark.parametrize(
    ("broker_age_s", "computed_age_s", "is_breached"),
    [
        (1, 1, False),
        (20, 1, True),
        # No event made it: it has waited since it was computed.
        (None, 1, False),
        (None, 20, True),
    ],
)
async def test_an_unreadable_row_waits_since_its_event_came_or_since_it_was_computed(
    monkeypatch: pytest.MonkeyPatch, broker_age_s: int | None, computed_age_s: int, is_breached: bool
) -> None:
    now_us = 1_800_000_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: now_us * 1_000)
    came_us = None if broker_age_s is None else now_us - broker_age_s * 1_000_000
    found = [row(broker_time=came_us, computed_time=now_us - computed_age_s * 1_000_000)]
    monkeypatch.setattr(freshness, "_newest_rows", lambda view, **_: found)
    looked = await freshness._look(VIEW, Missing(), brokers="", rows=1)  # type: ignore[arg-type]
    report = freshness._judge(VIEW, looked, EMPTY)
    assert (report.checked_rows, report.unreadable_rows) == (1, 1)
    assert report.oldest_unreadable_ms == 1_000 * (computed_age_s if broker_age_s is None else broker_age_s)
    assert report.breaches == (("now",) if is_breached else ())
