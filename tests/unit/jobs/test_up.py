import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from infra.local.service import SERVICE_NAMES, ServiceAddresses
from infra.local.services import ServiceStatus
from jobs import up as up_module
from jobs.role import Role
from jobs.settings import Settings
from jobs.up import up


@dataclass
class FakeServices:
    running: set[str]
    ended: list[str] = field(default_factory=list)

    def up(self, which: Any, *, on_ready: Callable[[ServiceStatus], None]) -> ServiceAddresses:
        for name in which:
            took_ms = None if name in self.running else 10
            on_ready(ServiceStatus(name=name, state="running", address="a:1", took_ms=took_ms))
        return ServiceAddresses(kafka="a:1", redis="redis://a:1", triton="a:1")

    def down(self, which: Any = SERVICE_NAMES) -> None:
        self.ended += which


class FakeSupervisor:
    """Workers that run until Ctrl-C, which comes at once."""

    def __init__(self, *_: Any, ports: dict[Role, int], **__: Any) -> None:
        self.ports = ports
        made.append(self)

    def start(self, _: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def check(self) -> list[str]:
        return []

    def stop(self) -> None:
        pass


made: list[FakeSupervisor] = []


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> FakeServices:
    fake = FakeServices({"kafka"})
    made.clear()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADRACE_KAFKA", "a:1")
    monkeypatch.setattr(Settings, "local_services", lambda *_, **__: fake)
    monkeypatch.setattr(Settings, "address", lambda *_: "a:1")
    monkeypatch.setattr(up_module, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(up_module, "ensure_topics", lambda *_, **__: [])
    before = {caught: signal.getsignal(caught) for caught in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(up_module.signal, "signal", signal.signal)
    yield fake
    for caught, handler in before.items():
        signal.signal(caught, handler)


def test_services_that_ran_before_go_on_running(services: FakeServices) -> None:
    up()
    assert services.ended == ["redis", "triton"]


def test_services_that_all_ran_before_are_left_alone(services: FakeServices) -> None:
    services.running = set(SERVICE_NAMES)
    up()
    assert services.ended == []


def test_services_may_be_kept(services: FakeServices) -> None:
    up(keep_services=True)
    assert services.ended == []


def test_metrics_port_0_takes_free_ports(services: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "0")
    up()
    (supervisor,) = made
    assert len(set(supervisor.ports.values())) == len(Role)
    assert min(supervisor.ports.values()) > 1_024
