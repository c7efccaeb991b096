import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from streams.inference.batcher import MicroBatch, MicroBatcher


def rows(*values: int) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.int64())})


def batcher(**changes: int) -> MicroBatcher[str]:
    return MicroBatcher(**{"max_rows": 4, "max_bytes": 1_000, "max_wait_us": 100} | changes)


def values(batch: MicroBatch[str] | None) -> list[int]:
    assert batch is not None
    return batch.rows["value"].to_pylist()


def test_rows_wait_for_others_until_the_first_of_them_is_due():
    batches = batcher()

    assert batches.add(rows(1), chunk="a", now_us=0) == []
    assert batches.add(rows(2), chunk="b", now_us=60) == []

    assert batches.next_deadline_us == 100
    assert batches.take_due(99) is None
    due = batches.take_due(100)
    assert values(due) == [1, 2]
    assert due.completed == ("a", "b")
    assert batches.next_deadline_us is None
    assert len(batches) == 0


def test_a_full_batch_does_not_wait():
    (full,) = batcher().add(rows(1, 2, 3, 4), chunk="a", now_us=0)

    assert values(full) == [1, 2, 3, 4]
    assert full.completed == ("a",)


def test_a_chunk_larger_than_a_batch_is_complete_with_its_last_row():
    batches = batcher()

    first, second = batches.add(rows(*range(9)), chunk="a", now_us=0)

    assert (values(first), first.completed) == ([0, 1, 2, 3], ())
    assert (values(second), second.completed) == ([4, 5, 6, 7], ())
    last = batches.take()
    assert (values(last), last.completed) == ([8], ("a",))


def test_a_batch_knows_where_its_rows_came_from():
    batches = batcher()
    batches.add(rows(0, 1, 2), chunk="a", now_us=0)

    (full,) = batches.add(rows(10, 11, 12), chunk="b", now_us=0)
    rest = batches.take()

    assert rest is not None
    assert [(s.chunk, s.start, s.n_rows, s.start_in_chunk) for s in full.spans] == [("a", 0, 3, 0), ("b", 3, 1, 0)]
    assert [(s.chunk, s.start, s.n_rows, s.start_in_chunk) for s in rest.spans] == [("b", 0, 2, 1)]


def test_bytes_fill_a_batch_too():
    batches = batcher(max_rows=100, max_bytes=3 * 8)

    first, second = batches.add(rows(*range(7)), chunk="a", now_us=0)

    assert [values(first), values(second), values(batches.take())] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_row_larger_than_a_batch_goes_alone():
    batches = batcher(max_bytes=4)

    assert [values(batch) for batch in batches.add(rows(1, 2), chunk="a", now_us=0)] == [[1], [2]]


def test_a_sooner_deadline_of_a_chunk_makes_the_batch_go_sooner():
    batches = batcher()
    batches.add(rows(1), chunk="a", now_us=0)
    batches.add(rows(2), chunk="b", now_us=10, deadline_us=30)

    assert batches.next_deadline_us == 30
    assert values(batches.take_due(30)) == [1, 2]


def test_a_later_deadline_of_a_chunk_does_not_make_it_wait_longer():
    batches = batcher()
    batches.add(rows(1), chunk="a", now_us=0, deadline_us=5_000)

    assert batches.next_deadline_us == 100


def test_a_chunk_without_rows_is_completed_with_what_waits_before_it():
    batches = batcher()
    batches.add(rows(1), chunk="a", now_us=0)
    batches.add(rows(), chunk="b", now_us=1)

    batch = batches.take()

    assert (values(batch), batch.completed) == ([1], ("a", "b"))


@pytest.mark.parametrize("name", ["max_rows", "max_bytes", "max_wait_us"])
def test_a_bound_out_of_range_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"`{name}` is -1, expected \d or more"):
        batcher(**{name: -1})


@settings(max_examples=150, deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 80), st.none() | st.integers(-50, 200)), min_size=1, max_size=25
    ),
    max_rows=st.integers(1, 9),
    max_bytes=st.integers(1, 120),
    max_wait_us=st.integers(0, 100),
)
def test_no_row_is_lost_or_reordered_and_the_bounds_hold(
    chunks: list[tuple[int, int, int | None]], max_rows: int, max_bytes: int, max_wait_us: int
):
    batches = MicroBatcher[int](max_rows=max_rows, max_bytes=max_bytes, max_wait_us=max_wait_us)
    sent: list[int] = []
    added_us: dict[int, int] = {}
    taken: list[tuple[int, MicroBatch[int]]] = []
    now_us = 0
    for number, (n_rows, pause_us, deadline_us) in enumerate(chunks):
        # The agent wakes at each deadline, however far apart chunks are.
        arrival_us = now_us + pause_us
        while (due_us := batches.next_deadline_us) is not None and due_us <= arrival_us:
            now_us = max(now_us, due_us)
            batch = batches.take_due(now_us)
            assert batch is not None
            taken.append((now_us, batch))
        now_us = arrival_us
        numbers = range(len(sent), len(sent) + n_rows)
        sent += numbers
        added_us |= dict.fromkeys(numbers, now_us)
        until_us = None if deadline_us is None else now_us + deadline_us
        full = batches.add(rows(*numbers), chunk=number, now_us=now_us, deadline_us=until_us)
        taken.extend((now_us, batch) for batch in full)
    if (due_us := batches.next_deadline_us) is not None:
        batch = batches.take_due(due_us)
        assert batch is not None
        taken.append((max(now_us, due_us), batch))

    assert [value for _, batch in taken for value in values(batch)] == sent
    assert [number for _, batch in taken for number in batch.completed] == list(range(len(chunks)))
    done = 0
    for at_us, batch in taken:
        assert batch.rows.num_rows <= max_rows
        assert batch.rows.num_rows * 8 <= max(max_bytes, 8)
        assert all(at_us <= added_us[value] + max_wait_us for value in values(batch))
        done += batch.rows.num_rows
        for number in batch.completed:
            assert sum(n for n, _, _ in chunks[: number + 1]) <= done
    origins = [
        (span.chunk, span.start_in_chunk + at, values(batch)[span.start + at])
        for _, batch in taken
        for span in batch.spans
        for at in range(span.n_rows)
    ]
    first_of = [sum(n_rows for n_rows, _, _ in chunks[:number]) for number in range(len(chunks))]
    assert origins == [(chunk, at, first_of[chunk] + at) for chunk, at, _ in origins]
    assert [value for _, _, value in origins] == sent
