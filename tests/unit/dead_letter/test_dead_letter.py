"""Dead letters read back, and the marks of rows that are sent again."""

from typing import Any

import numpy as np
import pytest

from streams.agents.dead_letter import write_dead_letter
from streams.dead_letter import DeadLetter, addressed_views, find_addressed, find_late, marked, read_dead_letters
from tests.support.transport import make_batch


class FakeEpoch:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def begin(self) -> int:
        return 1

    async def write_output(self, topic: str, **record: Any) -> None:
        self.records.append(record)


async def written(headers: Any = None, *, view: str | None = None, reason: str = "late", offset: int = 7) -> DeadLetter:
    """What is read of a letter that the features role writes."""
    epoch = FakeEpoch()
    batch = make_batch([b"v"], keys=[b"k"], headers=[headers], first_offset=offset, partition=3)
    await write_dead_letter(epoch, "dlq.t", batch, 0, reason=reason, detail="why", late_by_us=None, view=view)
    (record,) = epoch.records
    read = make_batch([record["value"]], topic="dlq.t", keys=[record["key"]], headers=[record["headers"]])
    (letter,), n_others = read_dead_letters(read)
    assert n_others == 0
    return letter


async def again(letter: DeadLetter, *, view: str | None = None) -> DeadLetter:
    """The letter that is written when a row is sent again and rejected again."""
    headers = marked(letter, headers=letter.headers, views=letter.addressed, late_for=letter.late_for)
    return await written(headers, view=view, offset=letter.place[2] + 100)


async def test_a_letter_is_read_as_it_was_written() -> None:
    letter = await written([("trace", b"1"), ("none", None)], view="a")
    assert (letter.key, letter.value, letter.headers) == (b"k", b"v", [("trace", b"1"), ("none", None)])
    assert (letter.reason, letter.view, letter.place, letter.name) == ("late", "a", ("t", 3, 7), "dlq.t-0-0")
    assert (letter.n_redriven, letter.origin, letter.is_cut) == (0, "t-3-7", False)


async def test_headers_of_the_record_that_look_like_headraces_stay_headers_of_the_record() -> None:
    own = [("headrace.reason", b"mine"), ("headrace.view", b"mine")]
    letter = await written(own)
    assert letter.headers == own
    assert (letter.reason, letter.view) == ("late", None)


async def test_a_row_that_is_sent_again_counts_up_and_keeps_its_first_place_and_its_headers() -> None:
    letter = await written([("trace", b"1")])
    for turn in (1, 2, 3):
        letter = await again(letter)
        assert (letter.n_redriven, letter.origin) == (turn, "t-3-7")
        assert letter.headers[0] == ("trace", b"1")
        assert [name for name, _ in letter.headers] == ["trace", "headrace.redriven", "headrace.origin"]
    assert letter.place == ("t", 3, 307)


async def test_a_row_that_one_view_rejected_is_meant_for_it_alone_also_when_every_view_rejects_it_later() -> None:
    first = await written(view="a")
    assert first.addressed == {"a"}
    second = await again(first)
    assert (second.view, second.addressed) == (None, {"a"})
    assert (await again(second, view="a")).addressed == {"a"}


async def test_a_row_that_every_view_rejected_is_meant_for_all() -> None:
    letter = await written(reason="decode_error")
    assert letter.addressed is None
    assert addressed_views(marked(letter, headers=[], views=None)) is None


async def test_a_producer_cannot_address_views_by_the_mark_of_a_row_that_was_never_sent_again() -> None:
    assert (await written([("headrace.views", b"b")])).addressed is None


async def test_a_row_that_a_view_was_late_for_says_so_from_then_on() -> None:
    first = await written(view="a")
    assert first.late_for == {"a"}
    headers = marked(first, headers=first.headers, views=first.addressed, late_for=first.late_for)
    assert find_late(np.array([9]), [headers]) == {9: {"a"}}
    second = await written(headers, view="a", reason="overflow")
    assert second.late_for == {"a"}
    assert (await written(view="a", reason="overflow")).late_for == set()
    assert (await written([("headrace.late_for", b"b")], view="a", reason="overflow")).late_for == set()


def test_rows_that_were_not_sent_again_for_being_late_are_not_found_among_those_that_were() -> None:
    headers = [None, [("headrace.views", b"a")], [("headrace.late_for", b"a,b")]]
    assert find_late(np.array([1, 2, 5]), headers) == {5: {"a", "b"}}


@pytest.mark.parametrize("count", [b"x", b"", b"-1", b"9" * 20, None])
async def test_a_count_that_is_none_is_no_count(count: bytes | None) -> None:
    assert (await written([("headrace.redriven", count)])).n_redriven == 0


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [("trace", b"1")],
        [("headrace.reason", b"late")],
        [("headrace.reason", b"late"), ("headrace.topic", b"t"), ("headrace.partition", b"x")],
        [("headrace.reason", b"late"), ("headrace.topic", b"t"), ("headrace.partition", None)],
    ],
)
def test_what_is_no_letter_is_counted(headers: Any) -> None:
    assert read_dead_letters(make_batch([b"v"], headers=[headers])) == ([], 1)


def test_rows_that_are_meant_for_some_views_are_found() -> None:
    batch = make_batch([b"v"] * 3, headers=[None, [("headrace.views", b"a,b")], [("trace", b"1")]], first_offset=5)
    assert find_addressed(batch.offsets, batch.headers) == {6: {"a", "b"}}
