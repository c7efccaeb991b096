"""``headrace replay``: through real workers once more, compared with what was live, and nothing of it left."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable

from infra.local.process import ProcessIdentity, exit_code, wait_until
from jobs.application import load_application
from jobs.consumer_group import is_caught_up
from jobs.parity import DIFFERENT
from schemas.view import FeatureView
from streams.sinks.offline import read_features, table_uri
from tests.integration.test_backfill_live import events
from tests.support.kafka import TIMEOUT_S
from tests.support.workbench import N_PARTITIONS, T0_MS, Workbench

N_EVENTS = 300
AT_150 = "2023-11-14T22:16:30Z"
"""Record timestamp of the 150th event of each partition."""


class Live:
    """An application that has run for a while, and what it left."""

    def __init__(self, brokers: str, redis_url: str, directory: Path) -> None:
        self.bench = Workbench(brokers, directory)
        self.bench.settings["HEADRACE_REDIS"] = redis_url
        self.redis_url = redis_url
        self.delta = directory / "home" / "delta"
        self.admin = AdminClient({"bootstrap.servers": brokers})
        self.workers: list[ProcessIdentity] = []

    def run(self, *, emit: str = "every_event", is_redriven: bool = False) -> None:
        """Send events through the live path, late and broken ones among them."""
        bench = self.bench
        bench.define("a", emit=emit)
        bench.start()
        self.workers.append(bench.run("worker", "--role", "offline", "--metrics-port", "0", "--worker-id", "offline"))
        for partition in range(N_PARTITIONS):
            self.send(events(N_EVENTS, partition=partition), partition)
        bench.drain()
        if is_redriven:
            done = self.headrace("dlq", "redrive", "--reason", "late", "--json")
            assert done.returncode == 0, done.stderr
            bench.drain()
        bench.stop()
        for topic in (bench.topic, self.view.topic):
            bench.until(lambda topic=topic: is_caught_up(bench.brokers, "headrace.shop.offline", topic), topic)  # type: ignore[misc]  # bound now
        assert self.workers.pop().end(grace_s=TIMEOUT_S)

    def send(self, values: list[bytes], partition: int) -> None:
        """Send events a second after the other, as their timestamps have it."""
        producer = Producer({"bootstrap.servers": self.bench.brokers})
        for n, value in enumerate(values):
            producer.produce(self.bench.topic, value, partition=partition, timestamp=T0_MS + n * 1_000)
        assert producer.flush(TIMEOUT_S) == 0
        self.bench.sent[partition] += len(values)

    @property
    def view(self) -> FeatureView:
        return load_application(str(self.bench.directory / "shop.py")).view(self.bench.view("a"))

    def headrace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jobs.cli", *arguments],
            env=self.bench.environment(),
            cwd=self.bench.directory,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def replay(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        done = self.headrace("replay", "--json", *arguments)
        assert done.returncode == code, done.stderr
        assert self.left_behind() == []
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def stores(self, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {store["store"]: store for store in found["views"][self.view.name]}

    def left_behind(self) -> list[str]:
        """All that a replay has made and not removed."""
        topics = [name for name in self.admin.list_topics(timeout=TIMEOUT_S).topics if self.bench.name in name]
        groups = self.admin.list_consumer_groups().result(TIMEOUT_S).valid
        with redis.Redis.from_url(self.redis_url) as client:
            keys = [key.decode() for key in client.keys(f"headrace:replay_*{self.bench.name}*")]
        directories = [str(path) for path in (self.bench.directory / "home" / "replay").glob("replay_*")]
        found = [name for name in topics if "replay_" in name]
        return [*found, *keys, *directories, *(group.group_id for group in groups if "replay_" in group.group_id)]


@pytest.fixture
def live(kafka: str, redis_url: str, tmp_path: Path) -> Iterator[Live]:
    made = Live(kafka, redis_url, tmp_path)
    yield made
    for worker in (made.bench.worker, *made.workers):
        if worker is not None and worker.is_alive():
            worker.end(grace_s=TIMEOUT_S)


def test_a_replay_makes_what_was_live_and_leaves_nothing(live: Live) -> None:
    live.run(is_redriven=True)
    n_records = sum(live.bench.sent.values())
    n_late = Counter(facts["headrace.reason"] for facts in live.bench.dead())[b"late"] // 2
    assert n_late > 10
    found = live.replay()
    assert found["records"] == n_records + n_late
    stores = live.stores(found)
    counted = {name: (store["mismatched"], store["not_judged"]) for name, store in stores.items()}
    assert counted == dict.fromkeys(("offline", "online", "dead letters"), (0, 0))
    assert stores["offline"]["rows"] == read_features(live.delta, live.view).num_rows > 500
    assert stores["online"]["rows"] == 5 * N_PARTITIONS
    assert stores["dead letters"]["rows"] == 2 * n_late + N_PARTITIONS


def test_a_section_is_compared_at_its_speed_after_what_was_before_it(live: Live) -> None:
    live.run(emit="latest")
    names = ",".join(f"{live.bench.topic}:{partition}=250" for partition in range(N_PARTITIONS))
    found = live.replay(live.view.name, "--from", AT_150, "--to", names, "--speed", "200", "--source", "kafka")
    assert [section["read"] for section in found["sections"]] == [[0, 250]] * N_PARTITIONS
    assert [section["compared"] for section in found["sections"]] == [[150, 250]] * N_PARTITIONS
    rows = [row for row in read_features(live.delta, live.view).to_pylist() if 150 <= row["source_offset"] < 250]
    stores = live.stores(found)
    assert stores["offline"]["rows"] == len(rows)
    assert [store["mismatched"] for store in stores.values()] == [0, 0, 0]


def test_dead_letters_that_the_live_path_has_yet_to_write_are_not_judged(live: Live) -> None:
    live.run()
    for partition in range(N_PARTITIONS):
        live.send([b"broken"] * 3, partition)  # nobody has read these
    letters = live.stores(live.replay("--source", "kafka"))["dead letters"]
    assert (letters["mismatched"], letters["not_judged"]) == (0, 3 * N_PARTITIONS)
    assert letters["rows"] > N_PARTITIONS


def test_what_differs_is_found_with_its_lineage(live: Live) -> None:
    live.run()
    where = "pane = 'EARLY' and source_partition = 1 and source_offset = 100"
    changed = DeltaTable(table_uri(live.delta, live.view)).update(updates={"x_2m": "x_2m + 1"}, predicate=where)
    assert changed["num_updated_rows"] == 1
    gone = DeltaTable(table_uri(live.delta, live.view)).delete(
        "pane = 'EARLY' and source_partition = 0 and source_offset = 40"
    )
    assert gone["num_deleted_rows"] == 1
    offline = live.stores(live.replay(code=DIFFERENT))["offline"]
    assert offline["mismatched"] == 2
    by_kind = {mismatch["kind"]: mismatch for mismatch in offline["mismatches"]}
    assert by_kind["value"]["served"] == by_kind["value"]["recomputed"] + 1
    assert (by_kind["value"]["column"], by_kind["value"]["lineage"]["source_offset"]) == ("x_2m", 100)
    assert (by_kind["missing"]["lineage"]["source_partition"], by_kind["missing"]["lineage"]["source_offset"]) == (
        0,
        40,
    )


def test_what_a_killed_one_has_left_the_next_one_clears_up(live: Live) -> None:
    live.run()
    killed = live.bench.run("replay", "--speed", "1")
    root = live.bench.directory / "home" / "replay"
    live.bench.until(lambda: any(root.glob("replay_*/delta/raw.*")), "it has archived records")
    process = killed.process()
    assert process is not None
    process.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not killed.is_alive(), timeout_s=TIMEOUT_S)
    assert live.left_behind() != []
    live.replay()


@pytest.fixture
def limited(live: Live) -> Iterator[redis.Redis]:
    """The application uses the online store as a user who may not delete what is there."""
    admin = redis.Redis.from_url(live.redis_url)
    admin.execute_command("ACL SETUSER", live.bench.name, "on", ">secret", "~*", "+@all", "-unlink")
    live.bench.settings["HEADRACE_REDIS"] = live.redis_url.replace("://", f"://{live.bench.name}:secret@")
    yield admin
    admin.execute_command("ACL DELUSER", live.bench.name)
    admin.close()


def test_what_redis_will_not_let_it_clear_up_is_told_before_a_record_is_replayed(
    live: Live, limited: redis.Redis
) -> None:
    live.run()
    done = live.headrace("replay", "--json")
    assert (done.returncode, done.stdout, "+scan +unlink" in done.stderr) == (1, "", True), done.stderr
    assert live.left_behind() == []
    limited.execute_command("ACL SETUSER", live.bench.name, "+unlink")
    assert live.replay()["records"] == sum(live.bench.sent.values())


def test_where_redis_comes_to_refuse_the_report_is_there_and_only_its_values_stay_until_the_next_one(
    live: Live, limited: redis.Redis
) -> None:
    live.run()
    limited.execute_command("ACL SETUSER", live.bench.name, "+unlink")
    replaying = live.bench.run("replay", "--json")
    live.bench.until(lambda: any(name.startswith("features.") for name in live.left_behind()), "topics")
    limited.execute_command("ACL SETUSER", live.bench.name, "-unlink")
    assert wait_until(lambda: not replaying.is_alive(), timeout_s=4 * TIMEOUT_S)
    said = live.bench.log.read_text()
    assert (exit_code(replaying.pid), '"dead letters"' in said, "+scan +unlink" in said) == (1, True, True), said
    left = live.left_behind()
    assert left
    assert all(name.startswith(("headrace:replay_", str(live.bench.directory))) for name in left), left
    limited.execute_command("ACL SETUSER", live.bench.name, "+unlink")
    live.replay()


def test_stopped_by_ctrl_c_it_leaves_nothing(live: Live) -> None:
    live.run()
    running = live.bench.run("replay", "--speed", "1")
    live.bench.until(lambda: any(name.startswith("features.") for name in live.left_behind()), "topics")
    process = running.process()
    assert process is not None
    process.send_signal(signal.SIGINT)
    assert wait_until(lambda: not running.is_alive(), timeout_s=2 * TIMEOUT_S)
    assert exit_code(running.pid) == 130, live.bench.log.read_text()[-2_000:]
    assert live.left_behind() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "2020-13-01"], "`--from` is '2020-13-01', expected a date"),
        (["--to", "nothing:0=3"], "`--to` has 'nothing:0=3', expected TOPIC:PARTITION=OFFSET"),
        (["--from", "0=3"], "`--from` names no offset of"),
        (["--from", "2100-01-01"], "no record lies between"),
        (["--speed", "0"], "--speed is '0'"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused_before_anything_is_made(
    live: Live, arguments: list[str], said: str
) -> None:
    live.bench.define("a")
    live.bench.make_topics()
    for partition in range(N_PARTITIONS):
        live.bench.send(3, partition=partition)
    done = live.headrace("replay", "--source", "kafka", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert live.left_behind() == []


def test_a_view_behind_a_repartition_topic_is_refused(live: Live) -> None:
    live.bench.define("a", source='key=""')
    live.bench.make_topics()
    done = live.headrace("replay", live.bench.view("a"))
    assert (done.returncode, "expected a view that reads its source directly" in done.stderr) == (2, True), done.stderr
