"""The watch, look by look, over a worker that does what it is told."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from prometheus_client import CollectorRegistry

from streams.agents import watch as watch_module
from streams.agents.watch import StalledError, Watch
from streams.observability.health import Health
from streams.observability.metrics import Metrics
from streams.transport.options import Partition

P0 = ("t", 0)


class FakeAdmin:
    def __init__(self, _: dict[str, Any]) -> None:
        self.ends = {P0: 0}
        self.is_down = False

    def list_offsets(self, asked: dict[TopicPartition, Any], **_: Any) -> dict[TopicPartition, "Future[Any]"]:
        answers = {}
        for tp in asked:
            answers[tp] = Future()
            if self.is_down:
                answers[tp].set_exception(KafkaException(KafkaError(KafkaError._TRANSPORT)))
            else:
                answers[tp].set_result(SimpleNamespace(offset=self.ends[tp.topic, tp.partition]))
        return answers

    def list_topics(self, **_: Any) -> None:
        if self.is_down:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))


class FakeConsumer:
    def __init__(self) -> None:
        self.poller = self
        self.is_joining = False
        self.ends: dict[Partition, int] = {}
        self.at: dict[Partition, int] = {P0: 0}
        self.assignment = {P0}
        self.is_polling = True
        self.hangs = threading.Event()
        self.hangs.set()

    @property
    def flowing(self) -> set[Partition]:
        return set(self.at)

    def done(self) -> dict[Partition, int]:
        return dict(self.at)

    def lags(self) -> dict[Partition, int]:
        return {tp: self.ends.get(tp, 0) - at for tp, at in self.at.items()}

    def paused_s(self) -> dict[str, float]:
        return {"memory": 0.5}

    def call(self, _: Any) -> "Future[None]":
        answer: Future[None] = Future()
        if self.is_polling:
            answer.set_result(None)
        return answer


class FakeApp:
    def __init__(self) -> None:
        self.consumer = FakeConsumer()
        self.headrace = SimpleNamespace(kafka={"bootstrap.servers": "127.0.0.1:1"}, has_failed=False)
        self.should_stop = False
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def crash(self, error: BaseException) -> None:
        self.crashed.set_result(error)


class Bench:
    """A watch whose looks follow upon each other at once, and what it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = FakeApp()
        self.admin = FakeAdmin({})
        self.health = Health()
        self.metrics = Metrics(CollectorRegistry())
        self.ends_in_time = threading.Event()
        monkeypatch.setattr(watch_module, "AdminClient", lambda _: self.admin)
        monkeypatch.setattr(watch_module.faulthandler, "dump_traceback", lambda *_, **__: None)
        self.watch = Watch(
            self.app,  # type: ignore[arg-type]  # a fake
            role="features",
            metrics=self.metrics,
            health=self.health,
            stall_timeout_s=60,
            end_in_time=self.ends_in_time.set,
        )
        self.looks = 0
        self.want = 0
        self.script: dict[int, Any] = {}
        self.reached = asyncio.Event()
        self.watch._stopping = self  # type: ignore[assignment]  # it is asked before each look

    def wait(self, _: float) -> bool:
        """Stand in for the pause between two looks; the script says what happens before the next."""
        self.looks += 1
        if (step := self.script.get(self.looks)) is not None:
            step()
        if self.looks > self.want:
            self.watch._loop.call_soon_threadsafe(self.reached.set)
            return True
        return False

    async def run(self, looks: int) -> None:
        """Look so often, or until the watch gives the worker up."""
        self.want = looks
        await self.watch.start()
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(self.reached.wait()), self.app.crashed],
            return_when=asyncio.FIRST_COMPLETED,
            timeout=30,
        )
        assert done, "the watch does not end"


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_a_consumer_that_has_stopped_while_records_wait_ends_the_worker(bench: Bench) -> None:
    bench.admin.ends[P0] = 7
    await bench.run(200)
    error = bench.app.crashed.result()
    assert isinstance(error, StalledError)
    assert "t-0 has stood at offset 0 for 60 s, 7 offsets before its end" in str(error)
    assert bench.app.headrace.has_failed
    assert bench.ends_in_time.is_set()
    assert not bench.health.live().is_good


async def test_the_worker_learns_how_far_its_topics_go_from_somebody_else(bench: Bench) -> None:
    bench.admin.ends[P0] = 7
    await bench.run(20)
    assert bench.app.consumer.ends == {P0: 7}
    at = {"role": "features", "topic": "t", "partition": "0"}
    assert bench.metrics.registry.get_sample_value("headrace_consumer_lag_records", at) == 7
    assert bench.health.ready().is_good


async def test_a_worker_at_rest_is_left_alone(bench: Bench) -> None:
    await bench.run(500)
    assert not bench.app.crashed.done()
    assert bench.health.live().is_good


async def test_a_store_that_does_not_answer_is_no_stall_and_is_told(bench: Bench) -> None:
    bench.admin.ends[P0] = 7
    for look in range(1, 500, 30):
        bench.script[look] = lambda: bench.metrics.store_retried("features", store="redis")
    await bench.run(488)
    assert not bench.app.crashed.done()
    assert bench.health.ready().reasons == ("redis does not answer",)


async def test_a_broker_that_does_not_answer_is_no_stall(bench: Bench) -> None:
    bench.admin.ends[P0] = 7
    bench.script[20] = lambda: setattr(bench.admin, "is_down", True)
    await bench.run(500)
    assert not bench.app.crashed.done()


async def test_partitions_that_are_restored_are_not_ready_and_no_stall(bench: Bench) -> None:
    bench.app.consumer.at = {}
    await bench.run(500)
    assert not bench.app.crashed.done()
    assert bench.health.ready().reasons == ("partitions are being restored: t-0",)


async def test_a_group_that_never_gives_partitions_ends_the_worker(bench: Bench) -> None:
    bench.app.consumer.at, bench.app.consumer.is_joining = {}, True
    await bench.run(500)
    assert "has given no partitions for 360 s" in str(bench.app.crashed.result())


async def test_a_poll_thread_that_hangs_ends_the_worker(bench: Bench) -> None:
    bench.app.consumer.is_polling = False
    await bench.run(500)
    assert "the poll thread has given no sign for 60 s" in str(bench.app.crashed.result())


async def test_an_event_loop_that_hangs_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    bench.watch._stall_timeout_s = 0.05
    bench.want = 5
    await bench.watch.start()
    assert bench.ends_in_time.wait(10)  # the loop does nothing else meanwhile
    assert "the event loop has been busy" in str(await asyncio.wait_for(bench.app.crashed, 10))


async def test_a_worker_that_is_ending_is_left_to_end(bench: Bench) -> None:
    bench.admin.ends[P0] = 7
    bench.app.should_stop = True
    bench.want = 200
    await bench.watch.start()
    await asyncio.to_thread(bench.watch._thread.join, 30)
    assert bench.looks < 200
    assert not bench.app.crashed.done()
    assert bench.health.live().is_good
    assert "the worker is ending" in bench.health.ready().reasons


async def test_a_watch_that_fails_does_not_leave_the_worker_unwatched(bench: Bench) -> None:
    def fail() -> dict[Partition, int]:
        msg = "a bug"
        raise RuntimeError(msg)

    bench.app.consumer.done = fail  # type: ignore[method-assign]
    await bench.run(200)
    assert "the watch has failed: RuntimeError('a bug')" in str(bench.app.crashed.result())
