"""Topics on a real Kafka, as the definitions want them, and reading them."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource, ResourceType
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
    found = AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=TIMEOUT_S).topics
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
    assert made == [source.topic, f"dlq.{source.topic}", f"features.{view.name}", f"state.{view.name}"]
    assert set(partition_counts(kafka, *made).values()) == {2}
    assert configuration(kafka, f"state.{view.name}")["cleanup.policy"] == "compact"
    # As the flights want it, and whatever the broker's default is.
    check_retention(kafka, [source.topic])
    assert origin(kafka, source.topic, "retention.ms") == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert origin(kafka, f"features.{view.name}", "retention.ms") != ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert int(configuration(kafka, f"dlq.{source.topic}")["max.message.bytes"]) > 1_048_588


def test_the_command_tells_every_topic_and_where_the_count_is_not_the_one_asked_for(
    kafka: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = make_topic(kafka, partitions=2)
    (tmp_path / "app.py").write_text(APPLICATION.format(topic=raw, view=f"v{uuid.uuid4().hex[:8]}"))
    monkeypatch.setenv("HEADRACE_KAFKA", kafka)
    monkeypatch.setenv("HEADRACE_APP", str(tmp_path / "app.py"))

    made = CliRunner().invoke(app, ["topics"])
    assert made.exit_code == 0
    assert re.search(rf"^{re.escape(raw)} +2 partitions  was there$", made.stdout, re.MULTILINE)
    assert re.search(rf"^dlq.{re.escape(raw)} +2 partitions  created$", made.stdout, re.MULTILINE)
    assert made.stderr == ""

    told = CliRunner().invoke(app, ["topics", "--partitions", "8", "--json"])
    entries = {entry["topic"]: entry for entry in json.loads(told.stdout)}
    assert entries[raw] == {"topic": raw, "partitions": 2, "created": False}
    assert told.exit_code == 0
    assert told.stderr.startswith(f"{raw}: there already, with another count than 8, and left as they are.")


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
    with pytest.raises(ServiceError, match=r"test\.none at .* cannot be read"):
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
