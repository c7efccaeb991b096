"""Sketches of many values: near the truth, and the same to the last bit however a log is cut or restored."""

import random
from typing import Any

import pytest

from schemas.aggregation import approx_distinct, distinct
from schemas.entity import Entity
from schemas.view import FeatureView
from streams.windowing import WindowEngine
from streams.windowing.hll import dump_sketch, estimate, load_sketch, new_sketch
from streams.windowing.snapshot import read_part
from tests.support.builders import Row, make_batch, make_source, run_engine

N_ROWS = 3_000


def make_view(**settings: Any) -> FeatureView:
    return FeatureView(
        "sketched", version=1, entity=Entity("thing", key="key"), source=make_source(), emit="every_event", **settings
    )


def make_log() -> list[Row]:
    chance = random.Random(7)
    names = ("id", "n", "x", "flag", "tags", "_broker_time", "_request_id")
    return [
        dict.fromkeys(names)
        | {"key": "a", "at": offset // 50 - chance.choice([0, 0, 3]), "_offset": offset}
        | {"kind": f"k{chance.randrange(10_000)}"}
        for offset in range(N_ROWS)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "slide": "20s",
            "allowed_lateness": "20s",
            "features": {
                "estimate": approx_distinct("kind").over("40s"),
                "exact": distinct("kind").over("40s"),
                "ever": approx_distinct("kind", lg_k=8).over(lifetime=True),
            },
        },
        {"gap": "2s", "features": {"estimate": approx_distinct("kind"), "exact": distinct("kind")}},
    ],
    ids=["sliding", "session"],
)
def test_many_values_are_estimated_well_and_the_same_for_every_cut(settings: dict[str, Any]) -> None:
    view, rows = make_view(**settings), make_log()
    whole, _, _ = run_engine(view, rows, close=True)
    parts, _, _ = run_engine(view, rows, splits=range(0, N_ROWS, 311), restore=True, close=True)

    assert parts.equals(whole)
    exact = whole.column("exact").to_pylist()
    assert max(exact) > 1_000
    for estimated, truth in zip(whole.column("estimate").to_pylist(), exact, strict=True):
        assert estimated == pytest.approx(truth, rel=0.07)


def test_a_sketch_is_small_however_many_values_it_has_seen() -> None:
    sizes = {}
    for make in (approx_distinct, distinct):
        view = make_view(slide="20s", features={"n": make("kind").over(lifetime=True)})
        engine = WindowEngine(view)
        engine.step(make_batch(view, make_log()), processing_time_us=0)
        sizes[make] = sum(table.nbytes for table in read_part(engine.snapshot(), identity={}).tables.values())

    assert sizes[approx_distinct] < sizes[distinct] / 10


@pytest.mark.parametrize("n_values", [5, 50, 380, 390, 3_000])
def test_an_estimate_is_of_the_set_of_values_alone(n_values: int) -> None:
    chance = random.Random(n_values)
    estimates = set()
    for _ in range(8):
        values = [*range(n_values), *range(0, n_values, 3)]
        chance.shuffle(values)
        sketches = [new_sketch(12) for _ in range(chance.choice([1, 2, 5]))]
        for value in values:
            at = chance.randrange(len(sketches))
            if chance.random() < 0.01:
                sketches[at] = load_sketch(dump_sketch(sketches[at]))
            sketches[at].update(value)
        estimates.add(estimate(*sketches, lg_k=12))

    assert len(estimates) == 1
    assert estimates.pop() == pytest.approx(n_values, rel=0 if n_values < 380 else 0.05)
