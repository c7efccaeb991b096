"""Key numbers, value codes and tallies: small stores with a dict as their model."""

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from streams.windowing.key_table import KeyTable
from streams.windowing.key_word import hash_words, to_keys, to_words
from streams.windowing.register import CellReads, CellRows
from streams.windowing.tally import Tally, count_distinct, entropy_bits, extreme_rank
from streams.windowing.value_pool import ValuePool


def test_released_key_numbers_are_used_again() -> None:
    keys = KeyTable(pa.string())
    first = keys.intern(pa.array(["a", "b", "c"]))
    keys.release(first[[1]])

    assert keys.find(pa.array(["b", "c"])).tolist() == [-1, 2]
    assert keys.intern(pa.array(["d", "a"])).tolist() == [1, 0]
    assert keys.capacity == len(keys) == 3
    assert keys.live_ids().tolist() == [0, 1, 2]
    assert keys.to_arrow(np.array([1, 0, 0])).to_pylist() == ["d", "a", "a"]


def test_keys_are_ranked_by_code_point_and_numbers_by_value() -> None:
    texts, numbers = KeyTable(pa.string()), KeyTable(pa.int64())

    ids = texts.intern(pa.array(["é", "a", "Z", "\N{GRINNING FACE}", ""]))
    assert texts.ranks(ids).tolist() == [3, 2, 1, 4, 0]
    assert numbers.ranks(numbers.intern(pa.array([10, -5, 9]))).tolist() == [2, 0, 1]


TEXTS = st.one_of(
    st.sampled_from(["", "\0", "a", "a\0", "a\0\0", "é" * 4, "x" * 64, "x" * 65, "x" * 64 + "y", "x" * 7, "x" * 8]),
    st.text(st.characters(codec="utf-8"), max_size=80),
)
KEY_STEPS = st.lists(st.tuples(st.booleans(), st.lists(TEXTS, max_size=8, unique=True)), max_size=12)


@pytest.mark.parametrize("hash_bits", [64, 33, 0])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=KEY_STEPS)
def test_a_key_table_is_a_dict(
    hash_bits: int, steps: list[tuple[bool, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With few bits, all keys collide: in the slots (0 bits), or in the upper half that is kept beside the number.
    mask = np.uint64(2**64 - 2 ** (64 - hash_bits) if hash_bits else 0)
    monkeypatch.setattr("streams.windowing.key_table.hash_words", lambda words: hash_words(words) & mask)
    table = KeyTable(pa.string())
    model: dict[str, int] = {}
    for is_release, texts in steps:
        keys = pa.array(texts, pa.string())
        known = [text for text in texts if text in model]
        assert table.find(keys).tolist() == [model.get(text, -1) for text in texts]
        if is_release:
            table.release(np.array([model.pop(text) for text in known], dtype=np.int64))
        else:
            for text, number in zip(texts, table.intern(keys).tolist(), strict=True):
                assert model.setdefault(text, number) == number
        assert len(set(model.values())) == len(model) == len(table)
        ids = np.array(list(model.values()), dtype=np.int64)
        assert table.to_arrow(ids).to_pylist() == list(model)
        assert sorted(model.values()) == table.live_ids().tolist()
        assert all(number < table.capacity for number in model.values())


def test_a_key_table_takes_many_keys_that_come_and_go() -> None:
    table = KeyTable(pa.string())
    for turn in range(20):
        keys = pa.array([f"key-{number}" for number in range(turn * 3_000, turn * 3_000 + 9_000)])
        ids = table.intern(keys)
        assert table.find(keys).tolist() == ids.tolist()
        table.release(ids[:3_000])
        assert table.find(keys[:3_000]).tolist() == [-1] * 3_000
    assert table.capacity == 9_000


def test_a_slice_of_an_array_has_the_words_of_its_own_keys() -> None:
    keys = pa.array(["first", "second key", "", "third"])

    assert to_keys(to_words(keys[1:3]), pa.string()).to_pylist() == ["second key", ""]
    assert to_keys(to_words(pa.array([-1, 2**62])), pa.int64()).to_pylist() == [-1, 2**62]


def test_values_are_coded_and_decoded() -> None:
    pool = ValuePool(pa.string())
    codes = pool.encode(pa.array(["x", None, "y", "x"]))

    assert pool.decode(codes, np.array([True, False, True, True])).to_pylist() == ["x", None, "y", "x"]
    assert pool.encode(pa.array(["y"])).tolist() == [codes[2]]
    assert pool.encode(pa.array([None, None], pa.string())).tolist() == [0, 0]


def test_lists_are_coded_too() -> None:
    pool = ValuePool(pa.list_(pa.string()))
    codes = pool.encode(pa.array([["p"], ["p", "q"], [], None, ["p"]]))

    assert codes[0] == codes[4] != codes[1]
    assert pool.decode(codes, np.array([True, True, True, False, True])).to_pylist() == [
        ["p"],
        ["p", "q"],
        [],
        None,
        ["p"],
    ]


def test_compaction_keeps_the_values_in_use() -> None:
    pool = ValuePool(pa.string())
    codes = pool.encode(pa.array(["a", "b", "c", "d"]))
    mapping = pool.compact([codes[[1]], codes[[3]]])

    assert len(pool) == 2
    assert pool.decode(mapping[codes[[1, 3]]], np.array([True, True])).to_pylist() == ["b", "d"]


def test_compaction_of_values_none_of_which_is_in_use_keeps_none() -> None:
    pool = ValuePool(pa.string())
    pool.encode(pa.array(["a", "b"]))
    pool.compact([])

    assert len(pool) == 0


def rows_of(cells: list[int]) -> CellRows:
    order = np.arange(len(cells), dtype=np.int64)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(cells) != 0]))
    lengths = np.diff(np.append(starts, len(cells)))
    return CellRows(order, starts, lengths, np.array(cells, dtype=np.int64)[starts], order)


def test_a_tally_counts_values_of_the_state_and_of_a_batch_as_of_a_row() -> None:
    tally = Tally()
    for _ in range(3):
        rows = rows_of([0, 0, 1])
        tally.commit(tally.scan(rows, np.array([5, 6, 5]), np.array([True, True, True])))
    rows = rows_of([0, 0, 1])
    batch = tally.scan(rows, np.array([7, 6, 9]), np.array([True, True, False]))
    reads = CellReads(
        np.array([0, 0, 1]), np.array([-1, 0, 2]), np.array([0, 1, 2]), np.array([1, 1, 1]), np.zeros(3, np.int64), 0
    )
    counts = tally.read(reads, batch)

    found = list(zip(counts.query.tolist(), counts.code.tolist(), counts.count.tolist(), strict=True))
    assert found == [(0, 5, 3), (0, 6, 3), (1, 5, 3), (1, 6, 3), (1, 7, 1), (2, 5, 3)]
    assert count_distinct(counts).tolist() == [2, 3, 1]


def test_dropped_cells_are_forgotten_and_runs_stay_few() -> None:
    tally = Tally()
    for _ in range(100):
        tally.commit(tally.scan(rows_of([0, 1]), np.array([1, 2]), np.array([True, True])))
    assert len(tally.runs) < 8
    tally.drop(np.array([False, True]))
    reads = CellReads(
        np.array([0, 1]), np.array([-1, -1]), np.array([0, 1]), np.array([1, 1]), np.zeros(2, np.int64), 0
    )
    counts = tally.read(reads, None)

    assert (counts.query.tolist(), counts.count.tolist()) == ([1], [100])


def test_entropy_does_not_hang_on_the_order_of_values() -> None:
    generator = np.random.default_rng(3)
    counts = generator.integers(1, 1_000, 50)
    results = set()
    for _ in range(20):
        generator.shuffle(counts)
        bits, has_value = entropy_bits(np.zeros(50, dtype=np.int64), counts.copy(), 2, decimals=12)
        results.add(bits[0].tobytes())
        assert has_value.tolist() == [True, False]
    assert len(results) == 1


def test_extremes_of_no_value() -> None:
    tally = Tally()
    reads = CellReads(np.empty(0, np.int64), np.empty(0, np.int64), np.array([0]), np.array([0]), np.array([0]), 0)
    code, has_value = extreme_rank(tally.read(reads, None), np.empty(0, np.int64), is_max=True)

    assert (code.tolist(), has_value.tolist()) == ([0], [False])
