"""``headrace compute``: a view over a file, without any service."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from jobs.application import load_application
from offline.computation import DEAD_LETTER_COLUMNS, Computation
from schemas.errors import ConfigError
from schemas.view import EMIT_MODES, FeatureView
from streams.wire import encode_rows


def compute(
    definition: Annotated[
        str, typer.Argument(metavar="MODULE[:VIEW]", help="Module (or .py file) that defines the view, and its name.")
    ],
    *,
    input_path: Annotated[Path, typer.Option("--input", help="Events in arrival order: NDJSON, or .parquet.")],
    output_path: Annotated[
        Path | None,
        typer.Option("--output", help="Feature rows: NDJSON, or .parquet.", show_default="standard output"),
    ] = None,
    dead_letters: Annotated[
        Path | None,
        typer.Option(
            help="Rows that are in no feature, with the reason: NDJSON, or .parquet.", show_default="counted only"
        ),
    ] = None,
    emit: Annotated[str | None, typer.Option(help=f"{', '.join(EMIT_MODES)}.", show_default="the view's own")] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows per batch; changes nothing in the output.")] = 50_000,
    close: Annotated[
        bool, typer.Option("--close", help="Take the watermark to the end of time after the last row.")
    ] = False,
) -> None:
    """Compute a view over a file of events, by the same engine as the live path.

    A row may have `_partition`, `_offset` and `_broker_time` (RFC 3339 or microseconds); without them it is in
    partition 0, its offset is its number in the file, and its time is not checked against the future. The output is the
    same, byte for byte, whatever the batch size.
    """
    view = _view(definition)
    if emit is not None and emit not in EMIT_MODES:
        msg = f"`--emit` is {emit!r}, expected one of {list(EMIT_MODES)}"
        raise ConfigError(msg)
    rows = rejected = 0
    with _open(output_path, view.row_schema) as output, _open_or_drop(dead_letters) as letters:
        for made in Computation(view=view, emit=emit).run(input_path, batch_rows=batch_rows, closes=close):
            output.write(made.rows)
            rows += made.rows.num_rows
            rejected += made.dead_letters.num_rows
            if letters is not None:
                letters.write(made.dead_letters)
    typer.echo(f"{rows:,} feature rows, {rejected:,} dead letters", err=True)


class _Writer(Protocol):
    def write(self, rows: pa.Table) -> None: ...


class _Lines:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, rows: pa.Table) -> None:
        self._stream.writelines(line + b"\n" for line in encode_rows(rows))


@contextmanager
def _open(path: Path | None, schema: pa.Schema) -> Iterator[_Writer]:
    if path is None:
        yield _Lines(typer.get_binary_stream("stdout"))
        return
    try:
        if path.suffix == ".parquet":
            with pq.ParquetWriter(path, schema) as writer:
                yield writer
        else:
            with path.open("wb") as stream:
                yield _Lines(stream)
    except OSError as exc:
        msg = f"{path} cannot be written: {exc.strerror or exc}; expected a file in a directory that exists"
        raise ConfigError(msg) from exc


@contextmanager
def _open_or_drop(path: Path | None) -> Iterator[_Writer | None]:
    if path is None:
        yield None
    else:
        with _open(path, DEAD_LETTER_COLUMNS) as writer:
            yield writer


def _view(definition: str) -> FeatureView:
    module, _, name = definition.partition(":")
    application = load_application(module)
    if name:
        return application.view(name)
    if len(application.views) != 1:
        msg = f"{module} defines views {sorted(application.views)}, expected which one, as {module}:VIEW"
        raise ConfigError(msg)
    return next(iter(application.views.values()))
