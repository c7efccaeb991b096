"""Where consumer groups stand, and how to place one."""

import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from jobs.topic_reader import read_topic
from schemas.errors import ServiceError

_TIMEOUT_S = 15.0
_RETRY_S = 0.1
# A broker that has just started reads its groups first, and makes the topic of their offsets for the first one.
NOT_YET = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


def committed_offsets(brokers: str, group: str, topic: str) -> dict[int, int]:
    """Tell the committed offset of each partition of ``topic``; a partition without one is left out.

    Raises:
        ServiceError: The broker does not answer.
    """
    # Not by AdminClient: librdkafka crashes where the broker answers that the offsets are in an open transaction.
    consumer = _consumer(brokers, group)
    try:
        partitions = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic].partitions
        found = read_committed(consumer, [TopicPartition(topic, number) for number in partitions])
    except KafkaException as exc:
        msg = (
            f"offsets of group {group} at {brokers} cannot be read: {exc.args[0].str()}; see `headrace services status`"
        )
        raise ServiceError(msg) from exc
    finally:
        consumer.close()
    return {tp.partition: tp.offset for tp in found if tp.offset >= 0}


def is_caught_up(brokers: str, group: str, topic: str) -> bool:
    """Tell whether no committed record of a topic lies behind what a group has committed.

    The end offsets do not tell: behind the last record of a transaction stands its marker.

    Raises:
        ServiceError: The broker does not answer.
    """
    return not any(read_topic(brokers, topic, start_offsets=committed_offsets(brokers, group, topic)))


def place_group(brokers: str, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Commit offsets for a group that has no members, so that it starts there.

    Raises:
        ServiceError: The broker refuses, for example since the group has members.
    """
    consumer = _consumer(brokers, group)
    try:
        positions = [TopicPartition(topic, number, at) for number, at in offsets.items()]
        for done in consumer.commit(offsets=positions, asynchronous=False) or ():
            if done.error is not None:
                raise KafkaException(done.error)
    except KafkaException as exc:
        msg = f"group {group} cannot be placed: {exc.args[0].str()}; end its members first"
        raise ServiceError(msg) from exc
    finally:
        consumer.close()


def _consumer(brokers: str, group: str) -> Consumer:
    """Make a consumer of a group that it does not join."""
    return Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": group,
            "enable.auto.commit": False,
            # Offsets of a transaction that is still open do not count, and are not waited for.
            "isolation.level": "read_uncommitted",
            "log_level": 2,  # each try to connect is an error of level 3; the one that counts is raised
        }
    )


def read_committed(consumer: Consumer, partitions: list[TopicPartition]) -> list[TopicPartition]:
    """Ask where the group of a consumer stands, until its broker knows.

    Raises:
        KafkaException: It does not answer.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            found = consumer.committed(partitions, timeout=_TIMEOUT_S)
            for tp in found:
                if tp.error is not None:
                    raise KafkaException(tp.error)
        except KafkaException as exc:
            if exc.args[0].code() not in NOT_YET or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return found
