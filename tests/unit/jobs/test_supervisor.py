import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.local.services import ServiceStatus
from infra.local.state import ServiceRecord
from jobs import supervisor as supervisor_module
from jobs.role import Role
from jobs.supervisor import Supervisor
from schemas.errors import ServiceError


@dataclass
class FakeProcess:
    pid: int
    argv: Sequence[str]
    environment: dict[str, str]
    alive: bool = True
    ended: list["FakeProcess"] = field(default_factory=list)

    def is_alive(self) -> bool:
        return self.alive

    def end(self, *, grace_s: float) -> None:
        assert grace_s > 0
        self.alive = False
        self.ended.append(self)


@dataclass
class World:
    """Processes and a clock."""

    now_s: float = 100.0
    started: list[FakeProcess] = field(default_factory=list)
    ended: list[FakeProcess] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)

    def spawn(self, argv: Sequence[str], *, environment: dict[str, str], cwd: Path, log: Path) -> FakeProcess:
        assert cwd == Path.cwd()
        assert log.name == f"worker-{argv[argv.index('--role') + 1]}.log"
        self.started.append(FakeProcess(len(self.started), argv, environment, ended=self.ended))
        return self.started[-1]

    def die(self, process: FakeProcess, *, code: int) -> None:
        process.alive = False
        self.exit_codes[process.pid] = code


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(supervisor_module, "spawn", made.spawn)
    monkeypatch.setattr(supervisor_module, "exit_code", made.exit_codes.get)
    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: made.now_s)
    return made


@pytest.fixture
def supervisor(world: World, tmp_path: Path) -> Supervisor:
    ports = {role: 9_000 + number for number, role in enumerate(Role)}
    return Supervisor(tmp_path, environment={"A": "1"}, ports=ports, log_level="warning")


def test_each_role_has_a_worker_with_its_port_and_environment(world: World, supervisor: Supervisor) -> None:
    supervisor.start(list(Role))
    for number, (role, process) in enumerate(zip(Role, world.started, strict=True)):
        command = " ".join(process.argv)
        assert f"-m jobs.cli worker --role {role}" in command
        assert f"--metrics-port {9_000 + number}" in command
        assert f"--parent {os.getpid()}" in command
        assert "--log-level warning" in command
        assert f"--worker-id {socket.gethostname()}-0" in command
        assert process.environment == {"A": "1"}
        assert supervisor.process(role) is process  # type: ignore[comparison-overlap]  # a fake
    assert supervisor.check() == []


def test_a_worker_that_fails_is_started_again_with_growing_pauses(world: World, supervisor: Supervisor) -> None:
    supervisor.start([Role.ONLINE])
    for number, pause_s in enumerate((0, 1, 2, 5, 10), start=1):
        world.die(world.started[-1], code=1)
        (line,) = supervisor.check()
        assert re.match(r"worker online ended with exit code 1 \(.*\), starting it again", line)
        if pause_s:
            # Nobody is kept waiting meanwhile: who watches the workers must see a signal at once.
            world.now_s += pause_s - 0.1
            assert supervisor.check() == []
            assert len(world.started) == number
            world.now_s += 0.1
            assert supervisor.check() == []
        assert len(world.started) == number + 1
    world.die(world.started[-1], code=1)
    with pytest.raises(ServiceError, match="6 times in a row"):
        supervisor.check()


def test_a_worker_that_ran_for_long_starts_again_at_once(world: World, supervisor: Supervisor) -> None:
    supervisor.start([Role.ONLINE])
    for _ in range(20):
        world.now_s += 90
        world.die(world.started[-1], code=-9)
        (line,) = supervisor.check()
        assert line.startswith("worker online was killed by SIGKILL, starting it again at once")
        assert world.started[-1].alive
    assert len(world.started) == 21


def test_a_worker_whose_fault_takes_long_to_show_is_given_up_in_the_end(world: World, supervisor: Supervisor) -> None:
    supervisor.start([Role.ONLINE])
    for _ in range(9):
        world.now_s += 31
        world.die(world.started[-1], code=1)
        assert len(supervisor.check()) == 1
    world.now_s += 31
    world.die(world.started[-1], code=1)
    with pytest.raises(ServiceError, match="10 times in 10 minutes"):
        supervisor.check()


def test_a_restart_is_told_with_its_reason(world: World, supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start([Role.ONLINE])
    log = tmp_path / "logs" / "worker-online.log"
    log.parent.mkdir()
    log.write_text(
        "INFO all is well\nTraceback (most recent call last):\n  File x\nredis.ConnectionError: no Redis\nINFO ending\n"
    )
    world.die(world.started[-1], code=1)
    (line,) = supervisor.check()
    assert line == (
        f"worker online ended with exit code 1 (redis.ConnectionError: no Redis), starting it again at once: {log}"
    )


def test_a_worker_whose_settings_are_wrong_is_not_started_again(
    world: World, supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start([Role.SCORING])
    log = tmp_path / "logs" / "worker-scoring.log"
    log.parent.mkdir()
    log.write_text("headrace: the model is missing, train it first\n")
    world.die(world.started[0], code=2)
    with pytest.raises(ServiceError, match="exit code 2, once") as raised:
        supervisor.check()
    assert "the model is missing, train it first" in str(raised.value)
    assert len(world.started) == 1


def test_what_an_earlier_run_logged_is_not_quoted(world: World, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "worker-online.log"
    log.parent.mkdir()
    log.write_text("ERROR of yesterday\n")
    supervisor = Supervisor(tmp_path, environment={}, ports=dict.fromkeys(Role, 0))
    supervisor.start([Role.ONLINE])
    with log.open("a") as lines:
        lines.write("ERROR of today\n")
    world.die(world.started[0], code=2)
    with pytest.raises(ServiceError) as raised:
        supervisor.check()
    assert "today" in str(raised.value)
    assert "yesterday" not in str(raised.value)


def test_workers_end_with_the_last_of_the_path_first(world: World, supervisor: Supervisor) -> None:
    supervisor.start(list(Role))
    supervisor.stop()
    roles = [process.argv[process.argv.index("--role") + 1] for process in world.ended]
    assert roles == ["serve", "scoring", "offline", "online", "features"]
    assert supervisor.check() == []
    supervisor.stop()


def test_a_worker_that_waits_for_its_start_is_not_started_once_all_is_stopped(
    world: World, supervisor: Supervisor
) -> None:
    supervisor.start([Role.ONLINE])
    for _ in range(2):
        world.die(world.started[-1], code=1)
        supervisor.check()
    supervisor.stop()
    world.now_s += 60
    assert supervisor.check() == []
    assert len(world.started) == 2


def test_one_workers_end_leaves_the_others_alone(world: World, supervisor: Supervisor) -> None:
    supervisor.start(list(Role))
    before: list[Any] = [supervisor.process(role) for role in (Role.FEATURES, Role.OFFLINE, Role.SCORING)]
    world.die(world.started[1], code=1)
    supervisor.check()
    assert [supervisor.process(role) for role in (Role.FEATURES, Role.OFFLINE, Role.SCORING)] == before


@dataclass
class FakeServices:
    """Local services of which some have ended."""

    log: Path
    gone: dict[str, ServiceRecord | None] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)

    def ended(self, which: list[str]) -> dict[str, ServiceRecord | None]:
        self.asked.append(list(which))
        return dict(self.gone)

    def die(self, name: str) -> None:
        self.gone[name] = ServiceRecord(7, 0.0, "a:1", {}, "", log=str(self.log))

    def start(self, name: str, *, cancelled: threading.Event) -> ServiceStatus:
        assert not cancelled.is_set()
        del self.gone[name]
        self.started.append(name)
        return ServiceStatus(name, "running", "a:1")


@pytest.fixture
def services(tmp_path: Path) -> FakeServices:
    (tmp_path / "kafka.log").write_text("INFO started\nFATAL out of disk\n")
    return FakeServices(tmp_path / "kafka.log")


@pytest.fixture
def watching(world: World, services: Any, tmp_path: Path) -> Supervisor:
    assert not world.started
    made = Supervisor(
        tmp_path, environment={}, ports=dict.fromkeys(Role, 0), services=services, cancelled=threading.Event()
    )
    made.watch(["kafka"], {"HEADRACE_KAFKA": "a:1"})
    return made


def test_a_service_that_dies_is_told_by_name_and_started_again(
    watching: Supervisor, services: FakeServices, tmp_path: Path
) -> None:
    assert watching.check() == []
    services.die("kafka")
    (line,) = watching.check()
    assert line == (
        "kafka (process 7) has ended, its log last with: FATAL out of disk; started again at a:1 "
        f"(log {tmp_path / 'kafka.log'})"
    )
    assert services.started == ["kafka"]
    assert watching.check() == []


def test_a_service_that_dies_again_and_again_ends_the_run(watching: Supervisor, services: FakeServices) -> None:
    for _ in range(3):
        services.die("kafka")
        watching.check()
    services.die("kafka")
    with pytest.raises(ServiceError, match=r"kafka .* FATAL out of disk, 4 times in 10 minutes"):
        watching.check()


def test_a_service_that_was_killed_is_said_to_be_for_its_log_does_not_know(
    world: World, watching: Supervisor, services: FakeServices
) -> None:
    services.die("kafka")
    world.exit_codes[7] = -9
    (line,) = watching.check()
    assert line.startswith("kafka (process 7) was killed by SIGKILL; started again at a:1")


def test_a_service_that_another_command_ended_ends_the_run(watching: Supervisor, services: FakeServices) -> None:
    services.gone["kafka"] = None
    with pytest.raises(ServiceError, match="kafka was ended by another command"):
        watching.check()
    assert services.started == []


def test_services_that_are_watched_later_are_asked_too_and_their_addresses_told(
    world: World, watching: Supervisor, services: FakeServices
) -> None:
    watching.watch(["triton"], {"HEADRACE_TRITON": "b:1"})
    watching.check()
    watching.start([Role.SCORING])
    assert services.asked == [["kafka", "triton"]]
    assert world.started[0].environment == {"HEADRACE_KAFKA": "a:1", "HEADRACE_TRITON": "b:1"}
