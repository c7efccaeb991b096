"""What a batch says of its size is what its records take in memory, however small they are."""

import gc
import tracemalloc

import numpy as np
import pytest

from streams.batch import Headers, RawBatch

N_ROWS = 5_000


def make_records(*, key: int | None, value: int | None, headers: int) -> RawBatch:
    def content(number: int, size: int | None) -> bytes | None:
        return None if size is None else str(number).zfill(size).encode()

    named: list[Headers] = [
        [("".join(["request", "_id"]), str(n).zfill(8).encode()) for _ in range(headers)] or None for n in range(N_ROWS)
    ]
    return RawBatch(
        topic="t",
        partition=0,
        offsets=np.arange(N_ROWS),
        broker_time_us=np.arange(N_ROWS),
        keys=[content(n, key) for n in range(N_ROWS)],
        values=[content(n, value) for n in range(N_ROWS)],
        headers=named,
        next_offset=N_ROWS,
    )


@pytest.mark.parametrize(
    ("key", "value", "headers"), [(None, None, 0), (None, 5, 0), (8, 132, 0), (8, 132, 1), (5, 5, 4), (None, 2_000, 1)]
)
def test_the_size_of_a_batch_is_the_memory_it_takes(key: int | None, value: int | None, headers: int) -> None:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    batch = make_records(key=key, value=value, headers=headers)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    # What is traced are sizes asked for, before they are rounded up.
    assert 0.95 * taken <= batch.size_bytes <= 1.3 * taken
