import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message

from streams.transport import poller as poller_module
from streams.transport.poller import PollThread, to_columns
from tests.support.transport import FakeApplication, FakeKafkaConsumer, make_message

TIMEOUT_S = 10.0
P0, P1 = ("t", 0), ("t", 1)


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> FakeKafkaConsumer:
    consumer = FakeKafkaConsumer()
    monkeypatch.setattr(poller_module.confluent_kafka, "Consumer", lambda _: consumer)
    return consumer


@pytest.fixture
def application() -> FakeApplication:
    return FakeApplication()


@pytest.fixture
def poller(kafka: FakeKafkaConsumer, application: FakeApplication) -> Iterator[PollThread]:
    thread = PollThread({}, application=application, revoke_timeout_s=0.2)
    thread.start()
    thread.subscribe(["t"]).result(TIMEOUT_S)
    yield thread
    thread.stop(TIMEOUT_S)
    assert kafka.is_closed


def polled(kafka: FakeKafkaConsumer, *steps: Any) -> None:
    """Have the next polls bring ``steps``, and wait until the thread is past them."""
    past = threading.Event()
    kafka.script.extend([*steps, past.set])
    assert past.wait(TIMEOUT_S), "the poll thread does not poll"


def until(application: FakeApplication, condition: Callable[[], bool]) -> None:
    with application.told:
        assert application.told.wait_for(condition, TIMEOUT_S), "the poll thread did not tell"


def assign(kafka: FakeKafkaConsumer, *partitions: tuple[str, int]) -> None:
    polled(kafka, lambda: kafka.rebalance("on_assign", *partitions))


def messages(tp: tuple[str, int], *offsets: int) -> list[Message]:
    return [make_message(tp, offset) for offset in offsets]


def test_new_partitions_wait_for_a_seek(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication
) -> None:
    assign(kafka, P0, P1)
    assert kafka.calls[1:] == [("assign", [P0, P1]), ("pause", [P0, P1])]
    assert application.assignments == [({P0, P1}, 1)]
    assert poller.assignment == {P0, P1}
    assert poller.group_metadata == "metadata"
    polled(kafka, messages(P0, 0))  # fetched before the seek: it will come again after it
    assert application.delivered == []

    poller.seek({P0: 5, P1: OFFSET_BEGINNING}, generation=1).result(TIMEOUT_S)
    assert kafka.calls[3:] == [("seek", (*P0, 5)), ("seek", (*P1, OFFSET_BEGINNING)), ("resume", [P0, P1])]
    polled(kafka, messages(P0, 5, 6) + messages(P1, 0))
    assert [(b.partition, b.offsets.tolist(), generation) for b, generation in application.delivered] == [
        (0, [5, 6], 1),
        (1, [0], 1),
    ]
    assert poller.highwater == {P0: 1_000, P1: 1_000}


def test_a_seek_of_an_assignment_that_is_over_does_nothing(poller: PollThread, kafka: FakeKafkaConsumer) -> None:
    assign(kafka, P0)
    polled(kafka, lambda: kafka.rebalance("on_revoke", P0))
    assign(kafka, P0)
    poller.seek({P0: 5}, generation=1).result(TIMEOUT_S)
    assert "seek" not in dict(kafka.calls)
    poller.seek({P0: 5, P1: 7}, generation=3).result(TIMEOUT_S)
    assert [call for call in kafka.calls if call[0] == "seek"] == [("seek", (*P0, 5))]


def test_a_moment_over_the_budget_takes_nothing_and_pauses_nothing(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "_PAUSE_AFTER_S", 3_600)
    assign(kafka, P0)
    poller.seek({P0: 0}, generation=1).result(TIMEOUT_S)
    del kafka.calls[:]
    application.is_over = True
    for _ in range(2):
        poller.call(lambda _: None).result(TIMEOUT_S)
    kafka.script.append(messages(P0, 0, 1))
    for _ in range(2):
        poller.call(lambda _: None).result(TIMEOUT_S)
    assert (application.delivered, kafka.calls, len(kafka.script)) == ([], [], 1)
    application.is_over = False
    until(application, lambda: bool(application.delivered))
    assert [batch.offsets.tolist() for batch, _ in application.delivered] == [[0, 1]]
    assert kafka.calls == []


def test_rows_pause_over_the_budget_and_go_on_below_it(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "_PAUSE_AFTER_S", 0)
    assign(kafka, P0)
    poller.seek({P0: 0}, generation=1).result(TIMEOUT_S)
    del kafka.calls[:]
    application.is_over = True
    polled(kafka)
    polled(kafka)
    assert poller.is_held_back
    assert kafka.calls == [("pause", [P0])]
    application.is_over = False
    polled(kafka)
    polled(kafka)
    assert not poller.is_held_back
    assert kafka.calls == [("pause", [P0]), ("resume", [P0])]


def test_partitions_that_come_while_held_back_stay_paused_until_there_is_room(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "_PAUSE_AFTER_S", 0)
    assign(kafka, P0)
    poller.seek({P0: 0}, generation=1).result(TIMEOUT_S)
    application.is_over = True
    polled(kafka)
    polled(kafka, lambda: kafka.rebalance("on_revoke", P0))
    assign(kafka, P1)
    del kafka.calls[:]
    poller.seek({P1: 0}, generation=3).result(TIMEOUT_S)
    assert ("resume", [P1]) not in kafka.calls
    application.is_over = False
    polled(kafka)
    polled(kafka)
    assert kafka.calls[-1] == ("resume", [P1])


def test_calls_are_served_while_a_revocation_waits_for_the_last_commit(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication
) -> None:
    application.is_prompt = False
    assign(kafka, P0)
    kafka.script.append(lambda: kafka.rebalance("on_revoke", P0))
    until(application, lambda: application.revocations == [({P0}, False)])
    assert poller.call(lambda _: "served").result(TIMEOUT_S) == "served"
    assert poller.assignment == {P0}
    application.last_commit.set_result(None)
    polled(kafka)
    assert poller.assignment == set()
    assert kafka.calls[-1] == ("unassign", None)
    assert application.errors == []


def test_a_revocation_that_takes_too_long_fails_the_worker(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication
) -> None:
    application.is_prompt = False
    assign(kafka, P0)
    polled(kafka, lambda: kafka.rebalance("on_revoke", P0))
    assert [type(error) for error in application.errors] == [TimeoutError]
    assert poller.assignment == set()


def test_a_last_commit_that_fails_fails_the_worker(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication
) -> None:
    application.is_prompt = False
    failure: Future[None] = Future()
    failure.set_exception(RuntimeError("no"))
    application.last_commit = failure
    assign(kafka, P0)
    polled(kafka, lambda: kafka.rebalance("on_lost", P0))
    assert [str(error) for error in application.errors] == ["no"]
    assert application.revocations == [({P0}, True)]
    assert poller.assignment == set()


def test_the_end_of_a_partition_is_known_until_there_is_more(poller: PollThread, kafka: FakeKafkaConsumer) -> None:
    assign(kafka, P0)
    poller.seek({P0: 0}, generation=1).result(TIMEOUT_S)
    end = make_message(P0, 3, failure=KafkaError(KafkaError._PARTITION_EOF))
    polled(kafka, [*messages(P0, 0, 1, 2), end])
    assert poller.at_end == {P0: 3}
    polled(kafka, messages(P0, 3))
    assert poller.at_end == {}


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.GROUP_AUTHORIZATION_FAILED])
def test_an_error_that_does_not_pass_ends_polling_and_is_told(
    kafka: FakeKafkaConsumer, application: FakeApplication, poller: PollThread, code: int
) -> None:
    kafka.script.append([make_message(P0, failure=KafkaError(code))])
    until(application, lambda: bool(application.errors))
    assert isinstance(application.errors[0], KafkaException)
    with pytest.raises(KafkaException, match="closed"):
        poller.call(lambda _: None).result(TIMEOUT_S)


def test_an_error_that_passes_by_itself_does_not_end_polling(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication
) -> None:
    polled(kafka, [make_message(P0, failure=KafkaError(KafkaError._ALL_BROKERS_DOWN))])
    assert application.errors == []
    assert poller.call(lambda _: 1).result(TIMEOUT_S) == 1


def test_the_error_of_a_call_is_its_callers(
    poller: PollThread, kafka: FakeKafkaConsumer, application: FakeApplication
) -> None:
    def fail(_: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    with pytest.raises(KafkaException):
        poller.call(fail).result(TIMEOUT_S)
    polled(kafka)
    assert application.errors == []


def test_no_call_waits_for_a_thread_that_has_ended(kafka: FakeKafkaConsumer, application: FakeApplication) -> None:
    thread = PollThread({}, application=application, revoke_timeout_s=1.0)
    with pytest.raises(KafkaException, match="closed"):
        thread.call(lambda _: None).result(TIMEOUT_S)
    thread.start()
    assert kafka.polled.wait(TIMEOUT_S)
    thread.stop(TIMEOUT_S)
    with pytest.raises(KafkaException, match="closed"):
        thread.call(lambda _: None).result(TIMEOUT_S)


def test_columns_hold_each_record_in_order() -> None:
    batch = to_columns(P1, [make_message(P1, 4, b"abc"), make_message(P1, 7, None)])
    assert (batch.topic, batch.partition) == P1
    assert batch.offsets.tolist() == [4, 7]
    assert batch.broker_time_us.tolist() == [1_000_000, 1_000_000]
    assert batch.values == [b"abc", None]
    assert (batch.next_offset, len(batch)) == (8, 2)
