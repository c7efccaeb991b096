"""Reads what is committed on a topic, from a start to the end as of now, as columnar batches."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from schemas.errors import ServiceError
from streams.batch import RawBatch
from streams.transport.poller import to_columns

_TIMEOUT_S = 15.0
_BATCH_ROWS = 50_000
_RETRY_S = 0.1
_SILENT = 2
"""Only what is critical: librdkafka tells each try to connect as an error, and the error that counts is raised."""
_UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_NOT_YET = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)


def read_topic(brokers: str, topic: str, *, start_offsets: Mapping[int, int] | None = None) -> Iterator[RawBatch]:
    """Yield the committed records of every partition up to its present end.

    Args:
        brokers: Kafka bootstrap servers.
        topic: The topic.
        start_offsets: First offset by partition; the beginning where a partition is not named.

    Raises:
        ServiceError: The broker cannot be read, or there is no such topic.
    """
    config: dict[str, Any] = {
        "bootstrap.servers": brokers,
        "group.id": "headrace-read",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",  # a start that retention has taken is read from what is left
        "enable.partition.eof": True,
        "log_level": _SILENT,
        "fetch.wait.max.ms": 20,  # it is known where the end is: an empty partition need not be waited for
        "fetch.queue.backoff.ms": 10,  # the default, a second, would let a fast reader run dry
    }
    consumer = Consumer(config)
    try:
        found = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
        if found.error is not None:
            raise KafkaException(found.error)
        starts = {number: (start_offsets or {}).get(number, OFFSET_BEGINNING) for number in found.partitions}
        consumer.assign([TopicPartition(topic, number, offset) for number, offset in starts.items()])
        reading = set(starts)
        while reading:
            rows: dict[int, list[Any]] = {}
            messages = consumer.consume(1, 0.2)
            messages += consumer.consume(_BATCH_ROWS, 0) if messages else []
            for message in messages:
                if (error := message.error()) is None:
                    rows.setdefault(message.partition() or 0, []).append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    reading.discard(message.partition() or 0)
                else:
                    raise KafkaException(error)
            for number, partition_rows in rows.items():
                yield to_columns((topic, number), partition_rows)
    except KafkaException as exc:
        raise _unreadable(brokers, topic, exc) from exc
    finally:
        consumer.close()


def end_offsets(brokers: str, topic: str) -> dict[int, int]:
    """Tell the end offset of each partition of a topic.

    Raises:
        ServiceError: The broker does not answer, or there is no such topic.
    """
    return {number: edges.stop for number, edges in _edges(brokers, topic).items()}


def first_offsets(brokers: str, topic: str) -> dict[int, int]:
    """Tell the first offset that each partition of a topic still has: 0 where nothing has gone.

    Raises:
        ServiceError: The broker does not answer, or there is no such topic.
    """
    return {number: edges.start for number, edges in _edges(brokers, topic).items()}


def _edges(brokers: str, topic: str) -> dict[int, range]:
    """Tell the offsets of each partition, of what is there."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "headrace-read", "log_level": _SILENT})
    try:
        found = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
        if found.error is not None:
            raise KafkaException(found.error)
        return {number: _edges_of(consumer, TopicPartition(topic, number)) for number in found.partitions}
    except KafkaException as exc:
        raise _unreadable(brokers, topic, exc) from exc
    finally:
        consumer.close()


def _unreadable(brokers: str, topic: str, exc: KafkaException) -> ServiceError:
    if exc.args[0].code() in _UNKNOWN:
        return ServiceError(
            f"there is no topic {topic} at {brokers}, expected it made already; run `headrace topics apply` "
            "(or `up`, or a worker), or see whether HEADRACE_APP is the application whose topics these are"
        )
    return ServiceError(
        f"topic {topic} at {brokers} cannot be read: {exc.args[0].str()}; see `headrace services status`"
    )


def _edges_of(consumer: Consumer, tp: TopicPartition) -> range:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return range(*consumer.get_watermark_offsets(tp, timeout=_TIMEOUT_S))
        except KafkaException as exc:
            # A topic that was just made has its leaders a moment later.
            if exc.args[0].code() not in _NOT_YET or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
