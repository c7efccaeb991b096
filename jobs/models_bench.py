"""``headrace models bench``: how many rows a request should have and how many be on the way, on this machine."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Final

import numpy as np
import typer

from jobs.models_rollout import AsJson, Model, Place, find_place
from offline.card import ModelCard, loaded_versions, write_config
from schemas.errors import ConfigError, InferenceError
from schemas.model import GoldenRows, ModelSpec
from schemas.request_shape import RequestShape
from streams.inference.triton import TritonModel
from streams.ports import Inference

_FEWEST_ROWS: Final = 64
_DEPTHS: Final = (1, 2, 4, 8)
_REQUESTS: Final = 2
"""Requests of the most rows that each place of the deepest run gets."""
_NEARLY: Final = 0.95
"""Share of the most rows a second from which on fewer rows on the way count for more."""
_TOLERANCE: Final = 1e-5
_TIMEOUT_S: Final = 30.0

Rounds = Annotated[int, typer.Option(help="Times that each pair is measured.", min=1)]
Write = Annotated[bool, typer.Option("--write", help="Write the pair chosen to the model's config.pbtxt, and load it.")]
Version = Annotated[
    int | None, typer.Option(help="Its version, loaded on the server.", min=1, show_default="the newest loaded")
]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """How requests are made, and what came of it.

    Attributes:
        rows: Rows of a request.
        in_flight: Requests on the way at once.
        rows_per_s: Median of the rounds.
    """

    rows: int
    in_flight: int
    rows_per_s: float

    @property
    def shape(self) -> RequestShape:
        """How requests are made."""
        return RequestShape(rows=self.rows, in_flight=self.in_flight)


def choose(pairs: Sequence[Pair]) -> Pair:
    """Of the pairs that are nearly the fastest, choose the one with the fewest rows on the way: it answers soonest.

    Args:
        pairs: At least one.
    """
    enough = _NEARLY * max(pair.rows_per_s for pair in pairs)
    fast = [pair for pair in pairs if pair.rows_per_s >= enough]
    return min(fast, key=lambda pair: (pair.rows * pair.in_flight, -pair.rows_per_s))


def bench(
    *, model: Model, version: Version = None, rounds: Rounds = 7, write: Write = False, as_json: AsJson = False
) -> None:
    """Find how many rows a request should have and how many requests be on the way, on this machine.

    Asks the model on Triton its card's golden rows, over and over, in requests of 64 rows up to the server's
    `max_batch_size`, 1 to 8 at once. Every answer is checked; pairs take turns, and medians count. Workers take what
    `--write` has written when they start.
    """
    place = find_place(model, is_light_too=True)
    card = place.card(version or _newest_loaded(place))
    pairs = asyncio.run(_measure(place, card, rounds=rounds))
    chosen = choose(pairs)
    if write:
        _write(place, card, chosen)
    if as_json:
        found = {"model": model, "version": card.version, "chosen": asdict(chosen), "is_written": write}
        typer.echo(json.dumps(found | {"pairs": [*map(asdict, pairs)]}, indent=2))
        return
    typer.echo(f"{'rows':>6} {'in flight':>10} {'rows/s':>10}")
    for pair in pairs:
        mark = "  <- chosen" if pair is chosen else ""
        typer.echo(f"{pair.rows:>6,} {pair.in_flight:>10} {pair.rows_per_s:>10,.0f}{mark}")
    if write:
        typer.echo("Written to the model's config.pbtxt and loaded; workers take it when they start.")


def _write(place: Place, card: ModelCard, chosen: Pair) -> None:
    """Put the choice into the configuration, and have the server take it: nothing else of it changes."""
    repository, name = place.settings.model_repository, place.spec.name
    write_config(repository, place.spec, loaded=loaded_versions(repository, name), requests=chosen.shape)

    async def load() -> None:
        async with place.server(card) as server:
            await server.connect(timeout_s=5.0)

    asyncio.run(load())


def _newest_loaded(place: Place) -> int:
    repository = place.settings.model_repository
    if not (loaded := loaded_versions(repository, place.spec.name)):
        msg = (
            f"model {place.spec.name} has no loaded version in {repository}, expected one; run `headrace models load "
            f"{place.spec.name} VERSION`"
        )
        raise ConfigError(msg)
    return loaded[-1]


async def _measure(place: Place, card: ModelCard, *, rounds: int) -> list[Pair]:
    url, spec, golden = place.settings.address("triton"), place.spec, card.golden_rows
    if not len(golden.features):
        msg = f"the card of {spec.name} version {card.version} has no golden rows, expected some; train it anew"
        raise ConfigError(msg)
    async with AsyncExitStack() as stack:
        servers = {}
        for depth in _DEPTHS:
            client = TritonModel(spec, card.served_version, url=url, golden=golden, max_in_flight=depth)
            servers[depth] = await stack.enter_async_context(client)
            await servers[depth].attach()
        largest = servers[1].max_batch_size
        await servers[1].prove(golden, tolerance=_TOLERANCE)
        wanted = _repeated(golden, n_rows=_REQUESTS * max(_DEPTHS) * largest)
        sizes = [size for size in (_FEWEST_ROWS << step for step in range(16)) if size < largest]
        cells = [*product((*sizes, largest), _DEPTHS)]
        seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
        for number in range(rounds + 1):  # the first one warms up
            for rows, depth in random.sample(cells, len(cells)):
                took_s = await _time(servers[depth], spec, wanted, rows=rows)
                if number:
                    seconds[rows, depth].append(took_s)
    n_rows = len(wanted.features)
    return [
        Pair(rows=rows, in_flight=depth, rows_per_s=n_rows / statistics.median(seconds[rows, depth]))
        for rows, depth in cells
    ]


def _repeated(golden: GoldenRows, *, n_rows: int) -> GoldenRows:
    at = np.arange(n_rows) % len(golden.features)
    return GoldenRows(
        features=golden.features[at], outputs={column: values[at] for column, values in golden.outputs.items()}
    )


async def _time(server: TritonModel, spec: ModelSpec, wanted: GoldenRows, *, rows: int) -> float:
    """Ask all rows in requests of ``rows`` rows; return the seconds that took, once the answers are checked."""
    parts = [wanted.features[start : start + rows] for start in range(0, len(wanted.features), rows)]
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(server.infer(part, timeout_s=_TIMEOUT_S) for part in parts))
    took_s = time.perf_counter() - began_s
    _check(answers, spec, wanted, rows=rows)
    return took_s


def _check(answers: Sequence[Inference], spec: ModelSpec, wanted: GoldenRows, *, rows: int) -> None:
    for output in spec.outputs:
        got = np.concatenate([answer.outputs[output.tensor][:, output.index] for answer in answers])
        off = float(np.abs(got - wanted.outputs[output.column]).max())
        if not off <= _TOLERANCE:
            msg = (
                f"`{output.column}` is off by {off:.2e} in requests of {rows} rows, expected at most {_TOLERANCE:.0e}; "
                "no time counts, see `headrace models compare`"
            )
            raise InferenceError(msg)
