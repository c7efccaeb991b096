"""The pool of tiles is a dict of tiles, whatever comes in whatever order."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from streams.windowing.tile import NO_CELL, TilePool

STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 5), st.integers(-20, 40)), min_size=1, max_size=12),
        st.integers(-20, 40),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_it_is_a_dict_of_tiles(steps: list[list[tuple[int, int]] | int]) -> None:
    pool = TilePool()
    pool.grow_keys(6)
    model: dict[tuple[int, int], int] = {}
    for step in steps:
        if isinstance(step, int):
            dropped = pool.drop_before(step)
            gone = {cell for (_, tile), cell in model.items() if tile < step}
            assert set(dropped.tolist()) == gone
            model = {place: cell for place, cell in model.items() if place[1] >= step}
        else:
            places = sorted(set(step))
            keys, tiles = (np.array(part, dtype=np.int64) for part in zip(*places, strict=True))
            cells, new = pool.find_or_add(keys, tiles)
            for position, (place, cell) in enumerate(zip(places, cells.tolist(), strict=True)):
                assert (position in new.tolist()) == (place not in model)
                assert model.setdefault(place, cell) == cell
        assert len(set(model.values())) == len(model)
        assert sorted(pool.live_cells().tolist()) == sorted(model.values())
        check_index(pool, model)


def check_index(pool: TilePool, model: dict[tuple[int, int], int]) -> None:
    keys = np.array([4, 0, 3], dtype=np.int64)
    index = pool.index(keys)
    for position, key in enumerate(keys.tolist()):
        for first, stop in ((-30, 50), (0, 10), (5, 5), (38, 60)):
            low, high = index.window(np.array([position]), np.array([first]), np.array([stop]))
            expected = [cell for (k, tile), cell in sorted(model.items()) if k == key and first <= tile < stop]
            assert index.cells[low[0] : high[0]].tolist() == expected
    check_chains(pool, model)
    assert pool.has_tiles(keys).tolist() == [any(k == key for k, _ in model) for key in keys.tolist()]


def check_chains(pool: TilePool, model: dict[tuple[int, int], int]) -> None:
    keys = np.array([4, 0, 4, 3], dtype=np.int64)
    first, stop = np.array([-30, 0, 5, 5]), np.array([50, 10, 38, 6])
    chains = pool.walk(keys, most=60)
    if chains is None:
        # Some are longer than the others.
        depths = sorted(sum(k == key for k, _ in model) for key in keys.tolist())
        assert depths[-1] > depths[0]
        return
    cells, segments = chains.window(first, stop)
    for query, key in enumerate(keys.tolist()):
        expected = [c for (k, t), c in sorted(model.items()) if k == key and first[query] <= t < stop[query]]
        assert [cell for cell in cells[:, query].tolist() if cell != NO_CELL] == expected
    assert (segments == -1).all()


def test_a_chain_longer_than_asked_for_is_not_walked() -> None:
    pool = TilePool()
    pool.grow_keys(1)
    pool.find_or_add(np.array([0, 0, 0]), np.array([1, 2, 3]))

    assert pool.walk(np.array([0]), most=2) is None
    assert pool.walk(np.array([0]), most=3) is not None


def test_a_window_tells_which_of_its_cells_the_batch_has_rows_of() -> None:
    pool = TilePool()
    pool.grow_keys(2)
    cells, _ = pool.find_or_add(np.array([0, 0, 1]), np.array([1, 2, 2]))
    pool.mark_batch(cells[[2, 1]])
    chains = pool.walk(np.array([0, 1]), most=4)
    assert chains is not None
    found, segments = chains.window(np.array([0, 0]), np.array([3, 3]))
    assert found.tolist() == [[cells[0], NO_CELL], [cells[1], cells[2]]]
    assert segments.tolist() == [[-1, -1], [1, 0]]

    pool.clear_batch(cells[[2, 1]])
    again = pool.walk(np.array([0, 1]), most=4)
    assert again is not None
    assert again.segments[0].tolist() == [-1, -1]


def test_tiles_far_apart_are_indexed_too() -> None:
    pool = TilePool()
    pool.grow_keys(2)
    cells, _ = pool.find_or_add(np.array([0, 0, 1]), np.array([-(2**60), 2**60, 7]))
    index = pool.index(np.array([0, 1]))
    low, high = index.window(np.array([0, 0, 1]), np.array([-(2**61), 0, 7]), np.array([0, 2**61, 8]))

    assert [index.cells[a:b].tolist() for a, b in zip(low, high, strict=True)] == [[cells[0]], [cells[1]], [cells[2]]]
