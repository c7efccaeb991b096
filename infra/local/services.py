"""Runs Kafka, Redis and Triton as child processes on loopback, with all their data under one home directory.

A service whose address is given belongs to someone else: it is checked and used, and never started or stopped. The
others are recorded in ``<home>/services.json``, so that any later command finds, uses or ends them. A process is
signalled only when its id and its start time are those of the record.
"""

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from infra.local.guard import watch
from infra.local.health import check_kafka, check_redis, check_triton
from infra.local.kafka.broker import KafkaService
from infra.local.port import choose_ports, is_port_free, without_login
from infra.local.process import exit_code, read_lines, spawn, telling_lines, wait_until
from infra.local.service import SERVICE_NAMES, Launch, Notify, Service, ServiceAddresses
from infra.local.state import ServiceRecord, locked, read_state, write_state
from infra.local.triton.server import TritonService
from infra.local.valkey import ValkeyService
from schemas.errors import ConfigError, ServiceError

_CHECKS: Final = {"kafka": check_kafka, "redis": check_redis, "triton": check_triton}
_TITLES: Final = {"kafka": "Kafka", "redis": "Redis", "triton": "Triton"}
_CHECK_TIMEOUT_S: Final = 5.0
_FIRST_CHECKS_TIMEOUT_S: Final = 1.0
_ATTEMPTS_OVER_PORTS: Final = 3
_PORT_RELEASE_TIMEOUT_S: Final = 5.0
_PORT_TAKEN: Final = ("already in use", "failed to bind", "only one usage of each socket address")
"""How a service that cannot have its port says so in its log, in lower case."""

_INTERRUPTED: Final = "was interrupted while starting"

State = Literal["given", "running", "unhealthy", "stopped"]


@dataclass(frozen=True)
class ServiceStatus:
    """What is known of one service.

    Attributes:
        name: ``kafka``, ``redis`` or ``triton``.
        state: ``given`` (someone else's, healthy), ``running`` (ours, healthy), ``unhealthy`` or ``stopped``.
        address: What clients connect to; None when stopped.
        version: Program and version, as far as known.
        pid: Process id; None for a service that is not ours, or stopped.
        took_ms: How long it took to become healthy; None where it was not started by this call.
        log: Log file; None for a service that is not ours.
        detail: What is wrong with it.
    """

    name: str
    state: State
    address: str | None = None
    version: str = ""
    pid: int | None = None
    took_ms: int | None = None
    log: str | None = None
    detail: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether clients can use it."""
        return self.state in ("given", "running")


class LocalServices:
    """The services of one home directory.

    Args:
        home: Directory of their data, logs and state file.
        environment: What their own environment is made from; PATH and JAVA_HOME lead to Java and Maven.
        model_repository: Triton's model repository.
        cache: Where downloads are kept for all home directories of the user.
        given: Services that exist already.
        has_standard_ports: Take the customary ports where they are free; otherwise any free ones.
        use_triton_fallback: Run the KServe server in place of Triton.
        kafka_jvm_flags: Further flags of the broker's Java, after the defaults and so stronger.
        notify: Takes a line about what takes long.
    """

    def __init__(
        self,
        home: Path,
        *,
        environment: Mapping[str, str],
        model_repository: Path,
        cache: Path,
        given: ServiceAddresses | None = None,
        has_standard_ports: bool = True,
        use_triton_fallback: bool = False,
        kafka_jvm_flags: tuple[str, ...] = (),
        notify: Notify = lambda line: None,
    ) -> None:
        self.home = home.absolute()
        self._given = given or ServiceAddresses()
        self._notify = notify
        self._has_standard_ports = has_standard_ports
        self._environment = environment
        self._state_lock = threading.Lock()
        self._token = secrets.token_hex(8)
        services: tuple[Service, ...] = (
            KafkaService(
                self.home, environment=environment, cache=cache.absolute(), notify=notify, jvm_flags=kafka_jvm_flags
            ),
            ValkeyService(self.home, environment=environment),
            TritonService(
                self.home,
                environment=environment,
                model_repository=model_repository,
                notify=notify,
                use_fallback=use_triton_fallback,
            ),
        )
        self._services = {service.name: service for service in services}

    def up(
        self,
        which: Iterable[str] = SERVICE_NAMES,
        *,
        on_ready: Callable[[ServiceStatus], None] = lambda status: None,
        cancelled: threading.Event | None = None,
    ) -> ServiceAddresses:
        """Make sure that each of ``which`` is healthy: use what is given or runs already, start the rest side by side.

        Those that are given are asked before any is started.

        Args:
            which: Names of services.
            on_ready: Told of each service as it becomes healthy, from any thread.
            cancelled: Once it is set, nothing more is started, and it fails.

        Returns:
            The addresses of ``which``; the others None.

        Raises:
            ConfigError: There is no such service.
            ServiceError: One could not be made healthy. What this call had started is ended again.
        """
        names = self._known(which)
        started: list[str] = []
        cancelled = cancelled or threading.Event()
        given = [name for name in names if self._given.get(name)]

        def ensure(name: str) -> ServiceStatus:
            status = self._given_status(name) if name in given else self._running_status(name)
            if status is None:
                status = self._start(name, started=started, cancelled=cancelled)
            on_ready(status)
            return status

        with locked(self.home), ThreadPoolExecutor(len(names) or 1, thread_name_prefix="services") as pool:
            futures: dict[str, Future[ServiceStatus]] = {}
            errors: list[BaseException] = []
            try:
                for group in (given, [name for name in names if name not in given]):
                    if not errors:
                        futures.update({name: pool.submit(ensure, name) for name in group})
                        errors = [error for name in group if (error := futures[name].exception()) is not None]
            except BaseException:
                cancelled.set()
                pool.shutdown(wait=True)
                self._end_started(started)
                raise
            if errors:
                self._end_started(started)
                if len(errors) == 1 or not all(isinstance(error, ServiceError) for error in errors):
                    raise errors[0]
                raise ServiceError("\n".join(str(error) for error in errors)) from errors[0]
            return ServiceAddresses(**{name: future.result().address for name, future in futures.items()})

    @contextlib.contextmanager
    def guarded(self, *, only_started: bool = False) -> Iterator[None]:
        """End services when the block is left, or when this process is killed inside it.

        Args:
            only_started: Those alone that this object started; otherwise all, for a run that owns them from start to
                end, such as a session of tests.
        """
        with watch(self.home, environment=self._environment, started_by=self._token if only_started else None):
            try:
                yield
            finally:
                records = read_state(self.home).items()
                ours = [name for name, record in records if not only_started or record.started_by == self._token]
                if ours:
                    self._notify(f"Ending {', '.join(ours)}.")
                self.down(ours)

    def down(self, which: Iterable[str] = SERVICE_NAMES) -> list[str]:
        """End the services that Headrace started, all at once, and clean up after them; given ones are left alone.

        Returns:
            The names of those that were running.

        Raises:
            ConfigError: There is no such service.
            ServiceError: A process survives SIGKILL.
        """
        names = self._known(which)
        if not self.home.exists():
            return []
        with locked(self.home):
            return self._end(names)

    def status(self, which: Iterable[str] = SERVICE_NAMES) -> list[ServiceStatus]:
        """Ask every service for its health."""
        names = self._known(which)
        with ThreadPoolExecutor(len(names) or 1, thread_name_prefix="services") as pool:
            return list(pool.map(self._status, names))

    def addresses(self) -> ServiceAddresses:
        """Give the addresses of the given services and of those recorded as running, without asking them."""
        records = read_state(self.home)
        found = {
            name: record.address for name, record in records.items() if record.is_ready and record.identity.is_alive()
        }
        return ServiceAddresses(**{name: self._given.get(name) or found.get(name) for name in SERVICE_NAMES})

    def ended(self, which: Iterable[str] = SERVICE_NAMES) -> dict[str, ServiceRecord | None]:
        """Tell which services of ours do not run (any more), with what is recorded of them; asks none of them."""
        records = read_state(self.home)
        ours = [name for name in self._known(which) if not self._given.get(name)]
        return {
            name: records.get(name) for name in ours if name not in records or not records[name].identity.is_alive()
        }

    def start(self, name: str, *, cancelled: threading.Event | None = None) -> ServiceStatus:
        """Start one service unless it is healthy; after a ``kill`` at the same address and with the same data.

        It stays a service of the run that had started it.

        Raises:
            ConfigError: There is no such service.
            ServiceError: It is a given one, its port has been taken meanwhile, or it does not become healthy.
        """
        (name,) = self._known([name])
        self._must_be_ours(name)
        with locked(self.home):
            record = read_state(self.home).get(name)
            return self._running_status(name) or self._start(
                name,
                same_ports=record.ports if record else None,
                cancelled=cancelled,
                started_by=record.started_by if record else None,
            )

    def kill(self, name: str, number: int = signal.SIGKILL, *, timeout_s: float = 30.0) -> int:
        """Send a signal to the main process of one service, as a crash would, and wait for its end where one follows.

        The record stays, so that ``start`` brings the service back at the same address.

        Args:
            name: Name of the service.
            number: The signal. After SIGSTOP, SIGCONT and the like there is no end to wait for.
            timeout_s: How long to wait for the end.

        Returns:
            The process id that was signalled.

        Raises:
            ConfigError: There is no such service.
            ServiceError: It is a given one, it does not run, or it does not end in time.
        """
        (name,) = self._known([name])
        self._must_be_ours(name)
        record = read_state(self.home).get(name)
        process = record.identity.process() if record else None
        if record is None or process is None:
            msg = f"{_TITLES[name]} does not run under {self.home}, expected it running; start it first"
            raise ServiceError(msg)
        process.send_signal(number)
        if number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGKILL", signal.SIGTERM)) and not wait_until(
            lambda: not record.identity.is_alive(), timeout_s=timeout_s, poll_s=0.01
        ):
            msg = (
                f"{_TITLES[name]} (process {record.pid}) is still there {timeout_s:.0f} s after signal {number}, "
                f"expected it gone; see {record.log}"
            )
            raise ServiceError(msg)
        return record.pid

    def process_ids(self, name: str) -> list[int]:
        """List the processes of one service that run now, its main process first (Triton has one for each model)."""
        (name,) = self._known([name])
        record = read_state(self.home).get(name)
        if record is None:
            return []
        pids = [process.pid for process in record.identity.members()]
        return sorted(pids, key=lambda pid: (pid != record.pid, pid))

    def _known(self, which: Iterable[str]) -> list[str]:
        names = list(dict.fromkeys(which))
        for name in names:
            if name not in self._services:
                msg = f"There is no service {name!r}, expected one of {', '.join(SERVICE_NAMES)}"
                raise ConfigError(msg)
        return names

    def _must_be_ours(self, name: str) -> None:
        if self._given.get(name):
            msg = (
                f"{_TITLES[name]} at {self._given.get(name)} was given, expected a service of Headrace's own; "
                f"unset HEADRACE_{name.upper()}"
            )
            raise ServiceError(msg)

    def _given_status(self, name: str) -> ServiceStatus | None:
        address = self._given.get(name)
        if address is None:
            return None
        try:
            version = _CHECKS[name](address, timeout_s=_CHECK_TIMEOUT_S)
        except ServiceError as exc:
            variable = f"HEADRACE_{name.upper()}"
            msg = (
                f"{_TITLES[name]} is given as {without_login(address)} ({variable}), but is not healthy: "
                f"{str(exc).rstrip('.')}. "
                f"Start it, or correct {variable}, or unset it to run one of Headrace's own"
            )
            raise ServiceError(msg) from exc
        return ServiceStatus(name, "given", address, version)

    def _running_status(self, name: str) -> ServiceStatus | None:
        """Find a service of an earlier command that can be used as it is; None when one has to be started."""
        record, service = read_state(self.home).get(name), self._services[name]
        if record is None or record.fingerprint != service.fingerprint or not record.identity.is_alive():
            return None
        try:
            answer = service.check(record.address, timeout_s=_CHECK_TIMEOUT_S)
        except ServiceError:
            return None
        version = record.version or answer
        if not record.is_ready:  # the command that started it was ended before it could note that
            self._record(name, replace(record, version=version, is_ready=True))
        return ServiceStatus(name, "running", record.address, version, record.pid, log=record.log)

    def _status(self, name: str) -> ServiceStatus:
        try:
            given = self._given_status(name)
        except ServiceError as exc:
            return ServiceStatus(name, "unhealthy", self._given.get(name), detail=str(exc))
        if given is not None:
            return given
        record = read_state(self.home).get(name)
        if record is None:
            return ServiceStatus(name, "stopped")
        if not record.identity.is_alive():
            detail = f"process {record.pid} has ended by itself; `headrace services up` starts it again"
            return ServiceStatus(name, "stopped", version=record.version, log=record.log, detail=detail)
        status = ServiceStatus(name, "running", record.address, record.version, record.pid, log=record.log)
        try:
            self._services[name].check(record.address, timeout_s=_CHECK_TIMEOUT_S)
        except ServiceError as exc:
            return replace(status, state="unhealthy", detail=str(exc))
        return status

    def _start(
        self,
        name: str,
        *,
        same_ports: Mapping[str, int] | None = None,
        started: list[str] | None = None,
        cancelled: threading.Event | None = None,
        started_by: str | None = None,
    ) -> ServiceStatus:
        service, began_s = self._services[name], time.monotonic()
        _go_on(service, cancelled)
        self._end([name], keeps_record=True)
        earlier = read_state(self.home).get(name)
        wanted = dict(service.standard_ports) if self._has_standard_ports else dict.fromkeys(service.standard_ports, 0)
        if earlier is not None and earlier.ports.keys() == wanted.keys():
            wanted = dict(earlier.ports)
        for attempt in range(1, _ATTEMPTS_OVER_PORTS + 1):
            ports = dict(same_ports) if same_ports is not None else choose_ports(wanted)
            if same_ports is not None and not wait_until(
                lambda: all(is_port_free(port) for port in same_ports.values()), timeout_s=_PORT_RELEASE_TIMEOUT_S
            ):
                taken = next(port for port in same_ports.values() if not is_port_free(port))
                msg = (
                    f"Port {taken} of {service.title} has been taken by another process, expected it free; "
                    "end that process, or run `headrace services up` for another port"
                )
                raise ServiceError(msg)
            try:
                launch = service.prepare(ports)
            except OSError as exc:
                msg = (
                    f"{service.title} could not be set up: {exc}. Check that there is room and that one may write "
                    f"to {self.home} and to the cache, or set HEADRACE_HOME and HEADRACE_CACHE to other directories"
                )
                raise ServiceError(msg) from exc
            _go_on(service, cancelled)
            record, log_start = self._spawn(service, launch, ports, started_by=started_by or self._token)
            if started is not None:
                started.append(name)
            failure = self._wait_until_healthy(service, launch, record, cancelled=cancelled)
            if failure == _INTERRUPTED:
                self._notify(f"Interrupted: ending {service.title}, which was starting.")
                self._end([name])
                _go_on(service, cancelled)
            if failure is None:
                status = ServiceStatus(
                    name, "running", launch.address, read_state(self.home)[name].version, record.pid, log=record.log
                )
                return replace(status, took_ms=round((time.monotonic() - began_s) * 1_000))
            lines = read_lines(Path(record.log), since_bytes=log_start)
            self._end([name])
            is_port_taken = any(sign in line.lower() for line in lines for sign in _PORT_TAKEN)
            if not is_port_taken or same_ports is not None or attempt == _ATTEMPTS_OVER_PORTS:
                break
            wanted = dict.fromkeys(wanted, 0)
        msg = (
            f"{service.title} {failure}. From {record.log}:\n{telling_lines(lines)}\n"
            f"Put right what they say and run `headrace services up` again (data: {self.home / name}), "
            f"or set HEADRACE_{name.upper()} to the address of a running one"
        )
        raise ServiceError(msg)

    def _spawn(
        self, service: Service, launch: Launch, ports: Mapping[str, int], *, started_by: str
    ) -> tuple[ServiceRecord, int]:
        log = self.home / "logs" / f"{service.name}.log"
        log_start = log.stat().st_size if log.exists() else 0
        identity = spawn(launch.argv, environment=launch.environment, cwd=launch.cwd, log=log)
        record = ServiceRecord(
            pid=identity.pid,
            started_at_s=identity.started_at_s,
            address=launch.address,
            ports=dict(ports),
            version=launch.version,
            log=str(log),
            fingerprint=service.fingerprint,
            started_by=started_by,
        )
        self._record(service.name, record)
        return record, log_start

    def _wait_until_healthy(
        self, service: Service, launch: Launch, record: ServiceRecord, *, cancelled: threading.Event | None
    ) -> str | None:
        """Wait for the process to answer at its own port; return what went wrong, None when nothing did."""
        reason = "it was never asked"
        deadline_s = time.monotonic() + service.start_timeout_s
        while time.monotonic() < deadline_s:
            if cancelled is not None and cancelled.is_set():
                return _INTERRUPTED
            if not record.identity.is_alive():
                code = exit_code(record.pid)
                return "ended while starting" + (f" with exit code {code}" if code is not None else "")
            try:
                version = service.check(launch.address, timeout_s=_FIRST_CHECKS_TIMEOUT_S)
                if record.identity.listens_on(record.ports.values()):
                    self._record(service.name, replace(record, version=launch.version or version, is_ready=True))
                    return None
                reason = f"it does not listen on all of its ports, {', '.join(map(str, record.ports.values()))}"
            except ServiceError as exc:
                reason = str(exc)
            time.sleep(0.05)
        return f"is not healthy {service.start_timeout_s:.0f} s after its start ({reason})"

    def _record(self, name: str, record: ServiceRecord | None) -> None:
        with self._state_lock:
            records = read_state(self.home)
            if record is None:
                records.pop(name, None)
            else:
                records[name] = record
            write_state(self.home, records)

    def _end_started(self, names: Iterable[str]) -> None:
        """End what an ``up`` that failed had started, and say so: some of it has been told to be up."""
        records = read_state(self.home)
        if left := [name for name in names if name in records]:
            self._notify(f"Ending {', '.join(left)}, which this had started.")
            self._end(left)

    def _end(self, names: Iterable[str], *, keeps_record: bool = False) -> list[str]:
        records = {name: record for name, record in read_state(self.home).items() if name in names}

        def end(name: str) -> bool:
            was_running = records[name].identity.end(grace_s=self._services[name].grace_s)
            self._services[name].clean()
            if not keeps_record:
                self._record(name, None)
            return was_running

        if not records:
            return []
        with ThreadPoolExecutor(len(records), thread_name_prefix="services") as pool:
            return [name for name, was_running in zip(records, pool.map(end, records), strict=True) if was_running]


def _go_on(service: Service, cancelled: threading.Event | None) -> None:
    if cancelled is not None and cancelled.is_set():
        msg = f"{service.title} {_INTERRUPTED}, expected it to become healthy; start it again"
        raise ServiceError(msg)
