import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from schemas.errors import ConfigError, InferenceUnavailableError
from streams.agents import scoring as scoring_module
from streams.agents.scoring import MAX_BATCH_ROWS, ScoringWorker
from streams.observability.metrics import Metrics
from streams.ports import Recovery
from streams.wire import encode_rows
from tests.support.feature_rows import T0_US
from tests.support.scoring import (
    TRIPS,
    FakeModel,
    by_distance,
    make_scorer,
    make_spec,
    make_triggers,
)
from tests.support.transport import make_batch

SPEC = make_spec()


class FakeEpoch:
    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.letters: list[Mapping[str, Any]] = []
        self.starts = 0
        self.commits = 0

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        self.commits += 1

    async def start(self) -> None:
        self.starts += 1

    async def write_rows(
        self, topic: str, *, partition: int | None, keys: Sequence[bytes | None], values: Sequence[bytes]
    ) -> None:
        assert topic == SPEC.topic
        self.rows += values

    async def write_output(self, topic: str, **record: Any) -> None:
        self.letters.append({"topic": topic, **record})


class FakeLineage:
    def __init__(self) -> None:
        self.done: list[Mapping[str, Any]] = []

    def scores_done(self, *_: Any, **facts: Any) -> None:
        self.done.append(facts)


class Gate:
    """A model that answers when it is let."""

    def __init__(self) -> None:
        self.inner = FakeModel()
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.is_down = False
        self.asked = asyncio.Event()

    async def infer(self, features: Any, *, timeout_s: float) -> Any:
        self.asked.set()
        await self.is_open.wait()
        if self.is_down:
            msg = "no Triton"
            raise InferenceUnavailableError(msg)
        return await self.inner.infer(features, timeout_s=timeout_s)

    async def recover(self) -> Recovery:
        return Recovery.AWAY


@pytest.fixture
async def model() -> Gate:
    return Gate()


@pytest.fixture
async def worker(model: Gate, monkeypatch: pytest.MonkeyPatch) -> ScoringWorker:
    monkeypatch.setattr(scoring_module, "_MAX_RETRY_S", 0.01)
    monkeypatch.setattr(scoring_module, "_RELEASE_GRACE_S", 0.05)
    scorer = make_scorer(SPEC, model)

    async def connect() -> None:
        if model.is_down:
            msg = "no Triton"
            raise InferenceUnavailableError(msg)

    async def follow(_: Callable[[], bool]) -> None:
        """There is no rollout to follow."""

    async def watch() -> None:
        """Nobody watches over a fake."""

    made = ScoringWorker(
        SPEC,
        view=TRIPS,
        scorer=scorer,
        connect=connect,
        follow=follow,
        watch=watch,
        application="shop",
        brokers="127.0.0.1:1",
        worker_id="0",
        metrics=Metrics(CollectorRegistry()),
        lineage=FakeLineage(),  # type: ignore[arg-type]  # a fake
    )
    made._epoch = FakeEpoch()  # type: ignore[assignment]  # a fake
    return made


def make_event(first_offset: int, n_rows: int, *, partition: int = 0, **changes: Any) -> Any:
    rows = make_triggers(*({"request_id": f"r{first_offset + n}"} | changes for n in range(n_rows)))
    batch = make_batch(
        encode_rows(rows),
        topic=TRIPS.topic,
        partition=partition,
        first_offset=first_offset,
        keys=[b"JFK"] * n_rows,
        headers=[[("trace", str(first_offset + n).encode())] for n in range(n_rows)],
    )
    event = SimpleNamespace(value=batch, acks=0, acked=asyncio.Event())

    def ack() -> None:
        event.acks += 1
        event.acked.set()

    event.ack = ack
    return event


def written(worker: ScoringWorker) -> int:
    return len(worker._epoch.rows)  # type: ignore[attr-defined]  # a fake


async def handle(worker: ScoringWorker, event: Any) -> None:
    async with worker._scoring:
        await worker._handle(event)


async def score_all(worker: ScoringWorker, event: Any) -> None:
    """Handle an event and see all that waits through, as where partitions go."""
    await handle(worker, event)
    assert await worker._release({(TRIPS.topic, 0)}, False)


async def test_rows_wait_for_others_and_are_acknowledged_once_written(worker: ScoringWorker) -> None:
    first, second = make_event(0, 2), make_event(2, 3)
    await handle(worker, first)
    await handle(worker, second)
    assert written(worker) == 0
    assert await worker._release({(TRIPS.topic, 0)}, False)
    assert written(worker) == 5
    assert (first.acks, second.acks) == (1, 1)


async def test_a_full_batch_goes_at_once_and_what_is_left_waits_for_others(worker: ScoringWorker) -> None:
    first, second = make_event(0, MAX_BATCH_ROWS + 1), make_event(MAX_BATCH_ROWS + 1, MAX_BATCH_ROWS - 1)
    await handle(worker, first)
    await worker._in_flight.settle()
    assert len(worker._batcher) == 1
    assert written(worker) == 0, "a commit would cut through the chunk"
    assert first.acks == 0
    await handle(worker, second)
    await worker._in_flight.settle()
    assert written(worker) == 2 * MAX_BATCH_ROWS
    assert (first.acks, second.acks) == (1, 1)


async def test_batches_are_scored_side_by_side_across_chunks_and_written_in_their_order(
    worker: ScoringWorker, model: Gate
) -> None:
    await worker._until_connected()
    waiting: list[asyncio.Event] = []

    async def answer_last_first(features: Any, *, timeout_s: float) -> Any:
        mine = asyncio.Event()
        waiting.append(mine)
        if len(waiting) == 3:
            mine.set()
        await mine.wait()
        if (at := waiting.index(mine)) > 0:
            waiting[at - 1].set()
        return await model.inner.infer(features, timeout_s=timeout_s)

    model.infer = answer_last_first  # type: ignore[method-assign]  # answers once three are asked, the last one first
    size = 3 * MAX_BATCH_ROWS // 2
    events = [make_event(0, size, partition=0), make_event(size, size, partition=1)]
    for event in events:
        await handle(worker, event)
    await asyncio.wait_for(worker._in_flight.settle(), 30)
    requests = [json.loads(row)["request_id"] for row in worker._epoch.rows]  # type: ignore[attr-defined]  # a fake
    assert requests == [f"r{number}" for number in range(2 * size)]
    assert [event.acks for event in events] == [1, 1]


async def test_rows_go_when_the_freshness_of_the_oldest_asks_for_it_whoever_came_first(
    worker: ScoringWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._model = make_spec(freshness="20s")
    worker._begin_anew()
    wall_us, clock_us = T0_US, 5_000_000
    monkeypatch.setattr(scoring_module.time, "time_ns", lambda: wall_us * 1_000)
    monkeypatch.setattr(scoring_module.time, "monotonic_ns", lambda: clock_us * 1_000)
    reserve_us = 100_000  # the commit interval: nothing has been scored or committed yet
    await handle(worker, make_event(0, 1, broker_time=wall_us - 1_000_000))
    assert worker._batcher.next_deadline_us == clock_us + 19_000_000 - reserve_us

    await handle(worker, make_event(1, 1, broker_time=wall_us - 4_000_000))
    assert worker._batcher.next_deadline_us == clock_us + 16_000_000 - reserve_us

    await handle(worker, make_event(2, 1, broker_time=wall_us - 3_000_000))
    await handle(worker, make_event(3, 1, broker_time=None))
    assert worker._batcher.next_deadline_us == clock_us + 10_000, "who does not know its age waits little"

    worker._scoring_pace.took(600_000)
    worker._commit_pace.took(50_000)
    await handle(worker, make_event(4, 1, broker_time=wall_us - 19_500_000))
    assert worker._batcher.next_deadline_us == clock_us, "it is late as it is"


async def test_rows_that_are_due_sooner_than_those_that_wait_are_not_waited_with(worker: ScoringWorker) -> None:
    worker._model = make_spec(freshness="30s")
    worker._begin_anew()
    now_us = scoring_module.time.time_ns() // 1_000
    scoring = asyncio.ensure_future(worker._score_when_due())
    waits, late = make_event(0, 1, broker_time=now_us), make_event(1, 1, broker_time=now_us - 60_000_000)
    await handle(worker, waits)
    await asyncio.sleep(0)  # the worker begins to wait
    await handle(worker, late)
    await asyncio.wait_for(late.acked.wait(), 10)
    assert waits.acks == 1
    scoring.cancel()


async def test_no_commit_comes_between_the_rows_of_a_chunk(worker: ScoringWorker, model: Gate) -> None:
    event = make_event(0, 2 * MAX_BATCH_ROWS)
    async with worker._lock:  # as a commit does
        await handle(worker, event)
        await asyncio.wait_for(model.asked.wait(), 10)
        assert (written(worker), event.acks) == (0, 0)
    await worker._in_flight.settle()
    assert (written(worker), event.acks) == (2 * MAX_BATCH_ROWS, 1)


async def test_commits_go_on_while_the_model_does_not_answer(worker: ScoringWorker, model: Gate) -> None:
    model.is_down = True
    event = make_event(0, MAX_BATCH_ROWS)
    await handle(worker, event)
    async with asyncio.timeout(5), worker._lock:  # as a commit does
        assert written(worker) == 0
    model.is_down = False
    await asyncio.wait_for(worker._in_flight.settle(), 5)
    assert written(worker) == MAX_BATCH_ROWS
    assert event.acks == 1


async def test_a_model_that_stays_away_holds_no_rebalance_up_and_writes_no_part_of_a_chunk(
    worker: ScoringWorker, model: Gate
) -> None:
    await worker._until_connected()
    answered = 0

    async def answer_once(features: Any, *, timeout_s: float) -> Any:
        nonlocal answered
        answered += 1
        model.asked.set()
        if answered > 1:
            msg = "no Triton"
            raise InferenceUnavailableError(msg)
        return await model.inner.infer(features, timeout_s=timeout_s)

    model.infer = answer_once  # type: ignore[method-assign]  # the first part is scored, the second is not
    event, later = make_event(0, MAX_BATCH_ROWS + 1), make_event(MAX_BATCH_ROWS + 1, 1)
    await handle(worker, event)
    await asyncio.wait_for(model.asked.wait(), 5)
    assert await asyncio.wait_for(worker._release({(TRIPS.topic, 0)}, False), 5)
    await handle(worker, later)  # it must not overtake what was left out
    assert written(worker) == 0
    assert (event.acks, later.acks) == (0, 0)
    model.infer = model.inner.infer  # type: ignore[method-assign]  # Triton is back
    await worker._begin()
    again = make_event(0, MAX_BATCH_ROWS + 1)
    await score_all(worker, again)
    assert written(worker) == MAX_BATCH_ROWS + 1
    assert again.acks == 1


async def test_a_call_that_hangs_is_given_up_when_partitions_go(worker: ScoringWorker, model: Gate) -> None:
    model.is_open.clear()
    await handle(worker, make_event(0, 1))
    assert await asyncio.wait_for(worker._release({(TRIPS.topic, 0)}, False), 5)
    assert written(worker) == 0


async def test_lost_partitions_are_not_scored(worker: ScoringWorker, model: Gate) -> None:
    event = make_event(0, 1)
    await handle(worker, event)
    await worker._release({(TRIPS.topic, 0)}, True)
    assert written(worker) == 0
    assert event.acks == 0
    assert model.inner.batches == []


async def test_new_partitions_begin_with_a_new_epoch_and_an_empty_batch(worker: ScoringWorker) -> None:
    await handle(worker, make_event(0, 1))
    await worker._begin()
    assert worker._epoch.starts == 1  # type: ignore[attr-defined]  # a fake
    assert len(worker._batcher) == 0


async def test_a_model_of_another_contract_ends_the_worker(worker: ScoringWorker) -> None:
    async def refuse() -> None:
        msg = "another file than the card describes"
        raise ConfigError(msg)

    worker._connect = refuse
    with pytest.raises(ConfigError):
        await worker._score_when_due()
    assert worker.app.headrace.has_failed
    assert isinstance(worker.app.crash_reason, ConfigError)


def sample(worker: ScoringWorker, name: str, **labels: str) -> float | None:
    return worker._metrics.registry.get_sample_value(name, labels)


async def test_a_dead_letter_is_the_record_that_came_and_says_why(worker: ScoringWorker, model: Gate) -> None:
    def answer(features: Any) -> Any:
        inference = by_distance(features)
        inference.outputs["probabilities"][3, 1] = 7.0
        return inference

    model.inner.answer = answer
    first, second = make_event(10, 2), make_event(40, 3, partition=2)
    await handle(worker, first)
    await handle(worker, second)
    assert await worker._release({(TRIPS.topic, 0)}, False)
    (letter,) = worker._epoch.letters  # type: ignore[attr-defined]  # a fake
    assert letter["topic"] == SPEC.dead_letter_topic
    assert (letter["key"], letter["value"]) == (b"JFK", second.value.values[1])
    headers = dict(letter["headers"])
    assert headers.pop("headrace.detail").startswith(b"`probability` is 7, expected")
    assert headers == {
        "trace": b"41",
        "headrace.reason": b"invalid_output",
        "headrace.topic": TRIPS.topic.encode(),
        "headrace.partition": b"2",
        "headrace.offset": b"41",
        "headrace.view": TRIPS.name.encode(),
        "headrace.request_id": b"r41",
    }
    lineage: Any = worker._lineage
    assert [(done["rows"], done["scores"]) for done in lineage.done] == [(2, 2), (3, 2)]


async def test_a_chunk_of_several_batches_tells_all_its_scores(worker: ScoringWorker) -> None:
    await score_all(worker, make_event(0, MAX_BATCH_ROWS + 3))
    lineage: Any = worker._lineage
    assert [done["scores"] for done in lineage.done] == [MAX_BATCH_ROWS + 3]


async def test_rows_that_are_not_scored_and_calls_that_are_repeated_are_metered(
    worker: ScoringWorker, model: Gate
) -> None:
    model.inner.failures = [InferenceUnavailableError("no Triton")]
    await handle(worker, make_event(0, 2))
    await handle(worker, make_event(2, 3, pane="ON_TIME"))
    await handle(worker, make_event(5, 1, definition_hash="another"))
    await worker._release({(TRIPS.topic, 0)}, False)
    rows = {"role": "scoring", "view": TRIPS.name}
    counted = {
        (outcome, reason): sample(worker, "headrace_rows_total", **rows, outcome=outcome, reason=reason)
        for outcome, reason in (("scored", ""), ("ignored", "closing_pane"), ("ignored", "other_definition"))
    }
    assert counted == {("scored", ""): 2, ("ignored", "closing_pane"): 3, ("ignored", "other_definition"): 1}
    assert sample(worker, "headrace_store_retries_total", role="scoring", store="triton") == 1


async def test_a_score_says_when_it_left_and_the_metric_when_it_was_committed(
    worker: ScoringWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = T0_US + 60_000_000
    monkeypatch.setattr(scoring_module.time, "time_ns", lambda: now_us * 1_000)
    await handle(worker, make_event(0, 2, broker_time=now_us - 50_000, computed_time=now_us - 40_000))
    now_us += 20_000
    await worker._release({(TRIPS.topic, 0)}, False)
    totals = [json.loads(row)["latency_ms"]["total"] for row in worker._epoch.rows]  # type: ignore[attr-defined]
    assert totals == [70.0, 70.0]
    assert sample(worker, "headrace_score_freshness_seconds_count", model=SPEC.name) is None
    now_us += 100_000
    await worker._commit({(TRIPS.topic, 0): 2})
    assert sample(worker, "headrace_score_freshness_seconds_count", model=SPEC.name) == 2
    assert sample(worker, "headrace_score_freshness_seconds_sum", model=SPEC.name) == pytest.approx(0.34)
    await worker._commit({(TRIPS.topic, 0): 2})
    assert sample(worker, "headrace_score_freshness_seconds_count", model=SPEC.name) == 2
