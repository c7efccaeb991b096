import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry

from schemas.errors import DecodeError, SinkRejectedError, SinkUnavailableError
from streams.agents import offline as offline_module
from streams.agents.offline import OfflineWorker
from streams.batch import RawBatch
from streams.observability.metrics import Metrics
from streams.sinks.offline import CommitResult
from streams.wire import encode_rows
from tests.support.feature_rows import make_rows, make_view
from tests.support.transport import make_batch

VIEW = make_view()
TP = (VIEW.topic, 0)
RAW = "store.events"


class FakeWriter:
    """An offline store in a list; fails as often as it is told."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.is_down = False
        self.offsets: list[list[int]] = []
        self.asked = asyncio.Event()

    def write(self, rows: pa.Table, *, view: Any, partition: int, offsets: pa.Array) -> CommitResult:
        assert view is VIEW
        assert rows.num_rows == len(offsets)
        self._loop.call_soon_threadsafe(self.asked.set)
        if self.failures:
            raise self.failures.pop(0)
        if self.is_down:
            msg = "no storage"
            raise SinkUnavailableError(msg)
        self.offsets.append(offsets.to_pylist())
        return CommitResult(rows=rows.num_rows, skipped=0, table_version=len(self.offsets))

    def on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop


class FakeArchive:
    """An archive in a list."""

    def __init__(self) -> None:
        self.values: list[list[bytes | None]] = []

    def write(self, batch: RawBatch) -> CommitResult:
        assert batch.topic == RAW
        self.values.append(list(batch.values))
        return CommitResult(rows=len(batch), skipped=0, table_version=len(self.values))


class FakeLineage:
    def __init__(self) -> None:
        self.notes: list[Mapping[str, Any]] = []

    def batch_done(self, role: str, **note: Any) -> None:
        self.notes.append({"role": role, **note})


@pytest.fixture
async def writer() -> FakeWriter:
    made = FakeWriter()
    made.on(asyncio.get_running_loop())
    return made


@pytest.fixture
def archive() -> FakeArchive:
    return FakeArchive()


@pytest.fixture
async def worker(writer: FakeWriter, archive: FakeArchive, monkeypatch: pytest.MonkeyPatch) -> OfflineWorker:
    monkeypatch.setattr(offline_module, "_MAX_RETRY_S", 0.01)
    return OfflineWorker(
        [VIEW],
        application="shop",
        brokers="127.0.0.1:1",
        writer=writer,  # type: ignore[arg-type]  # a fake
        archive=archive,  # type: ignore[arg-type]  # a fake
        archived=[RAW],
        metrics=Metrics(CollectorRegistry()),
        lineage=FakeLineage(),  # type: ignore[arg-type]  # a fake
        flush_rows=10,
        flush_interval_s=0.0,
    )


@pytest.fixture
def make_event() -> Callable[..., Any]:
    def make(first_offset: int, n_rows: int = 4, **batch: Any) -> Any:
        values = encode_rows(make_rows(VIEW, [{"source_offset": n} for n in range(n_rows)]))
        event = SimpleNamespace(
            value=make_batch(values, topic=VIEW.topic, first_offset=first_offset, **batch), acked=False
        )
        event.ack = lambda: setattr(event, "acked", True)
        return event

    return make


async def test_rows_gather_into_one_commit_and_are_acknowledged_after_it(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    events = [make_event(0), make_event(4), make_event(10)]
    for event in events[:2]:
        await worker._gather(event)
    assert writer.offsets == []
    assert not any(event.acked for event in events)
    await worker._gather(events[2])
    assert writer.offsets == [[*range(8), *range(10, 14)]]
    assert all(event.acked for event in events)


def raw_event(first_offset: int, values: list[bytes | None]) -> Any:
    event = SimpleNamespace(value=make_batch(values, topic=RAW, first_offset=first_offset), acked=False)
    event.ack = lambda: setattr(event, "acked", True)
    return event


async def test_raw_records_are_archived_as_they_came_whatever_is_in_them(
    worker: OfflineWorker, archive: FakeArchive
) -> None:
    events = [raw_event(0, [b"no json", None]), raw_event(2, [b"{}"])]
    for event in events:
        await worker._gather(event)
    assert archive.values == []
    await worker._flush_due()
    assert archive.values == [[b"no json", None, b"{}"]]
    assert all(event.acked for event in events)


async def test_large_records_are_stored_before_they_are_many(
    worker: OfflineWorker, archive: FakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_module, "_FLUSH_BYTES", 1_000)
    await worker._gather(raw_event(0, [b"x" * 1_000]))
    assert archive.values == [[b"x" * 1_000]]


async def test_what_waits_is_stored_when_it_is_due(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    event = make_event(0)
    await worker._gather(event)
    await worker._flush_due()
    assert writer.offsets == [[0, 1, 2, 3]]
    assert event.acked
    await worker._flush_due()
    assert len(writer.offsets) == 1


async def test_a_store_that_does_not_answer_is_tried_again(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    writer.failures = [SinkUnavailableError("no storage")] * 3
    await worker._gather(make_event(0, 10))
    assert writer.offsets == [list(range(10))]


async def test_partitions_that_go_leave_nothing_gathered(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    event = make_event(0)
    await worker._gather(event)
    assert await worker._release({TP}, False)
    assert writer.offsets == [[0, 1, 2, 3]]
    assert event.acked


async def test_partitions_that_are_lost_are_not_stored_any_more(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    event = make_event(0)
    await worker._gather(event)
    await worker._release({TP}, True)
    assert writer.offsets == []
    assert not event.acked


async def test_a_store_that_stays_away_holds_no_rebalance_up_and_loses_no_row(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    writer.is_down = True
    waiting, after = make_event(0, 10), make_event(10)

    async def gather() -> None:
        async with worker._lock:
            await worker._gather(waiting)

    task = asyncio.ensure_future(gather())
    await writer.asked.wait()
    await asyncio.wait_for(worker._release({TP}, False), 5)
    await task
    # What comes after the rows that were given up must not be stored before them: the store leaves out what is older.
    writer.is_down = False
    await worker._gather(after)
    await worker._flush_due()
    assert writer.offsets == []
    assert not waiting.acked
    assert not after.acked
    await worker._begin()
    await worker._gather(make_event(0, 10))
    assert writer.offsets == [list(range(10))]


async def test_a_refusal_of_the_store_ends_the_worker(
    worker: OfflineWorker, writer: FakeWriter, make_event: Callable[..., Any]
) -> None:
    writer.failures = [SinkRejectedError("another definition")]
    await worker._gather(make_event(0))
    with pytest.raises(SinkRejectedError):
        await worker._flush_due()
    assert worker.app.headrace.has_failed
    assert isinstance(worker.app.crash_reason, SinkRejectedError)


async def test_a_record_that_is_no_feature_row_is_an_error_that_says_where(worker: OfflineWorker) -> None:
    event = SimpleNamespace(value=make_batch([b"{}", b"nonsense"], topic=VIEW.topic, first_offset=7))
    with pytest.raises(DecodeError, match=rf"{VIEW.topic}-0 from offset 7"):
        await worker._gather(event)
