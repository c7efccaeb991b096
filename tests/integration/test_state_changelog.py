"""State snapshots on a real topic, written in epochs."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from jobs.topics import _COMPACTED
from streams.state.changelog import Snapshot, read_snapshot, state_topic, write_snapshot
from streams.transport.epoch import Epoch
from tests.support.kafka import TIMEOUT_S, join_group, make_group, make_topic


@pytest.fixture
def view(kafka: str) -> str:
    """Name of a view that has a state topic."""
    name = f"view_{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": kafka})
    topic = NewTopic(state_topic(name), 2, 1, config=_COMPACTED)
    admin.create_topics([topic])[state_topic(name)].result(TIMEOUT_S)
    return name


@pytest.fixture
async def epoch(kafka: str) -> AsyncIterator[Epoch]:
    """An epoch that can be committed without offsets."""
    group, topic = make_group(), make_topic(kafka)
    consumer = join_group(kafka, group, topic)
    made = Epoch({"bootstrap.servers": kafka}, transactional_id=group, group_metadata=consumer.consumer_group_metadata)
    await made.start()
    yield made
    consumer.close()


async def restore(kafka: str, view: str, *, partition: int = 1) -> Snapshot | None:
    return await asyncio.to_thread(read_snapshot, {"bootstrap.servers": kafka}, view, partition=partition)


async def test_a_view_without_a_snapshot_has_none(kafka: str, view: str) -> None:
    assert await restore(kafka, view) is None


async def test_a_snapshot_of_many_messages_comes_back_whole(kafka: str, view: str, epoch: Epoch) -> None:
    snapshot = Snapshot(state=os.urandom(3_500_000), next_offset=42)
    await write_snapshot(epoch, view, partition=1, snapshot=snapshot)
    await epoch.commit({})
    assert await restore(kafka, view) == snapshot
    assert await restore(kafka, view, partition=0) is None


async def test_the_newest_committed_snapshot_is_restored(kafka: str, view: str, epoch: Epoch) -> None:
    older, newer = Snapshot(state=os.urandom(2_000_000), next_offset=1), Snapshot(state=b"newer", next_offset=2)
    for snapshot in (older, newer):
        await write_snapshot(epoch, view, partition=1, snapshot=snapshot)
        await epoch.commit({})
    await write_snapshot(epoch, view, partition=1, snapshot=Snapshot(state=b"never committed", next_offset=3))
    await epoch.abort()
    assert await restore(kafka, view) == newer


async def test_a_snapshot_of_an_open_epoch_does_not_count(kafka: str, view: str, epoch: Epoch) -> None:
    await write_snapshot(epoch, view, partition=1, snapshot=Snapshot(state=b"open", next_offset=3))
    assert await restore(kafka, view) is None
    await epoch.abort()


async def test_a_topic_that_is_not_there_is_an_error_and_no_empty_state(kafka: str) -> None:
    with pytest.raises(KafkaException):
        await restore(kafka, "there_is_no_such_view")
