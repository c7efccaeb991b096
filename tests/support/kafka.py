"""Topics of a test's own on a real Kafka."""

import time
import uuid
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription, NewTopic

from jobs.consumer_group import NOT_YET
from jobs.topic_reader import read_topic

TIMEOUT_S = 30.0


def make_topic(brokers: str, name: str = "t", *, partitions: int = 1, config: dict[str, str] | None = None) -> str:
    """Make a topic that no other test has, and return its name."""
    topic = f"test.{name}.{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config or {})])[topic].result(TIMEOUT_S)
    # The broker hears of it a moment after the controller has made it.
    deadline_s = time.monotonic() + TIMEOUT_S
    while topic not in admin.list_topics(timeout=TIMEOUT_S).topics:
        assert time.monotonic() < deadline_s, f"{topic} does not appear"
    return topic


def make_group() -> str:
    """Name a consumer group that no other test has."""
    return f"test.{uuid.uuid4().hex[:8]}"


def produce(brokers: str, topic: str, values: Sequence[bytes], *, partition: int = 0) -> None:
    """Put values on a partition, all of them acknowledged."""
    producer = Producer({"bootstrap.servers": brokers, "linger.ms": 5, "message.max.bytes": 16 * 2**20})
    for value in values:
        producer.produce(topic, value, partition=partition)
        producer.poll(0)
    assert producer.flush(TIMEOUT_S) == 0


def committed_values(brokers: str, topic: str) -> list[bytes | None]:
    """Values that a reader of committed data sees, in order of partition and offset."""
    batches = sorted(read_topic(brokers, topic), key=lambda batch: (batch.partition, int(batch.offsets[0])))
    return [value for batch in batches for value in batch.values]


def join_group(brokers: str, group: str, topic: str) -> Consumer:
    """Join a group and wait until partitions have come."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    polls = 0
    while not consumer.assignment():
        consumer.poll(0.1)
        polls += 1
        assert polls < 10 * TIMEOUT_S, f"no partitions of {topic} within {TIMEOUT_S:.0f} s"
    return consumer


def describe_group(admin: AdminClient, group: str) -> ConsumerGroupDescription | None:
    """Describe a consumer group; None while its broker does not know of it yet."""
    try:
        return admin.describe_consumer_groups([group])[group].result(TIMEOUT_S)
    except KafkaException as exc:
        if exc.args[0].code() in NOT_YET:
            return None
        raise
