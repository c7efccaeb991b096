"""Watches a worker from a thread of its own, and ends it when it stands still although there is work.

A consumer that has stopped without an error is the failure that nobody notices: lag grows, and every process is there.
The watch asks the broker itself how far the topics go, on a connection of its own, and compares that with what the
worker has done. It asks the event loop and the poll thread for a sign too: one that hangs stops everything.

Time is counted in looks and not by a clock: in a process that was frozen for an hour, no hour has passed.
"""

import asyncio
import concurrent.futures
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import faust
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from schemas.errors import HeadraceError
from streams.observability.health import Health, Progress
from streams.observability.metrics import Metrics
from streams.transport.options import Partition

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
_ENDS_EVERY_S: Final = 5.0
_JOIN_TIMEOUT_S: Final = 300.0
"""For so long (``max.poll.interval.ms``) a group may wait for a member that is busy."""
_ASK_TIMEOUT_S: Final = 10.0
_WAIT_SHOWN_S: Final = 10.0
"""How long it is told of a store that it did not answer."""


class _EndedError(Exception):
    """The worker has ended."""


class StalledError(HeadraceError):
    """The worker stands still although there is work."""


class Watch:
    """Looks at a worker each second; see the module's docstring.

    Args:
        app: The worker's app.
        role: Its role.
        metrics: Tells of stores that do not answer, and takes lag and pauses.
        health: Takes what is seen.
        stall_timeout_s: How long the worker may stand still.
        end_in_time: Ends the process after a while, should it not have ended by then.
    """

    def __init__(
        self,
        app: faust.App,
        *,
        role: str,
        metrics: Metrics,
        health: Health,
        stall_timeout_s: float,
        end_in_time: Callable[[], None],
    ) -> None:
        self._app = app
        self._role = role
        self._metrics = metrics
        self._health = health
        self._stall_timeout_s = stall_timeout_s
        self._end_in_time = end_in_time
        self._progress = Progress(stall_timeout_s=stall_timeout_s)
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._now_s = 0.0
        self._joining_s = 0.0
        self._ends: dict[Partition, int] = {}
        self._admin: AdminClient | None = None
        self._polled: concurrent.futures.Future[None] | None = None
        self._poll_asked_s = 0.0
        self._retries: Mapping[str, int] = {}
        self._retried_s: dict[str, float] = {}
        self._stopping = threading.Event()

    async def start(self) -> None:
        """Begin; called on the worker's event loop once it runs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(INTERVAL_S):
                self._now_s += INTERVAL_S
                if self._now_s % _ENDS_EVERY_S == 0:
                    self._ask_ends()
                done = self._look()
                stalls = self._progress.look(self._now_s, done=done, ends=self._ends) + self._join_stalls()
                stalls += self._poll_stalls()
                if stalls:
                    raise StalledError("; ".join(stalls))
        except _EndedError:
            return
        except StalledError as exc:
            self._give_up(str(exc))
        except Exception as exc:
            logger.exception("the watch has failed")
            self._give_up(f"nothing is known of it, since the watch has failed: {exc!r}")

    def _look(self) -> dict[Partition, int]:
        """Look on the event loop.

        Raises:
            _EndedError: The worker has ended.
            StalledError: The loop does not come to it.
        """
        answer: concurrent.futures.Future[dict[Partition, int]] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, answer)
        except RuntimeError as exc:  # the loop is closed
            raise _EndedError from exc
        waited_s = 0.0
        while waited_s < self._stall_timeout_s:
            try:
                return answer.result(INTERVAL_S)
            except concurrent.futures.TimeoutError:
                waited_s += INTERVAL_S
        msg = f"the event loop has been busy for {waited_s:.0f} s"
        raise StalledError(msg)

    def _answer(self, answer: "concurrent.futures.Future[dict[Partition, int]]") -> None:
        try:
            answer.set_result(self._look_on_loop())
        except Exception as exc:
            answer.set_exception(exc)

    def _look_on_loop(self) -> dict[Partition, int]:
        consumer = self._app.consumer
        consumer.ends.update(self._ends)
        done: dict[Partition, int] = consumer.done()
        for (topic, partition), records in consumer.lags().items():
            self._metrics.consumer_lag(self._role, topic=topic, partition=partition, records=records)
        self._metrics.paused(self._role, consumer.paused_s())
        self._health.waits_for(self._waits(done))
        return done

    def _waits(self, done: Mapping[Partition, int]) -> list[str]:
        waits = []
        for store, retries in self._metrics.retries.items():
            if retries != self._retries.get(store, 0):
                self._retried_s[store] = self._now_s
                self._progress.excuse()
        self._retries = dict(self._metrics.retries)
        waits += [
            f"{store} does not answer" for store, at in self._retried_s.items() if self._now_s - at <= _WAIT_SHOWN_S
        ]
        consumer = self._app.consumer
        self._joining_s = self._joining_s + INTERVAL_S if consumer.is_joining else 0.0
        if self._app.should_stop or self._app.headrace.has_failed:
            waits.append("the worker is ending")
        elif consumer.is_joining:
            waits.append("the consumer group is being balanced")
        elif unstarted := sorted(consumer.poller.assignment - done.keys()):
            names = ", ".join(f"{topic}-{number}" for topic, number in unstarted)
            waits.append(f"partitions are being restored: {names}")
        return waits

    def _ask_ends(self) -> None:
        kafka: dict[str, Any] = self._app.headrace.kafka
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": kafka["bootstrap.servers"], "log_level": 2})
        partitions = {TopicPartition(*tp): OffsetSpec.latest() for tp in self._app.consumer.poller.flowing}  # type: ignore[no-untyped-call]  # its gap
        try:
            if not partitions:
                self._admin.list_topics(timeout=_ASK_TIMEOUT_S)
                return
            answers = self._admin.list_offsets(
                partitions, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_ASK_TIMEOUT_S
            )
            self._ends.update(
                {(tp.topic, tp.partition): answer.result(2 * _ASK_TIMEOUT_S).offset for tp, answer in answers.items()}
            )
        except (KafkaException, concurrent.futures.TimeoutError):
            self._progress.excuse()  # a broker that does not answer us gives the worker no rows either
            self._joining_s = 0.0

    def _join_stalls(self) -> list[str]:
        if self._joining_s < _JOIN_TIMEOUT_S + self._stall_timeout_s:
            return []
        return [f"the consumer group has given no partitions for {self._joining_s:.0f} s"]

    def _poll_stalls(self) -> list[str]:
        """Tell where the thread that talks to Kafka gives no sign: every call of the consumer goes through it."""
        if self._polled is None or self._polled.done():
            self._polled = self._app.consumer.poller.call(lambda _: None)
            self._poll_asked_s = self._now_s
        elif self._now_s - self._poll_asked_s >= self._stall_timeout_s:
            return [f"the poll thread has given no sign for {self._now_s - self._poll_asked_s:.0f} s"]
        return []

    def _give_up(self, stall: str) -> None:
        if self._app.should_stop or self._app.headrace.has_failed:
            return  # it ends already, inside its own deadline
        self._health.stalled([stall])
        msg = (
            f"the worker stands still: {stall}. It ends with exit code 1, to be started again; what its threads were "
            "doing stands on its standard error"
        )
        logger.critical(msg)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._app.headrace.has_failed = True
        self._end_in_time()
        asyncio.run_coroutine_threadsafe(self._app.crash(StalledError(msg)), self._loop)
