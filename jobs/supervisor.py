"""Workers as child processes: started, watched, started again when they fail, ended by PID.

The local services that they use are watched too: a worker without its service fails for a reason of another's.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.local.process import ProcessIdentity, exit_code, read_lines, spawn, telling_line, telling_lines
from infra.local.services import LocalServices
from jobs.role import Role
from schemas.errors import ServiceError

_GRACE_S: Final = 15.0
_BACKOFF_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_AFTER_S: Final = 30.0
_WINDOW_S: Final = 600.0
_MOST_IN_WINDOW: Final = 10
"""Ends within the window after which a worker is given up, however long it runs each time."""
_MOST_SERVICE_ENDS: Final = 3
_TAIL_BYTES: Final = 16_384


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
        http_port: Port of the HTTP API of the serve role.
        log_level: Their log level.
        services: Local services to watch.
        cancelled: Once it is set, no service is waited for.
    """

    def __init__(
        self,
        home: Path,
        *,
        environment: Mapping[str, str],
        ports: Mapping[Role, int],
        http_port: int = 0,
        log_level: str = "info",
        services: LocalServices | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._home = home
        self._environment = dict(environment)
        self._ports = dict(ports)
        self._http_port = http_port
        self._log_level = log_level
        self._children: dict[Role, _Child] = {}
        self._services = services
        self._watched: list[str] = []
        self._cancelled = cancelled
        self._ends: defaultdict[str, list[float]] = defaultdict(list)

    def watch(self, names: Sequence[str], addresses: Mapping[str, str]) -> None:
        """Watch these services too from now on, and tell ``addresses`` to the workers that start from now on.

        Args:
            names: Names of services; those that are given are asked nothing.
            addresses: Environment variables.
        """
        self._watched += names
        self._environment.update(addresses)

    def start(self, roles: Sequence[Role]) -> None:
        """Start a worker of each role."""
        for role in roles:
            self._children[role] = self._spawn(role, failures=0)

    def check(self) -> list[str]:
        """Start ended services and workers again, workers after growing pauses that are not waited for.

        Returns:
            A line for each that has ended since the last check, with the reason.

        Raises:
            ServiceError: A worker failed for a reason that a new start cannot mend (exit code 2), or one failed again
                and again, or a service was ended by another command or does not start again.
        """
        told = self._check_services()
        for role, child in self._children.items():
            if child.restart_s is not None:
                if time.monotonic() >= child.restart_s:
                    self._children[role] = self._spawn(role, failures=child.failures)
                continue
            if child.process.is_alive():
                continue
            code = exit_code(child.process.pid)
            lines = read_lines(child.log, since_bytes=child.log_start)
            is_young = time.monotonic() - child.started_s < _HEALTHY_AFTER_S
            failures = child.failures + 1 if is_young else 1
            recent = self._count_end(f"worker {role}")
            if code == 2 or failures > len(_BACKOFF_S) or recent >= _MOST_IN_WINDOW:
                times = f"{failures} times in a row" if failures > 1 else "once"
                if recent >= _MOST_IN_WINDOW:
                    times = f"{recent} times in {_WINDOW_S / 60:.0f} minutes"
                tail = telling_lines(lines)
                msg = f"worker {role} ended with exit code {code}, {times}; {child.log} ends with:\n{tail}"
                raise ServiceError(msg)
            pause_s = _BACKOFF_S[failures - 1]
            when = f"in {pause_s:.0f} s" if pause_s else "at once"
            told.append(f"worker {role} {_end_told(code, lines)}, starting it again {when}: {child.log}")
            child.failures, child.restart_s = failures, time.monotonic() + pause_s
            if not pause_s:
                self._children[role] = self._spawn(role, failures=failures)
        return told

    @property
    def roles(self) -> list[Role]:
        """The roles that have been started."""
        return list(self._children)

    def process(self, role: Role) -> ProcessIdentity:
        """Tell which process is the worker of ``role``; one that has ended until it is started again."""
        return self._children[role].process

    def stop(self) -> None:
        """End the workers, those that read what others write first: each drains and commits before it goes."""
        for role in (Role.SERVE, Role.SCORING, Role.OFFLINE, Role.ONLINE, Role.FEATURES):
            if (child := self._children.pop(role, None)) is not None:
                child.process.end(grace_s=_GRACE_S)

    def _check_services(self) -> list[str]:
        if self._services is None:
            return []
        told = []
        for name, record in self._services.ended(self._watched).items():
            if record is None:
                msg = f"{name} was ended by another command, such as `headrace services down`; run this one again"
                raise ServiceError(msg)
            log = Path(record.log)
            size = log.stat().st_size if log.exists() else 0
            code = exit_code(record.pid)
            if code is not None and code < 0:
                # Its log does not know.
                gone = f"{name} (process {record.pid}) was killed by {signal.Signals(-code).name}"
            else:
                reason = telling_line(read_lines(log, since_bytes=max(0, size - _TAIL_BYTES)))
                gone = f"{name} (process {record.pid}) has ended, its log last with: {reason}"
            if self._count_end(name) > _MOST_SERVICE_ENDS:
                msg = f"{gone}, {_MOST_SERVICE_ENDS + 1} times in {_WINDOW_S / 60:.0f} minutes; see {record.log}"
                raise ServiceError(msg)
            status = self._services.start(name, cancelled=self._cancelled)
            told.append(f"{gone}; started again at {status.address} (log {log})")
        return told

    def _count_end(self, name: str) -> int:
        now = time.monotonic()
        self._ends[name] = [at for at in self._ends[name] if now - at <= _WINDOW_S] + [now]
        return len(self._ends[name])

    def _command(self, role: Role) -> list[str]:
        argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", role, "--parent", str(os.getpid())]
        # Not the default: a worker that somebody starts beside these has that.
        argv += ["--worker-id", f"{socket.gethostname()}-0"]
        argv += ["--metrics-port", str(self._ports[role]), "--log-level", self._log_level]
        return [*argv, "--http-port", str(self._http_port)] if role is Role.SERVE else argv

    def _spawn(self, role: Role, *, failures: int) -> _Child:
        log = self._home / "logs" / f"worker-{role}.log"
        argv = self._command(role)
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


def _end_told(code: int | None, lines: Sequence[str]) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} ({telling_line(lines)})"
