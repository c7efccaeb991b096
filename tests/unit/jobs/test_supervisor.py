import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

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
        assert "worker online ended with exit code 1, starting it again" in line
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
    for _ in range(8):
        world.now_s += 31
        world.die(world.started[-1], code=-9)
        assert len(supervisor.check()) == 1
        assert world.started[-1].alive
    assert len(world.started) == 9


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
    assert roles == ["scoring", "offline", "online", "features"]
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
