"""An application of a test's own on a real Kafka, and the worker that computes its features."""

import json
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from infra.local.port import choose_ports
from infra.local.process import ProcessIdentity, exit_code, spawn, wait_until
from jobs.consumer_group import is_caught_up
from jobs.topic_reader import read_topic
from tests.support.kafka import TIMEOUT_S, produce

GROUP = "headrace.shop.features"
N_PARTITIONS = 2
T0_MS = 1_700_000_040_000
"""A full minute."""

APPLICATION = """
from streams import Entity, EventSource, FeatureView, count, sum_

user = Entity("user", key="user_id")
events = EventSource("{topic}", contract="shop_event@1", max_out_of_orderness="5s", {source})
VIEWS = [{views}]
"""
VIEW = """
    FeatureView("{name}", version={version}, entity=user, source=events, slide="1m", allowed_lateness="10s",
                emit="{emit}", features={{"x_2m": {feature}.over("2m")}}),
"""


class Workbench:
    """An application of its own, and the worker that computes its features."""

    def __init__(self, brokers: str, directory: Path) -> None:
        self.brokers = brokers
        self.name = uuid.uuid4().hex[:8]
        self.topic = f"test.events.{self.name}"
        self.directory = directory
        self.settings: dict[str, str] = {}
        self.worker: ProcessIdentity | None = None
        self.port = choose_ports({"metrics": 0})["metrics"]
        self.sent: Counter[int] = Counter()

    @property
    def log(self) -> Path:
        return self.directory / "worker.log"

    def view(self, name: str) -> str:
        return f"{name}_{self.name}"

    def define(
        self, *names: str, version: int = 1, feature: str = "count()", emit: str = "every_event", source: str = ""
    ) -> None:
        """Write the application."""
        views = [VIEW.format(name=self.view(name), version=version, feature=feature, emit=emit) for name in names]
        application = APPLICATION.format(topic=self.topic, views="".join(views), source=source)
        (self.directory / "shop.py").write_text(application)

    def environment(self) -> dict[str, str]:
        paths = {"PYTHONPATH": str(Path.cwd()), "HEADRACE_HOME": str(self.directory / "home")}
        # Lineage names the online store; this role never connects to it.
        addresses = {"HEADRACE_KAFKA": self.brokers, "HEADRACE_REDIS": "redis://127.0.0.1:1"}
        return {**os.environ, **paths, **addresses, "HEADRACE_APP": "shop", **self.settings}

    def run(self, *arguments: str, module: str = "jobs.cli") -> ProcessIdentity:
        argv = [sys.executable, "-m", *module.split(), *arguments]
        return spawn(argv, environment=self.environment(), cwd=self.directory, log=self.log)

    def make_topics(self) -> None:
        topics = self.run("topics", "apply", "--partitions", str(N_PARTITIONS))
        assert wait_until(lambda: not topics.is_alive(), timeout_s=TIMEOUT_S)
        assert exit_code(topics.pid) == 0, self.log.read_text()

    def start(self, *options: str, module: str = "jobs.cli") -> None:
        """Make the topics and start the worker.

        Args:
            options: More of its options.
            module: Module that runs the command line, maybe with arguments of its own before it.
        """
        self.make_topics()
        self.worker = self.run(
            "worker", "--role", "features", "--metrics-port", str(self.port), *options, module=module
        )

    def stop(self) -> None:
        assert self.worker is not None
        assert self.worker.end(grace_s=TIMEOUT_S), "the worker does not drain"
        assert exit_code(self.worker.pid) == 0, self.log.read_text()[-2_000:]

    def kill(self) -> None:
        assert self.worker is not None
        process = self.worker.process()
        assert process is not None, self.log.read_text()[-2_000:]
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not self.worker.is_alive(), timeout_s=TIMEOUT_S)

    def send(self, n_events: int, *, partition: int = 0, at_ms: int | None = None) -> None:
        """Send events of one user per partition, a second after the other."""
        start_ms = T0_MS + self.sent[partition] * 1_000 if at_ms is None else at_ms
        self.send_values([event(start_ms + n * 1_000, user=f"u{partition}") for n in range(n_events)], partition)

    def send_values(self, values: list[bytes], partition: int = 0) -> None:
        produce(self.brokers, self.topic, values, partition=partition)
        self.sent[partition] += len(values)

    def drain(self) -> None:
        self.until(lambda: is_caught_up(self.brokers, GROUP, self.topic), "all is processed")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        assert wait_until(condition, timeout_s=2 * TIMEOUT_S, poll_s=0.1), f"{what}: {self.log.read_text()[-3_000:]}"

    def rows(self, name: str, *, version: int = 1) -> list[dict[str, Any]]:
        batches = read_topic(self.brokers, f"features.{self.view(name)}")
        found = [json.loads(value or b"") for batch in batches for value in batch.values]
        return [row for row in found if row["view_version"] == version]

    def as_of(self, name: str, *, version: int = 1) -> Counter[tuple[int, int]]:
        """Source partition and offset of each as-of row, with how often it is there."""
        rows = self.rows(name, version=version)
        return Counter((row["source_partition"], row["source_offset"]) for row in rows if row["pane"] == "EARLY")

    def each_once(self, n_events: int) -> Counter[tuple[int, int]]:
        return Counter((partition, offset) for partition in self.sent for offset in range(n_events))

    def dead(self) -> list[dict[str, bytes]]:
        """Facts of dead letters in the order of their records: the partitions of their own topic have none."""
        batches = read_topic(self.brokers, f"dlq.{self.topic}")
        letters = [dict(headers or ()) for batch in batches for headers in batch.headers]
        return sorted(letters, key=lambda facts: (int(facts["headrace.partition"]), int(facts["headrace.offset"])))

    def forget_group(self) -> None:
        """Delete what the group has committed, as Kafka does with a group that was away for a week."""
        admin = AdminClient({"bootstrap.servers": self.brokers})
        admin.delete_consumer_groups([GROUP])[GROUP].result(TIMEOUT_S)

    def allow_bytes(self, n_bytes: int) -> None:
        """Let the source topic take records up to this size."""
        setting = ConfigEntry("max.message.bytes", str(n_bytes), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.topic, incremental_configs=[setting])
        admin = AdminClient({"bootstrap.servers": self.brokers})
        admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)

    def delete_records(self, before: int, *, partition: int = 0) -> None:
        """Delete records, as retention does."""
        at = TopicPartition(self.topic, partition, before)
        admin = AdminClient({"bootstrap.servers": self.brokers})
        admin.delete_records([at])[at].result(TIMEOUT_S)


def event(time_ms: int, *, user: str = "u0") -> bytes:
    content = {
        "event_id": uuid.uuid4().hex,
        "user_id": user,
        "event_time": time_ms,
        "event_type": "click",
        "amount": 1.5,
    }
    return json.dumps(content).encode()
