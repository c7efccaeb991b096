"""A topic as a log to be read again: its records in order, partition by partition, between offsets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemas.errors import ServiceError
from streams.batch import RawBatch
from streams.ports import LogPart
from streams.transport.poller import to_columns

_TIMEOUT_S: Final = 15.0
_READ_TIMEOUT_S: Final = 30.0
_READ_ROWS: Final = 50_000
T = TypeVar("T")


@dataclass(frozen=True)
class TopicLog:
    """What is on a topic, for reading.

    Attributes:
        brokers: Kafka bootstrap servers.
        topic: The topic.
        is_committed_only: Whether records of transactions that are open or were called off are left out, and what lies
            behind the first open one.
    """

    brokers: str
    topic: str
    is_committed_only: bool = True

    def __str__(self) -> str:
        return f"topic {self.topic} at {self.brokers}"

    def parts(self) -> dict[int, LogPart]:
        """Tell what is there, by partition.

        Raises:
            ServiceError: The broker cannot be read, or there is no such topic.
        """
        return self._ask(self._parts)

    def _parts(self, consumer: Consumer) -> dict[int, LogPart]:
        parts = {}
        for number in self._numbers(consumer):
            found = consumer.get_watermark_offsets(TopicPartition(self.topic, number), timeout=_TIMEOUT_S)
            if found is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer within {_TIMEOUT_S:.0f} s"))
            if (offsets := range(*found)) or number == 0:
                parts[number] = LogPart(offsets=offsets, records=len(offsets), size_bytes=None)
        return parts

    def first_at(self, time_us: int) -> dict[int, int]:
        """Tell, by partition, the first offset with a record timestamp of this time or later; the end where none has.

        Raises:
            ServiceError: The broker cannot be read, or there is no such topic.
        """
        parts = self.parts()
        time_ms = -(-time_us // 1_000)
        asked = [TopicPartition(self.topic, number, time_ms) for number in parts]
        found = self._ask(lambda consumer: consumer.offsets_for_times(asked, timeout=_TIMEOUT_S))
        return {tp.partition: tp.offset if tp.offset >= 0 else parts[tp.partition].offsets.stop for tp in found}

    def read(self, partition: int, offsets: range) -> Iterator[RawBatch]:
        """Read the records of a partition in log order.

        Raises:
            ServiceError: The broker cannot be read, or the first of these offsets has gone.
        """
        consumer = self._consumer()
        try:
            consumer.assign([TopicPartition(self.topic, partition, offsets.start)])
            while True:
                messages = consumer.consume(1, _READ_TIMEOUT_S)
                messages += consumer.consume(_READ_ROWS, 0) if messages else []
                if not messages:
                    msg = f"no answer within {_READ_TIMEOUT_S:.0f} s; a transaction may be open there"
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, msg))
                rows = []
                is_over = False
                for message in messages:
                    if (error := message.error()) is None:
                        is_over = is_over or (message.offset() or 0) >= offsets.stop
                        if not is_over:
                            rows.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        is_over = True
                    else:
                        raise KafkaException(error)
                if rows:
                    yield to_columns((self.topic, partition), rows)
                if is_over or (rows and (rows[-1].offset() or 0) + 1 >= offsets.stop):
                    return
        except KafkaException as exc:
            raise self._failure(exc) from exc
        finally:
            consumer.close()

    def _numbers(self, consumer: Consumer) -> list[int]:
        found = consumer.list_topics(self.topic, timeout=_TIMEOUT_S).topics[self.topic]
        if found.error is not None:
            raise KafkaException(found.error)
        return sorted(found.partitions)

    def _ask(self, question: Callable[[Consumer], T]) -> T:
        consumer = self._consumer()
        try:
            return question(consumer)
        except KafkaException as exc:
            raise self._failure(exc) from exc
        finally:
            consumer.close()

    def _failure(self, exc: KafkaException) -> ServiceError:
        return ServiceError(f"{self} cannot be read: {exc.args[0].str()}; see `headrace services status`")

    def _consumer(self) -> Consumer:
        config: dict[str, Any] = {
            "bootstrap.servers": self.brokers,
            "group.id": "headrace-read",
            "enable.auto.commit": False,
            "isolation.level": "read_committed" if self.is_committed_only else "read_uncommitted",
            "auto.offset.reset": "error",  # what is gone must not be passed over unseen
            "enable.partition.eof": True,
            "log_level": 2,  # each try to connect is an error of level 3; the one that counts is raised
            "fetch.wait.max.ms": 20,
        }
        return Consumer(config)
