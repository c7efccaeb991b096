"""Transcripts: semantics as scripts of rows in and rows expected out, in YAML, run through any executor.

A file holds a list of transcripts::

    - name: what it shows, as a sentence
      source: {max_out_of_orderness: 5s}          # settings of the event source
      view: {slide: 1m, allowed_lateness: 30s}    # settings of the view; emit is every_event unless said
      features:
        n: {count: , over: 1m}                    # aggregation: column, then where/over/newest/lifetime
      steps:
        - rows:
            - {key: a, at: "00:00:10"}
          expect:
            - {key: a, pane: EARLY, end: "00:01:00", n: 1}
          dead_letters: []
          watermark: "00:00:05"

Times are ``hh:mm:ss`` (``-`` in front: before) on the transcript's ``day``, 2024-01-01 unless said. A row's offset
counts on from the row before; its broker time is null unless given as ``broker``. Of each expected row only the columns
that it names are compared, but there must be exactly these rows in exactly this order. A step is one of ``rows``,
``idle`` (``{at: processing time, caught_up: true}``), ``restart`` (from a snapshot) and ``close``; ``processing_time``
of a step of rows is given the same way.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from typer.testing import CliRunner

from jobs.commands import app
from schemas import aggregation
from schemas.entity import Entity
from schemas.time import parse_rfc3339_us
from schemas.view import FeatureView
from streams.windowing import StepResult, WindowEngine
from tests.support.builders import EVENT_FIELDS, Row, make_batch, make_source, to_rows

SECOND_US = 1_000_000
COLUMNS = {
    "end": "window_end",
    "start": "window_start",
    "index": "pane_index",
    "final": "is_final",
    "offset": "source_offset",
}
"""Short names that an expected row may use."""
TIMES = {"event_time", "window_end", "window_start", "watermark", "broker_time"}
FUNCTIONS = {
    name.rstrip("_"): getattr(aggregation, name)
    for name in dir(aggregation)
    if name.rstrip("_") in aggregation.FUNCTIONS
}


class TranscriptError(AssertionError):
    """What came out is not what the transcript says."""


@dataclass(frozen=True)
class Output:
    """What a step made; None for what an executor cannot tell."""

    rows: list[Row]
    dead_letters: list[Row]
    watermark_us: int | None = None
    is_idle: bool | None = None


class Executor(Protocol):
    """Something that a transcript runs through."""

    def rows(self, rows: list[Row], *, processing_time_us: int) -> Output: ...

    def idle(self, *, processing_time_us: int, is_caught_up: bool) -> Output: ...

    def close(self) -> Output: ...

    def restart(self) -> Output: ...


class EngineExecutor:
    """The engine in process; with ``is_singly``, a row a batch, each taken by an engine restored from a snapshot."""

    def __init__(self, view: FeatureView, *, is_singly: bool) -> None:
        self.view = view
        self.engine = WindowEngine(view)
        self.is_singly = is_singly

    def rows(self, rows: list[Row], *, processing_time_us: int) -> Output:
        batches = [[row] for row in rows] if self.is_singly else [rows]
        results = []
        for batch in batches:
            if self.is_singly and not self.engine.is_idle:
                self.engine = WindowEngine.restore(self.view, self.engine.snapshot())
            results.append(self.engine.step(make_batch(self.view, batch), processing_time_us=processing_time_us))
        return self.output(results)

    def idle(self, *, processing_time_us: int, is_caught_up: bool) -> Output:
        result = self.engine.poll_idle(processing_time_us=processing_time_us, is_caught_up=is_caught_up)
        return self.output([] if result is None else [result])

    def close(self) -> Output:
        return self.output([self.engine.close()])

    def restart(self) -> Output:
        self.engine = WindowEngine.restore(self.view, self.engine.snapshot())
        return self.output([])

    def output(self, results: list[StepResult]) -> Output:
        return Output(
            rows=[row for result in results for row in to_rows(result.rows)],
            dead_letters=[row for result in results for row in to_rows(result.dead_letters)],
            watermark_us=self.engine.watermark_us,
            is_idle=self.engine.is_idle,
        )


class ComputeExecutor:
    """``headrace compute`` on a file: each step runs it anew, on all the rows so far, and takes what it adds."""

    def __init__(self, transcript: "Transcript", directory: Path) -> None:
        self.view = transcript.view
        self.events, self.rows_path, self.dead_path = (
            directory / name for name in ("events.ndjson", "rows.ndjson", "dead_letters.ndjson")
        )
        self.module = directory / "definition.py"
        self.module.write_text(
            "from pathlib import Path\n\n"
            "from tests.support.transcript import load_transcripts\n\n"
            f"FOUND = load_transcripts(Path({str(transcript.directory)!r}))\n"
            f"VIEWS = [next(t.view for t in FOUND if t.name == {transcript.name!r})]\n"
        )
        self.lines: list[str] = []
        self.n_rows = self.n_letters = 0

    def rows(self, rows: list[Row], *, processing_time_us: int) -> Output:
        del processing_time_us
        self.lines += [json.dumps(self.document(row)) for row in rows]
        return self.compute()

    def document(self, row: Row) -> Row:
        places = [name for name in ("_offset", "_broker_time") if row[name] is not None]
        return {name: row[name] for name in [*self.view.source.schema.fields, *places] if name in row}

    def idle(self, *, processing_time_us: int, is_caught_up: bool) -> Output:
        msg = f"a file has no processing time, expected no idle step (at {processing_time_us}, {is_caught_up})"
        raise AssertionError(msg)

    def close(self) -> Output:
        return self.compute("--close")

    def restart(self) -> Output:
        return Output([], [])

    def compute(self, *options: str) -> Output:
        self.events.write_text("".join(f"{line}\n" for line in self.lines))
        paths = ["--input", self.events, "--output", self.rows_path, "--dead-letters", self.dead_path]
        arguments = ["compute", str(self.module), *map(str, paths), "--batch-rows", "2", *options]
        result = CliRunner().invoke(app, arguments)
        if result.exception is not None:
            raise result.exception
        rows, letters = (
            list(map(json.loads, path.read_text().split("\n")[:-1])) for path in (self.rows_path, self.dead_path)
        )
        made = Output([to_us(row) for row in rows[self.n_rows :]], letters[self.n_letters :])
        self.n_rows, self.n_letters = len(rows), len(letters)
        return made


def to_us(row: Row) -> Row:
    """A feature row as it is written, with its times in microseconds."""
    return {n: parse_rfc3339_us(v) if n in TIMES and v is not None else v for n, v in row.items()}


@dataclass(frozen=True)
class Transcript:
    """One script; see the module."""

    name: str
    text: dict[str, Any]
    directory: Path

    def has_step_with(self, *names: str) -> bool:
        """Tell whether any step says one of these."""
        return any(name in step for step in self.text["steps"] for name in names)

    @property
    def fits_a_file(self) -> bool:
        """Whether its rows can stand in a file: that has no processing time and no headers, and JSON has no NaN."""
        rows = [row for step in self.text["steps"] for row in step.get("rows", ())]
        is_plain = all("request_id" not in row and row.get("x") == row.get("x") for row in rows)
        return is_plain and not self.has_step_with("idle")

    @property
    def view(self) -> FeatureView:
        fields = self.text.get("fields", {})
        source = make_source(EVENT_FIELDS | fields, **self.text.get("source", {}))
        features = {name: make_feature(dict(definition)) for name, definition in self.text["features"].items()}
        settings = {"emit": "every_event"} | self.text["view"]
        return FeatureView(
            "transcript", version=1, entity=Entity("thing", key="key"), source=source, features=features, **settings
        )

    def run(self, executor: Executor) -> None:
        """Run all steps.

        Raises:
            TranscriptError: Something else came out.
        """
        offset = 0
        for number, step in enumerate(self.text["steps"], start=1):
            place = f"{self.name}, step {number}"
            now_us = self.time_us(step.get("processing_time", "00:00:00"))
            if "rows" in step:
                rows = []
                for row in step["rows"]:
                    offset = row.get("offset", offset)
                    rows.append(self.event(row) | {"_offset": offset})
                    offset += 1
                output = executor.rows(rows, processing_time_us=now_us)
            elif "idle" in step:
                idle = step["idle"]
                now_us = self.time_us(idle["at"])
                output = executor.idle(processing_time_us=now_us, is_caught_up=idle["caught_up"])
            elif "close" in step:
                output = executor.close()
            elif "restart" in step:
                output = executor.restart()
            else:
                msg = f"{place}: expected one of `rows`, `idle`, `restart` and `close`"
                raise TranscriptError(msg)
            self.compare(place, output, step)

    def event(self, row: Row) -> Row:
        event = {name: value for name, value in row.items() if name != "offset"}
        if isinstance(event.get("at"), str) and "raw" not in event:
            event["at"] = self.time_us(event["at"]) // SECOND_US
        event["_broker_time"] = self.time_us(event.pop("broker")) if "broker" in event else None
        event["_request_id"] = event.pop("request_id", None)
        return event

    def time_us(self, text: str) -> int:
        hours, minutes, seconds = text.removeprefix("-").split(":")
        time_us = round((int(hours) * 3_600 + int(minutes) * 60 + float(seconds)) * SECOND_US)
        return parse_rfc3339_us(f"{self.text.get('day', '2024-01-01')}T00:00:00Z") + (
            -time_us if text[0] == "-" else time_us
        )

    def compare(self, place: str, output: Output, step: dict[str, Any]) -> None:
        expected = [self.expected(row) for row in step.get("expect", [])]
        got = [{name: row[name] for name in want} for row, want in zip(output.rows, expected, strict=False)]
        unread = [f"{r['key']} {r['pane']}" for r in output.rows[len(expected) :]]
        if got != expected or unread:
            msg = f"{place}: rows\n  got      {got}{unread or ''}\n  expected {expected}"
            raise TranscriptError(msg)
        wanted = step.get("dead_letters", [])
        letters = [
            {name: letter.get(name, letter.get(f"_{name}")) for name in want}
            for letter, want in zip(output.dead_letters, wanted, strict=False)
        ]
        if letters != wanted or len(output.dead_letters) != len(wanted):
            msg = f"{place}: dead letters\n  got      {output.dead_letters}\n  expected {wanted}"
            raise TranscriptError(msg)
        is_told = output.watermark_us is not None
        if is_told and "watermark" in step and output.watermark_us != self.time_us(step["watermark"]):
            msg = f"{place}: watermark\n  got      {output.watermark_us}\n  expected {step['watermark']}"
            raise TranscriptError(msg)
        if output.is_idle is not None and "is_idle" in step and output.is_idle != step["is_idle"]:
            msg = f"{place}: is_idle\n  got      {output.is_idle}\n  expected {step['is_idle']}"
            raise TranscriptError(msg)

    def expected(self, row: Row) -> Row:
        named = {COLUMNS.get(name, name): value for name, value in row.items()}
        return {n: self.time_us(v) if n in TIMES and v is not None else v for n, v in named.items()}


def make_feature(definition: dict[str, Any]) -> Any:
    """Make a feature from ``{aggregation: column, where, …, over | newest | lifetime}``."""
    ((name, column),) = [(n, definition.pop(n)) for n in list(definition) if n in FUNCTIONS]
    arguments = [] if column is None else [column]
    if name in {"from_event", "derived"}:
        return FUNCTIONS[name](*arguments)
    settings = {key: definition.pop(key) for key in list(definition) if key not in {"over", "newest", "lifetime"}}
    made = FUNCTIONS[name](*arguments, **settings)
    if "over" in definition:
        return made.over(definition["over"])
    if "newest" in definition:
        return made.over(last=definition["newest"])
    return made.over(lifetime=True) if definition.get("lifetime") else made


def load_transcripts(directory: Path) -> Iterator[Transcript]:
    """Read all transcripts of a directory."""
    for path in sorted(directory.glob("*.yaml")):
        for text in yaml.safe_load(path.read_text()):
            yield Transcript(f"{path.stem}: {text['name']}", text, directory)
