import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.local.service import ServiceAddresses
from infra.local.services import ServiceStatus
from infra.local.state import claimed
from jobs import up as up_module
from jobs.role import Role
from jobs.settings import Settings
from jobs.up import up
from schemas.errors import ConfigError, ServiceError

SHIPPED_MODELS = Path(__file__).parents[3] / "model_repository"


@dataclass
class FakeServices:
    asked: list[list[str]] = field(default_factory=list)
    guarded_by: list[bool] = field(default_factory=list)
    on_up: Callable[[threading.Event], None] = lambda cancelled: None

    def up(
        self, which: list[str], *, on_ready: Callable[[ServiceStatus], None], cancelled: threading.Event
    ) -> ServiceAddresses:
        self.asked.append(list(which))
        self.on_up(cancelled)
        for name in which:
            on_ready(ServiceStatus(name=name, state="running", address="a:1"))
        return ServiceAddresses(kafka="a:1", redis="redis://a:1", triton="a:1" if "triton" in which else None)

    @contextlib.contextmanager
    def guarded(self, *, only_started: bool) -> Iterator[None]:
        self.guarded_by.append(only_started)
        yield


@dataclass
class FakeSupervisor:
    """Workers; ``on_check`` says what happens meanwhile, by default Ctrl-C at once."""

    ports: dict[Role, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    roles: list[Role] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)
    on_check: Callable[[], None] = lambda: signal.raise_signal(signal.SIGINT)
    stopped: int = 0

    def make(self, _: Path, *, ports: dict[Role, int], environment: dict[str, str], **__: Any) -> "FakeSupervisor":
        self.ports, self.environment = ports, dict(environment)
        return self

    def watch(self, names: list[str], addresses: dict[str, str]) -> None:
        self.watched += names
        self.environment.update(addresses)

    def start(self, roles: list[Role]) -> None:
        self.roles += roles

    def check(self) -> list[str]:
        self.on_check()
        return []

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> FakeSupervisor:
    fake = FakeSupervisor()
    monkeypatch.setattr(up_module, "Supervisor", fake.make)
    monkeypatch.setattr(up_module, "_CHECK_S", 0.0)
    return fake


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, supervisor: FakeSupervisor) -> FakeServices:
    assert not supervisor.roles
    fake = FakeServices()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADRACE_MODEL_REPOSITORY", str(SHIPPED_MODELS))
    monkeypatch.setattr(Settings, "local_services", lambda *_, **__: fake)
    monkeypatch.setattr(up_module, "ensure_topics", lambda *_, **__: [])
    return fake


def test_it_guards_the_services_that_it_starts_and_no_others(services: FakeServices) -> None:
    up()
    assert services.guarded_by == [True]


def test_services_may_be_kept(services: FakeServices) -> None:
    up(keep_services=True)
    assert services.guarded_by == []


def test_all_roles_run_and_the_services_are_watched(services: FakeServices, supervisor: FakeSupervisor) -> None:
    up()
    assert services.asked == [["kafka", "redis", "triton"]]
    assert supervisor.roles == list(Role)
    assert supervisor.watched == ["kafka", "redis", "triton"]
    assert supervisor.environment["HEADRACE_KAFKA"] == "a:1"
    assert supervisor.stopped == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_in_good_order_on_every_signal_that_asks_for_the_end(
    services: FakeServices, supervisor: FakeSupervisor, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    supervisor.on_check = lambda: signal.raise_signal(number)
    up()
    assert supervisor.stopped == 1
    assert services.guarded_by == [True]
    assert signal.getsignal(number) is before


def test_a_hangup_that_is_ignored_stays_ignored(services: FakeServices, supervisor: FakeSupervisor) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    found: list[Any] = []

    def look() -> None:
        found.append(signal.getsignal(signal.SIGHUP))
        signal.raise_signal(signal.SIGINT)

    supervisor.on_check = look
    try:
        up()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert services.asked
    assert found == [signal.SIG_IGN]


def test_an_interrupt_is_heard_also_in_the_background_of_a_shell_which_ignores_it(
    services: FakeServices, supervisor: FakeSupervisor
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        up()
    finally:
        signal.signal(signal.SIGINT, before)
    assert services.asked
    assert supervisor.stopped == 1


def test_ctrl_c_while_services_start_starts_nothing_more(services: FakeServices, supervisor: FakeSupervisor) -> None:
    def interrupted(cancelled: threading.Event) -> None:
        signal.raise_signal(signal.SIGINT)
        assert cancelled.is_set()
        msg = "Kafka was interrupted while starting"
        raise ServiceError(msg)

    services.on_up = interrupted
    up()
    assert supervisor.roles == []


def test_ctrl_c_while_the_last_service_gets_ready_starts_no_worker(
    services: FakeServices, supervisor: FakeSupervisor
) -> None:
    services.on_up = lambda _: signal.raise_signal(signal.SIGINT)
    up()
    assert supervisor.roles == []


def test_a_service_that_does_not_start_is_told(services: FakeServices) -> None:
    def fail(_: threading.Event) -> None:
        msg = "Kafka ended while starting"
        raise ServiceError(msg)

    services.on_up = fail
    with pytest.raises(ServiceError, match="ended while starting"):
        up()


def test_a_second_run_in_the_same_home_is_refused(services: FakeServices, tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "home", by="demo"),
        pytest.raises(ConfigError, match=rf"`headrace demo` already runs here \(pid {os.getpid()}\)"),
    ):
        up()
    assert services.asked == []
    assert services.guarded_by == []
    up()
    assert services.asked


@pytest.mark.parametrize("port", ["0", "9101"])
def test_metrics_ports_are_free_ones_and_told(
    services: FakeServices,
    supervisor: FakeSupervisor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    port: str,
) -> None:
    taken = lambda wanted: {role: 20_000 + number for number, role in enumerate(wanted)}  # noqa: E731 - one line
    monkeypatch.setenv("HEADRACE_METRICS_PORT", port)
    monkeypatch.setattr(up_module, "choose_ports", taken)
    up()
    assert services.asked
    assert supervisor.ports == {role: 20_000 + number for number, role in enumerate(Role)}
    assert "worker scoring: metrics on http://127.0.0.1:20003/metrics" in capsys.readouterr().out


def test_without_a_model_the_other_roles_run_and_scoring_starts_once_it_is_trained(
    services: FakeServices,
    supervisor: FakeSupervisor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    repository = tmp_path / "models"
    monkeypatch.setenv("HEADRACE_MODEL_REPOSITORY", str(repository))
    checks: list[list[Role]] = []

    def train() -> None:
        checks.append(list(supervisor.roles))
        if len(checks) == 2:
            assert not repository.exists()
            shutil.copytree(SHIPPED_MODELS, repository)
        if len(checks) == 3:
            signal.raise_signal(signal.SIGINT)

    supervisor.on_check = train
    up()
    without = [role for role in Role if role is not Role.SCORING]
    assert checks == [without, without, [*without, Role.SCORING]]
    assert services.asked == [["kafka", "redis"], ["triton"]]
    assert supervisor.environment["HEADRACE_TRITON"] == "a:1"
    output = capsys.readouterr().out
    assert "scoring: waits for `headrace train`, there is no model late_arrival in" in output
    assert "Model late_arrival is trained: scoring starts" in output


def test_a_triton_that_is_given_is_asked_although_the_model_is_not_trained(
    services: FakeServices, supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_MODEL_REPOSITORY", str(tmp_path / "models"))
    monkeypatch.setenv("HEADRACE_TRITON", "b:1")
    up()
    assert services.asked == [["kafka", "redis", "triton"]]
    assert Role.SCORING not in supervisor.roles


def test_a_model_that_is_another_than_its_card_says_is_refused_before_anything_starts(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    shutil.copytree(SHIPPED_MODELS, repository)
    (repository / "late_arrival" / "1" / "model.onnx").write_bytes(b"another")
    monkeypatch.setenv("HEADRACE_MODEL_REPOSITORY", str(repository))
    with pytest.raises(ConfigError, match="SHA-256"):
        up()
    assert services.asked == []


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("HEADRACE_HOME", "{file}", "cannot be written to"),
        ("HEADRACE_HOME", "{file}/below", "cannot be written to"),
        ("HEADRACE_DELTA", "{file}", "cannot be written to"),
        ("HEADRACE_LINEAGE", "{file}/events.ndjson", "cannot be written to"),
        ("HEADRACE_MODEL_REPOSITORY", "{file}", "is a file, expected a directory of models"),
        ("HEADRACE_METRICS_ADDRESS", "no.such.host.invalid", "nothing can listen"),
        ("HEADRACE_METRICS_ADDRESS", "192.0.2.1", "nothing can listen"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name_before_anything_starts(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, name: str, value: str, fault: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(name, value.format(file=tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"^{name} is '.*{fault}"):
        up()
    assert services.asked == []


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "localhost"])  # noqa: S104 - asked, not served
def test_an_address_of_this_machine_takes_metrics(
    services: FakeServices, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HEADRACE_METRICS_ADDRESS", address)
    up()
    assert services.asked
