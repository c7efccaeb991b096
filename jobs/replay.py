"""``headrace replay``: records that have been, through the live path once more, beside what is live."""

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any, Final
from uuid import uuid4

import numpy as np
import pyarrow.dataset as ds
import typer
from numpy.typing import NDArray
from rich.console import Console

from infra.local.state import claimed
from jobs.application import Application, consumer_groups, load_recorded_application
from jobs.backfill import Source, moment_us, record_log
from jobs.consumer_group import committed_offsets
from jobs.namespace import name_in, source_in
from jobs.parity import DIFFERENT, look, print_comparisons, read_online
from jobs.produce import read_speed, stop_on_signal
from jobs.reach import reach_kafka, reach_redis
from jobs.record_bar import record_bar
from jobs.replay_feed import Feed, Section, feed
from jobs.replay_run import ROLES, Namespace, left_behind
from jobs.role import Role
from jobs.settings import Settings
from jobs.topic_reader import first_offsets, read_topic
from jobs.topics import count_partitions
from offline.backfill import check_view
from offline.parity import Comparison
from offline.replayed import Letter, compare_letters, compare_replay
from schemas.errors import ConfigError
from schemas.view import FeatureView
from streams.dead_letter import read_dead_letters
from streams.ports import RecordLog
from streams.sinks.offline import open_table, scan_features, table_schema

_PLACE: Final = re.compile(r"(?:(?P<topic>[^:,=]+):)?(?P<partition>\d+)=(?P<offset>\d+)")
_STOPPED: Final = 130


def replay(
    view_names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VIEW]...", help="Feature views; else all that read their source directly."),
    ] = None,
    *,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME|OFFSETS",
            help="From the first record of this time on (a date or RFC 3339), or from offsets, such as "
            "shop.events:0=1200,shop.events:1=900.",
            show_default="all",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="TIME|OFFSETS", help="Up to there, not with it.", show_default="all that is there"),
    ] = None,
    speed: Annotated[
        str, typer.Option(metavar="N|max", help="How many times faster than real time, or as fast as possible.")
    ] = "max",
    source: Annotated[
        Source, typer.Option(help="delta: the archive of the raw topics; kafka: the topics.")
    ] = Source.DELTA,
    shown: Annotated[int, typer.Option("--list", min=0, help="How many differences to list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Put records through the live path once more, under names of their own, and compare with what was live.

    Workers of the features, offline and online role run on topics, tables and keys of their own, which are gone at the
    end. Rows, online values and dead letters are compared to the bit with the rows and dead letters of the live path.
    Windows reach back: what was before `--from` goes through first, as fast as possible, and is not compared. Exit code
    3 where something differs.
    """
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    views, left_out = _choose(application, view_names)
    rate = read_speed(speed)
    settings.check_delta()
    brokers, redis_url = settings.address("kafka"), settings.address("redis")
    reach_kafka(brokers)
    reach_redis(redis_url)
    logs = {view.input.topic: record_log(source, settings, view) for view in views}
    sections = _plan(logs, from_, to)
    partitions = count_partitions(brokers, sorted(logs))
    root, console = settings.home / "replay", Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    for why in left_out:
        say(f"left out: {why}")
    with claimed(root, by="replay"), stop_on_signal() as stop, ExitStack() as stack:
        for left in left_behind(root, brokers=brokers, redis_url=redis_url):
            say(f"clearing up what {left.name} has left, which was killed")
            left.clear()
        name = f"replay_{uuid4().hex[:8]}"
        namespace = Namespace(name=name, directory=root / name, brokers=brokers, redis_url=redis_url)
        namespace.clear()  # of nothing yet: what may not be cleared up is told before all the work
        stack.callback(namespace.clear)
        counts = {topic: _count(topic, partitions, sections) for topic in logs}
        made = namespace.begin(
            application, views, partitions={source_in(name, topic): count for topic, count in counts.items()}
        )
        workers = namespace.workers(made, settings, os.environ)
        stack.callback(workers.stop)
        workers.start(ROLES)
        started_s = time.perf_counter()
        fed = _feed(namespace, logs, sections, speed=rate, stop=stop, console=console)
        is_done = not stop.is_set() and namespace.run_dry(made, workers, stop=stop, say=say)
        if not is_done:
            say("stopped before its end; what it made goes")
            raise typer.Exit(_STOPPED)
        took_s = time.perf_counter() - started_s
        workers.stop()
        compared = {
            view.name: _compare(
                view,
                replayed=made.views[name_in(name, view.name)],
                namespace=namespace,
                settings=settings,
                sections=sections,
                fed=fed,
                group=consumer_groups(application)[Role.FEATURES][0],
            )
            for view in views
        }
        # Before clearing up, which may fail.
        if as_json:
            found = _document(compared, fed, sections, took_s=took_s, shown=shown)
            typer.echo(json.dumps(found, indent=2, default=str))
        else:
            for view in views:
                print_comparisons(
                    compared[view.name], shown=shown, said=f"{view.name} v{view.version}, {_spans(view, sections)}"
                )
            n_wanted = sum(len(section.wanted) for section in sections)
            said = f"{fed.records:,} records in {took_s:.1f} s, offsets of {n_wanted:,} compared"
            Console().print(said, soft_wrap=True)
    if any(comparison.mismatched for found in compared.values() for comparison in found):
        raise typer.Exit(DIFFERENT)


def _choose(application: Application, names: Sequence[str] | None) -> tuple[list[FeatureView], list[ConfigError]]:
    """Find the views to replay, and why others are left out; an error where they are named, or all there are."""
    views: list[FeatureView] = []
    left_out: list[ConfigError] = []
    for view in {view.name: view for view in map(application.view, names or application.views)}.values():
        try:
            _check(view)
        except ConfigError as exc:
            left_out.append(exc)
        else:
            views.append(view)
    if left_out and (names or not views):
        raise left_out[0]
    return views, left_out


def _check(view: FeatureView) -> None:
    if view.input.is_repartitioned:
        msg = (
            f"view {view.name} reads {view.input.topic}, where rows of several partitions come in another order each "
            "time, expected a view that reads its source directly; `headrace parity` makes its rows anew"
        )
        raise ConfigError(msg)
    check_view(view)


def _plan(logs: Mapping[str, RecordLog], from_: str | None, to: str | None) -> list[Section]:
    """Lay out what is read and what is wanted of each partition.

    Raises:
        ConfigError: There is nothing between the two, or an option cannot be read.
        SinkError, ServiceError: A log cannot be read.
    """
    sections = []
    for topic, log in logs.items():
        parts = log.parts()
        starts = _bounds(
            from_, "--from", topic, log, default={n: part.offsets.start for n, part in parts.items()}, logs=logs
        )
        stops = _bounds(to, "--to", topic, log, default={n: part.offsets.stop for n, part in parts.items()}, logs=logs)
        for number, part in sorted(parts.items()):
            start, stop = (min(max(at[number], part.offsets.start), part.offsets.stop) for at in (starts, stops))
            read = range(part.offsets.start, max(start, stop))
            sections.append(Section(topic=topic, partition=number, read=read, wanted=range(start, max(start, stop))))
    if not any(section.wanted for section in sections):
        msg = (
            f"no record lies between `--from` {from_ or 'the first'} and `--to` {to or 'the last'} of "
            f"{', '.join(map(str, logs.values()))}, expected some"
        )
        raise ConfigError(msg)
    return sections


def _count(topic: str, partitions: Mapping[str, int], sections: Sequence[Section]) -> int:
    """Tell how many partitions the topic gets that stands in for one: what is live, or archived, may have gone."""
    return max([partitions.get(topic, 1), *(section.partition + 1 for section in sections if section.topic == topic)])


def _bounds(
    text: str | None, option: str, topic: str, log: RecordLog, *, default: dict[int, int], logs: Mapping[str, RecordLog]
) -> Mapping[int, int]:
    if text is None:
        return default
    if "=" not in text:
        time_us = moment_us(text, option)
        assert time_us is not None  # noqa: S101 - there is a text
        return {**default, **log.first_at(time_us)}
    offsets: dict[int, int] = {}
    for part in text.split(","):
        place = _PLACE.fullmatch(part.strip())
        if (
            place is None
            or (place["topic"] or next(iter(logs))) not in logs
            or (place["topic"] is None and len(logs) > 1)
        ):
            msg = (
                f"`{option}` has {part!r}, expected TOPIC:PARTITION=OFFSET, several with commas between, of "
                f"{', '.join(sorted(logs))}"
            )
            raise ConfigError(msg)
        if place["topic"] in (None, topic):
            offsets[int(place["partition"])] = int(place["offset"])
    if missing := sorted(default.keys() - offsets.keys()):
        msg = f"`{option}` names no offset of {topic}:{missing[0]}, expected one for each partition that has records"
        raise ConfigError(msg)
    return offsets


def _feed(
    namespace: Namespace,
    logs: Mapping[str, RecordLog],
    sections: list[Section],
    *,
    speed: float | None,
    stop: threading.Event,
    console: Console,
) -> Feed:
    bar = record_bar(console)
    with bar:
        task = bar.add_task("replay", total=sum(len(section.read) for section in sections))
        return feed(
            namespace.brokers,
            logs,
            sections,
            namespace=namespace.name,
            speed=speed,
            stop=stop,
            tell=lambda records: bar.advance(task, records),
        )


def _compare(
    view: FeatureView,
    *,
    replayed: FeatureView,
    namespace: Namespace,
    settings: Settings,
    sections: Sequence[Section],
    fed: Feed,
    group: str,
) -> list[Comparison]:
    """Compare what a replay has made of one view; ``group`` is the consumer group that has made it live."""
    topic = view.input.topic
    originals = {number: offsets for (name, number), offsets in fed.originals.items() if name == topic}
    wanted = {section.partition: section.wanted for section in sections if section.topic == topic}
    made = _rows(namespace.delta, replayed)
    _, entities = look(made, replayed, lambda _: True)
    pseudonyms = settings.pseudonyms([view])
    values = asyncio.run(read_online(replayed, entities, redis_url=namespace.redis_url, pseudonyms=pseudonyms))
    compared = compare_replay(
        view,
        replayed=replayed,
        live=scan_features(settings.delta, view, storage_options=settings.delta_options),
        made=made,
        values=values,
        originals=originals,
        wanted=wanted,
        pseudonyms=pseudonyms,
    )
    # Before the letters: those of what is committed are there then. A group that has been forgotten tells nothing.
    ends = committed_offsets(namespace.brokers, group, topic)
    live, is_whole = _letters(namespace.brokers, view, None)
    remade, _ = _letters(namespace.brokers, replayed, originals)
    renamed = {
        Letter(
            partition=letter.partition,
            offset=letter.offset,
            reason=letter.reason,
            view=None if letter.view is None else view.name,
        )
        for letter in remade
    }
    return [*compared, compare_letters(live, renamed, wanted=wanted, ends=ends, is_whole=is_whole)]


def _rows(root: str, view: FeatureView) -> ds.Dataset:
    """Open the rows of a replay; a view of which none was made has no table."""
    if open_table(root, view) is None:
        return ds.dataset(table_schema(view).empty_table())
    return scan_features(root, view)


def _letters(
    brokers: str, view: FeatureView, originals: Mapping[int, NDArray[np.int64]] | None
) -> tuple[set[Letter], bool]:
    """Read the dead letters of a view by the offsets of their records as these were live, and whether all are there."""
    topic = view.sources[0].dead_letter_topic
    if topic not in count_partitions(brokers, [topic]):
        return set(), False
    letters = set()
    for batch in read_topic(brokers, topic):
        for letter in read_dead_letters(batch)[0]:
            _, partition, offset = letter.place
            if letter.view in (None, view.name):
                at = offset if originals is None else int(originals[partition][offset])
                letters.add(Letter(partition=partition, offset=at, reason=letter.reason, view=letter.view))
    return letters, not any(first_offsets(brokers, topic).values())


def _spans(view: FeatureView, sections: Sequence[Section]) -> str:
    spans = [
        f"{section.partition}: {section.wanted.start} to {section.wanted.stop - 1}"
        for section in sections
        if section.topic == view.input.topic and section.wanted
    ]
    return f"replayed from {view.input.topic}, offsets by partition {', '.join(spans)}"


def _document(
    compared: Mapping[str, Sequence[Comparison]], fed: Feed, sections: Sequence[Section], *, took_s: float, shown: int
) -> dict[str, Any]:
    return {
        "records": fed.records,
        "took_s": round(took_s, 3),
        "sections": [
            {
                "topic": section.topic,
                "partition": section.partition,
                "read": [section.read.start, section.read.stop],
                "compared": [section.wanted.start, section.wanted.stop],
            }
            for section in sections
        ],
        "views": {
            name: [
                {**asdict(found), "mismatches": [asdict(mismatch) for mismatch in found.mismatches[:shown]]}
                for found in comparisons
            ]
            for name, comparisons in compared.items()
        },
    }
