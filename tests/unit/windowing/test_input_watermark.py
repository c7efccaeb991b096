"""The watermark behind a repartition topic: a minimum over inputs, of which the idle ones are left out."""

from typing import Any

import pyarrow as pa
import pytest

from schemas.row import RECORD_COLUMNS
from schemas.time import MINUS_INFINITY_US
from streams.windowing.input_watermark import InputWatermarks

NEVER = MINUS_INFINITY_US


def record(topic: str, partition: int, watermark: int | None, *, of: int = 2, idle: bool = False) -> dict[str, Any]:
    place = {"_source": topic, "_source_partition": partition, "_source_partitions": of}
    return {**place, "_watermark": watermark, "_is_idle": idle, "_is_event": not idle}


def move(inputs: InputWatermarks, *records: dict[str, Any], start: int = NEVER) -> list[int]:
    table = pa.Table.from_pylist(list(records), schema=RECORD_COLUMNS)
    return inputs.move(table, watermark_us=start).tolist()  # type: ignore[no-any-return]


def test_it_stays_at_minus_infinity_until_every_partition_has_spoken() -> None:
    inputs = InputWatermarks(["a"])

    assert move(inputs, record("a", 0, 50), record("a", 0, 60), record("a", 1, None)) == [NEVER] * 3
    assert move(inputs, record("a", 1, 40)) == [40]


def test_a_source_that_nobody_has_heard_of_holds_it_back() -> None:
    inputs = InputWatermarks(["a", "b"])

    assert move(inputs, record("a", 0, 50, of=1), record("b", 0, 10, of=1), record("b", 0, 70, of=1)) == [NEVER, 10, 50]


def test_an_idle_partition_is_left_out_and_its_return_takes_nothing_back() -> None:
    inputs = InputWatermarks(["a"])

    assert move(
        inputs,
        record("a", 0, 50),
        record("a", 1, 10),
        record("a", 1, 10, idle=True),
        record("a", 0, 60),
        record("a", 1, 20),
        record("a", 0, 70),
        record("a", 1, 65),
    ) == [NEVER, 10, 50, 60, 60, 60, 65]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_where_all_are_idle_it_is_their_maximum_whichever_fell_silent_first(order: tuple[int, int]) -> None:
    inputs = InputWatermarks(["a"])
    watermarks = {0: 50, 1: 10}
    move(inputs, *(record("a", number, watermark) for number, watermark in watermarks.items()))

    moved = move(inputs, *(record("a", number, watermarks[number], idle=True) for number in order), start=10)
    assert moved[-1] == 50


def test_a_partition_that_is_added_holds_it_where_it_is_until_it_speaks() -> None:
    inputs = InputWatermarks(["a"])

    assert move(inputs, record("a", 0, 50, of=1), record("a", 0, 60, of=2), record("a", 0, 70, of=2)) == [50, 50, 50]
    assert move(inputs, record("a", 1, 65, of=2), start=50) == [65]


def test_what_is_after_a_record_counts_with_the_next_one_whoever_sends_it() -> None:
    inputs = InputWatermarks(["a"])
    first, second = record("a", 0, 10), record("a", 1, 30)

    assert move(inputs, first | {"_watermark_after": 20}, second, first | {"_watermark": 20}) == [NEVER, 20, 20]
    assert move(inputs, record("a", 0, 25) | {"_watermark_after": 40}, start=20) == [25]
    assert move(inputs, record("a", 1, 30), start=25) == [30]


def test_what_it_knows_can_be_told_and_read_again() -> None:
    inputs = InputWatermarks(["a", "b"])
    move(inputs, record("a", 0, 50), record("a", 1, 10, idle=True), record("b", 0, 30, of=1))
    again = InputWatermarks(["a", "b"])
    again.read(inputs.inputs())

    assert again.inputs() == {"a": [(50, False), (10, True)], "b": [(30, False)]}
    assert move(again, record("b", 0, 45, of=1), start=30) == move(inputs, record("b", 0, 45, of=1), start=30) == [45]
