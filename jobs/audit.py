"""Adds everything up: raw topics against feature rows, dead letters, scores, the online and the offline store.

Nothing here trusts a counter of the pipeline: it reads what is committed on the topics and what the stores hold. Each
raw record must be in an as-of row, on the dead-letter topic with a reason, or have come so late that only LATE panes
hold it, which is decided anew from its event time and the watermarks before it.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from jobs.application import Application, load_application
from jobs.reach import reach_kafka, reach_redis
from jobs.settings import Settings
from jobs.topic_reader import read_topic
from schemas.model import ModelSpec
from schemas.row import Pane
from schemas.source import EventSource
from schemas.time import MINUS_INFINITY_US
from schemas.topology import connect
from schemas.view import FeatureView
from streams.agents.feature_topic import decode_feature_rows
from streams.dead_letter import find_addressed
from streams.decoding import decode
from streams.repartition import RepartitionedRows
from streams.sinks.archive import Archive
from streams.sinks.offline import open_table, read_features, table_schema, table_uri
from streams.sinks.online import KEEP_TTLS, OnlineReader, OnlineValue, Status
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms
from streams.sinks.rows import ORDER_COLUMNS
from streams.windowing.event_time import read_event_times
from streams.windowing.input_watermark import InputWatermarks
from streams.windowing.plan import compile_view

_TRIES = 5
_SETTLE_S = 2.0
"""How long rows may take from their topic to the stores."""
_KEYS_PER_READ = 5_000
"""Keys in one read of the online store, which answers nobody else meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One sum that must come out even.

    Attributes:
        name: What is compared.
        expected: What one side says.
        actual: What the other side says.
        detail: How the sum is made up, for people.
    """

    name: str
    expected: int
    actual: int
    detail: str = ""

    @property
    def is_met(self) -> bool:
        """Tell whether the two sides agree."""
        return self.expected == self.actual


def run_audit(
    application: Application,
    *,
    brokers: str,
    redis_url: str,
    delta: str,
    delta_options: Mapping[str, str] | None = None,
    pseudonyms: Pseudonyms = NO_PSEUDONYMS,
    scored_from: Mapping[str, Mapping[int, int]] | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Check]:
    """Compare everything with everything.

    Rows may be on their way meanwhile, such as those that an idle partition fires: what does not come out is added up
    again until nothing changes any more, a few times at most.

    Args:
        application: Views and models.
        brokers: Kafka bootstrap servers.
        redis_url: The online store.
        delta: Root of the offline store.
        delta_options: Options of its object store, as delta-rs takes them.
        pseudonyms: What stands in the online store for personal values of views that ask for it.
        scored_from: By model, the offset of each partition of its trigger topic that scoring began at. For a model
            that is not named it is taken to have begun with the first row, by time of computing, that was answered.
        tell: Takes a line about what is being read, which may take a minute.

    Raises:
        HeadraceError: Something cannot be read.
    """
    stores: dict[str, Any] = {
        "brokers": brokers,
        "redis_url": redis_url,
        "delta": delta,
        "delta_options": delta_options,
        "pseudonyms": pseudonyms,
    }
    checks = _add_up(application, **stores, scored_from=scored_from, tell=tell)
    for _ in range(_TRIES):
        before = checks
        if all(check.is_met for check in checks):
            break
        tell("something is on its way, it seems: adding up again")
        time.sleep(_SETTLE_S)
        checks = _add_up(application, **stores, scored_from=scored_from, tell=tell)
        if checks == before:
            break
    return checks


def _add_up(
    application: Application,
    *,
    brokers: str,
    redis_url: str,
    delta: str,
    delta_options: Mapping[str, str] | None,
    pseudonyms: Pseudonyms,
    scored_from: Mapping[str, Mapping[int, int]] | None,
    tell: Callable[[str], object],
) -> list[Check]:
    checks: list[Check] = []
    for view in application.views.values():
        tell(f"{view.name}: reading {view.topic}")
        rows = _feature_rows(brokers, view)
        for source in view.sources:
            tell(f"{view.name}: reading {source.topic} and its dead letters")
        checks += _check_sources(brokers, view, rows, application.name)
        tell(f"{view.name}: reading Delta and Redis")
        checks += _check_offline(delta, view, rows, delta_options)
        checks += asyncio.run(_check_online(redis_url, view, rows, pseudonyms))
        for model in application.models.values():
            if model.trigger.name == view.name:
                tell(f"{view.name}: reading {model.topic}")
                checks += _check_scores(brokers, model, rows, (scored_from or {}).get(model.name))
    for topic in connect(list(application.views.values())).topics:
        tell(f"{topic}: reading its archive")
        checks.append(_check_archive(brokers, Archive(delta, topic, delta_options)))
    return checks


def _check_archive(brokers: str, archive: Archive) -> Check:
    """Compare a topic with its archive, which holds what was there before its first record too."""
    n_records, first = 0, dict[int, int]()
    for batch in read_topic(brokers, archive.topic):
        n_records += len(batch)
        first.setdefault(batch.partition, int(batch.offsets[0]))
    is_there = archive.is_there
    return Check(
        name=f"{archive.topic}: records on the topic = records archived",
        expected=n_records,
        actual=archive.count(first) if is_there else 0,
        detail="" if is_there else "there is no archive: does the offline role run?",
    )


def _feature_rows(brokers: str, view: FeatureView) -> pl.DataFrame:
    tables = []
    for batch in read_topic(brokers, view.topic):
        found = decode_feature_rows(batch, view)
        rows, n_rows = found.rows, found.rows.num_rows
        rows = rows.append_column("_partition", pa.repeat(pa.scalar(batch.partition, pa.int64()), n_rows))
        tables.append(rows.append_column("_offset", pa.array(found.batch.offsets[:n_rows])))
    schema = pa.schema([*view.row_schema, pa.field("_partition", pa.int64()), pa.field("_offset", pa.int64())])
    frame = pl.from_arrow(pa.concat_tables(tables) if tables else schema.empty_table())
    assert isinstance(frame, pl.DataFrame)  # noqa: S101 - a table gives a frame
    return frame


def _check_sources(brokers: str, view: FeatureView, rows: pl.DataFrame, application: str) -> list[Check]:
    early = rows.filter(pl.col("pane") == Pane.EARLY)
    if not view.input.is_repartitioned:
        (source,) = view.sources
        places = {"partition": "source_partition", "offset": "source_offset"}
        early = early.select("watermark", **{name: pl.col(column) for name, column in places.items()})
        return _check_source(brokers, view, source, early, None)
    routed = _routed_records(brokers, view, application)
    checks = []
    for source in view.sources:
        places = {"partition": "origin_partition", "offset": "origin_offset"}
        mine = early.filter(pl.col("origin_topic") == source.topic)
        mine = mine.select("watermark", **{name: pl.col(column) for name, column in places.items()})
        of_source = routed.filter(pl.col("topic") == source.topic)
        doubled = of_source.height - of_source.unique(["partition", "offset"]).height
        checks += _check_source(brokers, view, source, mine, of_source)
        checks.append(
            Check(name=f"{source.topic}: records that stand twice on {view.input.topic}", expected=0, actual=doubled)
        )
    return checks


def _routed_records(brokers: str, view: FeatureView, application: str) -> pl.DataFrame:
    """The events on a repartition topic, each with the watermark that it was judged against."""
    schema = {"topic": pl.String, "partition": pl.Int64, "offset": pl.Int64, "watermark_us": pl.Int64}
    frames = [pl.DataFrame(schema=schema)]
    merged: dict[int, tuple[InputWatermarks, int]] = {}
    for batch in read_topic(brokers, view.input.topic):
        read = RepartitionedRows(batch, view.input, application=application)
        if not read.rows.num_rows:
            continue
        records = read.rows.combine_chunks()
        fresh = InputWatermarks([source.topic for source in view.sources]), MINUS_INFINITY_US
        inputs, watermark_us = merged.get(batch.partition, fresh)
        moved_us = inputs.move(records, watermark_us=watermark_us)
        merged[batch.partition] = inputs, int(moved_us[-1])
        origins = read.origins(records["_offset"].to_numpy())
        columns = [origins[f"origin_{name}"].to_pylist() for name in ("topic", "partition", "offset")]
        frame = pl.DataFrame(dict(zip(schema, (*columns, moved_us), strict=True)), schema=schema)
        frames.append(frame.filter(pl.Series(records["_is_event"].to_pylist())))
    return pl.concat(frames)


def _check_source(
    brokers: str, view: FeatureView, source: EventSource, early: pl.DataFrame, routed: pl.DataFrame | None
) -> list[Check]:
    reasons: Counter[str] = Counter()
    dead: list[tuple[int, int]] = []
    for batch in read_topic(brokers, source.dead_letter_topic):
        for record_headers in batch.headers:
            facts = dict(record_headers or ())
            if facts.get("headrace.view", view.name.encode()) == view.name.encode():
                reasons[facts["headrace.reason"].decode()] += 1
                dead.append((int(facts["headrace.partition"]), int(facts["headrace.offset"])))
    seen = pl.DataFrame(dead, schema={"partition": pl.Int64, "offset": pl.Int64}, orient="row")
    seen = pl.concat([early.select("partition", "offset"), seen])
    raw, unseen = _unseen_records(brokers, view, source, seen)
    if view.emit != "every_event":
        # The other modes leave admitted rows without an as-of row of their own: only the dead letters can be told.
        detail = f"{raw:,} records, {_letters(reasons)}, emits {view.emit}"
        late = Check(name=f"{view.name}: dead letters = records they are of", expected=len(dead), actual=len(set(dead)))
        return [replace(late, detail=detail)]
    late_only = _late_only(view, early, unseen, routed)
    detail = f"{early.height:,} as-of rows + {_letters(reasons)} + {late_only:,} in LATE panes alone"
    doubled = seen.height - seen.unique().height
    return [
        Check(
            name=f"{source.topic}: records = as-of rows of {view.name} + dead letters + late-pane rows",
            expected=raw,
            actual=early.height + len(dead) + late_only,
            detail=detail,
        ),
        Check(name=f"{view.name}: records counted more than once", expected=0, actual=doubled),
    ]


def _letters(reasons: Counter[str]) -> str:
    by_reason = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items()))
    return f"{reasons.total():,} dead letters" + (f" ({by_reason})" if by_reason else "")


def _unseen_records(
    brokers: str, view: FeatureView, source: EventSource, seen: pl.DataFrame
) -> tuple[int, pl.DataFrame]:
    """Count the raw records, and give the event times of those that are neither in an as-of row nor dead letters."""
    offsets = {int(number): part["offset"].to_numpy() for (number,), part in seen.group_by("partition")}
    schema = {"partition": pl.Int64, "offset": pl.Int64, "event_time_us": pl.Int64}
    raw, frames = 0, [pl.DataFrame(schema=schema)]
    for batch in read_topic(brokers, source.topic):
        # What was sent again for other views alone is none of this one's.
        others = [o for o, views in find_addressed(batch.offsets, batch.headers).items() if view.name not in views]
        raw += len(batch) - len(others)
        seen_offsets = np.union1d(offsets.get(batch.partition, np.empty(0, np.int64)), np.array(others, np.int64))
        left = np.setdiff1d(batch.offsets, seen_offsets, assume_unique=True)
        if not len(left):
            continue
        decoded = decode(batch.take(np.searchsorted(batch.offsets, left)), source.schema).rows
        times = read_event_times(
            decoded.column(source.event_time).combine_chunks(),
            unit_us=source.event_time_unit_us,
            plausible_us=(source.plausible_from_us, source.plausible_until_us),
        )
        columns = ([batch.partition] * decoded.num_rows, decoded.column("_offset").to_pylist(), times.time_us)
        frames.append(pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema).filter(times.is_usable))
    return raw, pl.concat(frames)


def _late_only(view: FeatureView, early: pl.DataFrame, unseen: pl.DataFrame, routed: pl.DataFrame | None) -> int:
    """Count the unseen rows whose as-of window was expired by the watermark before them, as the design has it."""
    if not unseen.height or view.slide_us is None:
        return 0
    plan = compile_view(view)
    times_us = unseen["event_time_us"].to_numpy()
    unseen = unseen.with_columns(pl.Series("window_end_us", plan.end_us(plan.reached_ends(times_us) + 1)))
    if routed is not None:
        judged = unseen.join(routed, on=["partition", "offset"])
    else:
        before = early.sort("offset").with_columns(
            pl.col("watermark").dt.epoch("us").cum_max().over("partition").alias("watermark_us")
        )
        judged = unseen.sort("offset").join_asof(
            before, on="offset", by="partition", strategy="backward", check_sortedness=False
        )
    return judged.filter(pl.col("window_end_us") + view.allowed_lateness_us <= pl.col("watermark_us")).height


def _check_offline(delta: str, view: FeatureView, rows: pl.DataFrame, options: Mapping[str, str] | None) -> list[Check]:
    # A view of which no row has been stored yet has no table.
    has_table = open_table(delta, view, storage_options=options) is not None
    stored = read_features(delta, view, storage_options=options) if has_table else table_schema(view).empty_table()
    frame = pl.from_arrow(stored.select([view.entity.key, "source_partition", "pane", *ORDER_COLUMNS]))
    assert isinstance(frame, pl.DataFrame)  # noqa: S101 - a table gives a frame
    return [
        Check(
            name=f"{view.name}: rows on the topic = rows in Delta",
            expected=rows.height,
            actual=frame.height,
            detail="" if has_table else f"there is no table {table_uri(delta, view)}",
        ),
        Check(
            name=f"{view.name}: rows in Delta more than once",
            expected=0,
            actual=frame.height - frame.unique().height,
        ),
    ]


async def _check_online(redis_url: str, view: FeatureView, rows: pl.DataFrame, pseudonyms: Pseudonyms) -> list[Check]:
    newest = rows.sort([*ORDER_COLUMNS]).group_by(view.entity.key, maintain_order=True).last()
    keys = newest[view.entity.key].to_list()
    values: list[OnlineValue] = []
    async with OnlineReader(redis_url, pseudonyms=pseudonyms) as reader:
        for start in range(0, len(keys), _KEYS_PER_READ):
            values += await reader.read(view, keys[start : start + _KEYS_PER_READ], now_us=0)
    # What came before this may have expired: it was not written before it was computed.
    kept_since = None if view.ttl_us is None else datetime.now(UTC) - timedelta(microseconds=KEEP_TTLS * view.ttl_us)
    matching = expired = 0
    for row, value in zip(newest.iter_rows(named=True), values, strict=True):
        if value.status is Status.MISSING and kept_since is not None and row["computed_time"] < kept_since:
            expired += 1
            continue
        is_same_row = value.source_offset == row["source_offset"] and value.pane == row["pane"]
        served = pseudonyms.features(view, {name: row[name] for name in view.definitions})
        matching += is_same_row and value.features == served
    return [
        Check(
            name=f"{view.name}: entities = entities with their newest row online",
            expected=len(keys) - expired,
            actual=matching,
            detail=f"{expired} have expired, as the view's ttl says" if expired else "",
        )
    ]


def _check_scores(
    brokers: str, model: ModelSpec, rows: pl.DataFrame, scored_from: Mapping[int, int] | None
) -> list[Check]:
    scored = [
        json.loads(value or b"null")["request_id"]
        for batch in read_topic(brokers, model.topic)
        for value in batch.values
    ]
    rejected = [
        dict(headers or ()).get("headrace.request_id", b"").decode()
        for batch in read_topic(brokers, model.dead_letter_topic)
        for headers in batch.headers
    ]
    answered = Counter(scored) + Counter(rejected)
    early = rows.filter(pl.col("pane") == Pane.EARLY)
    if scored_from is None:
        first = cast(datetime | None, early.filter(pl.col("request_id").is_in(list(answered)))["computed_time"].min())
        is_asked = pl.lit(value=True) if first is None else pl.col("computed_time") >= first
        since = (
            ", no row has been answered yet: does the scoring role run?"
            if first is None
            else f", of the rows since {first:%Y-%m-%d %H:%M:%S} UTC, the first that was answered"
        )
    else:
        start = pl.col("_partition").replace_strict(dict(scored_from) or {0: 0}, default=0, return_dtype=pl.Int64)
        is_asked, since = pl.col("_offset") >= start, ""
    asked = early.filter(is_asked)["request_id"].to_list()
    return [
        Check(
            name=f"{model.topic}: as-of rows = scores + dead letters",
            expected=len(asked),
            actual=len(scored) + len(rejected),
            detail=f"{len(scored):,} scores + {len(rejected):,} dead letters{since}",
        ),
        Check(
            name=f"{model.topic}: requests answered other than once",
            expected=0,
            actual=len((Counter(asked) - answered) + (answered - Counter(asked))),
        ),
    ]


def _verdict(checks: Sequence[Check]) -> str:
    differing = sum(not check.is_met for check in checks)
    if not differing:
        return f"[green]Everything adds up: {len(checks)} checks.[/green]"
    return (
        f"[red]{differing} of {len(checks)} checks differ.[/red] What is still under way counts as missing: let the "
        "pipeline come to rest, and run it again."
    )


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print the sums as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("check", overflow="fold")
    table.add_column("expected", justify="right")
    table.add_column("found", justify="right")
    table.add_column("")
    for check in checks:
        mark = "[green]ok[/green]" if check.is_met else "[red]differs[/red]"
        table.add_row(check.name, f"{check.expected:,}", f"{check.actual:,}", mark)
        if check.detail:
            table.add_row(f"  [dim]{check.detail}[/dim]", "", "", "")
    console.print(table)


def audit(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False) -> None:
    """Check that topics, stores and scores add up, to the row.

    Raw topics, feature rows, dead letters, scores, Redis and Delta are compared; exit code 1 when they differ. Let the
    pipeline come to rest first: what is still under way counts as missing.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    brokers, redis_url = settings.address("kafka"), settings.address("redis")
    pseudonyms = settings.pseudonyms(application.views.values())
    reach_kafka(brokers)
    reach_redis(redis_url)
    with Console(stderr=True).status("Adding up") as status:
        checks = run_audit(
            application,
            brokers=brokers,
            redis_url=redis_url,
            pseudonyms=pseudonyms,
            delta=settings.delta,
            delta_options=settings.delta_options,
            tell=status.update,
        )
    if as_json:
        typer.echo(json.dumps([{**asdict(check), "is_met": check.is_met} for check in checks], indent=2))
    else:
        console = Console()
        print_checks(console, checks)
        console.print(_verdict(checks), highlight=False)
    if not all(check.is_met for check in checks):
        raise typer.Exit(1)
