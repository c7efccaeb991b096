import asyncio
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry

from jobs.flights.model import LATE_ARRIVAL
from schemas.errors import DecodeError, SinkRejectedError, SinkUnavailableError
from schemas.view import FeatureView
from streams.agents.online import OnlineWorker
from streams.observability.metrics import Metrics
from streams.sinks.online import WriteResult
from streams.wire import encode_rows
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.transport import make_batch

VIEW = make_view()


class FakeWriter:
    """A store that fails as often as it is told, then waits until it is let."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.tries = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.asked = asyncio.Event()

    async def write(self, rows: pa.Table, *, view: FeatureView) -> WriteResult:
        self.tries += 1
        if self.failures:
            raise self.failures.pop(0)
        self.asked.set()
        await self.is_open.wait()
        return WriteResult(written=rows.num_rows - 1, superseded=1)


class FakeLineage:
    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []

    def batch_done(self, _: str, **facts: Any) -> None:
        self.done.append(facts)


@pytest.fixture
async def writer() -> FakeWriter:
    return FakeWriter()


@pytest.fixture
async def worker(writer: FakeWriter) -> OnlineWorker:
    return OnlineWorker(
        [VIEW],
        application="shop",
        brokers="127.0.0.1:1",
        writer=writer,  # type: ignore[arg-type]  # a fake
        metrics=Metrics(CollectorRegistry()),
        lineage=FakeLineage(),  # type: ignore[arg-type]  # a fake
    )


def make_event(*, values: list[bytes] | None = None) -> Any:
    rows = make_rows(VIEW, [{"source_offset": number} for number in range(3)])
    event = SimpleNamespace(value=make_batch(values or encode_rows(rows), topic=VIEW.topic, first_offset=7), acks=0)

    def ack() -> None:
        event.acks += 1

    event.ack = ack
    return event


async def test_a_batch_is_acknowledged_once_the_store_has_it(worker: OnlineWorker, writer: FakeWriter) -> None:
    writer.is_open.clear()
    event = make_event()
    handling = asyncio.ensure_future(worker._handle(event))
    await asyncio.wait_for(writer.asked.wait(), 5)
    assert event.acks == 0
    writer.is_open.set()
    await asyncio.wait_for(handling, 5)
    assert event.acks == 1
    lineage: Any = worker._lineage
    (done,) = lineage.done
    assert (done["offsets"], done["rows"], done["output_rows"]) == ((7, 10), 3, 2)
    sample = worker._metrics.registry.get_sample_value
    assert sample("headrace_online_rows_total", {"view": VIEW.name, "outcome": "written"}) == 2
    assert sample("headrace_freshness_seconds_count", {"view": VIEW.name}) == 3


async def test_a_store_that_is_down_is_asked_again_until_it_takes_the_rows(
    worker: OnlineWorker, writer: FakeWriter
) -> None:
    writer.failures = [SinkUnavailableError("down", retry_after_ms=1) for _ in range(4)]
    event = make_event()
    await asyncio.wait_for(worker._handle(event), 10)
    assert (writer.tries, event.acks) == (5, 1)
    sample = worker._metrics.registry.get_sample_value
    assert sample("headrace_store_retries_total", {"role": "online", "store": "redis"}) == 4


async def test_rows_that_the_store_refuses_end_the_worker(worker: OnlineWorker, writer: FakeWriter) -> None:
    writer.failures = [SinkRejectedError("another program uses the key")]
    event = make_event()
    with pytest.raises(SinkRejectedError):
        await worker._handle(event)
    assert event.acks == 0


async def test_what_is_no_feature_row_is_named_by_its_place(worker: OnlineWorker) -> None:
    with pytest.raises(DecodeError, match=rf"{VIEW.topic}-0 from offset 7"):
        await worker._handle(make_event(values=[b"nonsense"]))


class FakeScores:
    """A store of scores that is away once."""

    def __init__(self) -> None:
        self.written: list[tuple[list[bytes], list[int], str, int]] = []
        self.is_away = True

    async def write(self, scores: list[bytes], *, offsets: list[int], model: Any, keep_us: int) -> WriteResult:
        if self.is_away:
            self.is_away = False
            message = "away"
            raise SinkUnavailableError(message, retry_after_ms=1)
        self.written.append((list(scores), offsets, model.name, keep_us))
        return WriteResult(written=len(scores), superseded=0)


async def test_scores_that_use_cases_want_are_kept_with_their_offsets(writer: FakeWriter) -> None:
    kept = FakeScores()
    worker = OnlineWorker(
        [VIEW],
        application="shop",
        brokers="127.0.0.1:1",
        writer=writer,  # type: ignore[arg-type]  # a fake
        scores={LATE_ARRIVAL.topic: (LATE_ARRIVAL, 5)},
        score_writer=kept,  # type: ignore[arg-type]  # a fake
        metrics=Metrics(CollectorRegistry()),
        lineage=FakeLineage(),  # type: ignore[arg-type]  # a fake
    )
    event = make_event(values=[b"one", b"two"])
    event.value = make_batch([b"one", b"two"], topic=LATE_ARRIVAL.topic, first_offset=7)
    await worker._handle_scores(event)
    assert kept.written == [([b"one", b"two"], [7, 8], "late_arrival", 5)]
    assert event.acks == 1


class FakeReader:
    """Reads what it is told to."""

    def __init__(self) -> None:
        self.reads: list[Any] = []
        self.offset: int | None = 2
        self.error: Exception | None = None

    async def read(self, view: FeatureView, entities: list[Any], *, now_us: int) -> list[Any]:
        self.reads.append((view.name, entities))
        if self.error is not None:
            raise self.error
        return [SimpleNamespace(window_end_us=T0_US, pane_index=0, source_offset=self.offset)]


def failures(worker: OnlineWorker) -> float | None:
    return worker._metrics.registry.get_sample_value("headrace_read_back_failures_total", {"view": VIEW.name})


@pytest.mark.parametrize(("offset", "lost"), [(2, 0), (9, 0), (1, 1), (None, 1)])
async def test_the_newest_row_of_a_batch_is_read_back_once_a_second(
    worker: OnlineWorker, offset: int | None, lost: int
) -> None:
    reader = FakeReader()
    reader.offset = offset
    worker._reader = reader  # type: ignore[assignment]  # a fake
    for _ in range(3):
        await worker._handle(make_event())
    assert reader.reads == [(VIEW.name, ["u1"])]
    assert failures(worker) == lost


async def test_a_store_that_goes_away_before_the_read_back_fails_nothing(worker: OnlineWorker) -> None:
    reader = FakeReader()
    reader.error = SinkUnavailableError("away")
    worker._reader = reader  # type: ignore[assignment]  # a fake
    event = make_event()
    await worker._handle(event)
    assert (event.acks, failures(worker)) == (1, 0)
