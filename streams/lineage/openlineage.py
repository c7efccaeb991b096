"""OpenLineage events of what the roles read and write.

A stream has no end, and a run that never completes is never shown. So each job tells of windows of processing time:
one run with one COMPLETE event holds everything the job did in the window, and stands for itself.

Telling never holds data back: it puts a note into a bounded queue; a thread gathers the notes and sends the events.
What cannot be queued or sent is counted, logged at most once a minute, and given up.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState, set_producer
from openlineage.client.facet_v2 import job_type_job, nominal_time_run, processing_engine_run
from openlineage.client.transport import Transport, get_default_factory
from openlineage.client.uuid import generate_new_uuid

from schemas.errors import ConfigError, LineageError
from schemas.model import ModelSpec
from schemas.time import format_rfc3339
from schemas.view import FeatureView
from streams.lineage.dataset import (
    PartitionOffsets,
    Stores,
    feature_output,
    feature_topic,
    looked_up,
    raw_topics,
    score_output,
)

logger = logging.getLogger(__name__)

NAMESPACE: Final = "headrace"
"""Namespace of the jobs."""

_LOG_INTERVAL_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 5.0
_VERSION: Final = version("headrace")
_PRODUCER: Final = f"urn:headrace:{_VERSION}"


class LineageMetrics(Protocol):
    """Where the emitter counts what it has sent and lost."""

    def lineage_sent(self) -> None:
        """Count an event that was sent."""
        ...

    def lineage_failed(self, reason: str, *, events: int = 1) -> None:
        """Count what was lost: ``queue_full``, ``rejected`` or ``closed``."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Note:
    role: str
    view: FeatureView
    model: ModelSpec | None
    model_version: str
    topic: str
    partition: int
    offsets: tuple[int, int]
    rows: int
    output_rows: int
    started_us: int
    ended_us: int


@dataclass(kw_only=True)
class _Window:
    """What one job did since its last event."""

    last: _Note
    started_us: int
    ended_us: int
    output_rows: int = 0
    partitions: dict[int, PartitionOffsets] = field(default_factory=dict)

    def add(self, note: _Note) -> None:
        self.last = note
        self.started_us = min(self.started_us, note.started_us)
        self.ended_us = max(self.ended_us, note.ended_us)
        self.output_rows += note.output_rows
        start, end = note.offsets
        read = self.partitions.setdefault(note.partition, PartitionOffsets(note.partition, start, end, 0))
        read.startOffset = min(read.startOffset, start)
        read.endOffset = max(read.endOffset, end)
        read.rowCount += note.rows


class LineageEmitter:
    """Sends OpenLineage events from a thread of its own; never blocks and never raises once it is made.

    Args:
        transport: A file that takes one event a line (made with its directories), an OpenLineage transport
            configuration such as ``{"type": "http", "url": "http://marquez:5000"}``, or a transport.
        stores: Where the datasets are.
        metrics: Where events sent and lost are counted.
        window_s: Seconds of processing time that one event of a job covers.
        queue_size: Notes that may wait; about 300 bytes each.
        clock_us: Tells the time in microseconds since the epoch.

    Raises:
        ConfigError: The transport cannot be made.
    """

    def __init__(
        self,
        transport: str | Path | Mapping[str, Any] | Transport,
        *,
        stores: Stores | None = None,
        metrics: LineageMetrics | None = None,
        window_s: float = 10.0,
        queue_size: int = 10_000,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        set_producer(_PRODUCER)
        self._client = _make_client(transport)
        self._stores = stores or Stores()
        self._metrics = metrics
        self._window_s = window_s
        self._clock_us = clock_us
        self._queue: queue.Queue[_Note | None] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._last_log_s = -_LOG_INTERVAL_S
        self._log_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lineage", daemon=True)
        self._thread.start()

    def batch_done(
        self,
        role: str,
        *,
        view: FeatureView,
        topic: str,
        partition: int,
        offsets: tuple[int, int],
        rows: int,
        started_us: int,
        output_rows: int | None = None,
    ) -> None:
        """Tell of a batch of a view that the features, online or offline role has finished.

        Args:
            role: features, online or offline.
            view: The view.
            topic: Topic that was read.
            partition: Its partition.
            offsets: First offset read, and the one after the last.
            rows: Records read.
            started_us: When the work on the batch began.
            output_rows: Rows written; as many as were read when left out.
        """
        self._put(
            _Note(
                role=role,
                view=view,
                model=None,
                model_version="",
                topic=topic,
                partition=partition,
                offsets=offsets,
                rows=rows,
                output_rows=rows if output_rows is None else output_rows,
                started_us=started_us,
                ended_us=self._clock_us(),
            )
        )

    def scores_done(
        self,
        model: ModelSpec,
        *,
        view: FeatureView,
        partition: int,
        offsets: tuple[int, int],
        rows: int,
        scores: int,
        started_us: int,
        model_version: str = "",
    ) -> None:
        """Tell of a batch that the scoring role has finished.

        Args:
            model: The model.
            view: The view whose rows were scored.
            partition: Partition of the view's topic.
            offsets: First offset read, and the one after the last.
            rows: Rows read.
            scores: Scores written.
            started_us: When the work on the batch began.
            model_version: Version of the model that scored.
        """
        self._put(
            _Note(
                role="scoring",
                view=view,
                model=model,
                model_version=model_version,
                topic=view.topic,
                partition=partition,
                offsets=offsets,
                rows=rows,
                output_rows=scores,
                started_us=started_us,
                ended_us=self._clock_us(),
            )
        )

    def close(self, timeout: float = 5.0) -> bool:
        """Send what is waiting and stop; further notes are counted as lost.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether everything was sent or given up in time.
        """
        if not self._closing.is_set():
            self._closing.set()
            with contextlib.suppress(queue.Full):  # then the thread is awake anyway
                self._queue.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        with contextlib.suppress(queue.Empty):  # told of while the thread was ending
            while True:
                if self._queue.get_nowait() is not None:
                    self._lost("closed", "the emitter is closed")
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, note: _Note) -> None:
        if self._closing.is_set():
            self._lost("closed", "the emitter is closed")
            return
        try:
            self._queue.put_nowait(note)
        except queue.Full:
            self._lost("queue_full", f"{self._queue.maxsize} notes wait, the transport is too slow")

    def _run(self) -> None:
        windows: dict[tuple[str, str], _Window] = {}
        due_s = 0.0
        is_open = True
        while is_open:
            wait_s = max(due_s - time.monotonic(), 0.0) if windows else None
            try:
                note = self._queue.get(timeout=wait_s)
            except queue.Empty:
                note = None
            if note is not None:
                due_s = due_s if windows else time.monotonic() + self._window_s
                _gather(windows, note)
            is_open = not (self._closing.is_set() and self._queue.empty())
            if not is_open or time.monotonic() >= due_s:
                self._send_all(windows)
        self._client.close(timeout=_CLOSE_TIMEOUT_S)

    def _send_all(self, windows: dict[tuple[str, str], _Window]) -> None:
        for window in windows.values():
            try:
                self._send(window)
            except LineageError as exc:
                self._lost("rejected", str(exc))
            else:
                if self._metrics is not None:
                    self._metrics.lineage_sent()
        windows.clear()

    def _send(self, window: _Window) -> None:
        try:
            self._client.emit(self._event(window))
        except Exception as exc:
            # A transport may raise anything; nothing of it may end the thread.
            msg = f"event of {window.last.role} could not be sent: {type(exc).__name__}: {exc}"
            raise LineageError(msg) from exc

    def _event(self, window: _Window) -> RunEvent:
        note = window.last
        inputs, outputs = self._datasets(window)
        return RunEvent(
            eventType=RunState.COMPLETE,
            eventTime=format_rfc3339(window.ended_us),
            producer=_PRODUCER,
            run=Run(
                runId=str(generate_new_uuid()),
                facets={
                    "nominalTime": nominal_time_run.NominalTimeRunFacet(
                        format_rfc3339(window.started_us), format_rfc3339(window.ended_us)
                    ),
                    "processing_engine": processing_engine_run.ProcessingEngineRunFacet(_VERSION, "Headrace"),
                },
            ),
            job=Job(
                NAMESPACE,
                f"{note.role}.{note.model.name if note.model else note.view.name}",
                facets={
                    "jobType": job_type_job.JobTypeJobFacet(
                        processingType="STREAMING",
                        integration="HEADRACE",
                        jobType=note.role.upper(),
                        emissionPattern=job_type_job.EmissionPattern(
                            eventTrigger="PERIODIC",
                            eventContentMode="COMPLETE_SNAPSHOT",
                            windowDuration=max(1, round(self._window_s)),
                        ),
                    )
                },
            ),
            inputs=inputs,
            outputs=outputs,
        )

    def _datasets(self, window: _Window) -> tuple[list[InputDataset], list[OutputDataset]]:
        note, stores = window.last, self._stores
        partitions = [window.partitions[number] for number in sorted(window.partitions)]
        if note.model is not None:
            scored = feature_topic(stores, note.view, partitions=partitions)
            lookups = [looked_up(stores, view.name, version=view.version) for view in note.model.lookups]
            output = score_output(stores, note.model, model_version=note.model_version, rows=window.output_rows)
            return [scored, *lookups], [output]
        output = feature_output(stores, note.view, role=note.role, rows=window.output_rows)
        if note.role == "features":
            return raw_topics(stores, note.view, partitions=partitions), [output]
        return [feature_topic(stores, note.view, partitions=partitions)], [output]

    def _lost(self, reason: str, detail: str) -> None:
        if self._metrics is not None:
            self._metrics.lineage_failed(reason)
        with self._log_lock:
            now_s = time.monotonic()
            if now_s - self._last_log_s < _LOG_INTERVAL_S:
                return
            self._last_log_s = now_s
        logger.warning("lineage lost (%s), data goes on: %s", reason, detail)


def _gather(windows: dict[tuple[str, str], _Window], note: _Note) -> None:
    job = (note.role, note.model.name if note.model else note.view.name)
    if job not in windows:
        windows[job] = _Window(last=note, started_us=note.started_us, ended_us=note.ended_us)
    windows[job].add(note)


def _make_client(transport: str | Path | Mapping[str, Any] | Transport) -> OpenLineageClient:
    try:
        made = transport if isinstance(transport, Transport) else _make_transport(transport)
    except Exception as exc:
        # The library raises whatever its transports do. A configuration may hold a key: its type alone is named.
        named = f"of type {transport.get('type')!r}" if isinstance(transport, Mapping) else f"to file {transport}"
        msg = (
            f"lineage transport {named} cannot be made ({exc}), expected a file that can be written, or a "
            "configuration such as {'type': 'http', 'url': 'http://host:5000'}"
        )
        raise ConfigError(msg) from exc
    # The repository the process was started in need not be that of the definitions.
    return OpenLineageClient(transport=made, config={"facets": {"source_code_location": {"disabled": True}}})


def _make_transport(transport: str | Path | Mapping[str, Any]) -> Transport:
    if isinstance(transport, Mapping):
        if "type" not in transport:
            msg = "it has no `type`"
            raise ValueError(msg)
        return get_default_factory().create(dict(transport))
    Path(transport).parent.mkdir(parents=True, exist_ok=True)
    return get_default_factory().create({"type": "file", "log_file_path": str(transport), "append": "true"})
