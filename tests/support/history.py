"""A place with an application, the archive of its topic, and what the live path makes of it; without any service."""

import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs.application import load_application
from jobs.commands import run
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline
from streams.sinks.archive import ArchiveWriter
from streams.sinks.offline import OfflineWriter, read_features, table_schema
from tests.support.workbench import T0_MS, event

PROJECT = Path(__file__).parents[2]
TOPIC = "shop.events"
N_RECORDS = 400
FILES = 8
APPLICATION = """
from streams import Entity, EventSource, FeatureView, Serving, count, last_n, sum_

user = Entity("user", key="user_id")
events = EventSource("shop.events", contract="{contract}", max_out_of_orderness="5s", {source})
VIEWS = [FeatureView("activity", version=1, entity=user, source=events, slide="1m", allowed_lateness="10s",
                     emit="{emit}", {view} features={{"n_2m": count().over("2m"), "spend_5m": sum_("amount").over("5m"),
                                "last_3": last_n("{listed}").over(last=3)}})]
"""


def write_application(
    directory: Path,
    *,
    emit: str = "every_event",
    source: str = "",
    contract: str = "shop_event@1",
    view: str = "",
    listed: str = "amount",
) -> None:
    definition = {"emit": emit, "source": source, "contract": contract, "view": view, "listed": listed}
    (directory / "history_shop.py").write_text(APPLICATION.format(**definition))


def records(partition: int, offsets: range) -> RawBatch:
    """Events of three users, out of order, some late, some broken; their broker time is a second a record."""
    values = []
    for offset in offsets:
        chance = random.Random(f"{partition}-{offset}")
        behind_ms = chance.choice([0, 0, 0, 2_000, 4_000, 90_000, 300_000])
        value = event(T0_MS + offset * 1_000 - behind_ms, user=f"u{chance.randrange(3)}-{partition}")
        values.append(b"no json" if chance.random() < 0.03 else value)
    return RawBatch(
        topic=TOPIC,
        partition=partition,
        offsets=np.array(offsets, np.int64),
        broker_time_us=np.array([(T0_MS + offset * 1_000) * 1_000 for offset in offsets], np.int64),
        keys=[None] * len(offsets),
        values=values,
        headers=[None] * len(offsets),
        next_offset=offsets.stop,
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command has said."""

    code: int
    out: str
    err: str


class Place:
    """A home with an application and the archive of its topic."""

    def __init__(self, directory: Path, *, n_archived: int = FILES, **definition: str) -> None:
        self.directory = directory
        self.delta = directory / "delta"
        write_application(directory, **definition)
        size = N_RECORDS // FILES
        self.batches = {
            partition: [records(partition, range(first, first + size)) for first in range(0, N_RECORDS, size)]
            for partition in (0, 1)
        }
        for partition in self.batches:
            self.archive(partition, range(n_archived))

    def archive(self, partition: int, batches: range) -> None:
        writer = ArchiveWriter(self.delta)
        for number in batches:
            writer.write(self.batches[partition][number])

    @property
    def environment(self) -> dict[str, str]:
        application = str(self.directory / "history_shop.py")
        home = str(self.directory / "home")
        return {"HEADRACE_APP": application, "HEADRACE_HOME": home, "HEADRACE_DELTA": str(self.delta)}

    def kill(
        self,
        *arguments: str,
        step: str,
        times: int = 1,
        module: str = "dying_backfill",
        command: str = "backfill activity",
    ) -> None:
        """Run a command, by default the backfill of the view, and have it killed as it passes a step."""
        command_line = [f"tests.support.{module}", step, str(times), *command.split(), *arguments]
        done = subprocess.run(
            [sys.executable, "-m", *command_line],
            env={**os.environ, "PYTHONPATH": str(PROJECT), **self.environment},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    def run(
        self, *arguments: str, command: str = "backfill activity", settings: Mapping[str, str] | None = None
    ) -> Outcome:
        """Run a command, by default the backfill of the view."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name, value in {**self.environment, "COLUMNS": "200", **(settings or {})}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["headrace", *command.split(), *arguments])
            try:
                run()
            except SystemExit as exc:
                code = int(exc.code or 0)
        return Outcome(code=code, out=out.getvalue(), err=err.getvalue())

    def backfill(self, *arguments: str) -> dict[str, Any]:
        done = self.run("--json", *arguments)
        assert done.code == 0, done.err
        found: dict[str, Any] = json.loads(done.out)
        return found

    @property
    def view(self) -> FeatureView:
        return load_application(str(self.directory / "history_shop.py")).view("activity")

    def live_rows(self, view: FeatureView) -> dict[int, list[pa.Table]]:
        """What the live path makes of the records, one batch at a time."""
        rows: dict[int, list[pa.Table]] = {}
        for partition, batches in self.batches.items():
            pipeline = PartitionPipeline(view.sources[0], [view], partition=partition)
            rows[partition] = [
                pipeline.process(batch, processing_time_us=0, computed_time_us=1, epoch=1).rows[view.name]
                for batch in batches
            ]
        return rows

    def write_live(self, view: FeatureView, made: Mapping[int, Sequence[pa.Table]]) -> None:
        writer = OfflineWriter(self.delta)
        for partition, tables in made.items():
            rows = pa.concat_tables(tables)
            writer.write(rows, view=view, partition=partition, offsets=range(rows.num_rows))


def content(rows: pa.Table) -> list[dict[str, Any]]:
    """All that rows say but when they were committed, in an order of their own."""
    kept = rows.select([name for name in rows.column_names if name not in ("computed_time", "epoch")])
    keys = ("source_partition", "source_offset", "window_end", "pane", "pane_index", "user_id")
    ordered: list[dict[str, Any]] = kept.sort_by([(key, "ascending") for key in keys]).to_pylist()
    return ordered


def expected(view: FeatureView, made: Mapping[int, Sequence[pa.Table]]) -> list[dict[str, Any]]:
    """The same of rows of the live path, as its writer stores them."""
    rows = pa.concat_tables([table for tables in made.values() for table in tables])
    return [{name: row[name] for name in row if name in table_schema(view).names} for row in content(rows)]


def stored(root: Path, view: FeatureView) -> list[dict[str, Any]]:
    rows = read_features(root, view)
    return content(rows.drop_columns(["event_date", "available_time"]))
