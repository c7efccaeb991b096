"""``headrace models load|compare|shadow|canary|promote|rollback|status``: the life of a model version."""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from jobs.application import load_application
from jobs.reach import reach_kafka
from jobs.settings import Settings
from offline.card import ModelCard, load_card, loaded_versions, versions, write_config
from schemas.errors import ConfigError, InferenceError
from schemas.model import ModelSpec
from schemas.time import parse_duration_us
from streams.inference.rollout import SHARES, Limits, Rollout, Stage, promote, roll_back, start_canary, start_shadow
from streams.inference.rollout_log import Entry, RolloutLog, View
from streams.inference.tally import count_bins
from streams.inference.triton import TritonModel

TOLERANCE: Final = 0.01
"""Largest difference from the golden rows of its card with which a version may begin to score."""

Model = Annotated[str, typer.Argument(help="Name of the model.")]
Version = Annotated[int, typer.Argument(help="Its version, as in the model repository.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
Reason = Annotated[str, typer.Option(help="Why; it is kept with the state.")]
_DEFAULTS: Final = Limits()
Window = Annotated[str, typer.Option(help="How long each step is watched, such as 5m.")]
MinRows = Annotated[int, typer.Option(help="Rows of each version below which nothing is concluded.")]
MaxFailures = Annotated[float, typer.Option(help="Share of failed rows above the champion's that is too much.")]
MaxSlowdown = Annotated[float, typer.Option(help="Times the champion's p99 latency that is too much.")]
MaxDrift = Annotated[float, typer.Option(help="Population stability index of the scores that is too much.")]
Tolerance = Annotated[float, typer.Option(help="Largest |difference| from the golden rows of its card.", min=0.0)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A model of the application, and where it runs.

    Attributes:
        settings: The settings of the run.
        spec: The model's contract.
        is_light: Whether it is a light model, which has no rollout: its newest version answers.
    """

    settings: Settings
    spec: ModelSpec
    is_light: bool

    def card(self, version: int) -> ModelCard:
        """Read the card of a version, which must be there and fit the contract."""
        repository, name = self.settings.model_repository, self.spec.name
        if version not in (held := versions(repository, name)):
            msg = (
                f"model {name} has no version {version} in {repository}, expected one of {held}; train it (`headrace "
                "train`) or get it from the model store (`headrace models fetch`)"
            )
            raise ConfigError(msg)
        card = load_card(repository, name, version)
        card.check(self.spec)
        return card

    def server(self, card: ModelCard) -> TritonModel:
        """Make a client of a version."""
        url = self.settings.address("triton")
        return TritonModel(self.spec, card.served_version, url=url, golden=card.golden_rows)

    def log(self) -> RolloutLog:
        """Open the topic of the rollout."""
        brokers = self.settings.address("kafka")
        reach_kafka(brokers)
        return RolloutLog(brokers, self.spec)


def load(*, model: Model, version: Version, as_json: AsJson = False) -> None:
    """Load a version beside those in use, warm it up, and prove it by the golden rows of its card.

    Where there is a rollout, versions that it does not use are unloaded. Nothing is scored by it yet:
    `shadow` and `canary` begin that.
    """
    place = find_place(model, is_light_too=True)
    card, started = place.card(version), time.perf_counter()
    repository = place.settings.model_repository
    loaded = write_config(repository, place.spec, loaded=[version, *_in_use(place)])

    async def run() -> None:
        async with place.server(card) as server:
            await server.connect(timeout_s=5.0)

    asyncio.run(run())
    document = {"model": model, "version": version, "sha256": card.sha256, "loaded": loaded}
    _print(
        document | {"took_s": round(time.perf_counter() - started, 3)},
        f"{model} version {version} is loaded and answers as its card says; on the server: {loaded}",
        as_json=as_json,
    )


def compare(*, model: Model, version: Version, tolerance: Tolerance = TOLERANCE, as_json: AsJson = False) -> None:
    """Compare what a loaded version answers to the golden rows of its card with what it did in training.

    The exit code is 1 where it is off by more than the tolerance.
    """
    place = find_place(model, is_light_too=True)
    card = place.card(version)
    off = asyncio.run(_differences(place, card))
    is_within = all(each <= tolerance for each in off.values())
    _print(
        {
            "model": model,
            "version": version,
            "rows": len(card.golden),
            "max_difference": {name: None if math.isnan(each) else each for name, each in off.items()},
            "tolerance": tolerance,
            "is_within": is_within,
        },
        f"{model} version {version}, {len(card.golden)} golden rows: "
        + ", ".join(f"{name} off by at most {each:.2e}" for name, each in off.items()),
        as_json=as_json,
    )
    if not is_within:
        raise _off(place, version, off, tolerance)


def shadow(
    *,
    model: Model,
    version: Version,
    window: Window = "5m",
    min_rows: MinRows = _DEFAULTS.min_rows,
    max_failures: MaxFailures = _DEFAULTS.max_failures,
    max_slowdown: MaxSlowdown = _DEFAULTS.max_slowdown,
    max_drift: MaxDrift = _DEFAULTS.max_drift,
    tolerance: Tolerance = TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Have a version score beside the champion; what it answers is compared, and never published."""
    limits = _limits(window, min_rows, max_failures, max_slowdown, max_drift)
    place = find_place(model)
    candidate = _seen_to_answer(place, version, tolerance)
    _change(
        place,
        lambda view: Entry(
            generation=0,
            state=start_shadow(_state(place, view).state, candidate.served_version, now_us=_now_us()),
            limits=limits,
        ),
        as_json=as_json,
    )


def canary(
    *,
    model: Model,
    version: Version,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Share of the entities, once for each step.", show_default=" ".join(map(str, SHARES))),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Stay at the last share, as for an A/B test.")] = False,
    window: Window = "5m",
    min_rows: MinRows = _DEFAULTS.min_rows,
    max_failures: MaxFailures = _DEFAULTS.max_failures,
    max_slowdown: MaxSlowdown = _DEFAULTS.max_slowdown,
    max_drift: MaxDrift = _DEFAULTS.max_drift,
    tolerance: Tolerance = TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Have a version score a share of the entities, always the same ones, and more of them step by step.

    It is promoted after the last step, and rolled back by itself where it fails, is slow, or scores otherwise.
    """
    limits = _limits(window, min_rows, max_failures, max_slowdown, max_drift)
    place = find_place(model)
    candidate = _seen_to_answer(place, version, tolerance)
    _change(
        place,
        lambda view: Entry(
            generation=0,
            state=start_canary(
                _state(place, view).state,
                candidate.served_version,
                now_us=_now_us(),
                shares=share or SHARES,
                is_held=hold,
            ),
            limits=limits,
        ),
        as_json=as_json,
    )


def promote_(*, model: Model, reason: Reason = "asked for", as_json: AsJson = False) -> None:
    """Make the candidate in shadow or canary the champion now; it is watched for one window more."""
    place = find_place(model)

    def decide(view: View) -> Entry:
        entry = _state(place, view)
        baseline = view.tally(entry.state.champion).evidence
        return replace(entry, state=promote(entry.state, now_us=_now_us(), baseline=baseline, reason=reason))

    _change(place, decide, as_json=as_json)


def rollback(*, model: Model, reason: Reason = "asked for", as_json: AsJson = False) -> None:
    """Drop the candidate, or take back a champion that is still being watched."""
    place = find_place(model)

    def decide(view: View) -> Entry:
        entry = _state(place, view)
        return replace(entry, state=roll_back(entry.state, now_us=_now_us(), reason=reason))

    _change(place, decide, as_json=as_json)


def status(*, model: Model, as_json: AsJson = False) -> None:
    """Show which version scores whom, why, and what each has done since this step began."""
    place = find_place(model)
    with place.log() as log:
        view = log.read()
    _show(place, _state(place, view), view, as_json=as_json)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``headrace models``."""
    commands: dict[str, Callable[..., None]] = {"promote": promote_}
    commands = {each.__name__: each for each in (load, compare, shadow, canary)} | commands
    for name, command in (commands | {"rollback": rollback, "status": status}).items():
        app.command(name)(command)


def find_place(model: str, *, is_light_too: bool = False) -> Place:
    """Find a model of the application.

    Raises:
        ConfigError: The application has none of that name.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    known = application.served_models if is_light_too else application.models
    if model not in known:
        msg = f"model {model!r} is not served by {application.module}, expected one of {sorted(known)}"
        raise ConfigError(msg)
    return Place(settings=settings, spec=known[model], is_light=model not in application.models)


def _in_use(place: Place) -> list[int]:
    """Versions that may score: those of the rollout, or all that are loaded where there is none (light models)."""
    if place.is_light:
        return loaded_versions(place.settings.model_repository, place.spec.name)
    with place.log() as log:
        entry = log.read().entry
    if entry is None:
        return loaded_versions(place.settings.model_repository, place.spec.name)
    used = (entry.state.champion, entry.state.candidate, entry.state.previous)
    return [int(each.version) for each in used if each is not None]


def _limits(window: str, min_rows: int, max_failures: float, max_slowdown: float, max_drift: float) -> Limits:
    return Limits(
        window_us=parse_duration_us(window, field="--window"),
        min_rows=min_rows,
        max_failures=max_failures,
        max_slowdown=max_slowdown,
        max_drift=max_drift,
    )


def _seen_to_answer(place: Place, version: int, tolerance: float) -> ModelCard:
    """See that a version is loaded, and answers as its card says, before it scores anybody."""
    card = place.card(version)
    off = asyncio.run(_differences(place, card))
    if not all(each <= tolerance for each in off.values()):
        raise _off(place, version, off, tolerance)
    return card


async def _differences(place: Place, card: ModelCard) -> dict[str, float]:
    async with place.server(card) as server:
        await server.attach()
        return await server.differences(card.golden_rows)


def _off(place: Place, version: int, off: dict[str, float], tolerance: float) -> InferenceError:
    msg = (
        f"model {place.spec.name} version {version} answers the golden rows of its card off by {off}, expected at "
        f"most {tolerance:g}; see whether the server runs the file that the card was made with"
    )
    return InferenceError(msg)


def _state(place: Place, view: View) -> Entry:
    if view.entry is None:
        msg = (
            f"the rollout of model {place.spec.name} has no state on topic {place.spec.rollout_topic}, expected a "
            "champion there; start a scoring worker (`headrace worker --role scoring`): the first one begins with the "
            "newest version that the repository holds"
        )
        raise ConfigError(msg)
    return view.entry


def _change(place: Place, decide: Callable[[View], Entry], *, as_json: bool) -> None:
    with place.log() as log:
        made = log.change(decide)
        if made is None:
            raise AssertionError
        _show(place, made, View(n_bins=count_bins(place.spec.outputs[0]), entry=made), as_json=as_json)


def _show(place: Place, entry: Entry, view: View, *, as_json: bool) -> None:
    state = entry.state
    named = {"champion": state.champion, "candidate": state.candidate, "previous": state.previous}
    document: dict[str, Any] = {
        "model": place.spec.name,
        "generation": entry.generation,
        "stage": str(state.stage),
        **{role: None if each is None else each.version for role, each in named.items()},
        "share": state.share,
        "shares": list(state.shares) if state.stage is Stage.CANARY else [],
        "is_held": state.is_held,
        "since_us": state.since_us,
        "reason": state.reason,
        "window_us": entry.limits.window_us,
        "min_rows": entry.limits.min_rows,
        "versions": {
            each.version: _described(view, each.version, state)
            for each in (state.champion, state.candidate)
            if each is not None
        },
    }
    lines = [f"{place.spec.name}: {_sentence(state)} ({state.reason})"]
    # While nothing is decided, nothing is counted.
    for number, seen in {} if state.stage is Stage.STABLE else document["versions"].items():
        lines.append(f"  version {number}: {seen['rows']} rows, {seen['failures']} failed, p99 {seen['p99_ms']} ms")
        if seen["compared"]:
            lines[-1] += f", {seen['compared']} compared: off by at most {seen['difference_max']:.4f}"
    _print(document, "\n".join(lines), as_json=as_json)


def _described(view: View, version: str, state: Rollout) -> dict[str, Any]:
    served = state.champion if state.champion.version == version else state.candidate
    tally = view.tally(served)
    return {
        "rows": tally.rows,
        "failures": tally.failures,
        "p99_ms": round(tally.p99_ms, 2) if tally.rows else None,
        "scores": tally.scores.tolist(),
        "compared": tally.compared,
        "difference_mean": tally.difference_sum / tally.compared if tally.compared else None,
        "difference_max": tally.difference_max if tally.compared else None,
    }


def _sentence(state: Rollout) -> str:
    champion = f"champion is version {state.champion.version}"
    match state.stage:
        case Stage.STABLE:
            return champion
        case Stage.SHADOW:
            return f"{champion}, version {state.candidate and state.candidate.version} in its shadow"
        case Stage.CANARY:
            return f"{champion}, version {state.candidate and state.candidate.version} scores {state.share:.0%}"
        case Stage.WATCH:
            return f"{champion} and is watched, version {state.previous and state.previous.version} before it"


def _print(document: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        Console(highlight=False).print(escape(text), soft_wrap=True)


def _now_us() -> int:
    return time.time_ns() // 1_000
