"""``headrace compute``: a view over a file, without any service."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from jobs.application import load_application
from jobs.lateness_table import print_report
from jobs.row_file import open_row_file
from offline.computation import DEAD_LETTER_COLUMNS, Computation
from offline.event_file import EventFile
from offline.report import report_lateness
from schemas.errors import ConfigError
from schemas.view import EMIT_MODES, FeatureView

_MOST_ROWS: Final = 1_000_000_000
"""Of a batch: more than memory holds, and far from where readers' own counters end."""


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
    batch_rows: Annotated[
        int, typer.Option(min=1, max=_MOST_ROWS, help="Rows per batch; changes nothing in the output.")
    ] = 50_000,
    close: Annotated[
        bool, typer.Option("--close", help="Take the watermark to the end of time after the last row.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Make no rows: show late rows and staleness at several settings of max_out_of_orderness."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --report: print JSON in place of a table.")] = False,
) -> None:
    """Compute a view over a file of events, without any service.

    It is done by the engine of the live path. A row may have `_partition`, `_offset` and `_broker_time` (RFC 3339 or
    microseconds); without them it is in partition 0, its offset is its number in the file, and its time is not checked
    against the future. The output is the same, byte for byte, whatever the batch size.
    """
    view = _view(definition)
    if report:
        given = {"--output": output_path, "--dead-letters": dead_letters, "--emit": emit, "--close": close or None}
        if named := [option for option, value in given.items() if value is not None]:
            msg = f"`--report` is given with {', '.join(named)}, expected neither: it makes no rows; run twice for both"
            raise ConfigError(msg)
        EventFile(input_path, view.sources).check()
        print_report(report_lateness(view, input_path, batch_rows=batch_rows), as_json=as_json)
        return
    if as_json:
        msg = "`--json` is given without `--report`, expected both or neither: rows are JSON as they are"
        raise ConfigError(msg)
    if emit is not None and emit not in EMIT_MODES:
        msg = f"`--emit` is {emit!r}, expected one of {list(EMIT_MODES)}"
        raise ConfigError(msg)
    computation = Computation(view, emit=emit)
    _check_paths(view, input_path, output_path, dead_letters)
    rows, reasons = 0, Counter[str]()
    with ExitStack() as stack:
        output = stack.enter_context(open_row_file(output_path, view.row_schema))
        letters = None
        if dead_letters is not None:
            letters = stack.enter_context(open_row_file(dead_letters, DEAD_LETTER_COLUMNS))
        for made in computation.run(input_path, batch_rows=batch_rows, closes=close):
            output.write(made.rows)
            rows += made.rows.num_rows
            reasons.update(made.dead_letters["reason"].to_pylist())
            if letters is not None:
                letters.write(made.dead_letters)
    by_reason = ", ".join(f"{reason} {number:,}" for reason, number in sorted(reasons.items()))
    found = f"{reasons.total():,} dead letters" + (f" ({by_reason})" if by_reason else "")
    typer.echo(f"{rows:,} feature rows, {found}", err=True)


def _check_paths(view: FeatureView, input_path: Path, *outputs: Path | None) -> None:
    """See whether the input is there, before any output is opened, and that nothing is written over it."""
    EventFile(input_path, view.sources).check(is_read_twice=view.input.is_repartitioned)
    taken = {input_path.resolve()}
    for output in outputs:
        if output is not None and output.resolve() in taken:
            msg = f"{output} is named twice among input, output and dead letters, expected a file for each"
            raise ConfigError(msg)
        if output is not None and output.exists() and not output.is_file():
            continue  # a pipe or a device may well stand for two of them
        taken |= {output.resolve()} if output is not None else set()


def _view(definition: str) -> FeatureView:
    # A path may have a colon of its own.
    is_whole = definition.endswith(".py") or ":" not in definition
    module, colon, name = (definition, "", "") if is_whole else definition.rpartition(":")
    if colon and not name:
        msg = f"`{definition}` names no view after the colon, expected MODULE:VIEW, or MODULE where it has one view"
        raise ConfigError(msg)
    application = load_application(module)
    if name:
        return application.view(name)
    if len(application.views) != 1:
        msg = f"{module} defines views {sorted(application.views)}, expected which one, as {module}:VIEW"
        raise ConfigError(msg)
    return next(iter(application.views.values()))
