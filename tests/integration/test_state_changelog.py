"""State on a real topic, written in epochs."""

import asyncio
import dataclasses
import threading
import uuid
from collections.abc import AsyncIterator

import pytest
from confluent_kafka import KafkaException

from jobs.topics import ensure_topics, plan_topics
from schemas.view import FeatureView
from streams.state.changelog import Changelog, ViewState, read_states
from streams.transport.epoch import Epoch
from streams.windowing.engine import WindowEngine
from tests.support.builders import make_batch, make_source
from tests.support.kafka import TIMEOUT_S, join_group, make_group, make_topic
from tests.unit.pipeline.test_partition_pipeline import make_view


@pytest.fixture
def view(kafka: str) -> FeatureView:
    """A view that has a state topic."""
    name = f"view_{uuid.uuid4().hex[:8]}"
    source = dataclasses.replace(make_source(max_out_of_orderness="0s"), topic=f"test.{name}")
    view = make_view(source, name)
    ensure_topics(kafka, plan_topics([view], []), partitions=2)
    return view


@pytest.fixture
async def epoch(kafka: str) -> AsyncIterator[Epoch]:
    """An epoch that can be committed without offsets."""
    group, topic = make_group(), make_topic(kafka)
    consumer = join_group(kafka, group, topic)
    made = Epoch({"bootstrap.servers": kafka}, transactional_id=group, group_metadata=consumer.consumer_group_metadata)
    await made.start()
    yield made
    consumer.close()


async def restore(kafka: str, view: FeatureView, *, partition: int = 1) -> ViewState | None:
    wanted = [(view, partition)]
    states = await asyncio.to_thread(read_states, {"bootstrap.servers": kafka}, wanted)
    return states.get((view.name, partition))


def feed(engine: WindowEngine, *, n_rows: int) -> None:
    first = -1 if engine.last_offset is None else engine.last_offset
    rows = [{"_offset": first + n + 1, "key": f"key {first + n + 1}", "at": 1, "n": n} for n in range(n_rows)]
    engine.step(make_batch(engine.view, rows), processing_time_us=0)


async def test_a_view_of_which_nothing_was_committed_has_no_state(kafka: str, view: FeatureView) -> None:
    assert await restore(kafka, view) is None


async def test_state_of_many_messages_comes_back_whole(kafka: str, view: FeatureView, epoch: Epoch) -> None:
    log, engine = Changelog(epoch, view, partition=1, state=ViewState()), WindowEngine(view, source_partition=1)
    for _ in range(3):
        feed(engine, n_rows=100_000)
        await log.write_state(engine)
        await log.write_position((engine.last_offset or 0) + 1)
        await epoch.commit({})
    state = await restore(kafka, view)
    assert state is not None
    assert sum(len(part) for part in state.parts) > 2_000_000
    assert state.emitted_to == 300_000
    restored = WindowEngine.restore_parts(view, state.parts, source_partition=1)
    assert restored.close().rows == engine.close().rows
    assert await restore(kafka, view, partition=0) is None


async def test_an_epoch_that_was_undone_leaves_no_trace(kafka: str, view: FeatureView, epoch: Epoch) -> None:
    log = Changelog(epoch, view, partition=1, state=ViewState())
    await log.write_position(5)
    await epoch.commit({})
    await log.write_position(9)
    await epoch.abort()
    assert await restore(kafka, view) == ViewState(emitted_to=5)


async def test_an_open_epoch_is_waited_for(kafka: str, view: FeatureView, epoch: Epoch) -> None:
    log = Changelog(epoch, view, partition=1, state=ViewState())
    await log.write_position(5)
    await asyncio.to_thread(epoch._producer.flush, TIMEOUT_S)
    began = threading.Event()
    reading = asyncio.ensure_future(restore(kafka, view))
    await asyncio.to_thread(began.wait, 1.0)
    assert not reading.done()
    await epoch.commit({})
    assert await reading == ViewState(emitted_to=5)


async def test_a_topic_that_is_not_there_is_an_error_and_no_empty_state(kafka: str) -> None:
    view = make_view(make_source(max_out_of_orderness="0s"), "there_is_no_such_view")
    with pytest.raises(KafkaException):
        await restore(kafka, view)
