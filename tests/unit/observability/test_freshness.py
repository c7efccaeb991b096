import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry

from schemas.aggregation import count
from schemas.row import TIMESTAMP
from schemas.serving import Serving
from streams.observability.freshness import WINDOW_S, FreshnessObjectives
from streams.observability.metrics import Metrics
from tests.support.feature_rows import T0_US, make_view

FEATURES = {"n": count().over("5m")}
QUICK = make_view("quick", features=FEATURES, serving=Serving(freshness="150ms", freshness_share=0.9))
FREE = make_view("free", features=FEATURES)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.clock = Clock()
        self.objectives = FreshnessObjectives([QUICK, FREE], metrics=self.metrics, timer_s=self.clock)

    def write(self, *ages_ms: float | None, view: str = "quick") -> None:
        times: Sequence[Any] = [None if age is None else T0_US - int(age * 1_000) for age in ages_ms]
        column = pa.chunked_array([pa.array(times, TIMESTAMP)])
        self.objectives.written(view, broker_time=column, readable_time_us=T0_US)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def breached(self, stage: str = "write") -> float | None:
        return self.value("headrace_freshness_breached", view="quick", stage=stage)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_bound_itself_is_in_time_and_the_share_itself_is_enough(rig: Rig) -> None:
    rig.write(*[150.0] * 9, 150.001)
    assert rig.breached() == 0
    rig.write(151)
    assert rig.breached() == 1
    labels = {"view": "quick", "stage": "write"}
    assert rig.value("headrace_freshness_rows_total", **labels, within="true") == 9
    assert rig.value("headrace_freshness_rows_total", **labels, within="false") == 2
    assert rig.value("headrace_freshness_objective_seconds", view="quick") == 0.15


def test_a_breach_is_told_once_when_it_begins_and_once_when_it_ends(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig.write(500)
    rig.write(500)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "freshness of view quick at write: breached, 0.00 % of the rows of the last 60 s within 150ms" in caplog.text
    rig.write(*[1.0] * 30)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "met again, 93.75 %" in caplog.text


def test_rows_count_for_a_minute_and_without_rows_nothing_is_breached(rig: Rig) -> None:
    rig.write(500)
    rig.clock.now_s += WINDOW_S - 1
    assert rig.breached() == 1
    rig.clock.now_s += 1
    assert rig.breached() == 0
    rig.write(1)
    assert rig.breached() == 0


def test_what_is_not_known_and_what_has_no_objective_does_not_count(rig: Rig) -> None:
    rig.write(None)
    rig.write(500, view="free")
    assert rig.breached() == 0
    assert rig.value("headrace_freshness_rows_total", view="free", stage="write", within="false") is None


def test_rows_that_are_read_back_are_measured_and_those_that_are_not_are_in_time_for_nobody(rig: Rig) -> None:
    rig.objectives.read_back("quick", broker_time_us=T0_US - 100_000, read_time_us=T0_US, is_there=True)
    assert rig.breached("read") == 0
    rig.objectives.read_back("quick", broker_time_us=T0_US - 100_000, read_time_us=T0_US, is_there=False)
    assert rig.breached("read") == 1
    assert rig.value("headrace_read_back_failures_total", view="quick") == 1
    assert rig.value("headrace_read_freshness_seconds_count", view="quick") == 1
    rig.objectives.read_back("free", broker_time_us=T0_US - 100_000, read_time_us=T0_US, is_there=True)
    assert rig.value("headrace_read_freshness_seconds_sum", view="free") == pytest.approx(0.1)
    rig.objectives.read_back("free", broker_time_us=None, read_time_us=T0_US, is_there=True)
    assert rig.value("headrace_read_freshness_seconds_count", view="free") == 1
