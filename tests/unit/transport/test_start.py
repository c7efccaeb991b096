from typing import Any

import pytest
from confluent_kafka import OFFSET_END, TopicPartition

from schemas.errors import ConfigError
from streams.transport.start import Edge, StartAt

T = "shop.events"


class FakeConsumer:
    """Partitions of 100 records from offset 10 on, one a second from 2026 on."""

    FIRST_MS = 1_767_225_600_000

    def get_watermark_offsets(self, _: TopicPartition, *, timeout: float) -> tuple[int, int]:
        assert timeout
        return (10, 110)

    def offsets_for_times(self, asked: list[TopicPartition], *, timeout: float) -> list[TopicPartition]:
        assert timeout
        answers = []
        for tp in asked:
            offset = 10 + max(0, -(-(tp.offset - self.FIRST_MS) // 1_000))
            answers.append(TopicPartition(tp.topic, tp.partition, offset if offset < 110 else OFFSET_END))
        return answers


def resolve(text: str, *partitions: int) -> dict[Any, int]:
    consumer: Any = FakeConsumer()
    return StartAt.parse(text, topics=[T]).resolve(consumer, [(T, number) for number in partitions])


def test_a_group_may_begin_at_either_end() -> None:
    assert StartAt.parse("end", topics=[T]).edge is Edge.END
    assert resolve("beginning", 0, 1) == {(T, 0): 10, (T, 1): 10}
    assert resolve("end", 0) == {(T, 0): 110}


@pytest.mark.parametrize(
    ("time", "offset"),
    [
        ("2025-12-31T00:00:00Z", 10),
        ("2026-01-01T00:00:00Z", 10),
        ("2026-01-01T01:00:05+01:00", 15),
        ("2026-01-01T00:00:05.000001Z", 16),  # a microsecond after a record begins behind it
        ("2026-01-01T00:01:39Z", 109),
    ],
)
def test_a_time_begins_at_the_first_record_that_is_not_older(time: str, offset: int) -> None:
    assert resolve(time, 0) == {(T, 0): offset}


@pytest.mark.parametrize("time", ["2026-01-01T00:01:40Z", "2099-01-01T00:00:00Z"])
def test_a_time_after_the_last_record_is_the_end_and_never_the_start(time: str) -> None:
    assert resolve(time, 0, 1) == {(T, 0): 110, (T, 1): 110}


def test_offsets_are_taken_as_they_are() -> None:
    assert resolve(f"{T}:0=10, {T}:1=110", 0, 1) == {(T, 0): 10, (T, 1): 110}


def test_no_partitions_ask_nothing() -> None:
    assert resolve("2026-01-01T00:00:00Z") == {}


def test_a_partition_that_is_not_named_is_not_read_from_its_start_unasked() -> None:
    with pytest.raises(ConfigError, match=f"names no offset of {T}:1, expected one for each partition"):
        resolve(f"{T}:0=10", 0, 1)


@pytest.mark.parametrize("offset", [9, 111])
def test_an_offset_that_is_not_there_is_refused(offset: int) -> None:
    with pytest.raises(ConfigError, match=f"{T}:0={offset}, expected an offset from 10 to 110"):
        resolve(f"{T}:0={offset}", 0)


@pytest.mark.parametrize(
    ("number", "unit"),
    [("1767225600", "seconds"), ("1767225600000", "milliseconds"), ("1767225600000000", "microseconds")],
)
def test_a_number_is_refused_and_the_time_it_may_mean_is_named(number: str, unit: str) -> None:
    with pytest.raises(ConfigError, match=f"write 2026-01-01T00:00:00.000000Z if it is in {unit}$"):
        StartAt.parse(number, topics=[T])


def test_a_number_that_is_a_time_in_no_unit_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="before 1990 or after 2100 in every unit"):
        StartAt.parse("-5", topics=[T])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yesterday", "expected `beginning`, `end`, a time such as 2026-01-31T09:00:00Z, or offsets"),
        ("2026-01-01T00:00:00", "has no UTC offset"),
        ("other:0=5", "names topic 'other', expected one that the role reads"),
        (f"{T}:0=", "expected TOPIC:PARTITION=OFFSET"),
        (f"{T}=5", "expected TOPIC:PARTITION=OFFSET"),
    ],
)
def test_what_is_no_place_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StartAt.parse(text, topics=[T])
