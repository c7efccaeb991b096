"""At which sizes the engine goes another way, and when it numbers keys and cells anew, shows in no row."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import given, settings

from schemas.view import FeatureView
from tests.property.test_engine_equals_oracle import is_same_bytes, logs, run_engine, views
from tests.support.builders import Row

OTHER_SIZES = {
    "streams.windowing.sliding._CELLS_WORTH_GIVING_BACK": 0,
    "streams.windowing.sliding._KEYS_WORTH_GIVING_BACK": 0,
    "streams.windowing.sliding._TILES_AT_ONCE": 500,
    "streams.windowing.pane._FEW_ENDS": 0,
    "streams.windowing.window_column._LONGEST_CHAIN": 0,
    "streams.windowing.window_column._QUERIES_AT_ONCE": 2,
    "streams.windowing.newest.LONG": 1,
}


@contextmanager
def sizes(changed: dict[str, int]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(patch(name, value))
        yield


@settings(max_examples=150, deadline=None)
@given(
    view=views(),
    rows=logs(),
    changed=st.lists(st.sampled_from(sorted(OTHER_SIZES)), min_size=1, unique=True),
    splits=st.lists(st.integers(0, 30), max_size=6),
    restore=st.booleans(),
)
def test_the_way_a_batch_is_taken_in_does_not_show(
    view: FeatureView, rows: list[Row], changed: list[str], splits: list[int], restore: bool
) -> None:
    whole, dead, _ = run_engine(view, rows, close=True)
    with sizes({name: OTHER_SIZES[name] for name in changed}):
        splits = [split for split in splits if split < len(rows)]
        other, other_dead, _ = run_engine(view, rows, splits=splits, restore=restore, close=True)

    assert is_same_bytes(dead, other_dead)
    assert is_same_bytes(whole, other)
