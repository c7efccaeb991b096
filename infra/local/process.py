"""Child processes that are known by process id and start time, so that no other process is ever signalled."""

import contextlib
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

import infra
from schemas.errors import ServiceError

_START_TIME_TOLERANCE_S: Final = 0.05
_PROC: Final = Path("/proc")
_ERROR: Final = re.compile(r"\b(ERROR|FATAL|Error:|Exception|Caused by)|^[EF]\d{4} |^Traceback ")
_RAISED: Final = re.compile(r"^[\w.]*(Error|Exception|Timeout)\b")
_NO_ERROR: Final = re.compile(r"\b(INFO|DEBUG|TRACE)\b")
"""What mentions an exception all the same is about what a program goes on from."""
_LOG_ROTATE_BYTES: Final = 16 * 1024 * 1024
_children: Final[dict[int, subprocess.Popen[bytes]]] = {}
"""Children of this process by process id: kept so that an ended one is reaped and leaves no zombie."""
_exit_codes: Final[dict[int, int]] = {}
"""Exit codes of the children that have been reaped."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process and no later one that was given the same id.

    Attributes:
        pid: Process id.
        started_at_s: When the process started, as :func:`start_time_s` tells it.
    """

    pid: int
    started_at_s: float

    def process(self) -> psutil.Process | None:
        """Find the process, or None when it has ended (a zombie has) or its id belongs to another one by now."""
        try:
            process = psutil.Process(self.pid)
            if abs(start_time_s(self.pid) - self.started_at_s) > _START_TIME_TOLERANCE_S:
                return None
        except psutil.NoSuchProcess:
            return None
        return None if _has_ended(process) else process

    def is_alive(self) -> bool:
        """Tell whether this very process still runs."""
        return self.process() is not None

    def members(self) -> list[psutil.Process]:
        """List the process and all that it started: its descendants, and what it left behind in its session.

        A session id is not given away while a member lives, so a member found by it after the leader's end is ours.
        """
        leader = self.process()
        found: dict[int, psutil.Process] = {}
        if leader is not None:
            found[leader.pid] = leader
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update({child.pid: child for child in leader.children(recursive=True)})
        elif psutil.pid_exists(self.pid) and not self._is_zombie():
            return []
        if hasattr(os, "getsid"):
            for process in psutil.process_iter():
                with contextlib.suppress(OSError, psutil.Error):
                    is_member = os.getsid(process.pid) == self.pid
                    if is_member and start_time_s(process.pid) >= self.started_at_s - _START_TIME_TOLERANCE_S:
                        found.setdefault(process.pid, process)
        return [process for process in found.values() if not _has_ended(process)]

    def listens_on(self, ports: Collection[int]) -> bool:
        """Tell whether the process, together with those that it started, listens on all of ``ports``.

        Where the operating system does not say, the answer is yes.
        """
        listening: set[int] = set()
        for process in self.members():
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.AccessDenied:
                return True
            except psutil.Error:
                continue
            listening.update(c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr)
        return listening.issuperset(ports)

    def _is_zombie(self) -> bool:
        try:
            return abs(start_time_s(self.pid) - self.started_at_s) <= _START_TIME_TOLERANCE_S
        except psutil.NoSuchProcess:
            return True

    def end(self, *, grace_s: float) -> bool:
        """End the process and all that it started: SIGTERM, and SIGKILL for what is left after ``grace_s``.

        A stopped process is made to go on, so that it can end in order.

        Returns:
            True when anything had to be ended.

        Raises:
            ServiceError: A process survives SIGKILL for 10 s.
        """
        members = self.members()
        if not members:
            return False
        leader = [process for process in members if process.pid == self.pid]
        _signal(leader or members, signal.SIGTERM)
        if hasattr(signal, "SIGCONT"):
            _signal(leader or members, signal.SIGCONT)
        _wait_until_gone(leader or members, timeout_s=grace_s)
        left = self.members()
        if left and leader and not any(process.pid == self.pid for process in left):
            _signal(left, signal.SIGTERM)
            _wait_until_gone(left, timeout_s=1.0)
            left = self.members()
        _signal(left, getattr(signal, "SIGKILL", signal.SIGTERM))
        survivors = _wait_until_gone(left, timeout_s=10.0)
        if survivors:
            pids = ", ".join(str(process.pid) for process in survivors)
            msg = f"Process {pids} is still there 10 s after SIGKILL, expected it gone; look at it with `ps -fp {pids}`"
            raise ServiceError(msg)
        return True


def spawn(argv: Sequence[str], *, environment: Mapping[str, str], cwd: Path, log: Path) -> ProcessIdentity:
    """Start a child in a session of its own, so that Ctrl-C at the terminal does not reach it.

    Args:
        argv: Program and arguments.
        environment: The whole environment of the child.
        cwd: Its working directory.
        log: File that takes its output; appended to, after being moved to ``<log>.1`` when over 16 MiB.

    Raises:
        ServiceError: The program cannot be run.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > _LOG_ROTATE_BYTES:
        log.replace(log.with_name(log.name + ".1"))
    try:
        with log.open("ab") as output:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=dict(environment),
                start_new_session=True,
            )
    except OSError as exc:
        msg = f"{argv[0]} could not be run ({exc}), expected a program that this machine can execute"
        raise ServiceError(msg) from exc
    _children[child.pid] = child
    try:
        return ProcessIdentity(child.pid, start_time_s(child.pid))
    except psutil.NoSuchProcess:
        return ProcessIdentity(child.pid, 0.0)


def start_time_s(pid: int) -> float:
    """Tell when a process started: in seconds since boot on Linux, as clocks may step, since the epoch elsewhere.

    Raises:
        psutil.NoSuchProcess: There is none with that id.
    """
    try:
        fields_after_name = (
            (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        return int(fields_after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return psutil.Process(pid).create_time()


def project_path(environment: Mapping[str, str]) -> str:
    """Make a PYTHONPATH by which a child that runs elsewhere finds this project and this interpreter's packages."""
    project = str(Path(infra.__path__[0]).parent)
    packages = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return os.pathsep.join(filter(None, (project, *packages, environment.get("PYTHONPATH"))))


def exit_code(pid: int) -> int | None:
    """Give the exit code of a child of this process that has ended; None where that is not known."""
    child = _children.get(pid)
    return child.poll() if child is not None else _exit_codes.get(pid)


def read_lines(log: Path, *, since_bytes: int) -> list[str]:
    """Read the lines of a log that are not blank, from ``since_bytes`` on (from its start if it was rotated since)."""
    try:
        start = since_bytes if since_bytes <= log.stat().st_size else 0
        with log.open("rb") as lines:
            lines.seek(start)
            text = lines.read().decode("utf-8", errors="replace")
    except OSError as exc:
        return [f"(the log cannot be read: {exc})"]
    return [line for line in text.splitlines() if line.strip()]


def telling_line(lines: Sequence[str]) -> str:
    """Quote the last line of a log that reports an error, else its last line."""
    found = [line for line in lines if _is_error(line) or line.startswith("headrace: ")]
    errors = [line for line in found if not line.startswith("Traceback")]
    return (errors or list(lines) or ["(the log is empty)"])[-1].strip()[:300]


def telling_lines(lines: Sequence[str], *, count: int = 8) -> str:
    """Quote the last ``count`` lines of a log, and before them the last that report errors, as shutdowns are chatty."""
    tail_start = max(0, len(lines) - count)
    errors = [line for line in lines[:tail_start] if _is_error(line)][-count:]
    quoted = [*errors, "..."] if errors else []
    quoted += lines[tail_start:]
    return "\n".join(f"    {line[:300]}" for line in quoted) or "    (the log is empty)"


def _is_error(line: str) -> bool:
    return bool((_ERROR.search(line) or _RAISED.search(line)) and not _NO_ERROR.search(line))


def wait_until(condition: Callable[[], bool], *, timeout_s: float, poll_s: float = 0.05) -> bool:
    """Ask ``condition`` until it holds or ``timeout_s`` has passed; tell which."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(poll_s)
    return True


def _has_ended(process: psutil.Process) -> bool:
    """Tell whether a process has gone, with all its threads and open ports; a child of ours is reaped on the way.

    A zombie that is a child of ours may have threads that still end: it counts as gone when it can be reaped.
    """
    child = _children.get(process.pid)
    if child is not None:
        if child.poll() is None:
            return False
        _exit_codes[process.pid] = child.returncode
        _children.pop(process.pid, None)
        return True
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _wait_until_gone(processes: list[psutil.Process], *, timeout_s: float) -> list[psutil.Process]:
    wait_until(lambda: all(_has_ended(process) for process in processes), timeout_s=timeout_s, poll_s=0.02)
    return [process for process in processes if not _has_ended(process)]
