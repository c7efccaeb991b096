"""Where most keys have gone quiet, what was kept for them is given back, and the others go on."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.aggregation import approx_distinct, count, distinct, entropy, last, sum_
from schemas.entity import Entity
from schemas.view import FeatureView
from streams.windowing import WindowEngine
from streams.windowing.key_table import KeyTable
from tests.support.builders import make_batch, make_source

QUIET = 300
FEATURES = {
    **{"n": count().over("60s"), "total": sum_("x").over("60s"), "kinds": distinct("kind").over("60s")},
    **{"sketch": approx_distinct("kind").over("60s"), "entropy_3": entropy("kind").over(last=3)},
    **{"newest": last("kind").over(lifetime=True)},
}


def minute(number: int, names: list[str]) -> list[dict[str, Any]]:
    at = 60 * number + 1
    return [
        {"_offset": 1_000 * number + i, "at": at, "key": name, "kind": f"kind-{i % 7}", "x": float(i)}
        for i, name in enumerate(names)
    ]


def run(monkeypatch: pytest.MonkeyPatch, *, fewest: int) -> tuple[WindowEngine, list[list[dict[str, Any]]]]:
    monkeypatch.setattr("streams.windowing.sliding._CELLS_WORTH_GIVING_BACK", fewest)
    monkeypatch.setattr("streams.windowing.sliding._KEYS_WORTH_GIVING_BACK", fewest)
    view = FeatureView(
        "giving_back",
        version=1,
        entity=Entity("thing", key="key"),
        source=make_source(),
        slide="10s",
        allowed_lateness="10s",
        state_ttl="60s",
        features=FEATURES,
    )
    engine = WindowEngine(view)
    shown = []
    loyal = ["one", "a key of more than sixty-four bytes, of which the table keeps a dict beside its words"]
    for number in range(6):
        names = loyal if number else [*(f"quiet-{i}" for i in range(QUIET)), *loyal]
        result = engine.step(make_batch(view, minute(number, names)), processing_time_us=0)
        shown.append(result.rows.to_pylist())
    return engine, shown


def test_the_keys_that_go_on_are_what_they_would_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, shown = run(monkeypatch, fewest=100)
    other, expected = run(monkeypatch, fewest=1 << 40)
    state, all_room = engine._intake._state, other._intake._state

    assert shown == expected
    assert (state.keys.capacity, all_room.keys.capacity) == (2, QUIET + 2)
    assert state.windowless.groups[0].n_kept.shape == state.windowless.newest_us.shape == (2,)
    assert len(state.windows.bank.registers) == len(all_room.windows.bank.registers)
    assert engine.close().rows.to_pylist() == other.close().rows.to_pylist()


def test_keys_are_numbered_anew_in_their_order() -> None:
    keys = KeyTable(pa.string())
    long = "x" * 70
    ids = keys.intern(pa.array(["a", "b", long, "c"]))
    keys.release(ids[[0, 3]])

    assert keys.renumber().tolist() == [1, 2]
    assert keys.find(pa.array([long, "b", "a"])).tolist() == [1, 0, -1]
    assert keys.to_arrow(np.array([0, 1])).to_pylist() == ["b", long]
    assert keys.intern(pa.array(["new", "b"])).tolist() == [2, 0]
