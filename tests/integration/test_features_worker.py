"""The features role on a real Kafka, across what a user does to its views and what becomes of its topics."""

import hashlib
import json
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from infra.local.port import choose_ports
from infra.local.process import ProcessIdentity, exit_code, spawn, wait_until
from jobs.consumer_group import is_caught_up
from jobs.scrape import scrape
from jobs.topic_reader import read_topic
from streams.transport.epoch import MAX_RECORD_BYTES
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
        return {**os.environ, **paths, **addresses, "HEADRACE_APP": "shop"}

    def run(self, *arguments: str) -> ProcessIdentity:
        argv = [sys.executable, "-m", "jobs.cli", *arguments]
        return spawn(argv, environment=self.environment(), cwd=self.directory, log=self.log)

    def start(self) -> None:
        topics = self.run("topics", "--partitions", str(N_PARTITIONS))
        assert wait_until(lambda: not topics.is_alive(), timeout_s=TIMEOUT_S)
        assert exit_code(topics.pid) == 0, self.log.read_text()
        self.worker = self.run("worker", "--role", "features", "--metrics-port", str(self.port))

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
        batches = read_topic(self.brokers, f"dlq.{self.topic}")
        return [dict(headers or ()) for batch in batches for headers in batch.headers]

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


@pytest.fixture
def bench(kafka: str, tmp_path: Path) -> Iterator[Workbench]:
    made = Workbench(kafka, tmp_path)
    yield made
    if made.worker is not None and made.worker.is_alive():
        made.worker.end(grace_s=TIMEOUT_S)


def test_a_view_added_later_goes_over_all_that_is_there_and_the_others_send_nothing_again(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    for partition in range(N_PARTITIONS):
        bench.send(300, partition=partition)
    bench.send_values([b"{}"])
    bench.drain()
    bench.stop()
    bench.define("a", "b")
    bench.start()
    bench.until(lambda: len(bench.as_of("b")) > 0, "the new view has rows")
    bench.kill()
    bench.start()
    for partition in range(N_PARTITIONS):
        bench.send(50, partition=partition)
    bench.drain()
    expected = bench.as_of("a")
    assert expected == Counter((p, o) for p in (0, 1) for o in range(bench.sent[p]) if (p, o) != (0, 300))
    assert bench.as_of("b") == expected
    assert [letter["headrace.reason"] for letter in bench.dead()] == [b"schema_violation"]


def test_a_view_that_was_away_has_every_row_once_when_it_is_back(bench: Workbench) -> None:
    bench.define("a", "b")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.define("a", "b")
    bench.start()
    bench.send(100)
    bench.drain()
    assert bench.as_of("a") == bench.as_of("b") == bench.each_once(300)
    assert [row["x_2m"] for row in bench.rows("a")] == [row["x_2m"] for row in bench.rows("b")]


def test_a_new_version_starts_anew_beside_the_rows_of_the_old_one(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.define("a", version=2, feature='sum_("amount")')
    bench.start()
    bench.send(100)
    bench.drain()
    assert bench.as_of("a") == bench.each_once(100)
    assert bench.as_of("a", version=2) == bench.each_once(200)
    bench.stop()
    bench.define("a")
    bench.start()
    bench.drain()
    bench.until(lambda: len(bench.as_of("a")) == 200, "the old version has caught up")
    assert bench.as_of("a") == bench.each_once(200)


def test_a_group_whose_offsets_expired_sends_nothing_again(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.send_values([b"no json"])
    bench.drain()
    bench.stop()
    bench.forget_group()
    bench.start()
    bench.send(100)
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(201) if offset != 100)
    assert [letter["headrace.reason"] for letter in bench.dead()] == [b"decode_error"]


def test_what_retention_took_before_it_was_read_is_told_and_the_rest_is_processed(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    bench.send(100)
    bench.delete_records(150)
    bench.start()
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(200) if not 100 <= offset < 150)
    lost = scrape([bench.port]).total("headrace_offsets_lost_total", role="features", topic=bench.topic)
    assert lost == 50
    assert f"{bench.topic}-0: offsets 100 to 149 are gone" in bench.log.read_text()


def test_an_event_larger_than_any_dead_letter_is_cut_and_the_worker_goes_on(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.allow_bytes(4 * MAX_RECORD_BYTES)
    huge = b'{"user_id": "' + b"x" * 2 * MAX_RECORD_BYTES + b'"}'
    bench.send_values([huge])
    bench.send(10)
    bench.drain()
    assert bench.as_of("a") == Counter((0, offset) for offset in range(1, 11))
    (letter,) = bench.dead()
    assert (letter["headrace.reason"], letter["headrace.offset"]) == (b"schema_violation", b"0")
    assert letter["headrace.value_sha256"] == hashlib.sha256(huge).hexdigest().encode()


def test_a_topic_that_was_made_again_is_refused(bench: Workbench) -> None:
    bench.define("a")
    bench.start()
    bench.send(100)
    bench.drain()
    bench.stop()
    admin = AdminClient({"bootstrap.servers": bench.brokers})
    admin.delete_topics([bench.topic])[bench.topic].result(TIMEOUT_S)
    bench.start()
    assert bench.worker is not None
    bench.until(lambda: not bench.worker.is_alive(), "the worker ends")
    assert exit_code(bench.worker.pid) == 1
    assert f"{bench.topic}-0 is to be read from offset 100, but ends at 0" in bench.log.read_text()


def test_an_idle_partition_closes_its_windows_by_the_clock_and_a_restart_takes_the_same_decision(
    bench: Workbench,
) -> None:
    bench.define("a", emit="on_close", source='idle_timeout="1s", idle_advance=True')
    bench.start()
    # A first event near the end of its window, which closes 1 s (idle) + 6 s (out-of-orderness and rest) later.
    bench.send(2, at_ms=T0_MS + 58_000)
    bench.until(lambda: len(bench.rows("a")) >= 1, "the window is closed")
    (row, *_) = bench.rows("a")
    assert (row["pane"], row["x_2m"], row["source_offset"]) == ("ON_TIME", 2, 1)
    bench.kill()
    bench.start()
    bench.send_values([event(T0_MS + 59_500), event(T0_MS + 400_000)])
    bench.drain()
    panes = [(row["window_end"], row["pane"], row["pane_index"], row["x_2m"]) for row in bench.rows("a")]
    assert len(set(panes)) == len(panes)
    assert next(pane for pane in panes if pane[1] == "ON_TIME")[3] == 2
