"""``headrace bench offline``: a backfill from the archive, and a training set, as their commands do them.

Rounds of ``headrace backfill``, of the same features by hand in DuckDB's SQL and in polars (see
:mod:`jobs.bench.by_hand`), each in processes of its own over the same archived files, are interleaved; a figure is the
median of its rounds. All three write Parquet, and the rows of both others are compared with those of the backfill, to
the row, before a time counts. The time of a backfill is what it says itself: from its plan to its commit, with the
start of its processes; of the others, from their first file to their last. Processor time is all that their processes
took, imports among it: other work on the machine shows in it less than in the time by the clock.

Events of 20,000 users advance at 10,000 a second, so that windows of all users close once a minute.
"""

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from jobs.bench.by_hand import COLUMNS, ENGINES
from jobs.bench.figure import Figure
from jobs.bench.history import VIEWS
from jobs.bench.job import KEYS, EventStream, to_json
from jobs.bench.own_services import NOT_PASSED_ON
from offline.training_set import join_features
from schemas.errors import ConfigError, ServiceError, WindowingError
from schemas.row import Pane
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline
from streams.sinks.archive import Archive, ArchiveWriter, archive_uri
from streams.sinks.offline import OfflineWriter, complete_rows, read_features

_VIEW: Final = VIEWS[0]
_PARTITIONS: Final = 2
_EVENTS: Final = {True: 1_000_000, False: 4_000_000}
_ROUNDS: Final = {True: 1, False: 3}
_LABELS: Final = {True: 100_000, False: 1_000_000}
_BATCH_ROWS: Final = 100_000
_EVENTS_PER_S: Final = 10_000
_JOINED_VIEWS: Final = 5
_JOIN_S: Final = 60.0
"""Seconds that a million labels may take."""
_JOINED_USERS: Final = 200
_TOLERANCE: Final = 1e-9

Tell = Callable[[str], None]


@dataclass
class Took:
    """What rounds took, by the clock and of the processor, in microseconds an event."""

    events_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure a backfill and a training set.

    Args:
        quick: Fewer events, labels and rounds.
        tell: Takes a line of progress.

    Raises:
        ConfigError: DuckDB is not there.
        ServiceError: A process of it failed.
        WindowingError: Rows differ.
    """
    if importlib.util.find_spec("duckdb") is None:
        msg = "DuckDB is not installed, expected it to compare with; install the extra: pip install 'headrace[bench]'"
        raise ConfigError(msg)
    n_events = _EVENTS[quick]
    with TemporaryDirectory(prefix="headrace-bench-") as directory:
        root = Path(directory)
        tell(f"archiving {n_events:,} events")
        n_bytes = archive_events(root / "delta", n_events)
        files = DeltaTable(archive_uri(root / "delta", _VIEW.input.topic)).file_uris()
        took = {name: Took() for name in ("backfill", *ENGINES)}
        for number in range(_ROUNDS[quick]):
            tell(f"round {number + 1} of {_ROUNDS[quick]}")
            target = root / f"round-{number}"
            _measure(took["backfill"], n_events, lambda target=target: _backfill(root, target))  # type: ignore[misc]
            for name in ENGINES:
                output = root / f"{name}.parquet"
                _measure(took[name], n_events, lambda name=name, output=output: _by_hand(name, output, files))  # type: ignore[misc]
        made = compared_rows(read_features(target, _VIEW))
        for name in ENGINES:
            check_same(made, pl.read_parquet(root / f"{name}.parquet"), name=name)
        tell(f"{len(made):,} rows are what {' and '.join(ENGINES)} compute")
        figures = _speeds(took, n_bytes / n_events)
        del made
        return [*figures, *_training_set(root, _LABELS[quick], tell)]


def archive_events(root: Path, n_events: int) -> int:
    """Archive events of the job, a user in one partition; returns the bytes of their payloads."""
    writer, stream = ArchiveWriter(root), EventStream(KEYS, events_per_s=_EVENTS_PER_S)
    reached, n_bytes = [0] * _PARTITIONS, 0
    while stream.n_rows < n_events:
        batch = stream.batch(min(_BATCH_ROWS, n_events - stream.n_rows))
        numbers = pc.utf8_slice_codeunits(batch["user_id"], 1).cast(pa.int64()).to_numpy() % _PARTITIONS
        for partition in range(_PARTITIONS):
            rows = batch.filter(pa.array(numbers == partition))
            first, stop = reached[partition], reached[partition] + rows.num_rows
            values = to_json(rows).splitlines()
            n_bytes += sum(map(len, values))
            writer.write(
                RawBatch(
                    topic=_VIEW.input.topic,
                    partition=partition,
                    offsets=np.arange(first, stop),
                    broker_time_us=rows["event_time"].to_numpy() * 1_000,
                    keys=[user.encode() for user in rows["user_id"].to_pylist()],
                    values=values,
                    headers=[None] * len(values),
                    next_offset=stop,
                )
            )
            reached[partition] = stop
    return n_bytes


def _measure(took: Took, n_events: int, call: Callable[[], float]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken_s = call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took.events_per_s.append(n_events / taken_s)
    took.cpu_us.append(cpu_s / n_events * 1e6)


def _backfill(root: Path, target: Path) -> float:
    kept = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    own = {"HEADRACE_APP": "jobs.bench.history", "HEADRACE_HOME": str(root), "HEADRACE_DELTA": str(root / "delta")}
    options = ["--workers", str(_PARTITIONS), "--into", str(target), "--json"]
    said = _run(["-m", "jobs.cli", "backfill", _VIEW.name, *options], kept | own)
    return float(json.loads(said)["took_s"])


def _by_hand(name: str, output: Path, files: Sequence[str]) -> float:
    return float(_run(["-m", "jobs.bench.by_hand", name, str(output), *files], dict(os.environ)))


def _run(arguments: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"`python {' '.join(arguments[:4])}` ended with {done.returncode}, expected 0: {done.stderr[-2_000:]}"
        raise ServiceError(msg)
    return done.stdout


def compared_rows(rows: pa.Table) -> pl.DataFrame:
    """The columns of feature rows that the others have too."""
    frame = pl.from_arrow(rows.append_column("window_end_ms", rows["window_end"].cast(pa.timestamp("ms", "UTC"))))
    if not isinstance(frame, pl.DataFrame):
        msg = f"expected a table, got {type(frame).__name__}"
        raise TypeError(msg)
    return frame.select(pl.col(COLUMNS[:3]), pl.col("window_end_ms").dt.epoch("ms"), pl.col(COLUMNS[4:]))


def check_same(made: pl.DataFrame, other: pl.DataFrame, *, name: str) -> None:
    """See that two have the same rows; sums may differ in what order they were added up in.

    Raises:
        WindowingError: They have not.
    """
    place = list(COLUMNS[:4])
    both = made.sort(place).with_columns(pl.col("pane").cast(pl.String))
    theirs = other.select(COLUMNS).sort(place)
    if not both.select(place).equals(theirs.select(place)):
        missing = both.join(theirs, on=place, how="anti").head(3).to_dicts()
        spare = theirs.join(both, on=place, how="anti").head(3).to_dicts()
        msg = f"the backfill has {len(both)} rows, {name} {len(theirs)}; without: {missing}, beyond: {spare}"
        raise WindowingError(msg)
    for column in COLUMNS[4:]:
        near = (both[column] - theirs[column]).abs() <= _TOLERANCE * (1 + theirs[column].abs())
        if not near.fill_null(value=False).all():
            wrong = both.with_columns(theirs[column].alias("expected")).filter(~near.fill_null(value=False))
            msg = f"{column} of the backfill is not what {name} computes: {wrong.head(3).to_dicts()}; no time counts"
            raise WindowingError(msg)


def _speeds(took: dict[str, Took], event_bytes: float) -> list[Figure]:
    speeds = {name: statistics.median(found.events_per_s) for name, found in took.items()}
    costs = {name: statistics.median(found.cpu_us) for name, found in took.items()}
    figures = [Figure(name="offline.backfill", value=speeds["backfill"], unit="events/s", bar=500_000)]
    figures += [
        Figure(
            name=f"offline.backfill.to_{name}",
            value=speeds["backfill"],
            unit="events/s",
            compared_with=f"offline.{name}",
            ratio=speeds["backfill"] / speeds[name],
        )
        for name in ENGINES
    ]
    figures += [Figure(name=f"offline.{name}", value=speeds[name], unit="events/s") for name in ENGINES]
    for name in took:
        figures.append(
            Figure(
                name=f"offline.{name}.cpu",
                value=costs[name],
                unit="us/event",
                compared_with=None if name == "backfill" else "offline.backfill.cpu",
                ratio=None if name == "backfill" else costs[name] / costs["backfill"],
            )
        )
    return [*figures, Figure(name="offline.event", value=event_bytes, unit="bytes")]


def _training_set(root: Path, n_labels: int, tell: Tell) -> list[Figure]:
    """Join labels with five views that have a row for each label, and see that the right one is what came out."""
    tell(f"making the rows of {_JOINED_VIEWS} views")
    views = [replace(_VIEW, name=f"bench_{number}") for number in range(_JOINED_VIEWS)]
    archive, writer = Archive(str(root / "delta"), _VIEW.input.topic), OfflineWriter(root / "joined")
    made: list[pa.Table] = []
    for partition in range(_PARTITIONS):
        pipeline = PartitionPipeline(_VIEW.sources[0], views, partition=partition)
        for batch in archive.read(partition, range(n_labels // _PARTITIONS)):
            done = pipeline.process(batch, processing_time_us=0, computed_time_us=None, epoch=None)
            made.append(complete_rows(done.rows[views[0].name], views[0]))
            for view in views:
                rows = done.rows[view.name]
                offsets = rows["source_offset"].combine_chunks()
                writer.write(rows, view=view, partition=partition, offsets=offsets)
    rows = pa.concat_tables(made)
    labels = rows.filter(pc.equal(rows["pane"], str(Pane.EARLY))).select(["user_id", "event_time"])
    tell(f"joining {labels.num_rows:,} labels with {_JOINED_VIEWS} views")
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    joined = join_features(labels, views, root=root / "joined").rows
    taken_s, taken_cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    checked = check_joined(joined, rows, views)
    tell(f"{checked:,} joined rows are the newest that could be read")
    return [
        Figure(
            name=f"offline.training_set.labels_{n_labels // 1_000}k",
            value=taken_s,
            unit="s",
            bar=_JOIN_S * n_labels / 1_000_000,
            is_lower_better=True,
        ),
        Figure(name="offline.training_set.cpu", value=taken_cpu_s / n_labels * 1e6, unit="us/label"),
    ]


def check_joined(joined: pa.Table, rows: pa.Table, views: Sequence[FeatureView]) -> int:
    """See for some users that each label has what the newest row says that could be read at its time.

    Args:
        joined: Labels with the features of the views.
        rows: Rows of any of them, which say the same.
        views: The views.

    Returns:
        Values of rows that were compared.

    Raises:
        WindowingError: One differs.
    """
    users = pc.unique(rows["user_id"])[:_JOINED_USERS]
    mine = pl.from_arrow(joined.filter(pc.is_in(joined["user_id"], value_set=users)))
    known = pl.from_arrow(rows.filter(pc.is_in(rows["user_id"], value_set=users)))
    if not isinstance(mine, pl.DataFrame) or not isinstance(known, pl.DataFrame):
        msg = "expected two tables"
        raise TypeError(msg)
    labels = mine.with_row_index("label")
    pairs = labels.select("label", "user_id", at="event_time").join(known, on="user_id")
    newest = (
        pairs.filter(pl.col("available_time") <= pl.col("at"))
        .sort("label", "window_end", "pane_index", "source_offset")
        .unique("label", keep="last")
        .select("label", *COLUMNS[4:])
    )
    expected = labels.select("label").join(newest, on="label", how="left").sort("label")
    for view in views:
        for name in COLUMNS[4:]:
            got = labels.sort("label")[f"{view.name}__{name}"]
            if not got.equals(expected[name], check_names=False, check_dtypes=False):
                msg = f"{view.name}__{name} is not what the newest row that could be read says; no time counts"
                raise WindowingError(msg)
    return len(labels) * len(views)
