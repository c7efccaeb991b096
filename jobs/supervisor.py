"""Workers as child processes: started, watched, started again when they fail, ended by PID."""

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.local.process import ProcessIdentity, exit_code, read_lines, spawn, telling_lines
from jobs.role import Role
from schemas.errors import ServiceError

_GRACE_S: Final = 15.0
_BACKOFF_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_AFTER_S: Final = 30.0


@dataclass
class _Child:
    role: Role
    process: ProcessIdentity
    log: Path
    log_start: int
    started_s: float
    failures: int = 0
    restart_s: float | None = None


class Supervisor:
    """Runs one worker of each role.

    Args:
        home: Directory below which the logs are.
        environment: Environment of the workers.
        ports: Port of each role's metrics.
        log_level: Their log level.
    """

    def __init__(
        self, home: Path, *, environment: Mapping[str, str], ports: Mapping[Role, int], log_level: str = "info"
    ) -> None:
        self._home = home
        self._environment = dict(environment)
        self._ports = dict(ports)
        self._log_level = log_level
        self._children: dict[Role, _Child] = {}

    def start(self, roles: Sequence[Role]) -> None:
        """Start a worker of each role."""
        for role in roles:
            self._children[role] = self._spawn(role, failures=0)

    def check(self) -> list[str]:
        """Start ended workers again, after growing pauses; returns at once.

        Returns:
            A line for each worker that has ended since the last check.

        Raises:
            ServiceError: A worker failed for a reason that a new start cannot mend (exit code 2), or again and again.
        """
        told = []
        for role, child in self._children.items():
            if child.restart_s is not None:
                if time.monotonic() >= child.restart_s:
                    self._children[role] = self._spawn(role, failures=child.failures)
                continue
            if child.process.is_alive():
                continue
            code = exit_code(child.process.pid)
            tail = telling_lines(read_lines(child.log, since_bytes=child.log_start))
            is_young = time.monotonic() - child.started_s < _HEALTHY_AFTER_S
            failures = child.failures + 1 if is_young else 1
            if code == 2 or failures > len(_BACKOFF_S):
                times = "once" if failures == 1 else f"{failures} times in a row"
                msg = f"worker {role} ended with exit code {code}, {times}; {child.log} ends with:\n{tail}"
                raise ServiceError(msg)
            pause_s = _BACKOFF_S[failures - 1]
            when = f"in {pause_s:.0f} s" if pause_s else "at once"
            told.append(f"worker {role} ended with exit code {code}, starting it again {when} (log {child.log})")
            child.failures, child.restart_s = failures, time.monotonic() + pause_s
            if not pause_s:
                self._children[role] = self._spawn(role, failures=failures)
        return told

    def process(self, role: Role) -> ProcessIdentity:
        """Tell which process is the worker of ``role``; one that has ended until it is started again."""
        return self._children[role].process

    def stop(self) -> None:
        """End the workers, scoring first: each drains and commits before it goes."""
        for role in (Role.SCORING, Role.OFFLINE, Role.ONLINE, Role.FEATURES):
            if (child := self._children.pop(role, None)) is not None:
                child.process.end(grace_s=_GRACE_S)

    def _spawn(self, role: Role, *, failures: int) -> _Child:
        log = self._home / "logs" / f"worker-{role}.log"
        argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", role, "--exit-with-parent"]
        # Not the default: a worker that somebody starts beside these has that.
        argv += ["--worker-id", f"{socket.gethostname()}-0"]
        argv += ["--metrics-port", str(self._ports[role]), "--log-level", self._log_level]
        log_start = log.stat().st_size if log.exists() else 0
        process = spawn(argv, environment=self._environment, cwd=Path.cwd(), log=log)
        return _Child(
            role=role,
            process=process,
            log=log,
            log_start=log_start,
            started_s=time.monotonic(),
            failures=failures,
        )
