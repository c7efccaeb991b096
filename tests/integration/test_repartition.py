"""Rows by way of a repartition topic on a real Kafka: routed once, judged once, whatever is killed in between."""

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.partitioner import murmur2

from jobs.consumer_group import is_caught_up
from jobs.topic_reader import read_topic
from schemas.time import parse_rfc3339_us
from tests.support.kafka import TIMEOUT_S, produce
from tests.support.workbench import GROUP, N_PARTITIONS, T0_MS, Workbench

APPLICATION = """
from streams import Entity, EventSource, FeatureView, count, last

events = EventSource("{topic}", contract="shop_event@1", key="user_id", max_out_of_orderness="5s", {source})
common = dict(version=1, source=events, slide="1m", allowed_lateness="10s", emit="every_event")
VIEWS = [
    FeatureView("user_{name}", entity=Entity("user", key="user_id"), features={{"n_1m": count().over("1m")}}, **common),
    FeatureView("category_{name}", entity=Entity("category", key="category"), features={{
        "n_1m": count().over("1m"),
        "n": count().over(lifetime=True),
        "newest": last("event_id").over(last=1),
    }}, **common),
]
"""


class RoutedWorkbench(Workbench):
    """An application with a view of users, by which its source is keyed, and one of categories."""

    def define(self, *, source: str = "") -> None:  # type: ignore[override]
        application = APPLICATION.format(topic=self.topic, name=self.name, source=source)
        (self.directory / "shop.py").write_text(application)

    @property
    def repartition_topic(self) -> str:
        return f"repartition.{self.topic}.category"

    def view(self, name: str) -> str:
        return f"{name}_{self.name}"

    def send_events(self, n_events: int, *, partition: int, kinds: tuple[str, ...] = ("click", "order")) -> None:
        first = self.sent[partition]
        self.send_values(
            [event(n * 1_000, kind=kinds[n % len(kinds)]) for n in range(first, first + n_events)], partition
        )

    def drain(self) -> None:
        for topic in (self.topic, self.repartition_topic):
            self.until(lambda topic=topic: is_caught_up(self.brokers, GROUP, topic), f"{topic} is processed")

    def origins(self) -> Counter[tuple[int, int]]:
        """Partition and offset of the source record behind each as-of row of the routed view."""
        rows = [row for row in self.rows("category") if row["pane"] == "EARLY"]
        assert {row["origin_topic"] for row in rows} <= {self.topic}
        return Counter((row["origin_partition"], row["origin_offset"]) for row in rows)

    def routed(self) -> list[tuple[int, bytes | None, dict[str, Any]]]:
        """Partition, key and envelope of each record on the repartition topic."""
        return [
            (batch.partition, key, json.loads((value or b"").partition(b"\n")[0]))
            for batch in read_topic(self.brokers, self.repartition_topic)
            for key, value in zip(batch.keys, batch.values, strict=True)
        ]


TWO_SOURCES = """
    FeatureView("both_{name}", version=1, entity=Entity("category", key="category"), slide="1m",
                source=[events, EventSource("{other}", contract="shop_event@1", max_out_of_orderness="5s")],
                emit="every_event", features={{
        "here": count(where="_source == '{topic}'").over(lifetime=True),
        "there": count(where="_source == '{other}'").over(lifetime=True),
    }}),
]
"""


def event(after_ms: int, *, kind: str | None = "click") -> bytes:
    content = {
        "event_id": uuid.uuid4().hex,
        "user_id": "u",
        "event_time": T0_MS + after_ms,
        "event_type": "click",
        "category": kind,
        "amount": 1.5,
    }
    return json.dumps(content).encode()


@pytest.fixture
def bench(kafka: str, tmp_path: Path) -> Iterator[RoutedWorkbench]:
    made = RoutedWorkbench(kafka, tmp_path)
    yield made
    if made.worker is not None and made.worker.is_alive():
        made.worker.end(grace_s=TIMEOUT_S)


def test_each_row_is_routed_and_counted_once_whatever_is_killed_between_the_two(bench: RoutedWorkbench) -> None:
    bench.define()
    bench.start()
    for turn in range(4):
        for partition in range(N_PARTITIONS):
            bench.send_events(400, partition=partition)
        at_least = 400 * N_PARTITIONS * turn + 1
        bench.until(lambda least=at_least: sum(key is not None for _, key, _ in bench.routed()) >= least, "some routed")
        if turn == 2:
            bench.stop()
            bench.forget_group()
        else:
            bench.kill()
        bench.start()
    bench.drain()
    expected = bench.each_once(1_600)
    assert bench.as_of("user") == expected
    assert bench.origins() == expected
    assert Counter((e["partition"], e["offset"]) for _, key, e in bench.routed() if key is not None) == expected
    for kind in ("click", "order"):
        counts = [row["n"] for row in bench.rows("category") if row["category"] == kind and row["pane"] == "EARLY"]
        assert sorted(counts) == list(range(1, 1_601))


def test_a_row_goes_where_every_default_partitioner_would_put_its_key(bench: RoutedWorkbench) -> None:
    bench.define()
    bench.start()
    kinds = ("", "a", "kind of a longer name", "ключ", "日本", *(f"k{n}" for n in range(20)))
    bench.send_events(2 * len(kinds), partition=1, kinds=kinds)
    bench.drain()
    places = {key: partition for partition, key, _ in bench.routed() if key is not None}
    assert places == {kind.encode(): (murmur2(kind.encode()) & 0x7FFFFFFF) % N_PARTITIONS for kind in kinds}
    assert set(places.values()) == set(range(N_PARTITIONS))


def test_dead_letters_name_the_record_of_the_source_whoever_found_them(bench: RoutedWorkbench) -> None:
    bench.define()
    bench.start()
    bench.send_events(200, partition=0)
    bench.send_events(200, partition=1)
    bench.drain()
    late, keyless = event(1_000), event(300_000, kind=None)
    bench.send_values([b"{", late, keyless], partition=1)
    bench.drain()
    letters = [
        (facts["headrace.reason"], facts.get("headrace.view"), int(facts["headrace.offset"])) for facts in bench.dead()
    ]
    assert sorted(letters, key=str) == sorted(
        [
            (b"decode_error", None, 200),
            (b"late", bench.view("user").encode(), 201),
            (b"late", bench.view("category").encode(), 201),
            (b"missing_key", bench.view("category").encode(), 202),
        ],
        key=str,
    )
    assert {facts["headrace.topic"] for facts in bench.dead()} == {bench.topic.encode()}
    values = [value for batch in read_topic(bench.brokers, f"dlq.{bench.topic}") for value in batch.values]
    assert sorted(filter(None, values)) == sorted([b"{", late, late, keyless])


def test_a_silent_partition_holds_windows_open_until_it_is_idle_and_says_so_once(bench: RoutedWorkbench) -> None:
    bench.define(source='idle_timeout="2s"')
    bench.start()
    bench.send_events(180, partition=0)
    closed = [parse_rfc3339_us("2023-11-14T22:15:00Z"), parse_rfc3339_us("2023-11-14T22:16:00Z")]
    bench.until(lambda: len([r for r in bench.rows("category") if r["pane"] == "ON_TIME"]) >= 4, "windows close")
    rows = [row for row in bench.rows("category") if row["pane"] == "ON_TIME"]
    assert sorted({parse_rfc3339_us(row["window_end"]) for row in rows}) == closed
    assert {row["n_1m"] for row in rows} == {30}
    assert {(row["origin_topic"], row["origin_partition"]) for row in rows} == {(bench.topic, 1)}
    assert {row["broker_time"] for row in rows} == {None}, "silence came to the broker at no time"
    bench.kill()
    bench.start()
    bench.send_events(100, partition=1)
    bench.drain()
    heartbeats = [envelope for _, key, envelope in bench.routed() if key is None]
    assert Counter(e["is_idle"] for e in heartbeats if e["partition"] == 1)[True] == N_PARTITIONS
    # The rows that come late to a partition that was idle are judged against the watermark that went on without it.
    assert [
        facts["headrace.partition"] for facts in bench.dead() if facts["headrace.view"].startswith(b"category")
    ] == ([b"1"] * 100)


def test_a_view_over_two_topics_has_every_row_of_both_and_closes_by_the_slower_one(bench: RoutedWorkbench) -> None:
    bench.define()
    other = f"{bench.topic}.other"
    both = TWO_SOURCES.format(topic=bench.topic, name=bench.name, other=other)
    application = (bench.directory / "shop.py").read_text().rstrip().removesuffix("]") + both
    (bench.directory / "shop.py").write_text(application)
    bench.start()
    bench.send_events(150, partition=0)
    bench.send_events(150, partition=1)
    produce(bench.brokers, other, [event(n * 1_000) for n in range(70)], partition=0)
    bench.until(lambda: is_caught_up(bench.brokers, GROUP, other), "the other topic is routed")
    bench.kill()
    bench.start()
    produce(bench.brokers, other, [event(n * 1_000) for n in range(75)], partition=1)
    for topic in (bench.topic, other, f"repartition.{bench.topic}--{other}.category"):
        bench.until(lambda topic=topic: is_caught_up(bench.brokers, GROUP, topic), f"{topic} is processed")
    rows = [row for row in bench.rows("both") if row["pane"] == "EARLY"]
    found = Counter((row["origin_topic"], row["origin_partition"]) for row in rows)
    assert found == {(bench.topic, 0): 150, (bench.topic, 1): 150, (other, 0): 70, (other, 1): 75}
    # Half of the events here are clicks and half orders; all of those there are clicks.
    assert max(row["here"] for row in rows) == 150
    assert max(row["there"] for row in rows) == 145
    assert bench.dead() == []
    watermark = max(parse_rfc3339_us(row["watermark"]) for row in rows if row["watermark"] is not None)
    assert watermark <= (T0_MS + 69_000 - 5_000) * 1_000


def test_two_applications_that_read_one_topic_by_one_key_do_not_see_each_other_s_rows(
    bench: RoutedWorkbench, kafka: str, tmp_path: Path
) -> None:
    bench.define()
    bench.start()
    bench.send_events(100, partition=0)
    bench.drain()
    bench.stop()
    (tmp_path / "second").mkdir()
    second = RoutedWorkbench(kafka, tmp_path / "second")
    second.topic = bench.topic
    second.define()
    application = (second.directory / "shop.py").read_text()
    (second.directory / "shop.py").write_text(f'NAME = "second_{second.name}"\n{application}')
    second.start()
    try:
        second.until(lambda: len(second.rows("category")) >= 100, "the second application has rows")
        second.until(
            lambda: is_caught_up(kafka, f"headrace.second_{second.name}.features", bench.repartition_topic), "all read"
        )
    finally:
        second.stop()
    bench.start()
    bench.send_events(50, partition=0)
    bench.drain()
    assert second.origins() == Counter({(0, offset): 1 for offset in range(100)})
    assert bench.origins() == Counter({(0, offset): 1 for offset in range(150)})
