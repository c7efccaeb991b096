"""Whatever bytes stand on a topic: no crash, and each record is in a feature row or a dead letter, once.

Each example is one batch, made of 120 payloads that a seed draws by breaking good ones; there are 100 examples, so
12,000 inputs, and the seed is what Hypothesis makes small.
"""

import json
import random
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.aggregation import count, last, sum_
from schemas.entity import Entity
from schemas.row import Reason
from schemas.view import FeatureView
from streams.pipeline import PartitionPipeline
from tests.support.builders import make_source
from tests.support.transport import make_batch

N_PAYLOADS = 120
ODD: list[Any] = [
    None, True, 0, -1, 2**63 - 1, 2**63, -(2**63) - 1, 2**200, 1.5, -0.0, 1e308, "", "a", "\x00", "\ud800", "9" * 400,
    [], [None], [[1]], {}, {"key": "a"}, "2013-01-01T00:00:00Z", 1_700_000_000_000, 10**18,
]  # fmt: skip
SCRAPS = [
    b"", b"{", b"}", b"\n", b"\r\n", b"\x00", b"\xff", b"{}", b"null", b"[" * 600, b'{"a":' * 600, b"NaN",
    b"\xef\xbb\xbf", b" ",
]  # fmt: skip


def draw_payload(random_: random.Random) -> bytes | None:
    """Draw a payload: good, with odd values, or with its bytes broken."""
    document: dict[str, Any] = {"key": random_.choice("abc"), "at": random_.randrange(1_200), "n": random_.randrange(9)}
    for _ in range(random_.choice([0, 0, 1, 1, 2])):
        document[random_.choice(["key", "at", "n", "kind", "other"])] = random_.choice(ODD)
    if random_.random() < 0.1:
        document.pop(random_.choice(list(document)))
    payload = json.dumps(document).encode()
    match random_.randrange(8):
        case 0:
            return random_.choice([None, *SCRAPS])
        case 1:
            return payload[: random_.randrange(len(payload))]
        case 2:
            at = random_.randrange(len(payload))
            return payload[:at] + random_.choice(SCRAPS) + payload[at:]
        case 3:
            at = random_.randrange(len(payload))
            return payload[:at] + bytes([random_.randrange(256)]) + payload[at + 1 :]
        case _:
            return payload


SOURCE = make_source(max_out_of_orderness="10s")
VIEW = FeatureView(
    "fuzzed",
    version=1,
    entity=Entity("thing", key="key"),
    source=SOURCE,
    slide="1m",
    allowed_lateness="18m",
    emit="every_event",
    features={"n_1m": count().over("1m"), "n_sum": sum_("n").over("2m"), "kind": last("kind").over(last=1)},
)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, N_PAYLOADS))
@example(seed=0, cut=0)
def test_every_record_is_in_a_row_or_a_dead_letter_whatever_its_bytes_are(seed: int, cut: int) -> None:
    random_ = random.Random(seed)
    payloads = [draw_payload(random_) for _ in range(N_PAYLOADS)]
    pipeline = PartitionPipeline(SOURCE, [VIEW], partition=0)
    counted: list[int] = []
    dead: list[int] = []
    admitted = without_as_of = 0
    for first, part in ((0, payloads[:cut]), (cut, payloads[cut:])):
        if not part:
            continue
        batch = make_batch(part, first_offset=first, broker_time_us=4_000_000_000_000_000)
        done = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=0)
        rows = done.rows[VIEW.name]
        is_as_of = np.array(rows["pane"].to_pylist()) == "EARLY"
        counted += np.array(rows["source_offset"].to_pylist(), np.int64)[is_as_of].tolist()
        dead += done.dead_letters["_offset"].to_pylist()
        assert {*done.dead_letters["reason"].to_pylist()} <= {str(reason) for reason in Reason}
        assert all(done.dead_letters["detail"].to_pylist())
        admitted += done.counts[VIEW.name].admitted
        without_as_of += done.counts[VIEW.name].without_as_of
    assert len(counted) == len({*counted, *dead}) - len(dead)  # each once, and none in both
    assert len(dead) == len(set(dead))
    assert admitted + len(dead) == N_PAYLOADS
    # A row that counts for older windows alone has no as-of row.
    assert len(counted) + without_as_of == admitted


def test_the_drawn_payloads_meet_each_kind_of_check_and_many_pass() -> None:
    random_ = random.Random(1)
    payloads = [draw_payload(random_) for _ in range(2_000)]
    batch = make_batch(payloads, broker_time_us=4_000_000_000_000_000)
    done = PartitionPipeline(SOURCE, [VIEW], partition=0).process(
        batch, processing_time_us=0, computed_time_us=0, epoch=0
    )
    reasons = {*done.dead_letters["reason"].to_pylist()}
    assert reasons >= {
        "decode_error",
        "schema_violation",
        "missing_key",
        "missing_event_time",
        "timestamp_unit",
        "late",
    }
    assert done.dead_letters.num_rows < 1_600
