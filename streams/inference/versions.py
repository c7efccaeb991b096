"""The versions of a model that a worker has open: generations of a rollout come and go, what they share stays."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.errors import ConfigError, HeadraceError, InferenceUnavailableError
from schemas.ladder import NO_LADDER
from schemas.model import ModelSpec, ServedVersion
from streams.inference.answer import Answers
from streams.inference.arms import Answering, Arms
from streams.inference.guard import GuardedModel
from streams.inference.rollout_log import Entry
from streams.inference.served_model import LightRung, ServedModel
from streams.inference.tally import Tally

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenVersion:
    """A version on the model server.

    Attributes:
        model: The version, asked only while it answers.
        connect: Loads it where it is not loaded, warms it up, and proves it by its card.
        close: Ends the connection.
    """

    model: GuardedModel
    connect: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class _Held:
    """An open version in both roles; recent answers of a champion outlive the steps of a canary."""

    version: OpenVersion
    champion: ServedModel
    candidate: ServedModel
    is_connected: bool = False
    is_connecting: bool = False
    check: asyncio.Task[None] | None = None


class Versions:
    """Makes the arms of each generation; belongs to one event loop.

    Args:
        spec: The model's contract.
        open_version: Opens a version, without a call of the server.
        light: The light model, of whichever champion.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        open_version: Callable[[ServedVersion], OpenVersion],
        light: Sequence[LightRung] = (),
    ) -> None:
        self._spec = spec
        self._untended = replace(spec, ladder=NO_LADDER)
        self._open_version = open_version
        self._light = light
        self._held: dict[ServedVersion, _Held] = {}

    def arms(self, entry: Entry, *, seen: Mapping[str, Tally] | None = None) -> Arms:
        """Make the arms of a generation, none of whose versions need be connected yet.

        A candidate that cannot be opened here takes part all the same: each of its rows is the champion's, and counts
        against it.

        Args:
            entry: The generation.
            seen: What this worker has seen of each version in it.

        Raises:
            ConfigError: The champion cannot be opened here.
        """
        state = entry.state
        champion = self._hold(state.champion).champion
        candidate: Answering | None = None
        if state.candidate is not None:
            try:
                candidate = self._hold(state.candidate).candidate
            except ConfigError as exc:
                logger.error("version %s of %s cannot be tried here: %s", state.candidate.version, self._spec.name, exc)
                candidate = _Absent(served=state.candidate, error=exc)
        previous: Answering | None = None
        if state.previous is not None:
            with contextlib.suppress(ConfigError):  # it may be gone by now: nothing is judged by it then
                previous = self._hold(state.previous).candidate
        return Arms(entry, champion=champion, candidate=candidate, previous=previous, seen=seen)

    async def connect(self, arms: Arms) -> None:
        """Connect the versions of a generation that are not connected yet.

        Raises:
            HeadraceError: The champion cannot be used. A candidate that cannot is told and left as it is: its rows are
                the champion's, and count against it.
        """
        await self._connect(arms.entry.state.champion)
        for other in (arms.entry.state.candidate, arms.entry.state.previous):
            if other is None or other not in self._held:
                continue
            try:
                await self._connect(other)
            except HeadraceError as exc:
                logger.error("version %s of %s cannot be used here: %s", other.version, self._spec.name, exc)

    async def watch(self, every_s: float) -> None:
        """Check each version that is open, every so many seconds (a fifth more or less at random), until cancelled.

        A check may take long, where a version is brought back: the others are not kept from theirs by it.
        """
        try:
            while True:
                await asyncio.sleep(every_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
                for held in self._held.values():
                    if not held.is_connecting and (held.check is None or held.check.done()):
                        held.check = asyncio.create_task(self._check(held))
        finally:
            for held in list(self._held.values()):
                await _end(held.check)

    async def _check(self, held: _Held) -> None:
        try:
            await held.version.model.check()
        except Exception:
            logger.exception("a version of %s could not be checked", self._spec.name)

    async def close_unused(self, entry: Entry) -> None:
        """Close the versions that a generation does not name; nothing may be under way with them any more."""
        state = entry.state
        for served in self._held.keys() - {state.champion, state.candidate, state.previous}:
            held = self._held.pop(served)
            # A check that is under way would find its connection closed.
            await _end(held.check)
            await held.version.model.close()
            await held.version.close()

    async def _connect(self, served: ServedVersion) -> None:
        held = self._held[served]
        if held.is_connected:
            return
        held.is_connecting = True
        try:
            await held.version.connect()
        finally:
            held.is_connecting = False
        held.is_connected = True

    def _hold(self, served: ServedVersion) -> _Held:
        if (held := self._held.get(served)) is None:
            version = self._open_version(served)
            held = self._held[served] = _Held(
                version=version,
                champion=ServedModel(self._spec, served, model=version.model, light=self._light),
                candidate=ServedModel(self._untended, served, model=version.model),
            )
        return held


async def _end(check: asyncio.Task[None] | None) -> None:
    if check is not None:
        check.cancel()
        await asyncio.wait([check])


@dataclass(frozen=True, kw_only=True)
class _Absent:
    """A version that this worker cannot have: it never answers."""

    served: ServedVersion
    error: ConfigError

    async def answer(self, *_: Any, **__: Any) -> Answers:
        raise InferenceUnavailableError(str(self.error)) from self.error
