"""A model of a test's own, and real workers that score with it what is put on its trigger topic."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from infra.local.port import choose_ports
from infra.local.process import ProcessIdentity, exit_code, spawn, wait_until
from jobs.application import load_application
from jobs.consumer_group import is_caught_up
from jobs.models_command import app as models
from jobs.topic_reader import read_topic
from jobs.topics import ensure_topics, plan_topics
from schemas.model import ModelSpec
from schemas.view import FeatureView
from streams.inference.rollout import Stage
from streams.inference.rollout_log import Entry, RolloutLog
from streams.wire import encode_rows
from tests.support.kafka import TIMEOUT_S, produce
from tests.support.scoring import make_triggers

N_PARTITIONS = 2
APPLICATION = """
from schemas.ladder import Ladder, Rule
from tests.support.scoring import AIRCRAFT, CARRIERS, make_spec, make_trigger_view

trips = make_trigger_view(name="trips_of_{name}")
VIEWS = [trips, CARRIERS, AIRCRAFT]
LADDER = Ladder(waived=("cache", "light_model"), rules=(Rule("true", {{"probability": 0.125}}),), timeout="20s")
MODELS = [make_spec(name="{name}", view=trips, ladder=LADDER)]
"""


@dataclass(kw_only=True)
class ScoringBench:
    """A model, its topics and its workers.

    Attributes:
        name: Name of the model.
        directory: Where its application, home and logs are.
        kafka: Bootstrap servers.
        redis: URL.
        triton: gRPC endpoint.
        repository: The server's repository.
    """

    name: str
    directory: Path
    kafka: str
    redis: str
    triton: str
    repository: Path
    workers: dict[str, ProcessIdentity] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    sent: int = 0

    def __post_init__(self) -> None:
        self.module = self.directory / f"{self.name}.py"
        self.module.write_text(APPLICATION.format(name=self.name))
        self.application = load_application(str(self.module))
        ensure_topics(self.kafka, plan_topics([self.view], [self.spec]), partitions=N_PARTITIONS)

    @property
    def spec(self) -> ModelSpec:
        return self.application.models[self.name]

    @property
    def view(self) -> FeatureView:
        return self.application.views[f"trips_of_{self.name}"]

    @property
    def environment(self) -> dict[str, str]:
        """What the command line reads."""
        return {
            "PYTHONPATH": str(Path.cwd()),
            "HEADRACE_HOME": str(self.directory / "home"),
            "HEADRACE_APP": str(self.module),
            "HEADRACE_KAFKA": self.kafka,
            "HEADRACE_REDIS": self.redis,
            "HEADRACE_TRITON": self.triton,
            "HEADRACE_MODEL_REPOSITORY": str(self.repository),
        }

    def models(self, command: str, *arguments: str) -> dict[str, Any]:
        """Run ``headrace models``."""
        result = CliRunner(env=self.environment).invoke(
            models, [command, self.name, *arguments, "--json"], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def log(self, worker: str = "a") -> str:
        path = self.directory / f"{worker}.log"
        return path.read_text() if path.exists() else ""

    def start(self, *names: str) -> None:
        """Start workers."""
        for name in names:
            self.ports[name] = choose_ports({"metrics": 0})["metrics"]
            argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", "scoring", "--worker-id", name]
            argv += ["--metrics-port", str(self.ports[name]), "--parent", str(os.getpid())]
            self.workers[name] = spawn(
                argv,
                environment={**os.environ, **self.environment},
                cwd=Path.cwd(),
                log=self.directory / f"{name}.log",
            )

    def stop(self, *names: str) -> None:
        for name in names:
            worker = self.workers.pop(name)
            assert worker.end(grace_s=TIMEOUT_S), f"worker {name} does not drain"
            assert exit_code(worker.pid) == 0, self.log(name)[-3_000:]

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        process = worker.process()
        assert process is not None, self.log(name)[-3_000:]
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not worker.is_alive(), timeout_s=TIMEOUT_S)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end(grace_s=TIMEOUT_S)

    def send(self, distances: Sequence[float], *, entities: Sequence[str] | None = None) -> None:
        """Put trigger rows on the topic, each with a request id of its own."""
        names = entities or [f"f{self.sent + number}" for number in range(len(distances))]
        rows = [
            {"distance": distance, "flight_id": name, "request_id": f"r{self.sent + number}"}
            for number, (distance, name) in enumerate(zip(distances, names, strict=True))
        ]
        values = encode_rows(make_triggers(*rows, view=self.view))
        for partition in range(N_PARTITIONS):
            produce(self.kafka, self.view.topic, values[partition::N_PARTITIONS], partition=partition)
        self.sent += len(distances)

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float = 2 * TIMEOUT_S) -> None:
        is_met = wait_until(condition, timeout_s=within_s, poll_s=0.1)
        assert is_met, f"{what}: {[self.log(name)[-3_000:] for name in self.workers]}"

    def drain(self) -> None:
        """Wait until all that was sent is scored."""
        group = f"headrace.{self.name}.scoring.{self.name}"
        self.until(lambda: is_caught_up(self.kafka, group, self.view.topic), "all rows are scored")

    def scores(self) -> list[dict[str, Any]]:
        """All scores, in the order of their requests; each request has one, and there are no dead letters."""
        batches = read_topic(self.kafka, self.spec.topic)
        found = [json.loads(value or b"") for batch in batches for value in batch.values]
        found.sort(key=lambda score: int(score["request_id"][1:]))
        assert [score["request_id"] for score in found] == [f"r{number}" for number in range(self.sent)]
        assert not list(read_topic(self.kafka, self.spec.dead_letter_topic))
        return found

    def until_followed(self, generation: int) -> None:
        """Wait until all workers score by a generation."""
        told = f"generation {generation} of the rollout"
        self.until(lambda: all(told in self.log(name) for name in self.workers), told)

    def seen(self, version: str) -> int:
        """Rows that the workers have told to have given a version since the present generation began."""
        rows: int = self.models("status")["versions"][version]["rows"]
        return rows

    @contextlib.contextmanager
    def under_load(self, distances: Sequence[float]) -> Iterator[None]:
        """Send rows meanwhile, some hundred a second."""
        is_over = threading.Event()
        faults: list[BaseException] = []

        def send() -> None:
            try:
                while not is_over.wait(0.05):
                    self.send(distances)
            except BaseException as exc:
                faults.append(exc)

        sender = threading.Thread(target=send, name="load")
        sender.start()
        try:
            yield
        finally:
            is_over.set()
            sender.join()
        assert not faults

    def entry(self) -> Entry:
        """Where the rollout stands."""
        with self.rollout() as log:
            entry = log.read().entry
        assert entry is not None
        return entry

    def reasons(self) -> list[str]:
        """Why each generation was made, from the first on: nothing has been compacted yet."""
        batches = read_topic(self.kafka, self.spec.rollout_topic)
        states = [
            value for batch in batches for key, value in zip(batch.keys, batch.values, strict=True) if key == b"state"
        ]
        return [json.loads(state or b"")["state"]["reason"] for state in states]

    def until_stage(self, stage: Stage, *, after: int) -> Entry:
        """Wait until the rollout has come to a stage in a later generation than ``after``."""

        def is_there() -> bool:
            entry = self.entry()
            return entry.state.stage is stage and entry.generation > after

        self.until(is_there, f"the rollout is {stage}")
        return self.entry()

    def rollout(self) -> RolloutLog:
        return RolloutLog(self.kafka, self.spec)
