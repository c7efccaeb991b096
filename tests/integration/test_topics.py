"""Topics on a real Kafka, as the definitions want them, and reading them."""

import json
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)
from typer.testing import CliRunner

from jobs.commands import app
from jobs.consumer_group import is_caught_up, place_group
from jobs.flights.producer import check_retention
from jobs.topic_reader import end_offsets, read_topic
from jobs.topics import Topic, ensure_topics, plan_topics
from schemas.errors import ConfigError, ServiceError
from schemas.source import EventSource
from schemas.view import FeatureView
from tests.support.feature_rows import make_view
from tests.support.kafka import TIMEOUT_S, make_group, make_topic, produce

NOBODY = "127.0.0.1:9"
APPLICATION = """
from schemas.aggregation import count
from schemas.entity import Entity
from schemas.source import EventSource
from schemas.view import FeatureView

shop = EventSource("{topic}", contract="shop_event@1", event_time="event_time", max_out_of_orderness="5s")
VIEWS = [
    FeatureView(
        "{view}", version=1, entity=Entity("user", key="user_id"), source=shop, slide="1m",
        features={{"n": count().over("5m")}},
    )
]
"""


def name() -> str:
    return f"test.{uuid.uuid4().hex[:8]}"


def partition_counts(kafka: str, *names: str) -> dict[str, int]:
    # A broker hears of a topic a moment after the controller has made it.
    admin = AdminClient({"bootstrap.servers": kafka})
    found = admin.list_topics(timeout=TIMEOUT_S).topics
    deadline_s = time.monotonic() + TIMEOUT_S
    while not found.keys() >= set(names) and time.monotonic() < deadline_s:
        found = admin.list_topics(timeout=TIMEOUT_S).topics
    return {topic: len(found[topic].partitions) for topic in names}


def described(kafka: str, topic: str) -> dict[str, Any]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": kafka})
    found: dict[str, Any] = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
    return found


def configuration(kafka: str, topic: str) -> dict[str, Any]:
    return {key: entry.value for key, entry in described(kafka, topic).items()}


def origin(kafka: str, topic: str, key: str) -> int:
    return int(described(kafka, topic)[key].source)


def alter(kafka: str, topic: str, config: dict[str, str]) -> None:
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in config.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not configuration(kafka, topic).items() >= config.items():
        assert time.monotonic() < deadline_s, f"the broker does not tell {config} of {topic}"


def test_missing_topics_are_made_with_the_partitions_of_their_source(kafka: str) -> None:
    raw, features = name(), name()
    planned = [Topic(name=raw), Topic(name=features, like=(raw,), config={"cleanup.policy": "compact"})]
    assert ensure_topics(kafka, planned, partitions=3) == [raw, features]
    assert partition_counts(kafka, raw, features) == {raw: 3, features: 3}
    assert configuration(kafka, features)["cleanup.policy"] == "compact"


def test_what_is_there_stays_as_it_is(kafka: str) -> None:
    raw, features = make_topic(kafka, partitions=2), name()
    planned = [Topic(name=raw), Topic(name=features, like=(raw,))]
    assert ensure_topics(kafka, planned, partitions=5) == [features]
    assert ensure_topics(kafka, planned, partitions=5) == []
    assert partition_counts(kafka, raw, features) == {raw: 2, features: 2}


def test_a_topic_of_several_sources_has_as_many_partitions_as_the_largest_unless_it_was_made_otherwise(
    kafka: str,
) -> None:
    small, large = make_topic(kafka, partitions=2), make_topic(kafka, partitions=3)
    made, own = name(), make_topic(kafka, partitions=5)
    planned = [Topic(name=topic, like=(small, large), is_exact=False) for topic in (made, own)]
    assert ensure_topics(kafka, planned) == [made]
    assert partition_counts(kafka, made, own) == {made: 3, own: 5}


def test_a_topic_with_other_partitions_than_its_source_is_refused_and_nothing_is_made(kafka: str) -> None:
    raw, features, other = make_topic(kafka, partitions=2), make_topic(kafka, partitions=3), name()
    planned = [Topic(name=raw), Topic(name=other, like=(raw,)), Topic(name=features, like=(raw,))]
    with pytest.raises(ConfigError, match=f"{features} has 3 partitions, expected 2 as {raw} has"):
        ensure_topics(kafka, planned)
    assert other not in AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=TIMEOUT_S).topics


def test_the_topics_of_a_view_are_made(kafka: str) -> None:
    base = make_view(f"view_{uuid.uuid4().hex[:8]}")
    source = EventSource(name(), contract=base.source.contract)
    view = FeatureView(
        base.name, version=1, entity=base.entity, source=source, slide="1m", features=dict(base.definitions)
    )
    made = ensure_topics(kafka, plan_topics([view], []), partitions=2)
    assert made == [
        source.topic,
        f"dlq.{source.topic}",
        f"redriven.{source.topic}",
        f"features.{view.name}",
        f"state.{view.name}",
    ]
    assert set(partition_counts(kafka, *made).values()) == {2}
    assert configuration(kafka, f"state.{view.name}")["cleanup.policy"] == "compact"
    # As the flights want it, and whatever the broker's default is.
    check_retention(kafka, [source.topic])
    assert origin(kafka, source.topic, "retention.ms") == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert origin(kafka, f"features.{view.name}", "retention.ms") != ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert int(configuration(kafka, f"dlq.{source.topic}")["max.message.bytes"]) > 1_048_588


@dataclass
class Applied:
    """An application of a test's own, and the commands on it."""

    kafka: str
    path: Path
    raw: str
    view: str
    settings: str = ""

    def write(self, settings: str = "") -> None:
        text = APPLICATION.format(topic=self.raw, view=self.view)
        self.path.write_text(f"{text}\nfrom schemas.topic import TopicSettings\nTOPICS = {{{settings}}}\n")

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["topics", *arguments])

    def planned(self) -> dict[str, dict[str, Any]]:
        done = self.run("plan", "--json")
        return {entry["topic"]: entry for entry in json.loads(done.stdout)}


@pytest.fixture
def applied(kafka: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Applied:
    """An application whose raw topic is not there yet."""
    found = Applied(kafka, tmp_path / "app.py", name(), f"v{uuid.uuid4().hex[:8]}")
    found.write()
    monkeypatch.setenv("HEADRACE_KAFKA", kafka)
    monkeypatch.setenv("HEADRACE_APP", str(found.path))
    return found


def fill(kafka: str, *topics: str) -> None:
    refused: list[Any] = []
    producer = Producer({"bootstrap.servers": kafka})
    for topic in topics:
        producer.produce(topic, b"1", key=b"k", on_delivery=lambda error, _: refused.append(error))
    producer.flush(TIMEOUT_S)
    assert refused == [None] * len(topics)


def test_a_plan_tells_what_would_be_made_and_makes_nothing(kafka: str, applied: Applied) -> None:
    planned = applied.run("plan")
    assert planned.exit_code == 3
    assert re.search(rf"^{re.escape(applied.raw)} +4 partitions  create$", planned.stdout, re.MULTILINE)
    assert "    retention.ms=-1" in planned.stdout
    assert planned.stdout.endswith("5 create\n")
    assert applied.raw not in AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=TIMEOUT_S).topics


def test_what_was_applied_leaves_nothing_to_do(kafka: str, applied: Applied) -> None:
    applied.write(f"'{applied.raw}': TopicSettings(partitions=3, retention='30d', min_insync_replicas=1)")
    done = applied.run("apply")
    assert done.exit_code == 0, done.output
    assert re.search(rf"^dlq.{re.escape(applied.raw)} +3 partitions  created$", done.stdout, re.MULTILINE)
    assert set(partition_counts(kafka, applied.raw, f"features.{applied.view}").values()) == {3}
    assert configuration(kafka, applied.raw)["retention.ms"] == "2592000000"
    again = applied.run("plan")
    assert (again.exit_code, again.stdout.splitlines()[-1]) == (0, "5 keep")


def test_a_topic_that_has_changed_is_made_as_wanted_again(kafka: str, applied: Applied) -> None:
    assert applied.run("apply").exit_code == 0
    fill(kafka, applied.raw)
    state = f"state.{applied.view}"
    alter(kafka, applied.raw, {"retention.ms": "86400000"})
    alter(kafka, state, {"segment.bytes": "33554432", "min.insync.replicas": "1"})
    changed = {topic: entry["config"] for topic, entry in applied.planned().items() if entry["action"] != "keep"}
    assert changed == {
        applied.raw: {"retention.ms": {"now": "86400000", "wanted": "-1"}},
        state: {"segment.bytes": {"now": "33554432", "wanted": "16777216"}},
    }
    done = applied.run("apply")
    assert done.exit_code == 0
    assert "    retention.ms from 86400000 to -1" in done.stdout
    assert configuration(kafka, applied.raw)["retention.ms"] == "-1"
    assert configuration(kafka, state)["min.insync.replicas"] == "1"  # nobody asked for another
    assert applied.run("plan").exit_code == 0


def test_a_larger_message_limit_is_left_as_it_is(kafka: str, applied: Applied) -> None:
    applied.run("apply")
    alter(kafka, f"dlq.{applied.raw}", {"max.message.bytes": "10000000"})
    assert applied.run("plan").exit_code == 0


@pytest.mark.parametrize(
    ("settings", "altered", "message"),
    [
        ("retention='1d'", {}, "retention.ms -1, expected 86400000: a shorter one would delete records"),
        ("partitions=8", {}, "4 partitions, expected 8 as TOPICS says: more would move keys"),
        ("partitions=2", {}, "4 partitions, expected 2 as TOPICS says: Kafka takes none away"),
        ("min_insync_replicas=2", {}, "min.insync.replicas 2 where there are 1 replicas, expected at most as many"),
    ],
)
def test_a_change_that_would_cost_records_is_refused_and_nothing_is_done(
    kafka: str, applied: Applied, settings: str, altered: dict[str, str], message: str
) -> None:
    assert applied.run("apply").exit_code == 0
    fill(kafka, applied.raw, f"features.{applied.view}")
    # A change that could be made waits with the one that cannot.
    alter(kafka, f"state.{applied.view}", {"segment.ms": "700000"})
    applied.write(f"'{applied.raw}': TopicSettings({settings})")
    before = configuration(kafka, applied.raw)
    for command in ("plan", "apply"):
        refused = applied.run(command)
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)
    assert configuration(kafka, applied.raw) == before
    assert partition_counts(kafka, applied.raw) == {applied.raw: 4}
    assert configuration(kafka, f"state.{applied.view}")["segment.ms"] == "700000"
    assert applied.planned()[applied.raw]["action"] == "refuse"


def test_rows_are_not_compacted_away(kafka: str, applied: Applied) -> None:
    assert applied.run("apply").exit_code == 0
    state = f"state.{applied.view}"
    fill(kafka, state)
    alter(kafka, state, {"cleanup.policy": "delete"})
    refused = applied.run("apply")
    assert isinstance(refused.exception, ConfigError)
    assert "cleanup.policy delete, expected compact: to compact would remove records" in str(refused.exception)
    alter(kafka, state, {"cleanup.policy": "delete,compact"})
    assert applied.run("apply").exit_code == 0
    assert configuration(kafka, state)["cleanup.policy"] == "compact"


def test_topics_without_a_record_may_become_anything_but_smaller(kafka: str, applied: Applied) -> None:
    assert applied.run("apply").exit_code == 0
    applied.write(f"'{applied.raw}': TopicSettings(partitions=6, retention='1d')")
    done = applied.run("apply")
    assert done.exit_code == 0, done.exception
    assert "    partitions from 4 to 6" in done.stdout
    counts = partition_counts(kafka, applied.raw, f"features.{applied.view}", f"state.{applied.view}")
    assert set(counts.values()) == {6}
    assert configuration(kafka, applied.raw)["retention.ms"] == "86400000"
    applied.write(f"'{applied.raw}': TopicSettings(partitions=5)")
    assert "Kafka takes none away" in str(applied.run("apply").exception)


def test_a_count_that_is_asked_for_where_topics_are_there_is_told_to_be_left_out(applied: Applied) -> None:
    assert applied.run("apply", "--partitions", "2").exit_code == 0
    told = applied.run("plan", "--partitions", "8", "--json")
    assert json.loads(told.stdout)[0] == {
        "topic": applied.raw,
        "action": "keep",
        "partitions": 2,
        "partitions_now": 2,
        "config": {},
        "refused": [],
    }
    assert told.exit_code == 0
    assert told.stderr.startswith(f"{applied.raw}: there already, with another count than 8, and left as they are.")


def test_a_broker_that_cannot_be_reached_is_an_error() -> None:
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9: .*services up"):
        ensure_topics(NOBODY, [Topic(name="t")])


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_topic_is_read_to_its_end(kafka: str) -> None:
    topic = make_topic(kafka, partitions=2)
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(100):
        producer.produce(topic, key=b"k", value=str(number).encode(), headers=[("h", b"x")], timestamp=number + 1)
    producer.flush(TIMEOUT_S)
    batches = list(read_topic(kafka, topic))
    assert sorted(int(value or b"") for batch in batches for value in batch.values) == list(range(100))
    assert {header for batch in batches for headers in batch.headers for header in headers or ()} == {("h", b"x")}
    assert sum(end_offsets(kafka, topic).values()) == 100
    for batch in batches:
        assert np.array_equal(batch.broker_time_us, [(int(value or b"") + 1) * 1_000 for value in batch.values])


def test_reading_may_start_in_the_middle(kafka: str) -> None:
    topic = make_topic(kafka, partitions=2)
    for partition in range(2):
        produce(kafka, topic, [b"%d" % number for number in range(10)], partition=partition)
    offsets = {
        (batch.partition, offset)
        for batch in read_topic(kafka, topic, start_offsets={0: 7})
        for offset in batch.offsets.tolist()
    }
    assert offsets == {(0, 7), (0, 8), (0, 9), *((1, offset) for offset in range(10))}


def test_an_empty_topic_has_nothing(kafka: str) -> None:
    topic = make_topic(kafka, partitions=2)
    assert list(read_topic(kafka, topic)) == []
    assert end_offsets(kafka, topic) == {0: 0, 1: 0}


@pytest.mark.parametrize("read", [lambda kafka, topic: list(read_topic(kafka, topic)), end_offsets])
def test_a_topic_that_is_not_there_is_an_error(kafka: str, read: Any) -> None:
    with pytest.raises(ServiceError, match=r"there is no topic test\.none at .* run `headrace topics apply`"):
        read(kafka, "test.none")


def test_a_group_has_caught_up_once_no_committed_record_lies_ahead_of_it(kafka: str) -> None:
    topic, group = make_topic(kafka, partitions=2), make_group()
    assert is_caught_up(kafka, group, topic)  # there is nothing to read
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": group})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=1)
    producer.commit_transaction(TIMEOUT_S)
    assert not is_caught_up(kafka, group, topic)  # what the group has read is unknown
    place_group(kafka, group, topic, {1: 2})
    assert not is_caught_up(kafka, group, topic)
    # The marker of the transaction stands at 3: no consumer need have read past it.
    place_group(kafka, group, topic, {1: 3})
    assert sum(end_offsets(kafka, topic).values()) == 4
    assert is_caught_up(kafka, group, topic)
