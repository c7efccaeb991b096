"""``headrace drift``: are a model's inputs still distributed as in training?"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer
from prometheus_client import CollectorRegistry, Gauge
from rich.console import Console
from rich.table import Table

from jobs.application import load_application
from jobs.backfill import moment_us
from jobs.drift_scores import ScoreWindow, read_score_windows
from jobs.metrics_file import write_metrics_file
from jobs.reach import reach_kafka
from jobs.settings import Settings
from offline.card import ModelCard, read_card, read_profile, versions
from offline.drift import Drift, Verdict, judge_inputs, low_confidence_share
from offline.model_input import as_of_rows, join_inputs, matrix_without_defaults
from offline.profile import TrainingProfile
from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.row import TIMESTAMP
from schemas.time import format_rfc3339, parse_duration_us, parse_rfc3339_us
from schemas.view import FeatureView
from streams.sinks.offline import read_features

DRIFTED: Final = 3
"""Exit code where an input has drifted: neither a wrong setting (2) nor a failure to look (1)."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A model's inputs in ``[start, end)`` of event time.

    Attributes:
        start_us: Its first microsecond.
        end_us: The one after its last.
        rows: Rows that were, or would have been, scored.
        inputs: What was found by input name.
    """

    start_us: int
    end_us: int
    rows: int
    inputs: Mapping[str, Drift]


def drift(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    *,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="From this event time on; a date or RFC 3339.", show_default="after training"),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Before this event time; a date or RFC 3339.", show_default="the newest window, which is not over"
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(help="Length of a window; one that is shorter than a day sees the time of day as drift.")
    ] = "1d",
    version: Annotated[
        int | None, typer.Option(min=1, help="Version whose training to compare with.", show_default="the newest")
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Compare the scores on the model's topic with its answers in training too.")
    ] = False,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=1.0, help="Probability of the likelier side below which confidence is low.")
    ] = 0.6,
    metrics_file: Annotated[
        Path | None,
        typer.Option(help="Write metrics here, for the textfile collector of Prometheus' node exporter."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, of all windows, in place of a table.")] = False,
) -> None:
    """Compare the distribution of a model's inputs with that of its training set, by windows of event time.

    The inputs are those of the offline store, joined as for training: what the online store would have answered at the
    event's time. Drift is a population stability index (PSI) of 0.2 or more, or of 0.1 or more where Kolmogorov-Smirnov
    has p < 0.05 too. Windows with too few rows are not judged. With `--scores` what the version has answered is
    compared with its answers to the rows that it was measured on. Exit code 3 where anything has drifted, 1 where no
    window has been judged.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    if model not in application.models:
        msg = f"model {model!r} is not defined in {application.module}, expected one of {sorted(application.models)}"
        raise ConfigError(msg)
    spec = application.models[model]
    width_us = parse_duration_us(window, field="--window")
    if width_us <= 0:
        msg = f"`--window` is {window}, expected more than 0, such as 1d"
        raise ConfigError(msg)
    card, profile = _trained(spec, settings.model_repository, version)
    since_us = _first_us(from_, profile, width_us=width_us)
    until_us = moment_us(to, "--to")
    if until_us is not None and until_us <= since_us:
        msg = f"`--from` is {format_rfc3339(since_us)} and `--to` is {to}, expected the earlier one first"
        raise ConfigError(msg)
    if scores and not profile.outputs:
        msg = (
            f"the profile of {model} version {card.version} has no answers, expected some of each output; "
            f"train it anew (`headrace train --version {card.version}`), or leave `--scores` out"
        )
        raise ConfigError(msg)
    settings.check_delta()
    brokers = settings.address("kafka") if scores else None
    found = read_windows(
        spec,
        profile,
        views=application.views,
        root=settings.delta,
        since_us=since_us,
        until_us=until_us,
        width_us=width_us,
        storage_options=settings.delta_options,
    )
    answered: list[ScoreWindow] = []
    if brokers is not None:
        reach_kafka(brokers)
        answered = read_score_windows(
            brokers,
            spec,
            card,
            profile.outputs,
            since_us=since_us,
            until_us=until_us,
            width_us=width_us,
            confidence=confidence,
        )
    if until_us is None:
        # The newest window is not over yet: a morning is no day.
        found, answered = found[:-1] or found, answered[:-1] or answered
    if metrics_file is not None and found:
        write_metrics_file(metrics_file, drift_metrics(card, found, answered))
    if as_json:
        typer.echo(json.dumps(_document(spec, card, profile, found, answered), indent=2))
    elif found:
        _print(card, profile, found)
    if answered and not as_json:
        _print_scores(profile, answered, confidence=confidence)
    verdicts = {each.verdict for part in found for each in part.inputs.values()}
    verdicts |= {each.verdict for part in answered for each in part.outputs.values()}
    if verdicts <= {Verdict.TOO_FEW_ROWS}:
        since = format_rfc3339(since_us)
        typer.echo(
            f"Nothing was judged: {sum(part.rows for part in found):,} rows in {len(found):,} windows from {since} on, "
            "expected some hundred in a window; name an earlier `--from`, or a longer `--window`.",
            err=True,
        )
        raise typer.Exit(1)
    if Verdict.DRIFT in verdicts:
        raise typer.Exit(DRIFTED)


def read_windows(
    spec: ModelSpec,
    profile: TrainingProfile,
    *,
    views: Mapping[str, FeatureView],
    root: str,
    since_us: int,
    until_us: int | None,
    width_us: int,
    storage_options: Mapping[str, str] | None = None,
) -> list[Window]:
    """Read a model's inputs from the offline store, and judge them window by window; windows without rows are left out.

    Args:
        spec: The model.
        profile: Its training's.
        views: The views by name.
        root: Root of the offline store.
        since_us: First event time of a row scored.
        until_us: The event time after the last; None for all there is.
        width_us: Length of a window, which are aligned to the epoch.
        storage_options: Options of the object store, as delta-rs takes them.

    Raises:
        SchemaMismatchError: A table belongs to another definition.
        SinkUnavailableError: A table does not exist, or the storage does not answer.
    """
    # The day leaves out whole partitions of the table.
    since = pa.scalar(since_us, TIMESTAMP)
    wanted = (pc.field("event_date") >= since.as_py().date()) & (pc.field("event_time") >= since)
    before = None
    if until_us is not None:
        until = pa.scalar(until_us, TIMESTAMP)
        before = (pc.field("event_date") <= until.as_py().date()) & (pc.field("event_time") < until)
        wanted &= before
    tables = {
        reference.name: read_features(
            root,
            views[reference.name],
            where=wanted if reference == spec.trigger else before,
            storage_options=storage_options,
        )
        for reference in spec.views
    }
    triggers = as_of_rows(tables[spec.trigger.name])
    joined = join_inputs(spec, triggers, views=views, tables=tables)
    matrix = matrix_without_defaults(spec, joined.columns, n_rows=triggers.num_rows)
    starts = triggers["event_time"].cast(pa.int64()).to_numpy() // width_us * width_us
    return [
        Window(
            start_us=int(start),
            end_us=int(start) + width_us,
            rows=int((starts == start).sum()),
            inputs=judge_inputs(profile.features, matrix[starts == start]),
        )
        for start in np.unique(starts)
    ]


def _trained(spec: ModelSpec, repository: Path, version: int | None) -> tuple[ModelCard, TrainingProfile]:
    if version is not None and version not in (held := versions(repository, spec.name)):
        msg = f"model {spec.name} has no version {version} in {repository}, expected one of {held}; train it"
        raise ConfigError(msg)
    card = read_card(repository, spec.name, version)
    card.check(spec)
    profile = read_profile(repository, card)
    if [*profile.features] != (names := [item.name for item in spec.inputs]):
        msg = (
            f"the profile of {spec.name} version {card.version} has {[*profile.features]}, expected {names}; train anew"
        )
        raise ConfigError(msg)
    return card, profile


def _first_us(from_: str | None, profile: TrainingProfile, *, width_us: int) -> int:
    """The event time to begin at: where nothing is said, the window after that in which training ended."""
    since_us = moment_us(from_, "--from")
    return parse_rfc3339_us(profile.until) // width_us * width_us + width_us if since_us is None else since_us


def _default_share(spec: ModelSpec, name: str, missing_share: float | None) -> float | None:
    (item,) = (item for item in spec.inputs if item.name == name)
    return missing_share if item.default is not None else 0.0


def _document(
    spec: ModelSpec,
    card: ModelCard,
    profile: TrainingProfile,
    found: Sequence[Window],
    answered: Sequence[ScoreWindow],
) -> dict[str, Any]:
    return {
        "model": card.name,
        "version": card.version,
        "training": {
            "since": profile.since,
            "until": profile.until,
            "inputs": {
                name: {"rows": kept.rows, "missing_share": kept.missing_share, "median": kept.median}
                for name, kept in profile.features.items()
            },
        },
        "windows": [
            {
                "start": format_rfc3339(part.start_us),
                "end": format_rfc3339(part.end_us),
                "rows": part.rows,
                "inputs": {
                    name: {**asdict(each), "default_share": _default_share(spec, name, each.missing_share)}
                    for name, each in part.inputs.items()
                },
            }
            for part in found
        ],
        "scores": [
            {
                "start": format_rfc3339(part.start_us),
                "end": format_rfc3339(part.end_us),
                **{name: value for name, value in asdict(part).items() if name not in ("start_us", "end_us")},
            }
            for part in answered
        ],
    }


def _print(card: ModelCard, profile: TrainingProfile, found: Sequence[Window]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 150)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("input", "windows", "drifted", "worst", "PSI", "KS", "p", "median", "trained", "missing", "trained"):
        table.add_column(title, justify="left" if title in ("input", "worst") else "right", no_wrap=True)
    for name, kept in profile.features.items():
        judged = [(part, part.inputs[name]) for part in found if part.inputs[name].psi is not None]
        if not judged:
            table.add_row(name, "0", "0", "too few rows")
            continue
        drifted = sum(each.verdict is Verdict.DRIFT for _, each in judged)
        part, worst = max(judged, key=lambda pair: pair[1].psi or 0.0)
        table.add_row(
            name,
            f"{len(judged):,}",
            f"[bold red]{drifted:,}[/]" if drifted else "[green]0[/]",
            format_rfc3339(part.start_us)[:16],
            *(_number(number) for number in (worst.psi, worst.ks, worst.p_value, worst.median, kept.median)),
            f"{worst.missing_share:.1%}",
            f"{kept.missing_share:.1%}",
        )
    console.print(table)
    console.print(
        f"{card.name} version {card.version}, {sum(part.rows for part in found):,} rows in {len(found):,} windows from "
        f"{format_rfc3339(found[0].start_us)[:16]} on; trained on {profile.since[:10]} to {profile.until[:10]}",
        soft_wrap=True,
    )


def _print_scores(profile: TrainingProfile, answered: Sequence[ScoreWindow], *, confidence: float) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    titles = ("PSI", "KS", "p", "median", "trained", "low confidence", "trained", "fallback", "incomplete")
    for title in ("output", "window", "scores", *titles):
        table.add_column(title, justify="left" if title in ("output", "window") else "right", no_wrap=True)
    for part in answered:
        for name, each in part.outputs.items():
            kept = profile.outputs[name]
            low, trained_low = part.low_confidence_shares.get(name), None
            if low is not None:
                trained_low = low_confidence_share(np.repeat(kept.values, kept.counts), confidence)
            color = "bold red" if each.verdict is Verdict.DRIFT else "default"
            table.add_row(
                f"[{color}]{name}[/]",
                format_rfc3339(part.start_us)[:16],
                f"{part.rows:,}",
                *(_number(number) for number in (each.psi, each.ks, each.p_value, each.median, kept.median)),
                *(_share(share) for share in (low, trained_low, part.fallback_share, part.incomplete_share)),
            )
    console = Console(highlight=False)
    console.width = max(console.width, 150)
    console.print(table)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,.3g}"


def drift_metrics(card: ModelCard, found: Sequence[Window], answered: Sequence[ScoreWindow]) -> CollectorRegistry:
    """Metrics of the newest window that could be judged, or else of the newest one; of at least one window."""
    judged = [part for part in found if any(each.psi is not None for each in part.inputs.values())]
    newest = (judged or found)[-1]
    registry = CollectorRegistry()

    def gauge(name: str, said: str, *labels: str) -> Gauge:
        return Gauge(f"headrace_drift_{name}", said, ["model", "version", *labels], registry=registry)

    of_input = {
        "psi": gauge("psi", "Population stability index against training, in the newest window judged", "input"),
        "ks": gauge("ks", "Kolmogorov-Smirnov distance from training", "input"),
        "missing_share": gauge("missing_ratio", "Share of rows without a value", "input"),
    }
    drifted = gauge("drifted", "Whether the input has drifted", "input")
    at = (card.name, str(card.version))
    for name, each in newest.inputs.items():
        drifted.labels(*at, name).set(each.verdict is Verdict.DRIFT)
        for statistic, shown in of_input.items():
            if (number := getattr(each, statistic)) is not None:
                shown.labels(*at, name).set(number)
    output_psi = gauge("output_psi", "Population stability index of scores, in their newest window judged", "output")
    low_confidence = gauge("low_confidence_ratio", "Share of scores of low confidence", "output")
    scored = [part for part in answered if any(each.psi is not None for each in part.outputs.values())]
    for part in scored[-1:]:
        for name, each in part.outputs.items():
            if each.psi is not None:
                output_psi.labels(*at, name).set(each.psi)
        for name, share in part.low_confidence_shares.items():
            if share is not None:
                low_confidence.labels(*at, name).set(share)
    gauge("window_rows", "Rows of that window").labels(*at).set(newest.rows)
    gauge("window_end_timestamp_seconds", "End of that window, in event time").labels(*at).set(newest.end_us / 1e6)
    gauge("checked_timestamp_seconds", "When drift was checked").labels(*at).set_to_current_time()
    return registry
