from collections.abc import Callable
from datetime import UTC, datetime
from io import StringIO
from typing import Any, cast

import pytest
from rich.console import Console

from jobs.audit import Check
from jobs.flights import demo as demo_module
from jobs.flights.demo import Demo, Plan
from jobs.role import Role
from jobs.scrape import Samples
from jobs.settings import Settings
from schemas.errors import ServiceError

DAY = datetime(2013, 1, 1, tzinfo=UTC)


class FakeSupervisor:
    def check(self) -> list[str]:
        return []


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Demo:
    """A demo whose workers answer no scrape."""
    monkeypatch.setattr(demo_module, "scrape", lambda _: Samples())
    monkeypatch.setattr(demo_module, "_REFRESH_S", 0.0)
    settings = Settings.from_environment(
        {"HEADRACE_HOME": str(tmp_path), "HEADRACE_KAFKA": "a:1", "HEADRACE_REDIS": "redis://a:1/0"}
    )
    plan = Plan(train_until=DAY, live_until=DAY, until=DAY, live_speed=1, late_share=0, invalid_share=0)
    supervisor: Any = FakeSupervisor()
    return Demo(settings, plan, supervisor=supervisor, ports={}, console=Console(file=StringIO()))


def test_a_role_is_done_once_its_committed_offsets_say_so_and_not_when_its_metrics_are_silent(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def is_caught_up(_: str, group: str, __: str) -> bool:
        asked.append(group)
        return asked.count(group) > 4

    monkeypatch.setattr(demo_module, "is_caught_up", is_caught_up)
    demo._wait_until_drained([Role.ONLINE, Role.FEATURES])
    features, online = (
        demo_module.consumer_groups(demo._application)[role][0] for role in (Role.FEATURES, Role.ONLINE)
    )
    assert asked.count(features) > 4
    # Only once nothing more comes onto their topics can the others be done.
    assert asked.index(online) > max(at for at, group in enumerate(asked) if group == features)


def test_workers_that_do_not_come_to_an_end_are_named(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_DRAIN_S", -1.0)
    monkeypatch.setattr(demo_module, "is_caught_up", lambda _, group, __: "features" in group)
    with pytest.raises(ServiceError, match="offline, online are not done"):
        demo._wait_until_drained([Role.OFFLINE, Role.ONLINE, Role.FEATURES])


def said(demo: Demo) -> str:
    file = demo._console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_what_takes_minutes_is_said_when_it_begins_even_where_there_is_no_terminal(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        assert "Training late_arrival" in said(demo)
        raise InterruptedError

    def audit(*_: object, tell: Callable[[str], object], **__: object) -> list[Check]:
        tell("a_view: reading a.topic")
        assert "a_view: reading a.topic\n" in said(demo)
        raise InterruptedError

    monkeypatch.setattr(demo_module, "train_late_arrival", train)
    monkeypatch.setattr(demo_module, "run_audit", audit)
    with pytest.raises(InterruptedError):
        demo._train()
    with pytest.raises(InterruptedError):
        demo._sum_up(cast(Any, None), live=cast(Any, None), scored_from={})
