"""Whatever bytes stand on a topic of Avro or Protobuf: no crash, and each is a row or a dead letter, alone as together.

Each example is one batch of 60 payloads that a seed draws by breaking good ones; 100 examples of each of the three
wires, so 18,000 inputs.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.contract import Contract
from streams.decoding import decode
from streams.writer_schema import WriterSchema, use_registry
from tests.support.contracts import FakeRegistry, avro_contract, avro_payload, framed, order_schema, proto_contract
from tests.support.transport import make_batch

N_PAYLOADS = 60
PLAIN, FRAMED, PROTO = avro_contract(), avro_contract(**{"x-framing": "confluent"}), proto_contract()
SCRAPS = [b"", b"\0", b"\xff" * 11, b"\x80" * 11, b"\x01", b"\xfe\xff\xff\xff\x0f", b"\0\0\0\0\x07", b"\x0b", b"\x0c"]


@pytest.fixture(scope="module", autouse=True)
def _registry() -> Iterator[None]:
    use_registry(lambda: FakeRegistry(WriterSchema(id=7, kind="AVRO", text=json.dumps(order_schema()))))
    yield
    use_registry(None)


def draw_good(random_: random.Random, contract: Contract) -> bytes:
    values: dict[str, Any] = {
        "key": random_.choice(["", "a", "\x00é"]),
        "at": random_.choice([0, -1, 2**63 - 1, 1_700_000_000_000]),
        "n": random_.choice([0, 1, -1, 2**31 - 1]),
        "x": random_.choice([None, 1.5, -0.0, 1e308, float("nan"), float("inf")]),
        "tags": random_.choice([[], ["t"], ["t"] * 9]),
    }
    if contract is PROTO:
        message = PROTO.wire.widened(**{name: value for name, value in values.items() if value is not None})  # type: ignore[union-attr]
        message.kind = random_.choice([0, 1, 2, 7, -1, 2**40])
        made: bytes = message.SerializeToString()
        return made
    payload = avro_payload(
        order_schema(), **values, kind=random_.choice([None, "view", "click"]), raw=random_.randbytes(3)
    )
    return framed(random_.choice([7, 7, 7, 8]), payload) if contract is FRAMED else payload


def draw_payload(random_: random.Random, contract: Contract) -> bytes | None:
    payload = draw_good(random_, contract)
    at = random_.randrange(len(payload) + 1)
    match random_.randrange(8):
        case 0:
            return random_.choice([None, *SCRAPS, random_.randbytes(random_.randrange(40))])
        case 1:
            return payload[:at]
        case 2:
            return payload[:at] + random_.choice(SCRAPS) + payload[at:]
        case 3:
            return payload[:at] + random_.randbytes(1) + payload[at + 1 :]
        case _:
            return payload


@pytest.mark.parametrize("contract", [PLAIN, FRAMED, PROTO], ids=["avro", "framed avro", "protobuf"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_payload_is_lost_and_none_knows_its_batch(contract: Contract, seed: int) -> None:
    random_ = random.Random(seed)
    payloads = [draw_payload(random_, contract) for _ in range(N_PAYLOADS)]
    together = decode(make_batch(payloads), contract)
    offsets = [*together.rows["_offset"].to_pylist(), *together.rejected["_offset"].to_pylist()]
    assert sorted(offsets) == list(range(N_PAYLOADS))
    assert together.rows["_offset"].to_pylist() == sorted(together.rows["_offset"].to_pylist())
    at = random_.randrange(N_PAYLOADS)
    alone = decode(make_batch([payloads[at]], first_offset=at), contract)
    for name in ("rows", "rejected"):
        table = getattr(together, name)
        kept = table.filter(pc.equal(table["_offset"], at))
        assert getattr(alone, name).combine_chunks().equals(kept.combine_chunks())
