import hashlib
from typing import Any

import pytest

from streams.agents.dead_letter import HEAD_BYTES, write_dead_letter
from streams.transport.epoch import MAX_RECORD_BYTES
from tests.support.transport import make_batch


class FakeEpoch:
    def __init__(self) -> None:
        self.letters: list[dict[str, Any]] = []

    def begin(self) -> int:
        return 1

    async def write_output(self, topic: str, **record: Any) -> None:
        self.letters.append({"topic": topic, **record})


async def letter(value: bytes | None, *, key: bytes = b"k", headers: Any = None, detail: str = "d") -> dict[str, Any]:
    epoch = FakeEpoch()
    batch = make_batch([b"other", value], keys=[None, key], headers=[None, headers], first_offset=7, partition=3)
    await write_dead_letter(epoch, "dlq.t", batch, 1, reason="late", detail=detail, view=None)
    (written,) = epoch.letters
    size = len(written["key"]) + len(written["value"] or b"")
    assert size + sum(len(name) + len(content or b"") for name, content in written["headers"]) < MAX_RECORD_BYTES
    return written


ORIGIN = {"headrace.topic": b"t", "headrace.partition": b"3", "headrace.offset": b"8", "headrace.reason": b"late"}


async def test_a_dead_letter_is_the_record_and_says_why_and_where_it_came_from() -> None:
    written = await letter(b"value", headers=[("trace", b"1"), ("none", None)])
    assert (written["topic"], written["key"], written["value"]) == ("dlq.t", b"k", b"value")
    assert dict(written["headers"]) == {"trace": b"1", "none": None, "headrace.detail": b"d", **ORIGIN}


async def test_a_tombstone_stays_one() -> None:
    assert (await letter(None))["value"] is None


@pytest.mark.parametrize("n_bytes", [MAX_RECORD_BYTES - 70_000, MAX_RECORD_BYTES, 5 * MAX_RECORD_BYTES])
async def test_a_record_that_is_too_large_is_cut_and_says_what_it_was(n_bytes: int) -> None:
    value = bytes(range(256)) * (n_bytes // 256)
    written = await letter(value)
    headers = dict(written["headers"])
    if n_bytes < MAX_RECORD_BYTES - 65_536:
        assert written["value"] == value
        assert "headrace.cut" not in headers
        return
    assert written["value"] == value[:HEAD_BYTES]
    assert headers.items() >= ORIGIN.items()
    assert headers["headrace.cut"] == b"value"
    assert headers["headrace.value_bytes"] == str(len(value)).encode()
    assert headers["headrace.value_sha256"] == hashlib.sha256(value).hexdigest().encode()


async def test_keys_and_headers_are_cut_where_they_are_too_large() -> None:
    large = b"x" * MAX_RECORD_BYTES
    written = await letter(b"value", key=large, headers=[("trace", large)], detail="d" * MAX_RECORD_BYTES)
    headers = dict(written["headers"])
    assert (written["value"], written["key"]) == (b"value", large[:HEAD_BYTES])
    assert headers["headrace.cut"] == b"key,headers"
    assert headers["headrace.key_bytes"] == str(len(large)).encode()
    assert "trace" not in headers


async def test_a_detail_that_quotes_all_of_the_record_is_shortened() -> None:
    assert len(dict((await letter(b"v", detail="d" * 9_999))["headers"])["headrace.detail"]) < 9_999
