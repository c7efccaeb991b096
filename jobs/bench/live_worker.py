"""A features worker of a benchmark's own: a process that does the job under a name that no other run has."""

import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
from confluent_kafka import Consumer, TopicPartition

from infra.local.process import exit_code, read_lines, spawn, telling_lines
from jobs.bench.job import make_view
from jobs.consumer_group import read_committed
from jobs.settings import Settings
from schemas.errors import ServiceError
from streams.transport.options import Delivery

PARTITIONS: Final = 4
_GRACE_S: Final = 15.0


class LiveWorker:
    """Runs from entering the block to leaving it, from the first event of the topic on.

    Args:
        settings: Settings of the run.
        name: Name of the view, the application and the log; new in this run.
        delivery: What it guarantees.

    Attributes:
        view: The view that it computes.
    """

    def __init__(self, settings: Settings, name: str, *, delivery: Delivery = Delivery.EXACTLY_ONCE) -> None:
        self.view = replace(make_view("latest"), name=name)
        self._application = settings.home / f"{name}.py"
        self._log = settings.home / "logs" / f"{name}.log"
        self._environment = {
            **settings.environment,
            "HEADRACE_APP": str(self._application),
            "HEADRACE_DELIVERY": str(delivery),
        }
        self._consumer = Consumer(
            {
                "bootstrap.servers": settings.address("kafka"),
                "group.id": f"headrace.{name}.features",
                "isolation.level": "read_uncommitted",
            }
        )

    def __enter__(self) -> Self:
        self._application.write_text(
            "from dataclasses import replace\n"
            "from jobs.bench.job import make_view\n"
            f'VIEWS = [replace(make_view("latest"), name="{self.view.name}")]\n'
        )
        argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", "features", "--metrics-port", "0"]
        self._identity = spawn(argv, environment=self._environment, cwd=Path.cwd(), log=self._log)
        self._process = psutil.Process(self._identity.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._consumer.close()
        self._identity.end(grace_s=_GRACE_S)

    def n_committed(self) -> int:
        """Events that it has committed.

        Raises:
            ServiceError: It has ended.
        """
        if not self._identity.is_alive():
            tail = telling_lines(read_lines(self._log, since_bytes=0))
            msg = f"the worker ended with exit code {exit_code(self._identity.pid)}; {self._log} ends with:\n{tail}"
            raise ServiceError(msg)
        partitions = [TopicPartition(self.view.input.topic, number) for number in range(PARTITIONS)]
        return sum(max(0, tp.offset) for tp in read_committed(self._consumer, partitions))

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        used = self._process.cpu_times()
        return float(used.user + used.system)

    def resident_bytes(self) -> int:
        """Memory that it holds."""
        return int(self._process.memory_info().rss)
