"""A whole pipeline under test: services and workers of its own, in a directory of its own."""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from infra.local.port import choose_ports
from infra.local.process import ProcessIdentity, spawn
from infra.local.service import SERVICE_NAMES
from infra.local.services import LocalServices
from jobs.application import Application, consumer_groups, load_application
from jobs.audit import Check, run_audit
from jobs.consumer_group import is_caught_up
from jobs.flights.producer import ProduceProgress, ProduceSummary, produce_flights
from jobs.role import CONSUMERS, Role
from jobs.scrape import Samples, scrape
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.topic_reader import read_topic
from jobs.topics import ensure_topics, plan_topics
from schemas.topology import connect
from tests.support.kafka import TIMEOUT_S, describe_group

POLL_S = 0.1
SHIPPED_MODELS = Path(__file__).parents[2] / "model_repository"


class MortalSupervisor(Supervisor):
    """A supervisor whose workers die at scheduled steps of their commits, one after the other.

    Attributes:
        deaths: By role, the steps that are still to be died at, each with how often it is passed before.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.deaths: dict[Role, list[tuple[str, int]]] = {}

    def _command(self, role: Role) -> list[str]:
        command = super()._command(role)
        if not (deaths := self.deaths.get(role)):
            return command
        step, times = deaths.pop(0)
        start = command.index("jobs.cli")
        return [*command[:start], "tests.support.dying_worker", step, str(times), *command[start + 1 :]]


class RunningPipeline:
    """The flights, from their topics to scores.

    Args:
        home: Directory of everything.
        services: Its services, all of them up.
    """

    def __init__(self, home: Path, services: LocalServices) -> None:
        self.home = home
        self.services = services
        addresses = services.addresses()
        assert addresses.kafka
        assert addresses.redis
        assert addresses.triton
        self.kafka, self.redis = addresses.kafka, addresses.redis
        self.environment = {
            **os.environ,
            "HEADRACE_HOME": str(home),
            "HEADRACE_KAFKA": addresses.kafka,
            "HEADRACE_REDIS": addresses.redis,
            "HEADRACE_TRITON": addresses.triton,
            "HEADRACE_MODEL_REPOSITORY": str(home / "models"),
            "HEADRACE_DELTA": str(home / "delta"),
            "HEADRACE_LINEAGE": str(home / "lineage" / "events.ndjson"),
            "HEADRACE_APP": "jobs.flights",
        }
        self.settings = Settings.from_environment(self.environment)
        self.application: Application = load_application("jobs.flights")
        chosen = choose_ports(dict.fromkeys([*Role, "http"], 0))
        self.ports = {role: chosen[role] for role in Role}
        self.api = f"http://127.0.0.1:{chosen['http']}"
        self.supervisor = MortalSupervisor(
            home, environment=self.environment, ports=self.ports, http_port=chosen["http"]
        )
        self.extras: dict[Role, ProcessIdentity] = {}
        self.admin = AdminClient({"bootstrap.servers": self.kafka, "log_level": 2})
        self.restarts: list[str] = []
        self.sent: list[ProduceSummary] = []
        self._sent_share = 0.0

    @property
    def groups(self) -> Mapping[Role, tuple[str, list[str]]]:
        """Consumer group and topics of each role."""
        return consumer_groups(self.application)

    def start_extra(self, role: Role) -> None:
        """Start a second worker of a role."""
        argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", role, "--worker-id", "extra"]
        log = self.home / "logs" / f"extra-{role}.log"
        argv += ["--metrics-port", "0", "--parent", str(os.getpid())]
        self.extras[role] = spawn(argv, environment=self.environment, cwd=Path.cwd(), log=log)

    def members(self, role: Role) -> list[int] | None:
        """How many partitions each member of a role's group has; None while it is being balanced."""
        name, _ = self.groups[role]
        group = describe_group(self.admin, name)
        if group is None or group.state != ConsumerGroupState.STABLE:
            return None
        return [len(member.assignment.topic_partitions) for member in group.members]

    def make_topics(self, *, partitions: int) -> None:
        views, models = list(self.application.views.values()), list(self.application.models.values())
        ensure_topics(self.kafka, plan_topics(views, models), partitions=partitions)

    def produce(self, start: datetime, end: datetime, **options: Any) -> ProduceSummary:
        """Produce a range of flights, with late and corrupted ones among them."""
        shares = {"late_share": 0.02, "invalid_share": 0.02}
        summary = produce_flights(self.kafka, start=start, end=end, **{**shares, **options})
        self.sent.append(summary)
        return summary

    @contextlib.contextmanager
    def producing(self, start: datetime, end: datetime, *, takes_s: float) -> Iterator[None]:
        """Produce a range of flights in about ``takes_s`` seconds meanwhile, and to its end."""
        failures: list[BaseException] = []
        speed = (end - start).total_seconds() / takes_s

        self._sent_share = 0.0

        def follow(progress: ProduceProgress) -> None:
            self._sent_share = progress.sent / progress.total

        def run() -> None:
            try:
                self.produce(start, end, speed=speed, on_progress=follow)
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=run, name="producer")
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if failures:
            raise failures[0]

    def until(self, condition: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Wait for a condition, starting ended workers again meanwhile."""
        deadline = time.monotonic() + within_s
        while not condition():
            self.restarts += self.supervisor.check()
            if time.monotonic() > deadline:
                msg = f"{what}: not within {within_s:.0f} s; restarts so far: {self.restarts}; logs in {self.home}/logs"
                raise AssertionError(msg)
            time.sleep(POLL_S)

    def until_sent(self, share: float, *, within_s: float = 60.0) -> None:
        """Wait until a share of what is being produced has been sent."""
        self.until(lambda: self._sent_share >= share, within_s=within_s, what=f"{share:.0%} of the events are sent")

    def until_drained(self, roles: Sequence[Role] = CONSUMERS, *, within_s: float = 90.0) -> None:
        """Wait until each role has committed everything that is on its topics."""
        # Features first: once they are done, nothing more comes onto the topics of the others.
        for role in sorted(roles, key=CONSUMERS.index):
            group, topics = self.groups[role]
            self.until(
                lambda group=group, topics=topics: all(is_caught_up(self.kafka, group, topic) for topic in topics),  # type: ignore[misc]  # bound now
                within_s=within_s,
                what=f"{role} has caught up with {topics}",
            )

    def until_silent(self, *, within_s: float = 90.0) -> None:
        """Wait until every source partition that is routed has been told to be idle, and what that fires is done.

        Until then windows stay open behind a repartition topic whose sources have empty partitions.
        """
        for topic in connect(list(self.application.views.values())).inputs:
            self.until(lambda topic=topic: all(self._idle_on(topic)), within_s=within_s, what=f"{topic} is idle")  # type: ignore[misc]  # bound now
        self.until_drained(within_s=within_s)

    def _idle_on(self, topic: str) -> list[bool]:
        """What each source partition has last said on a repartition topic; at least one, not idle, before it has."""
        said: dict[tuple[str, int], bool] = {}
        n_partitions = 1
        for batch in read_topic(self.kafka, topic):
            for value in batch.values:
                envelope = json.loads((value or b"").partition(b"\n")[0])
                said[envelope["topic"], envelope["partition"]] = envelope["is_idle"]
                n_partitions = envelope["partitions"]
        return [*said.values(), *[False] * (n_partitions - len(said))]

    def scrape(self, *roles: Role) -> Samples:
        return scrape(self.ports[role] for role in roles or tuple(Role))

    def audit(self, *, scored_from: Mapping[int, int] | None = None) -> list[Check]:
        (model,) = self.application.models
        return run_audit(
            self.application,
            brokers=self.kafka,
            redis_url=self.redis,
            delta=self.settings.delta,
            scored_from={model: scored_from or {}},
        )


@contextlib.contextmanager
def running_pipeline(home: Path, *, has_model: bool) -> Iterator[RunningPipeline]:
    """Start the services of a pipeline; at the end, end its workers and services.

    Args:
        home: Directory of everything.
        has_model: Whether the model that ships with the project is there from the start.
    """
    models = home / "models"
    if has_model:
        shutil.copytree(SHIPPED_MODELS, models)
    else:
        models.mkdir(parents=True)
    cache = Settings.from_environment(os.environ).cache
    services = LocalServices(
        home, environment=os.environ, model_repository=models, cache=cache, has_standard_ports=False
    )
    with services.guarded():
        services.up(SERVICE_NAMES)
        pipeline = RunningPipeline(home, services)
        try:
            yield pipeline
        finally:
            for extra in pipeline.extras.values():
                extra.end(grace_s=TIMEOUT_S)
            pipeline.supervisor.stop()


def differing(checks: Sequence[Check]) -> list[str]:
    """Say what does not add up."""
    return [
        f"{check.name}: expected {check.expected}, got {check.actual} ({check.detail})"
        for check in checks
        if not check.is_met
    ]
