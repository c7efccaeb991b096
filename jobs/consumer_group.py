"""Where consumer groups stand, and how to place one."""

import time
from collections.abc import Mapping

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from jobs.topic_reader import end_offsets
from schemas.errors import ServiceError

_TIMEOUT_S = 15.0
_RETRY_S = 0.1
# A broker that has just started reads its groups first.
_NOT_YET = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


def committed_offsets(brokers: str, group: str, topic: str) -> dict[int, int]:
    """Tell the committed offset of each partition of ``topic``; a partition without one is left out.

    Raises:
        ServiceError: The broker does not answer.
    """
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 3})
    request = [ConsumerGroupTopicPartitions(group)]
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            future = admin.list_consumer_group_offsets(request, request_timeout=_TIMEOUT_S)[group]
            found = future.result().topic_partitions or []
        except KafkaException as exc:
            if exc.args[0].code() in _NOT_YET and time.monotonic() < deadline:
                time.sleep(_RETRY_S)
                continue
            msg = (
                f"offsets of group {group} at {brokers} cannot be read: {exc.args[0].str()}; see `headrace services "
                "status`"
            )
            raise ServiceError(msg) from exc
        break
    return {tp.partition: tp.offset for tp in found if tp.topic == topic and tp.offset >= 0}


def is_caught_up(brokers: str, group: str, topic: str) -> bool:
    """Tell whether a group has committed everything on a topic that is not written in transactions."""
    ends = {number: end for number, end in end_offsets(brokers, topic).items() if end > 0}
    return ends.items() <= committed_offsets(brokers, group, topic).items()


def place_group(brokers: str, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Commit offsets for a group that has no members, so that it starts there.

    Raises:
        ServiceError: The broker refuses, for example since the group has members.
    """
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 3})
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, number, at) for number, at in offsets.items()])
    try:
        admin.alter_consumer_group_offsets([request], request_timeout=_TIMEOUT_S)[group].result()
    except KafkaException as exc:
        msg = f"group {group} cannot be placed: {exc.args[0].str()}; end its members first"
        raise ServiceError(msg) from exc
