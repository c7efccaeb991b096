"""``headrace bench``: how fast it is, and next to what."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Final

import typer

from jobs.bench.figure import Figure, print_figures
from schemas.errors import ConfigError

BENCHMARKS: Final = {
    name: f"jobs.bench.{name}" for name in ("engine", "live", "offline", "online", "producers", "scoring", "soak")
}
"""Modules of the benchmarks, by name; each has ``run(quick=…, tell=…)``, which gives its figures."""


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"Which: {', '.join(BENCHMARKS)}.")],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: done within 45 seconds.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")
    ] = None,
) -> None:
    """Measure how fast it is, next to what it is compared with.

    Both are measured in turns, and each figure stands beside its bar. Results are checked before a time counts: wrong
    ones are an error. A bar that is missed is none.
    """
    if name not in BENCHMARKS:
        msg = f"benchmark {name!r} is not there, expected one of {sorted(BENCHMARKS)}"
        raise ConfigError(msg)
    if json_path is not None and (json_path.is_dir() or not json_path.parent.is_dir()):
        msg = f"`--json` is {json_path}, expected a file in a directory that exists"
        raise ConfigError(msg)
    figures: list[Figure] = importlib.import_module(BENCHMARKS[name]).run(quick=quick, tell=_tell)
    print_figures(figures)
    if json_path is not None:
        json_path.write_text(json.dumps([figure.to_document() for figure in figures], indent=2) + "\n")


def _tell(line: str) -> None:
    typer.echo(line, err=True)
