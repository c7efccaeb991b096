"""``headrace training-set``: labels with the features that an online read at their moment would have returned."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from deltalake import write_deltalake
from rich.console import Console
from rich.table import Table

from jobs.application import load_application
from jobs.settings import Settings
from offline.late import with_late
from offline.training_set import JoinedSet, join_features
from schemas.errors import ConfigError, SinkRejectedError
from schemas.time import parse_duration_us
from streams.sinks.delta import mapped_errors


def training_set(
    labels: Annotated[Path, typer.Argument(help="Parquet file with a row for each label.")],
    output: Annotated[str, typer.Argument(help="Where to write: a name in .parquet, or the place of a Delta table.")],
    *,
    views: Annotated[
        list[str],
        typer.Option(
            "--view", help="A view, with the column of its entity keys where that has another name: VIEW=COLUMN."
        ),
    ],
    time_column: Annotated[str, typer.Option("--time", help="Column of the labels' times.")] = "event_time",
    max_age: Annotated[
        str | None, typer.Option(help="Age above which a row is stale, such as 1h.", show_default="each view's ttl")
    ] = None,
    late: Annotated[
        str | None,
        typer.Option(
            "--with-late",
            metavar="DURATION",
            help="Join rows that a backfill made with this `--with-late`, of the store that HEADRACE_DELTA names.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest in place of a table.")] = False,
) -> None:
    """Join features to labels, each as an online read at the label's time would have returned them.

    Nothing from after a label's time gets into its row. Beside the output, under its name and `.manifest.json`, stands
    what it was made of: views, definitions, versions of their tables, and how much is missing.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    named = [name.partition("=") for name in views]
    chosen = [application.view(name) for name, _, _ in named]
    if late is not None:
        chosen = [with_late(view, parse_duration_us(late, field="--with-late")) for view in chosen]
    keys = {view.name: column for view, (_, _, column) in zip(chosen, named, strict=True) if column}
    if "://" in output:
        msg = f"{output} is an object store, expected a place on this machine; copy it there"
        raise ConfigError(msg)
    if Path(output).exists():
        msg = f"{output} is there already, expected a name of its own for each training set; choose another one"
        raise ConfigError(msg)
    try:
        content = labels.read_bytes()
        rows = pq.read_table(pa.BufferReader(content))
    except (OSError, pa.ArrowException) as exc:
        msg = f"labels {labels} cannot be read: {exc}; expected a Parquet file"
        raise ConfigError(msg) from exc
    settings.check_delta()
    started_s = time.perf_counter()
    made = join_features(
        rows,
        chosen,
        root=settings.delta,
        storage_options=settings.delta_options,
        time=time_column,
        keys=keys,
        max_age_us=None if max_age is None else parse_duration_us(max_age, field="max_age"),
    )
    manifest = {**made.manifest, "labels": {**made.manifest["labels"], "sha256": hashlib.sha256(content).hexdigest()}}
    _write(made, manifest, output)
    if as_json:
        typer.echo(json.dumps(manifest, indent=2))
    else:
        _print(manifest, output, took_s=time.perf_counter() - started_s)


def _write(made: JoinedSet, manifest: dict[str, Any], output: str) -> None:
    try:
        if output.endswith(".parquet"):
            pq.write_table(made.rows, output, compression="zstd")
        else:
            with mapped_errors(output):
                write_deltalake(output, made.rows, mode="error")
        Path(f"{output.rstrip('/')}.manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as exc:
        msg = f"{output} cannot be written: {exc}; name a place in a directory that is there"
        raise SinkRejectedError(msg) from exc


def _print(manifest: dict[str, Any], output: str, *, took_s: float) -> None:
    table = Table("view", "table version", "rows", "present", "most often null", box=None, pad_edge=False)
    for view in manifest["views"]:
        name, share = max(view["null_shares"].items(), key=lambda item: item[1])
        table.add_row(
            f"{view['view']} v{view['version']}",
            str(view["table_version"]),
            f"{view['rows']:,}",
            f"{view['status_shares'].get('present', 0):.1%}",
            f"{name} {share:.1%}",
        )
    console = Console()
    console.print(table)
    console.print(f"{manifest['labels']['rows']:,} labels in {took_s:.1f} s, to {output}", soft_wrap=True)
