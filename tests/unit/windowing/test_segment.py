import numpy as np
import pytest

from streams.windowing.segment import Places, Steps, expand, find_segments, newest_until, scan, search, stable_argsort


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("bound", [1, 2, 2**16, 2**16 + 1, 2**33, 2**50])
def test_codes_of_any_width_are_sorted_with_ties_in_order(bound: int) -> None:
    codes = np.random.default_rng(1).integers(0, bound, 500)

    assert stable_argsort(codes, bound).tolist() == np.argsort(codes, kind="stable").tolist()


def test_segments_are_found_over_several_columns() -> None:
    starts, lengths = find_segments(ints(1, 1, 1, 2), ints(5, 5, 6, 6))

    assert starts.tolist() == [0, 2, 3]
    assert lengths.tolist() == [2, 1, 1]
    assert [part.tolist() for part in find_segments(ints())] == [[], []]


def test_lengths_are_expanded_to_owners_and_places() -> None:
    owner, place = expand(ints(2, 0, 3))

    assert owner.tolist() == [0, 0, 2, 2, 2]
    assert place.tolist() == [0, 1, 0, 1, 2]
    assert [part.tolist() for part in expand(ints())] == [[], []]


@pytest.mark.parametrize("ufunc", [np.add, np.maximum, np.minimum])
def test_a_scan_folds_each_segment_from_left_to_right(ufunc: np.ufunc) -> None:
    generator = np.random.default_rng(2)
    lengths = ints(1, 3, 100, 24, 25, 7)
    starts = np.cumsum(lengths) - lengths
    values = generator.random(lengths.sum()) * 10.0 ** generator.integers(-8, 8, lengths.sum())
    initial = generator.random(len(lengths))

    got = scan(ufunc, initial, values, starts=starts, lengths=lengths)

    expected = []
    for segment, start in enumerate(starts):
        state = initial[segment]
        for value in values[start : start + lengths[segment]]:
            state = ufunc(state, value)
            expected.append(state)
    assert got.tobytes() == np.array(expected).tobytes()


def test_a_scan_of_whole_numbers_wraps_without_harm() -> None:
    top = 2**63 - 1
    got = scan(np.add, ints(0, 5), ints(top, 1, -1, 7), starts=ints(0, 3), lengths=ints(3, 1))

    assert got.tolist() == [top, -(2**63), top, 12]


def test_steps_fold_segments_side_by_side_and_skip_empty_ones() -> None:
    steps = [(segments.tolist(), rows.tolist()) for segments, rows in Steps(ints(0, 2, 2), ints(2, 0, 3))]

    assert steps == [([0, 2], [0, 2]), ([0, 2], [1, 3]), ([2], [4])]


def test_the_newest_row_until_a_limit() -> None:
    order, starts, lengths = ints(0, 4, 7, 2, 3), ints(0, 3), ints(3, 2)
    segment, limit = ints(0, 0, 0, 0, 1, 1, 1), ints(-1, 0, 5, 9, 1, 2, 9)

    assert newest_until(segment, limit, order, starts, lengths).tolist() == [-1, 0, 1, 2, -1, 3, 4]


def test_search_finds_places_on_either_side() -> None:
    assert search(ints(1, 3, 3), ints(0, 3, 4)).tolist() == [0, 1, 3]
    assert search(ints(1, 3, 3), ints(3), side="right").tolist() == [3]


def test_places_are_those_of_the_last_mark_and_none_after_clearing() -> None:
    places = Places()
    places.grow(10)
    places.mark(np.array([7, 2, 7]))

    assert places.of(np.array([2, 7, 3])).tolist() == [1, 2, -1]
    places.clear(np.array([7, 2]))
    places.grow(12)
    assert places.of(np.arange(12)).tolist() == [-1] * 12
    assert places.last_of_each(np.array([11, 0, 11, 5, 0])).tolist() == [2, 3, 4]
    assert places.of(np.arange(12)).tolist() == [-1] * 12
