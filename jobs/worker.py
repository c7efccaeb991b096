"""``headrace worker``: one worker of one role."""

import logging
import os
import signal
import socket
import threading
import time
from typing import Annotated

import typer

from jobs.application import load_recorded_application
from jobs.log_level import LogLevel, LogLevelOption
from jobs.role import Role
from jobs.settings import Settings
from schemas.errors import ConfigError

_PARENT_POLL_S = 1.0


def worker(
    role: Annotated[Role, typer.Option(metavar="ROLE", help=f"What it does: {', '.join(Role)}.")],
    *,
    worker_id: Annotated[
        str | None,
        typer.Option(
            help="Name among the workers of the role, over all machines; of two of one name the older one is ended.",
            show_default="name of the host",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Port of the Prometheus endpoint, 0 for any free one.",
            show_default="9101 to 9105 by role",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Port of the HTTP API of the serve role, 0 for any free one.",
            show_default="8080",
        ),
    ] = None,
    start_at: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where a group begins that has never committed: `beginning`, `end`, a time of the records such as "
            "2026-01-31T09:00:00Z, or TOPIC:PARTITION=OFFSET of each partition, with commas between. A time after the "
            "last record is the end.",
            show_default="beginning",
        ),
    ] = None,
    log_level: LogLevelOption = LogLevel.INFO,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker of one role, until SIGTERM.

    Workers of a role share its partitions: start more of them to scale out, those on one host each with a --worker-id
    of its own. A worker that fails exits with code 1 and can be started again at any time: what it had not committed is
    done again, and what it had committed is not. Exit code 2 says that a setting, a definition or the loaded model is
    wrong, which a new start cannot mend.
    """
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    if role is Role.OFFLINE:
        settings.check_delta()
    port = settings.role_metrics_port(role) if metrics_port is None else metrics_port
    if role is Role.SERVE:
        if start_at is not None:
            msg = "`--start-at` is given for role serve, which reads no topic; leave it out"
            raise ConfigError(msg)
        from jobs.serve import run_server  # noqa: PLC0415

        own = settings.http_port if http_port is None else http_port
        run_server(application, settings, http_port=own, metrics_port=port, log_level=log_level)
        return
    # Faust and the adapters load for a second: only here, so that the other commands start fast.
    from jobs.composition import run_worker  # noqa: PLC0415

    worker_id = worker_id or socket.gethostname()
    run_worker(
        role,
        application,
        settings,
        worker_id=worker_id,
        metrics_port=port,
        log_level=log_level,
        start_at=start_at,
    )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
