"""State snapshots on a Kafka topic, one per view, one partition per source partition.

A snapshot is written inside the epoch that commits the offset it belongs to, cut into records that fit a message, so
that readers of committed data see it whole or not at all. The topic is compacted: record keys are the chunk numbers.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas.errors import StateVersionError
from streams.ports import EpochWriter

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 900_000
_READ_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of one view's engine for one source partition.

    Attributes:
        state: What ``WindowEngine.snapshot`` made.
        next_offset: Source offset that the engine takes next.
    """

    state: bytes
    next_offset: int


def state_topic(view: str) -> str:
    """Name of a view's state changelog."""
    return f"state.{view}"


async def write_snapshot(epoch: EpochWriter, view: str, *, partition: int, snapshot: Snapshot) -> None:
    """Write a snapshot into the open epoch."""
    chunks = [snapshot.state[at : at + _CHUNK_BYTES] for at in range(0, len(snapshot.state), _CHUNK_BYTES)] or [b""]
    snapshot_number = epoch.begin()
    for number, chunk in enumerate(chunks):
        headers = [
            ("snapshot", str(snapshot_number).encode()),
            ("chunks", str(len(chunks)).encode()),
            ("next_offset", str(snapshot.next_offset).encode()),
        ]
        await epoch.write(
            state_topic(view), key=str(number).encode(), value=chunk, headers=headers, partition=partition
        )


def read_snapshot(kafka: Mapping[str, Any], view: str, *, partition: int) -> Snapshot | None:
    """Read the newest committed snapshot; None when there is none. Blocks.

    Args:
        kafka: librdkafka configuration of the client (``bootstrap.servers`` and the like).
        view: Name of the view.
        partition: The source partition.

    Raises:
        StateVersionError: The topic holds only parts of its newest snapshot.
        KafkaException: The broker cannot be read.
    """
    consumer = Consumer(
        {
            **kafka,
            "group.id": "headrace-restore",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    newest: dict[int, Message] = {}
    newest_number = -1
    try:
        found = consumer.list_topics(state_topic(view), timeout=_READ_TIMEOUT_S).topics[state_topic(view)]
        if found.error is not None:
            raise KafkaException(found.error)
        consumer.assign([TopicPartition(state_topic(view), partition, OFFSET_BEGINNING)])
        while True:
            messages = consumer.consume(1, _READ_TIMEOUT_S)
            messages += consumer.consume(1_000, 0) if messages else []
            if not messages:
                msg = f"no answer from {state_topic(view)}-{partition} within {_READ_TIMEOUT_S:.0f} s"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, msg))
            for message in messages:
                if (error := message.error()) is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        return _assemble(newest, view, partition=partition)
                    raise KafkaException(error)
                number = int(_header(message, "snapshot"))
                # The last on the topic is the newest, whatever the clock said that numbers it.
                if number != newest_number:
                    newest, newest_number = {}, number
                newest[int(message.key() or b"0")] = message
    finally:
        consumer.close()


def _assemble(chunks: dict[int, Message], view: str, *, partition: int) -> Snapshot | None:
    if not chunks:
        return None
    first = next(iter(chunks.values()))
    expected = int(_header(first, "chunks"))
    if sorted(chunks) != list(range(expected)):
        msg = (
            f"state of view {view} partition {partition} has chunks {sorted(chunks)} of {expected}; its topic "
            f"{state_topic(view)} was truncated: delete the topic to rebuild the state from the source"
        )
        raise StateVersionError(msg)
    state = b"".join(chunks[number].value() or b"" for number in range(expected))
    return Snapshot(state=state, next_offset=int(_header(first, "next_offset")))


def _header(message: Message, name: str) -> bytes:
    value = dict(message.headers() or ()).get(name)
    if isinstance(value, bytes):
        return value
    msg = f"record at {message.topic()}-{message.partition()}@{message.offset()} has no header {name!r}: not a snapshot"
    raise StateVersionError(msg)
