"""``headrace backfill`` next to what the live path writes, with a real Kafka and running workers."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infra.local.process import ProcessIdentity
from jobs.application import load_application
from jobs.consumer_group import is_caught_up
from offline.late import with_late
from schemas.time import parse_duration_us
from schemas.view import FeatureView
from streams.sinks.offline import OfflineWriter, read_features
from tests.support.kafka import TIMEOUT_S
from tests.support.workbench import N_PARTITIONS, T0_MS, Workbench, event


class Store:
    """A workbench with an offline role beside it."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.delta = bench.directory / "home" / "delta"
        self.offline: ProcessIdentity | None = None

    def start_offline(self) -> None:
        self.offline = self.bench.run("worker", "--role", "offline", "--metrics-port", "0", "--worker-id", "offline")

    def stop_offline(self) -> None:
        assert self.offline is not None
        assert self.offline.end(grace_s=TIMEOUT_S), "the offline role does not drain"

    @property
    def view(self) -> FeatureView:
        return load_application(str(self.bench.directory / "shop.py")).view(self.bench.view("a"))

    def drain(self) -> None:
        """Wait until both roles have done all that is there."""
        self.bench.drain()
        for topic in {self.view.topic, self.view.input.topic}:
            self.bench.until(
                lambda topic=topic: is_caught_up(self.bench.brokers, "headrace.shop.offline", topic),  # type: ignore[misc]  # bound now
                f"the offline role has all of {topic}",
            )

    def backfill(self, *arguments: str) -> dict[str, Any]:
        return self.headrace("backfill", self.view.name, *arguments)

    def headrace(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", *arguments, "--json"],
            env=self.bench.environment(),
            cwd=self.bench.directory,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def content(self, root: Path) -> list[dict[str, Any]]:
        """All that rows say but when they were committed."""
        rows = read_features(root, self.view).drop_columns(["computed_time", "epoch"])
        keys = ("source_partition", "source_offset", "window_end", "pane", "pane_index", "user_id")
        ordered: list[dict[str, Any]] = rows.sort_by([(key, "ascending") for key in keys]).to_pylist()
        return ordered

    def as_of(self) -> Counter[tuple[int, int]]:
        """Source partition and offset of each as-of row, with how often it is in the table."""
        rows: pa.Table = read_features(self.delta, self.view)
        rows = rows.select(["pane", "source_partition", "source_offset"])
        return Counter(
            (row["source_partition"], row["source_offset"]) for row in rows.to_pylist() if row["pane"] == "EARLY"
        )


@pytest.fixture
def store(kafka: str, tmp_path: Path) -> Iterator[Store]:
    made = Store(Workbench(kafka, tmp_path))
    yield made
    for worker in (made.bench.worker, made.offline):
        if worker is not None and worker.is_alive():
            worker.end(grace_s=TIMEOUT_S)


def events(n_events: int, *, partition: int, first: int = 0) -> list[bytes]:
    """Some out of order, some late, some of no user."""
    behind_ms = (0, 3_000, 0, 200_000, 0, 1_000)
    values = [
        event(T0_MS + (first + n) * 1_000 - behind_ms[n % 6], user=f"u{partition}-{n % 5}") for n in range(n_events)
    ]
    values[n_events // 2] = b"no json"
    return values


@pytest.mark.parametrize("key", ["user_id", ""])
def test_archive_and_topic_give_the_rows_that_the_live_path_wrote(store: Store, key: str) -> None:
    """``key=""``: the view reads its source by way of a repartition topic."""
    bench = store.bench
    bench.define("a", source=f'key="{key}", idle_timeout="1s"')
    bench.start()
    store.start_offline()
    for first in range(0, 900, 300):
        for partition in range(N_PARTITIONS):
            bench.send_values(events(300, partition=partition, first=first), partition)
    bench.drain()
    if key == "":
        expected = sum(bench.sent.values())
        bench.until(lambda: len(bench.rows("a")) > expected // 2, "rows have come by way of the repartition topic")
    bench.stop()
    store.drain()
    store.stop_offline()
    live = store.content(store.delta)
    panes = Counter(row["pane"] for row in live)
    assert panes["EARLY"] > 1_000
    assert panes["ON_TIME"] > 0
    for source in ("delta", "kafka"):
        other = bench.directory / f"from-{source}"
        done = store.backfill("--source", source, "--into", str(other), "--workers", "2")
        assert store.content(other) == live
        assert done["rows_added"] == len(live)
    assert store.backfill()["rows_added"] == 0, "all of it is there"


@pytest.mark.parametrize("key", ["user_id", ""])
def test_late_rows_count_once_where_they_came_though_they_were_sent_again(store: Store, key: str) -> None:
    bench = store.bench
    bench.define("a", source=f'key="{key}", idle_timeout="1s"')
    bench.start()
    store.start_offline()
    for partition in range(N_PARTITIONS):
        bench.send_values(events(300, partition=partition), partition)
    n_sent, n_broken = sum(bench.sent.values()), N_PARTITIONS

    def late() -> int:
        return sum(facts["headrace.reason"] == b"late" for facts in bench.dead())

    bench.until(lambda: len(bench.as_of("a")) + len(bench.dead()) == n_sent, "each event is in a row or a dead letter")
    n_late = late()
    assert n_late > 10
    store.headrace("dlq", "redrive", "--reason", "late")
    bench.until(lambda: late() == 2 * n_late, "they are late again")
    bench.stop()
    store.drain()
    store.stop_offline()
    other = bench.directory / "other"
    done = store.backfill("--with-late", "all", "--into", str(other))
    assert done["copies"] == n_late
    assert set(done["dead_letters"]) <= {"decode_error"}  # on a repartition topic there are none
    folded = with_late(store.view, parse_duration_us(done["allowed_lateness"], field="allowed_lateness"))
    rows = read_features(other, folded).to_pylist()
    counted = Counter((row["source_partition"], row["source_offset"]) for row in rows if row["pane"] == "EARLY")
    assert set(counted.values()) == {1}
    assert len(counted) == n_sent - n_broken


@pytest.mark.parametrize("are_live_rows_stored", [True, False])
def test_beside_running_workers_each_event_has_its_row_once(store: Store, are_live_rows_stored: bool) -> None:
    """The live path begins at the end of its topic, and goes on while what was before is back-filled."""
    bench = store.bench
    bench.define("a")
    bench.make_topics()
    for partition in range(N_PARTITIONS):
        bench.send(500, partition=partition)
    bench.start("--start-at", "end")
    bench.until(lambda: "the group begins at" in bench.log.read_text(), "the group has begun")
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.05):
            for partition in range(N_PARTITIONS):
                bench.send(20, partition=partition)

    sender = threading.Thread(target=go_on)
    sender.start()
    try:
        if are_live_rows_stored:
            store.start_offline()
            writer = OfflineWriter(store.delta)
            everywhere = dict.fromkeys(range(N_PARTITIONS), 500)
            bench.until(lambda: writer.history(store.view, range(N_PARTITIONS)).live_from == everywhere, "live rows")
        else:
            bench.until(lambda: len(bench.as_of("a")) > 0, "the live path has rows")
        done = store.backfill("--source", "kafka")
        if not are_live_rows_stored:
            store.start_offline()
    finally:
        over.set()
        sender.join()
    store.drain()
    bench.stop()
    store.drain()
    store.stop_offline()
    assert done["rows_added"] >= N_PARTITIONS * 500
    for part in done["partitions"]:
        assert part["missing"] is None
        if are_live_rows_stored:
            assert (part["history"], part["live_from"]) == ([0, 500], 500)
        else:
            assert part["history"][1] >= 500
    everything = Counter((partition, offset) for partition in bench.sent for offset in range(bench.sent[partition]))
    assert store.as_of() == everything
