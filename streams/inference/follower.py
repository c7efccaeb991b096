"""Keeps a worker at what the log of a rollout says, and the log at what the worker has seen.

Each round: (1) read what has come; (2) where it is another generation, open and warm its versions, and only then have
them answer, while what is under way ends on the old ones; (3) post what was seen of each version; (4) whoever decides
judges what all workers have seen. A log that does not answer stops none of the scoring: who answers whom stays as it
was, and what was seen is posted once it is back.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, ParamSpec, TypeVar

from schemas.errors import HeadraceError, InferenceTimeoutError, InferenceUnavailableError
from streams.inference.rollout import Stage, observe, roll_back
from streams.inference.rollout_log import Entry, RolloutLog, View
from streams.inference.scorer import Scorer
from streams.inference.tally import merged
from streams.inference.versions import Versions

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_ROUND_S: Final = 0.5
_POST_S: Final = 1.0
_PAUSE_S: Final = 2.0
"""Before what failed is tried again."""


class RolloutFollower:
    """Follows the rollout of one model; belongs to one event loop, and to one thread besides, which waits for Kafka.

    Args:
        log: The log.
        scorer: Scores; its arms are of the state as the worker began.
        versions: Makes the arms of each generation.
        worker: Name of this worker among those of the model.
        clock_us: The time.
    """

    def __init__(
        self,
        log: RolloutLog,
        *,
        scorer: Scorer,
        versions: Versions,
        worker: str,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self._log = log
        self._scorer = scorer
        self._versions = versions
        self._worker = worker
        self._clock_us = clock_us
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._posted_s = -_POST_S

    async def connect(self) -> None:
        """Connect the versions that answer at present; see :meth:`Versions.connect`."""
        await self._versions.connect(self._scorer.arms)

    async def run(self, decides: Callable[[], bool]) -> None:
        """Follow until cancelled.

        Args:
            decides: Whether this worker is the one that judges, at present.
        """
        is_read = False
        try:
            while True:
                try:
                    view = await (self._aside(self._log.poll, _ROUND_S) if is_read else self._aside(self._log.read))
                    is_read = True
                    await self._take(view)
                    await self._tell(view, decides=decides())
                except HeadraceError as exc:
                    version = self._scorer.arms.entry.state.champion.version
                    logger.warning("version %s stays the champion here, next try in %.0f s: %s", version, _PAUSE_S, exc)
                    is_read = False
                    await asyncio.sleep(_PAUSE_S)
        finally:
            # What the thread is waiting for may take a while: nobody waits for it.
            self._thread.submit(self._log.close)
            self._thread.shutdown(wait=False)

    async def _take(self, view: View) -> None:
        """Have the versions of another generation answer, once they are warm."""
        entry, before = view.entry, self._scorer.arms
        if entry is None or entry.generation == before.entry.generation:
            return
        try:
            arms = self._versions.arms(entry, seen=view.seen_by(self._worker))
            await self._versions.connect(arms)
        except (InferenceUnavailableError, InferenceTimeoutError):
            raise  # the server is away, which is no fault of the version
        except HeadraceError as exc:
            await self._refuse(entry, exc)
            raise
        self._scorer.use(arms)
        logger.info("generation %d of the rollout: %s", entry.generation, entry.state.reason)
        await before.close()
        await self._versions.close_unused(entry)

    async def _refuse(self, entry: Entry, error: HeadraceError) -> None:
        """Take back a new champion that this worker can never have; who was champion before goes on here."""

        def decide(view: View) -> Entry | None:
            if view.entry is None or view.entry.generation != entry.generation:
                return None
            return replace(entry, state=roll_back(entry.state, now_us=self._clock_us(), reason=reason))

        reason = f"worker {self._worker} cannot score with version {entry.state.champion.version}: {error}"
        if entry.state.stage is Stage.WATCH:
            await self._aside(self._log.change, decide)

    async def _tell(self, view: View, *, decides: bool) -> None:
        """Post what this worker has seen, and judge what all of them have."""
        arms = self._scorer.arms
        if (
            view.entry is None
            or view.entry.generation != arms.entry.generation
            or view.entry.state.stage is Stage.STABLE
        ):
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._posted_s >= _POST_S:
            self._posted_s = now_s
            # Copies: scoring counts on while the thread writes them.
            tallies = {version: merged([tally]) for version, tally in arms.tallies.items()}
            await self._aside(self._log.post, self._worker, generation=arms.entry.generation, tallies=tallies)
        if decides and self._judge(view) is not None:
            await self._aside(self._log.change, self._judge)

    def _judge(self, view: View) -> Entry | None:
        entry = view.entry
        if entry is None:
            return None
        champion, candidate = (view.tally(each).evidence for each in (entry.state.champion, entry.state.candidate))
        state = observe(
            entry.state, champion=champion, candidate=candidate, now_us=self._clock_us(), limits=entry.limits
        )
        return None if state is entry.state else replace(entry, state=state)

    async def _aside(
        self, function: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """Call what waits for Kafka on the thread that does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))
