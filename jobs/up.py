"""``headrace up``: everything on this machine, in the foreground."""

import os
import signal
import threading
from typing import Annotated

import typer
from rich.console import Console

from infra.local.port import choose_ports
from infra.local.service import SERVICE_NAMES
from infra.local.services import ServiceStatus
from jobs.application import load_recorded_application
from jobs.role import Role
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.topics import ensure_topics, plan_topics


def up(
    *,
    keep_services: Annotated[bool, typer.Option(help="Leave Kafka, Redis and Triton running at the end.")] = False,
    log_level: Annotated[str, typer.Option(help="Log level of the workers: debug, info, warning or error.")] = "info",
) -> None:
    """Run all on this machine until Ctrl-C: services, topics, a worker of each role.

    Then what was started is ended. A worker that fails is started again. Services that ran before go on running.
    Addresses given by HEADRACE_KAFKA, HEADRACE_REDIS and HEADRACE_TRITON are used as they are.
    """
    console = Console()
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    services = settings.local_services(notify=console.print)
    ended = threading.Event()
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, lambda *_: ended.set())
    if settings.metrics_port:
        ports = {role: settings.role_metrics_port(role) for role in Role}
    else:
        free = choose_ports({role.value: 0 for role in Role})
        ports = {role: free[role.value] for role in Role}
    started: list[str] = []

    def on_ready(status: ServiceStatus) -> None:
        console.print(f"{status.name} {status.address}", highlight=False)
        if status.took_ms is not None:
            started.append(status.name)

    addresses = services.up(SERVICE_NAMES, on_ready=on_ready)
    # Told the addresses, a worker that starts while a service is away waits for it, and does not miss a setting.
    told = {f"HEADRACE_{name.upper()}": addresses.get(name) or "" for name in SERVICE_NAMES}
    supervisor = Supervisor(settings.home, environment={**os.environ, **told}, ports=ports, log_level=log_level)
    try:
        planned = plan_topics(list(application.views.values()), list(application.models.values()))
        ensure_topics(settings.address("kafka"), planned)
        roles = [role for role in Role if role is not Role.SCORING or application.models]
        supervisor.start(roles)
        for role in roles:
            console.print(f"worker {role}: metrics on http://127.0.0.1:{ports[role]}/metrics", highlight=False)
        console.print(f"Logs are in {settings.home / 'logs'}. Ctrl-C ends what was started.", highlight=False)
        while not ended.wait(1.0):
            for line in supervisor.check():
                console.print(line, style="yellow", highlight=False)
    finally:
        console.print("Ending the workers: each commits what it has done.")
        supervisor.stop()
        if not keep_services and started:
            services.down(started)
