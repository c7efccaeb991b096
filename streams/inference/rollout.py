r"""The rollout of a model version: which version scores whom, and what becomes of a new one. Pure: state in, state out.

    stable -> shadow -> canary 1 % -> 5 % -> 25 % -> 50 % -> watch -> stable
                 \________________ rollback ________________/

An entity belongs to the candidate if its hash lies below the canary's share: always the same ones, and a larger share
adds to them. Each step lasts a watch window; evidence against the candidate ends it at once, too little of it prolongs
it. After the promotion the new champion is watched for one window more against what the old one did before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError
from schemas.model import ServedVersion
from streams.inference.latency import Latency, is_slower, p99_ms

SHARES: Final = (0.01, 0.05, 0.25, 0.5)
"""Shares of the entities that a canary goes through before it is promoted."""
_HASHES: Final = 2**64
CHANCE: Final = 4.0
"""Standard deviations that are put down to chance: each step is judged some hundred times, mostly by few rows."""
_EXPECTED_ROWS: Final = 5


class Stage(StrEnum):
    """What is going on with a model."""

    STABLE = "stable"
    """The champion scores all."""
    SHADOW = "shadow"
    """The candidate scores all as well, for comparison alone."""
    CANARY = "canary"
    """The candidate scores a share of the entities, the champion the others."""
    WATCH = "watch"
    """The candidate has become the champion, and may still be taken back."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a candidate may be worse by, where chance alone would not have it so among so few rows.

    Attributes:
        window_us: How long each step lasts.
        min_rows: Rows of either version below which nothing is concluded from shares and distributions.
        max_failures: Share of failed rows above that of the champion.
        max_slowdown: Times the champion's p99 latency, in requests of about the same size.
        max_drift: Population stability index of the scores, against the champion's.
        max_loss: Brier score above that of the champion, where labels have come for ``min_rows``.
    """

    window_us: int = 300_000_000
    min_rows: int = 200
    max_failures: float = 0.01
    max_slowdown: float = 1.5
    max_drift: float = 0.2
    max_loss: float = 0.02

    def __post_init__(self) -> None:
        if self.window_us < 1 or self.min_rows < 1:
            msg = f"watch window is {self.window_us} us of at least {self.min_rows} rows, expected 1 or more of both"
            raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one version has done since a step began, over all workers.

    Attributes:
        rows: Rows given to it.
        failures: Those of them that it had no valid answer to.
        latency: How long its requests took.
        scores: Counts of its scores by bins, the same for all versions.
        labelled: Scores whose label has come.
        squared_error: Sum of squared differences of those from their labels.
    """

    rows: int = 0
    failures: int = 0
    latency: Latency = field(default_factory=dict)
    scores: tuple[int, ...] = ()
    labelled: int = 0
    squared_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Where the rollout of a model stands.

    Attributes:
        model: The model.
        champion: The version that scores whom the candidate does not.
        stage: What is going on.
        since_us: Since when, the step of the canary included.
        candidate: The version that is tried, in shadow and canary.
        previous: The champion before, while the new one is watched.
        shares: Shares of the entities that the canary goes through.
        step: Which of ``shares`` holds.
        is_held: Whether the canary stays at its last share, as an A/B test does, and is not promoted by itself.
        baseline: What the champion before did, which the new one is watched against.
        reason: Why the last change was made.
    """

    model: str
    champion: ServedVersion
    stage: Stage = Stage.STABLE
    since_us: int = 0
    candidate: ServedVersion | None = None
    previous: ServedVersion | None = None
    shares: tuple[float, ...] = SHARES
    step: int = 0
    is_held: bool = False
    baseline: Evidence | None = None
    reason: str = ""

    @property
    def share(self) -> float:
        """Share of the entities that the candidate scores."""
        return self.shares[self.step] if self.stage is Stage.CANARY else 0.0


def start_shadow(state: Rollout, candidate: ServedVersion, *, now_us: int) -> Rollout:
    """Have a candidate score beside the champion.

    Raises:
        ConfigError: Something else is going on, or it is the champion.
    """
    _see_startable(state, candidate, expected=(Stage.STABLE,))
    return replace(state, stage=Stage.SHADOW, candidate=candidate, since_us=now_us, reason="shadow asked for")


def start_canary(
    state: Rollout, candidate: ServedVersion, *, now_us: int, shares: Sequence[float] = SHARES, is_held: bool = False
) -> Rollout:
    """Have a candidate score a share of the entities, from its shadow or at once.

    Raises:
        ConfigError: Something else is going on, or the shares do not rise from above 0 to at most 1.
    """
    _see_startable(state, candidate, expected=(Stage.STABLE, Stage.SHADOW))
    wanted = tuple(shares)
    if not wanted or list(wanted) != sorted(set(wanted)) or not (wanted[0] > 0 and wanted[-1] <= 1):
        msg = f"canary shares are {wanted}, expected rising ones above 0 and up to 1, such as {SHARES}"
        raise ConfigError(msg)
    return replace(
        state,
        stage=Stage.CANARY,
        candidate=candidate,
        shares=wanted,
        step=0,
        is_held=is_held,
        since_us=now_us,
        reason="canary asked for",
    )


def promote(state: Rollout, *, now_us: int, baseline: Evidence | None = None, reason: str = "asked for") -> Rollout:
    """Make the candidate the champion, and watch it.

    Raises:
        ConfigError: There is no candidate.
    """
    if state.candidate is None:
        msg = f"model {state.model} has no candidate, expected one in shadow or canary; start one before"
        raise ConfigError(msg)
    return Rollout(
        model=state.model,
        champion=state.candidate,
        previous=state.champion,
        stage=Stage.WATCH,
        since_us=now_us,
        baseline=baseline,
        reason=f"promoted: {reason}",
    )


def roll_back(state: Rollout, *, now_us: int, reason: str = "asked for") -> Rollout:
    """Drop the candidate, or take back the champion that is being watched.

    Raises:
        ConfigError: There is nothing to take back.
    """
    if state.stage is Stage.STABLE:
        msg = f"model {state.model} is stable, expected a candidate or a champion that is watched; start a canary of "
        raise ConfigError(msg + "the version that is wanted")
    champion = state.previous if state.stage is Stage.WATCH and state.previous is not None else state.champion
    return Rollout(model=state.model, champion=champion, since_us=now_us, reason=f"rolled back: {reason}")


def observe(
    state: Rollout, *, champion: Evidence, candidate: Evidence, now_us: int, limits: Limits = Limits()
) -> Rollout:
    """Judge what happened since ``state.since_us``; the same state where nothing follows from it.

    Args:
        state: The state.
        champion: What the champion did.
        candidate: What the candidate did; nothing where there is none.
        now_us: The time.
        limits: What the candidate may be worse by.
    """
    if state.stage is Stage.STABLE:
        return state
    tried, base = (champion, state.baseline) if state.stage is Stage.WATCH else (candidate, champion)
    if (fault := _fault(tried, base or Evidence(), limits)) is not None:
        return roll_back(state, now_us=now_us, reason=fault)
    has_seen_enough = now_us - state.since_us >= limits.window_us and tried.rows >= limits.min_rows
    is_last = state.step + 1 == len(state.shares)
    if not has_seen_enough or state.stage is Stage.SHADOW or (state.is_held and is_last):
        return state
    if state.stage is Stage.WATCH:
        return Rollout(model=state.model, champion=state.champion, since_us=now_us, reason="watched to the end")
    if is_last:
        return promote(state, now_us=now_us, baseline=champion, reason="no step of the canary showed a fault")
    share = state.shares[state.step + 1]
    return replace(state, step=state.step + 1, since_us=now_us, reason=f"canary goes on to {share:g}")


def belongs_to_candidate(state: Rollout, entities: Sequence[str]) -> NDArray[np.bool_]:
    """Tell which entities the candidate scores, ``(n_entities,)``.

    The hash is keyed by model and candidate, so that it is not the same entities that meet every new version.
    """
    if state.candidate is None or state.share == 0:
        return np.zeros(len(entities), dtype=np.bool_)
    key = f"{state.model}/{state.candidate.sha256}".encode()[:64]
    bound = int(state.share * _HASHES)
    # Row by row, some 0.8 us each and only while a canary runs: no column hash here is stable over versions and keyed.
    hashes = (blake2b(entity.encode(), digest_size=8, key=key).digest() for entity in entities)
    return np.fromiter((int.from_bytes(each, "big") < bound for each in hashes), dtype=np.bool_, count=len(entities))


def stability_index(found: Sequence[int], expected: Sequence[int]) -> float:
    """Population stability index of two histograms over the same bins; above 0.2 they differ."""
    shares = [np.asarray(counts, dtype=np.float64) + 0.5 for counts in (found, expected)]  # none is empty
    got, wanted = (counts / counts.sum() for counts in shares)
    return float(np.sum((got - wanted) * np.log(got / wanted)))


def _fault(tried: Evidence, base: Evidence, limits: Limits) -> str | None:
    if tried.rows < limits.min_rows:
        return None
    failed, before = (each.failures / max(each.rows, 1) for each in (tried, base))
    pooled = (tried.failures + base.failures) / (tried.rows + base.rows)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / tried.rows + (1 / base.rows if base.rows else 0)))
    if failed - before > max(limits.max_failures, CHANCE * spread):
        return f"{failed:.2%} of its rows failed, {before:.2%} of the champion's"
    return _difference(tried, base, limits) if base.rows >= limits.min_rows else None


def _difference(tried: Evidence, base: Evidence, limits: Limits) -> str | None:
    for size in sorted(tried.latency.keys() & base.latency.keys()):
        found, expected = tried.latency[size], base.latency[size]
        if is_slower(found, expected, times=limits.max_slowdown):
            rows = f"in requests of up to {2**size} rows"
            return f"its p99 is {p99_ms(found):.1f} ms {rows}, the champion's {p99_ms(expected):.1f} ms"
    if _differ(tried.scores, base.scores):
        drift = stability_index(tried.scores, base.scores)
        if drift > limits.max_drift:
            return f"its scores are distributed otherwise than the champion's, PSI {drift:.2f}"
    if min(tried.labelled, base.labelled) >= limits.min_rows:
        loss, held = (each.squared_error / each.labelled for each in (tried, base))
        if loss > held + limits.max_loss:
            return f"its Brier score is {loss:.3f}, the champion's {held:.3f}"
    return None


def _differ(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Tell whether two histograms differ by more than chance: a chi-square test of two samples.

    The stability index itself does not tell: of the same distribution it is above 0.2 where rows are few or bins thin.
    Neighbouring bins are taken together until each is expected to hold five rows of the smaller sample. The quantile is
    by E. B. Wilson and M. M. Hilferty, The Distribution of Chi-Square, 1931.
    """
    n, m = sum(found), sum(expected)
    if not n or not m:
        return False
    bins, pending = [], np.zeros(2)
    for counts in zip(found, expected, strict=True):
        pending = pending + counts
        if pending.sum() * min(n, m) >= _EXPECTED_ROWS * (n + m):
            bins.append(pending)
            pending = np.zeros(2)
    if len(bins) < 2:
        return False
    bins[-1] = bins[-1] + pending
    one, other = np.array(bins).T
    freedom = len(bins) - 1
    spread = 2 / (9 * freedom)
    quantile = freedom * (1 - spread + CHANCE * math.sqrt(spread)) ** 3
    return float(np.sum((one * math.sqrt(m / n) - other * math.sqrt(n / m)) ** 2 / (one + other))) > quantile


def _see_startable(state: Rollout, candidate: ServedVersion, *, expected: tuple[Stage, ...]) -> None:
    is_other = state.candidate is not None and state.candidate != candidate
    if state.stage not in expected or is_other or candidate == state.champion:
        now = f"{state.stage} with champion {state.champion.version}" + (
            f" and candidate {state.candidate.version}" if state.candidate else ""
        )
        msg = (
            f"model {state.model} is {now}, expected {' or '.join(expected)} and version {candidate.version} to be "
            "neither champion nor second candidate; promote or roll back before"
        )
        raise ConfigError(msg)
