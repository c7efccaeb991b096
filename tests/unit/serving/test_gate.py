"""How long keys hold that no store confirms, and what a store without them means."""

from collections.abc import Sequence
from typing import Any

import pytest

from schemas.errors import SinkRejectedError, SinkUnavailableError
from streams.serving.edge import RefusedError
from streams.serving.gate import KEPT_S, Gate
from streams.serving.producer_key import KeyRing, ProducerKey, Rate, digest_of

SECRET = "hrk_a"  # noqa: S105
KEY = ProducerKey(
    name="shop", digest=digest_of(SECRET), sources=("*",), rate=Rate(1_000, 1_000), created_at="2026-01-01T00:00:00Z"
)
BEARER = f"Bearer {SECRET}"


class FakeStore:
    """A store of keys that may be away; its limits allow all."""

    ring_key = "keys"

    def __init__(self) -> None:
        self.ring = KeyRing().with_key(KEY)
        self.foreign = b""
        self.is_away = False
        self.n_reads = 0

    def rate_key(self, name: str) -> str:
        return f"rate:{name}"

    async def read_ring(self) -> KeyRing:
        self._answer()
        self.n_reads += 1
        return self.ring

    async def run(self, script: str, *, keys: Sequence[str], values: Sequence[bytes], arguments: Sequence[str]) -> Any:
        self._answer()
        version = self.foreign[:20] or (self.ring.packed()[:20] if self.ring.version else b"")
        return [b"1", *[b"0"] * (len(keys) - 1), version]

    def _answer(self) -> None:
        if self.is_away:
            msg = "Redis is away"
            raise SinkUnavailableError(msg)


class Rig:
    def __init__(self) -> None:
        self.store, self.now_us, self.told = FakeStore(), 0, list[str]()
        self.gate = Gate(
            self.store,  # type: ignore[arg-type]  # a fake
            global_rate=Rate(1_000, 1_000),
            store_unavailable=self.told.append,
            timer_us=lambda: self.now_us,
        )

    async def send(self, events: int = 1) -> None:
        key = await self.gate.identify(BEARER, source="a")
        await self.gate.take(key, events=events)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_known_key_costs_no_look_up(rig: Rig) -> None:
    for _ in range(5):
        rig.now_us += 100_000_000
        await rig.send()
    assert rig.store.n_reads == 1


async def test_a_known_key_holds_for_ten_minutes_after_the_store_last_confirmed_it(rig: Rig) -> None:
    await rig.send()
    rig.now_us += int(2 * KEPT_S * 1e6)
    await rig.send()  # the store is asked again, and is there
    rig.store.is_away = True
    rig.now_us += int(KEPT_S * 1e6)
    await rig.send()
    rig.now_us += 1
    with pytest.raises(SinkUnavailableError, match="whether the key is a good one cannot be told now: Redis is away"):
        await rig.send()
    rig.store.is_away = False
    await rig.send()
    assert set(rig.told) == {"redis"}


async def test_while_the_store_is_away_the_limits_are_those_of_the_process(rig: Rig) -> None:
    await rig.send()
    rig.store.is_away = True
    await rig.send(1_000)
    with pytest.raises(RefusedError, match="1 events are more than may be sent now: 0 of 1000 are left") as refused:
        await rig.send()
    assert (refused.value.status_code, refused.value.code) == (429, "rate_limited")
    rig.now_us += 2_000
    await rig.send()
    rig.store.is_away = False
    await rig.send(1_000)


async def test_a_store_that_has_lost_the_keys_lets_nobody_in(rig: Rig) -> None:
    await rig.send()
    rig.store.ring = KeyRing()
    for _ in range(2):
        with pytest.raises(RefusedError, match="the key is none that is known here") as refused:
            await rig.send()
        assert refused.value.status_code == 401


async def test_what_another_program_put_where_the_keys_were_is_said_to_be_none(rig: Rig) -> None:
    await rig.send()
    rig.store.foreign = b"a value of another program"
    with pytest.raises(SinkRejectedError, match=r"the keys of producers cannot be read .*; restore them"):
        await rig.send()
