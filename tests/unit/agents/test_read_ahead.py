import threading
from types import SimpleNamespace

import pytest

from streams.agents.read_ahead import ReadAhead
from streams.batch import RawBatch
from tests.support.transport import make_batch

TIMEOUT_S = 10.0


def values(batch: RawBatch) -> list[bytes | None]:
    return list(batch.values)


async def test_batches_are_read_before_the_agent_asks_for_them() -> None:
    read: list[int] = []
    all_read = threading.Event()

    def note(batch: RawBatch) -> int:
        read.append(batch.partition)
        if len(read) == 3:
            all_read.set()
        return batch.partition

    ahead = ReadAhead(note)
    batches = [make_batch([b"v"], partition=number) for number in range(3)]
    for batch in batches:
        ahead.begin(batch)
    assert all_read.wait(TIMEOUT_S)
    assert [await ahead.take(batch) for batch in reversed(batches)] == [2, 1, 0]
    assert read == [0, 1, 2]


async def test_waiting_for_an_event_leaves_its_batch_to_the_agent() -> None:
    ahead = ReadAhead(values)
    batch = make_batch([b"v"])
    ahead.begin(batch)
    await ahead.until_read(SimpleNamespace(value=batch))
    assert await ahead.take(batch) == [b"v"]


async def test_one_that_was_not_begun_is_read_when_it_is_taken() -> None:
    ahead = ReadAhead(values)
    batch = make_batch([b"v"])
    await ahead.until_read(SimpleNamespace(value=batch))
    assert await ahead.take(batch) == [b"v"]


async def test_what_cannot_be_read_fails_the_agent_and_not_those_who_wait() -> None:
    def refuse(_: RawBatch) -> None:
        msg = "no row"
        raise ValueError(msg)

    ahead = ReadAhead(refuse)
    batch = make_batch([b"v"])
    ahead.begin(batch)
    await ahead.until_read(SimpleNamespace(value=batch))
    with pytest.raises(ValueError, match="no row"):
        await ahead.take(batch)


async def test_a_batch_that_comes_again_cut_elsewhere_is_read_again() -> None:
    ahead = ReadAhead(values)
    ahead.begin(make_batch([b"1", b"2"], first_offset=5))
    ahead.forget()
    again = make_batch([b"1", b"2", b"3"], first_offset=5)
    ahead.begin(again)
    assert await ahead.take(again) == [b"1", b"2", b"3"]


async def test_what_is_forgotten_is_not_read_any_more() -> None:
    read: list[int] = []
    go_on = threading.Event()

    def note(batch: RawBatch) -> None:
        assert go_on.wait(TIMEOUT_S)
        read.append(batch.partition)

    ahead = ReadAhead(note)
    for number in range(3):
        ahead.begin(make_batch([b"v"], partition=number))
    ahead.forget()
    go_on.set()
    last = make_batch([b"v"], partition=9)
    ahead.begin(last)
    await ahead.take(last)
    # The first was being read already.
    assert read[-1] == 9
    assert set(read) <= {0, 9}
