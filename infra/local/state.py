"""What runs where: ``<home>/services.json``, written whole and atomically, guarded by a lock file."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Final, get_origin, get_type_hints

import psutil

from infra.local.process import ProcessIdentity
from schemas.errors import ConfigError, ServiceError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

STATE_FORMAT: Final = 1
RUN_LOCK: Final = "run.lock"
"""File of a home directory that is locked while a run has it for itself."""


@dataclass(frozen=True)
class ServiceRecord:
    """One service that Headrace started.

    Attributes:
        pid: Process id of the service.
        started_at_s: Start time of that process, to tell it from a later one with the same id.
        address: What clients connect to.
        ports: Port by role.
        version: Program and version, for people.
        log: Log file.
        fingerprint: What the service was started with; a service with another one is started anew.
        is_ready: Whether it has been healthy once.
        started_by: Token of the run that started it, so that this run ends what it started and nothing else.
    """

    pid: int
    started_at_s: float
    address: str
    ports: dict[str, int]
    version: str
    log: str
    fingerprint: str = ""
    is_ready: bool = False
    started_by: str = ""

    @property
    def identity(self) -> ProcessIdentity:
        """The process of the service."""
        return ProcessIdentity(self.pid, self.started_at_s)


def state_path(home: Path) -> Path:
    """Name the state file of a home directory."""
    return home / "services.json"


def read_state(home: Path) -> dict[str, ServiceRecord]:
    """Read the record of each service, ``{}`` when there is none.

    Raises:
        ServiceError: The file is not one that this version writes, or cannot be read.
    """
    path = state_path(home)
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        if content["format"] != STATE_FORMAT:
            msg = (
                f"{path} has format {content['format']!r}, expected {STATE_FORMAT}; "
                "end its services with the version of Headrace that wrote it"
            )
            raise ServiceError(msg)
        return {name: _record(record) for name, record in content["services"].items()}
    except FileNotFoundError:
        return {}
    except OSError as exc:
        msg = (
            f"{home} cannot be used as home of the services ({exc}), expected a directory of your own; set "
            "HEADRACE_HOME to one"
        )
        raise ServiceError(msg) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        msg = (
            f"{path} cannot be read ({type(exc).__name__}: {exc}), expected the JSON that `headrace services up` "
            f"writes; {_left_running(home)}, then delete it"
        )
        raise ServiceError(msg) from exc


def _record(content: dict[str, Any]) -> ServiceRecord:
    record = ServiceRecord(**content)
    hints = get_type_hints(ServiceRecord)
    for name in (field.name for field in fields(record)):
        value, kind = getattr(record, name), get_origin(hints[name]) or hints[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            msg = f"`{name}` is {value!r}, which is no {kind.__name__}"
            raise TypeError(msg)
    if record.pid <= 0 or not all(isinstance(port, int) for port in record.ports.values()):
        msg = f"process {record.pid} with ports {record.ports}"
        raise ValueError(msg)
    return record


def _left_running(home: Path) -> str:
    """Say which processes have to do with a home directory, as far as their command lines and directories tell."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "name"]):
        where = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        if process.pid != os.getpid() and any(str(home) in part for part in where):
            found.append(f"{process.pid} ({process.info['name']})")
    return f"end what runs from {home}: process {', '.join(found)}" if found else "no process of it was found running"


def write_state(home: Path, records: dict[str, ServiceRecord]) -> None:
    """Replace the state file in one step; without records there is no file."""
    path = state_path(home)
    if not records:
        path.unlink(missing_ok=True)
        return
    home.mkdir(parents=True, exist_ok=True)
    content = {"format": STATE_FORMAT, "services": {name: asdict(record) for name, record in sorted(records.items())}}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextlib.contextmanager
def locked(home: Path, *, timeout_s: float = 180.0) -> Iterator[None]:
    """Hold the home directory for one command at a time; the lock goes with the process that holds it.

    Raises:
        ServiceError: Another command still holds it after ``timeout_s``, or it cannot be written to.
    """
    path = home / "services.lock"
    with _open(path) as handle:
        deadline_s = time.monotonic() + timeout_s
        while not _try_lock(handle.fileno()):
            if time.monotonic() >= deadline_s:
                msg = (
                    f"{path} is held by another command for {timeout_s:.0f} s, expected it free; wait for it or end it"
                )
                raise ServiceError(msg)
            time.sleep(0.05)
        yield


@contextlib.contextmanager
def claimed(home: Path, *, by: str) -> Iterator[None]:
    """Have the home directory for one run; the claim goes with the process that holds it.

    Args:
        home: The directory.
        by: Name of the command that runs, for whoever finds it claimed.

    Raises:
        ConfigError: Another run has it.
        ServiceError: It cannot be written to.
    """
    with _open(home / RUN_LOCK) as handle:
        handle.seek(0)
        if not _try_lock(handle.fileno()):
            command, _, pid = handle.read().decode().strip().partition(" ")
            msg = (
                f"`headrace {command or by}` already runs here (pid {pid or 'unknown'}), expected no other run in "
                f"{home}; end that one first, or set HEADRACE_HOME to another directory"
            )
            raise ConfigError(msg)
        handle.truncate()
        handle.write(f"{by} {os.getpid()}\n".encode())
        handle.flush()
        yield


def _open(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+b")
    except OSError as exc:
        msg = f"{path.parent} cannot be written to ({exc}), expected a directory of your own; set HEADRACE_HOME to one"
        raise ServiceError(msg) from exc


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
