"""How often each step of scoring is tried again, as one table; afterwards comes what comes next."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from schemas.errors import InferenceTimeoutError, InferenceUnavailableError, SinkUnavailableError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[None]]

PASSING: Final = (InferenceUnavailableError, InferenceTimeoutError, SinkUnavailableError)
"""Errors that may pass."""


class Step(StrEnum):
    """A step of scoring."""

    FEATURES = "features"
    """Reading the online store; afterwards the rows wait in Kafka."""
    INFERENCE = "inference"
    """Asking the model; afterwards the ladder answers."""
    FUSION = "fusion"
    """Making scores of answers: pure, so that the same comes of it however often it is tried."""


@dataclass(frozen=True, kw_only=True)
class Retry:
    """When a step is tried again.

    Attributes:
        waits_s: Seconds before each further attempt.
        jitter: Share by which each wait is longer or shorter at random, so that workers do not come back all at once.
    """

    waits_s: tuple[float, ...] = ()
    jitter: float = 0.0


RETRIES: Final[Mapping[Step, Retry]] = {
    Step.FEATURES: Retry(waits_s=(1.0, 2.0, 4.0), jitter=0.2),
    Step.INFERENCE: Retry(waits_s=(0.02,), jitter=0.5),
    Step.FUSION: Retry(),
}


async def retried(
    call: Callable[[], Awaitable[Answer]],
    step: Step,
    *,
    failed: Callable[[], None] = lambda: None,
    may_retry: Callable[[Exception], bool] = lambda _: True,
    sleep: Sleep = asyncio.sleep,
) -> Answer:
    """Make a call, and make it again as the table says.

    Args:
        call: The call.
        step: Which step it is.
        failed: Told of each call that fails.
        may_retry: Whether a further attempt makes sense after this error.
        sleep: Waits seconds.

    Raises:
        SinkUnavailableError: As the last attempt raised it.
        InferenceUnavailableError: Likewise.
        InferenceTimeoutError: Likewise.
    """
    retry = RETRIES[step]
    for number, wait_s in enumerate(retry.waits_s, start=1):
        try:
            return await call()
        except PASSING as exc:
            failed()
            if not may_retry(exc):
                raise
            logger.warning("%s: attempt %d of %d failed: %s", step, number, len(retry.waits_s) + 1, exc)
            await sleep(wait_s * random.uniform(1 - retry.jitter, 1 + retry.jitter))  # noqa: S311 - no secret
    try:
        return await call()
    except PASSING:
        failed()
        raise
