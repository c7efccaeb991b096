"""Requests that are judged together are judged as each by itself."""

import asyncio
from collections.abc import Sequence

import pytest

from streams.serving.event_admission import AdmittedEvent, EventAdmission, Refusal
from streams.serving.joint_admission import THREAD_BYTES, JointAdmission
from tests.support.events import make_source, make_views
from tests.unit.serving.test_event_admission import NOW_US, VALUES


class Counting(EventAdmission):
    """Counts the events of each call."""

    def __init__(self) -> None:
        source = make_source()
        super().__init__(source, make_views(source))
        self.calls: list[int] = []

    def admit(self, values: Sequence[bytes], *, now_us: int) -> list[AdmittedEvent | Refusal]:
        self.calls.append(len(values))
        if b"boom" in values:
            msg = "it does not go on"
            raise RuntimeError(msg)
        return super().admit(values, now_us=now_us)


async def test_requests_of_the_same_moment_go_in_one_call_and_get_their_own() -> None:
    admission = Counting()
    joint = JointAdmission(admission, now_us=lambda: NOW_US)
    values_of_all = [value for value in VALUES if len(value) < 1_000]
    requests = [values_of_all[n : n + n % 4 + 1] for n in range(len(values_of_all))]
    found = await asyncio.gather(*(joint.admit(values) for values in requests))
    assert admission.calls == [sum(map(len, requests))]
    assert len(requests) > 15
    for values, judged in zip(requests, found, strict=True):
        assert list(judged.events) == admission.admit(values, now_us=NOW_US)
        assert judged.now_us == NOW_US
    assert len((await joint.admit(VALUES[:1])).events) == 1


async def test_a_call_is_bounded_and_large_requests_go_by_themselves() -> None:
    admission = Counting()
    joint = JointAdmission(admission, now_us=lambda: NOW_US)
    padded = b'{"key": "a", "at": 1700000000000, "n": 1, "pad": "%s"}' % (b"x" * (THREAD_BYTES - 1_000))
    large = [padded, VALUES[0] + b" " * 2_000]
    found = await asyncio.gather(*(joint.admit(values) for values in [large, *[[padded]] * 7]))
    assert sorted(admission.calls) == [1, 2, 3, 3]
    assert [len(judged.events) for judged in found] == [2] + [1] * 7
    assert all(isinstance(event, AdmittedEvent) for judged in found for event in judged.events)


async def test_a_failure_is_told_to_all_of_the_call_and_to_no_other() -> None:
    joint = JointAdmission(Counting(), now_us=lambda: NOW_US)
    found = await asyncio.gather(joint.admit([b"boom"]), joint.admit(VALUES[:1]), return_exceptions=True)
    assert all(isinstance(each, RuntimeError) for each in found)
    assert len((await joint.admit(VALUES[:1])).events) == 1


async def test_who_is_gone_takes_nothing_from_the_others() -> None:
    joint = JointAdmission(Counting(), now_us=lambda: NOW_US)
    gone, stays = (asyncio.create_task(joint.admit(VALUES[:1])) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert len((await stays).events) == 1
    with pytest.raises(asyncio.CancelledError):
        await gone
