"""A model server behind a circuit breaker: what does not answer is left alone, and comes back by itself.

While the circuit is open no row of a stream waits for the model. A probe of one row, made aside every second, finds out
whether it answers again, and tries to bring it back; so a stream that has fallen silent finds the model ready too.
While it is closed a check every few seconds finds what died although its server calls it ready, before a row does.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.errors import (
    HeadraceError,
    InferenceError,
    InferenceTimeoutError,
    InferenceUnavailableError,
    TensorMismatchError,
)
from streams.breaker import PAUSE_S, Breaker
from streams.inference.healing import Healing, Probed
from streams.inference.retry import Sleep, Step, retried
from streams.ports import Inference, ModelServer, Recovery

logger = logging.getLogger(__name__)

FAILURES: Final = 3
"""Failed batches in a row after which a model is not asked any more."""
MAX_PARTS: Final = 128
"""Requests that are made at most to find the rows of a batch which a model fails."""

Matrix = NDArray[np.float32]


class GuardedModel:
    """One version of a model on a server, asked only while it answers.

    Args:
        name: Name of the model, for messages.
        server: Where it runs.
        probe: ``(1, n_features)`` float32, a row that a working model answers.
        timeout_s: How long a batch may take, a second attempt included.
        failures: Failed batches in a row that open the circuit.
        pause_s: Seconds between probes.
        probe_failed: Told of each check that is not answered, as :class:`~streams.inference.healing.Probed` has it.
        healed: Told when the model was loaded anew although its server called it ready, and answers since.
        sleep: Waits seconds.
    """

    def __init__(
        self,
        name: str,
        server: ModelServer,
        *,
        probe: Matrix,
        timeout_s: float,
        failures: int = FAILURES,
        pause_s: float = PAUSE_S,
        probe_failed: Callable[[str], None] = lambda _: None,
        healed: Callable[[], None] = lambda: None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._name = name
        self._server = server
        self._probe = probe
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._probe_failed = probe_failed
        self._healed = healed
        self._healing = Healing()
        self._sleep = sleep
        self._breaker = Breaker(
            name,
            failures=failures,
            pause_s=pause_s,
            counted=(InferenceUnavailableError, InferenceTimeoutError),
            refuse=lambda message, _: InferenceUnavailableError(message),
        )
        self._probing: asyncio.Task[None] | None = None
        self._fault: HeadraceError | None = None

    @property
    def is_open(self) -> bool:
        """Whether the model is left alone at present."""
        return self._breaker.is_open

    async def infer(self, matrix: Matrix, *, failed: Callable[[], None] = lambda: None) -> Inference:
        """Ask the model, twice if need be; rows that alone make it fail are ``rejected``, and cost no others.

        Args:
            matrix: ``(n_rows, n_features)``, at least one row.
            failed: Told of each call that fails.

        Raises:
            InferenceUnavailableError: The model does not answer, or is known not to.
            InferenceTimeoutError: It does not in time.
            TensorMismatchError: It refuses whatever it is given: it is another model than the contract's.
            ConfigError: What was brought back is another model.
        """
        if self._fault is not None:
            raise self._fault
        if self.is_open:
            # The probe alone asks: no row is to wait for a model that may be away.
            msg = f"model {self._name} has not answered several times in a row: it is left alone for now"
            raise InferenceUnavailableError(msg)
        try:
            return await self._breaker.call(lambda: self._ask(matrix, failed=failed))
        except (InferenceUnavailableError, InferenceTimeoutError):
            if self.is_open:
                self.probe()
            raise

    def probe(self) -> None:
        """Begin to look whether the model answers, until it does; returns at once."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_until_back())

    async def check(self) -> None:
        """Ask the model one row beside those of the stream; bring it back where it fails again and again.

        Not done while the circuit is open: the probe asks and brings back then.
        """
        if self.is_open or self._fault is not None:
            return
        probed = await self._probed()
        if probed is not Probed.ANSWERED:
            logger.warning("model %s: a check of one row %s", self._name, probed)
            self._probe_failed(probed)
        self._healing = self._healing.after_probe(probed)
        if not self._healing.is_due(asyncio.get_running_loop().time()):
            return
        try:
            await self._recover()
        except HeadraceError as exc:
            self._give_up(exc)

    async def close(self) -> None:
        """End the probe."""
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing

    async def _ask(self, matrix: Matrix, *, failed: Callable[[], None]) -> Inference:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s

        def has_time(error: Exception) -> bool:
            return not isinstance(error, InferenceTimeoutError) and loop.time() < deadline_s

        try:
            return await retried(
                lambda: self._server.infer(matrix, timeout_s=max(0.001, deadline_s - loop.time())),
                Step.INFERENCE,
                failed=failed,
                may_retry=has_time,
                sleep=self._sleep,
            )
        except InferenceTimeoutError:
            raise
        except (InferenceUnavailableError, TensorMismatchError) as exc:
            if not await self._answers():
                raise
            logger.warning("model %s fails on some of %d rows: %s", self._name, len(matrix), exc)
            return await self._without_failing_rows(matrix, error=exc)

    async def _answers(self) -> bool:
        return await self._probed() is Probed.ANSWERED

    async def _probed(self) -> Probed:
        try:
            answer = await self._server.infer(self._probe, timeout_s=self._timeout_s)
        except InferenceTimeoutError:
            return Probed.LATE
        except TensorMismatchError:
            return Probed.REFUSED
        except InferenceError:
            return Probed.FAILED
        return Probed.REFUSED if answer.rejected else Probed.ANSWERED

    async def _recover(self) -> None:
        """Try to bring the model back, unless that was tried a moment ago."""
        loop = asyncio.get_running_loop()
        if not self._healing.may_try(loop.time()):
            return
        recovery = await self._server.recover()
        self._healing = self._healing.after_recovery(recovery, now_s=loop.time())
        if recovery is Recovery.HEALED:
            self._healed()

    async def _without_failing_rows(self, matrix: Matrix, *, error: InferenceError) -> Inference:
        """Halve the batch until the rows that fail stand alone; beside them the model answers."""
        outputs: dict[str, NDArray[np.generic]] = {}
        rejected: list[tuple[range, str]] = []
        waiting, n_asked, faults = [range(len(matrix))], 0, {range(len(matrix)): error}
        while waiting:
            part = waiting.pop()
            if len(part) == 1:
                rejected.append((part, f"model {self._name} fails on this row: {faults[part]}"))
                continue
            middle = part.start + len(part) // 2
            for half in (range(part.start, middle), range(middle, part.stop)):
                if n_asked == MAX_PARTS:
                    fault = f"model {self._name} fails on rows of this batch, too many to be told apart: {error}"
                    rejected.append((half, fault))
                    continue
                n_asked += 1
                try:
                    answer = await self._server.infer(matrix[half.start : half.stop], timeout_s=self._timeout_s)
                except (InferenceUnavailableError, TensorMismatchError) as exc:
                    faults[half] = exc
                    waiting.append(half)
                    continue
                for name, array in answer.outputs.items():
                    whole = outputs.setdefault(name, np.zeros((len(matrix), *array.shape[1:]), dtype=array.dtype))
                    whole[half.start : half.stop] = array
                rejected += [(range(half.start + r.start, half.start + r.stop), f) for r, f in answer.rejected]
        return Inference(outputs=outputs, rejected=sorted(rejected, key=lambda fault: fault[0].start))

    async def _probe_until_back(self) -> None:
        while True:
            try:
                await self._breaker.call(lambda: self._server.infer(self._probe, timeout_s=self._timeout_s))
            except InferenceTimeoutError:
                pass  # it is slow, not gone: to load it anew would make it slower
            except InferenceUnavailableError:
                try:
                    await self._recover()
                except HeadraceError as exc:
                    self._give_up(exc)
                    return
            except TensorMismatchError as exc:
                self._give_up(exc)
                return
            else:
                logger.info("model %s answers again", self._name)
                return
            await self._sleep(self._pause_s)

    def _give_up(self, error: HeadraceError) -> None:
        logger.error("model %s is another one than expected and is not asked any more: %s", self._name, error)
        self._fault = error
