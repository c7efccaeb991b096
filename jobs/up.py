"""``headrace up``: everything on this machine, in the foreground."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from infra.local.port import choose_ports, without_login
from infra.local.service import SERVICE_NAMES, ServiceAddresses
from infra.local.services import LocalServices, ServiceStatus
from infra.local.state import claimed
from jobs.application import Application, load_recorded_application, scored_model
from jobs.log_level import LogLevel, LogLevelOption
from jobs.role import Role
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.topics import application_topics, ensure_topics
from offline.card import load_card
from schemas.errors import ServiceError
from schemas.model import ModelSpec

_ENDING: Final = ("SIGINT", "SIGTERM", "SIGHUP")
_CHECK_S: Final = 1.0
_HTTP: Final = "http"


def up(
    *,
    keep_services: Annotated[
        bool, typer.Option("--keep-services", help="Leave Kafka, Redis and Triton running at the end.")
    ] = False,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run all on this machine until Ctrl-C: services, topics, a worker of each role.

    Then what was started is ended. A worker or service that fails is started again. Services that ran before go on
    running. Addresses given by HEADRACE_KAFKA, HEADRACE_REDIS and HEADRACE_TRITON are used as they are. While the model
    is not trained, scoring waits for `headrace train` and the other roles run.
    """
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    settings.check_local()
    run = _Run(settings, application, log_level=log_level)
    with claimed(settings.home, by="up"), _signals(run.ended), contextlib.ExitStack() as stack:
        if not keep_services:
            stack.enter_context(run.services.guarded(only_started=True))
        stack.callback(run.stop)
        run.go()


class _Run:
    """One run, from the services to its end.

    Attributes:
        services: The local services.
        ended: Set when the run is to end.
    """

    def __init__(self, settings: Settings, application: Application, *, log_level: LogLevel) -> None:
        self._settings = settings
        self._application = application
        self._console = Console(highlight=False, soft_wrap=True)
        self.services: LocalServices = settings.local_services(notify=self._say)
        self.ended = threading.Event()
        model = scored_model(application)
        self._waiting_for = None if model is None or _is_trained(settings.model_repository, model) else model
        self._has_scoring = model is not None
        wanted = {role.value: settings.role_metrics_port(role) for role in Role}
        self._ports = choose_ports({**wanted, _HTTP: settings.http_port})
        self._supervisor = Supervisor(
            settings.home,
            environment=os.environ,
            ports={role: self._ports[role.value] for role in Role},
            http_port=self._ports[_HTTP],
            log_level=log_level,
            services=self.services,
            cancelled=self.ended,
        )

    def go(self) -> None:
        """Start everything, then watch over it until the end."""
        scores = self._has_scoring and self._waiting_for is None
        # A Triton that is given is asked at once, and not when the model is trained at last.
        needs_triton = scores or (self._has_scoring and self._settings.triton is not None)
        try:
            addresses = self._start_services([name for name in SERVICE_NAMES if needs_triton or name != "triton"])
            if not self.ended.is_set():
                ensure_topics(str(addresses.kafka), application_topics(self._application))
                self._start_workers([role for role in Role if scores or role is not Role.SCORING])
                if self._waiting_for is not None:
                    self._say(
                        f"worker scoring: waits for `headrace train`, there is no model {self._waiting_for.name} in "
                        f"{self._settings.model_repository} yet"
                    )
                self._say(f"Logs are in {self._settings.home / 'logs'}. Ctrl-C ends what was started.")
            while not self.ended.wait(_CHECK_S):
                for line in self._supervisor.check():
                    self._say(line, style="yellow")
                self._start_scoring_once_trained()
        except ServiceError:
            if not self.ended.is_set():
                raise

    def stop(self) -> None:
        """End the workers."""
        if self._supervisor.roles:
            self._say("Ending the workers: each commits what it has done.")
        self._supervisor.stop()

    def _start_services(self, names: Sequence[str]) -> ServiceAddresses:
        addresses = self.services.up(names, on_ready=self._tell, cancelled=self.ended)
        # Told the addresses, a worker that starts while a service is away waits for it, and does not miss a setting.
        told = {f"HEADRACE_{name.upper()}": addresses.get(name) or "" for name in names}
        self._supervisor.watch(names, told)
        return addresses

    def _start_workers(self, roles: Sequence[Role]) -> None:
        self._supervisor.start(roles)
        for role in roles:
            self._say(f"worker {role}: metrics on http://127.0.0.1:{self._ports[role.value]}/metrics")
            if role is Role.SERVE:
                address = f"http://{self._settings.http_address}:{self._ports[_HTTP]}"
                self._say(f"worker {role}: API on {address}/v1/views, described by {address}/openapi.json")

    def _start_scoring_once_trained(self) -> None:
        if self._waiting_for is None or not _is_trained(self._settings.model_repository, self._waiting_for):
            return
        self._say(f"Model {self._waiting_for.name} is trained: scoring starts")
        self._waiting_for = None
        self._start_services(["triton"])
        self._start_workers([Role.SCORING])

    def _tell(self, status: ServiceStatus) -> None:
        self._say(f"{status.name:<7} {without_login(status.address or '')}")

    def _say(self, line: str, *, style: str | None = None) -> None:
        # The terminal may be gone, which ends the run: in good order all the same.
        with contextlib.suppress(OSError):
            self._console.print(line, style=style, markup=False)


@contextlib.contextmanager
def _signals(ended: threading.Event) -> Iterator[None]:
    """Have the signals that end a process set ``ended``; a hangup that is ignored, as by nohup, stays so."""
    known = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in known}
    # Shells let what they start in the background ignore the interrupt too; one that comes all the same is meant.
    ignored = [number for number in known if number.name == "SIGHUP" and before[number] is signal.SIG_IGN]
    caught = {number: handler for number, handler in before.items() if number not in ignored}
    for number in caught:
        signal.signal(number, lambda *_: ended.set())
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


def _is_trained(repository: Path, model: ModelSpec) -> bool:
    """Tell whether a model is in the repository; its configuration comes last.

    Raises:
        ConfigError: It is, and is another than the application wants.
    """
    if not (repository / model.name / "config.pbtxt").is_file():
        return False
    load_card(repository, model.name).check(model)
    return True
