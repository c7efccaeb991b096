"""The online role as a process, on a real Kafka, while its Redis is killed: nothing is lost, nothing goes back."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from infra.local.port import choose_ports
from infra.local.process import wait_until
from infra.local.services import LocalServices
from jobs.application import Application, consumer_groups, load_application
from jobs.consumer_group import is_caught_up
from jobs.freshness import BREACHED
from jobs.role import Role
from jobs.topics import ensure_topics, plan_topics
from schemas.view import FeatureView
from streams.sinks.online import OnlineReader, OnlineValue
from streams.wire import encode_rows
from tests.integration.conftest import MakeServices
from tests.support.feature_rows import T0_US, make_rows
from tests.support.kafka import produce

MODULE = """
from streams import Entity, EventSource, FeatureView, Serving, count

VIEWS = [
    FeatureView(
        "{name}",
        version=1,
        entity=Entity("user", key="user_id"),
        source=EventSource("{name}.events", contract="shop_event@1"),
        slide="1m",
        serving=Serving(freshness="{freshness}", freshness_share=0.9),
        features={{"n": count().over("5m")}},
    )
]
"""


@dataclass
class Rig:
    """An application of one view on the shared Kafka, and a Redis of its own.

    Attributes:
        application: The application.
        view: Its view.
        kafka: Bootstrap servers.
        redis: URL of its Redis.
        services: Its Redis, to be killed and started.
        environment: Environment of its commands.
        metrics_port: Port of the worker's metrics.
        offset: Offset of the next event that makes a row.
    """

    application: Application
    view: FeatureView
    kafka: str
    redis: str
    services: LocalServices
    environment: dict[str, str]
    metrics_port: int
    offset: int = 0

    def produce(self, *rows: dict[str, Any]) -> None:
        produce(self.kafka, self.view.topic, encode_rows(make_rows(self.view, rows)))

    def rows(self, n_entities: int, *, end_us: int, broker_time_us: int | None = None) -> list[dict[str, Any]]:
        """Rows of entities as of a window end; ``n`` is a number of its own in each."""
        made = []
        for entity in range(n_entities):
            self.offset += 1
            came_us = time.time_ns() // 1_000 if broker_time_us is None else broker_time_us
            made.append(
                {
                    "user_id": f"u{entity}",
                    "window_end": end_us,
                    "source_offset": self.offset,
                    "n": self.offset,
                    "broker_time": came_us,
                }
            )
        return made

    @contextlib.contextmanager
    def working(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run an online worker; killed at the end."""
        ports = ["--metrics-port", str(self.metrics_port)]
        command = [sys.executable, "-m", "jobs.cli", "worker", "--role", "online", *ports]
        process = subprocess.Popen(command, env=self.environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def until_caught_up(self, process: "subprocess.Popen[bytes]") -> None:
        group, (topic,) = consumer_groups(self.application)[Role.ONLINE]
        assert wait_until(lambda: is_caught_up(self.kafka, group, topic), timeout_s=90, poll_s=0.2)
        assert process.poll() is None

    def read(self, entities: Sequence[str]) -> list[OnlineValue]:
        async def read() -> list[OnlineValue]:
            async with OnlineReader(self.redis) as reader:
                return await reader.read(self.view, entities, now_us=T0_US)

        return asyncio.run(read())

    def freshness(self) -> tuple[int, dict[str, Any]]:
        """Run ``headrace freshness``; gives its exit code and its report."""
        command = [sys.executable, "-m", "jobs.cli", "freshness", "--json", "--metrics-port", str(self.metrics_port)]
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert ended.stdout, ended.stderr
        (report,) = json.loads(ended.stdout)
        return ended.returncode, report

    def metric(self, name: str) -> float:
        """Sum the samples of a metric of the worker."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture
def rig(kafka: str, make_services: MakeServices, tmp_path: Path, request: pytest.FixtureRequest) -> Rig:
    name = f"shop_{uuid4().hex[:8]}"
    module = tmp_path / f"{name}.py"
    module.write_text(MODULE.format(name=name, freshness=getattr(request, "param", "1h")))
    services = make_services()
    redis = services.up(["redis"]).redis
    assert redis is not None
    environment = {
        **os.environ,
        "HEADRACE_APP": str(module),
        "HEADRACE_HOME": str(tmp_path / "home"),
        "HEADRACE_KAFKA": kafka,
        "HEADRACE_REDIS": redis,
    }
    application = load_application(str(module))
    views = list(application.views.values())
    ensure_topics(kafka, plan_topics(views, []), partitions=1)
    port = choose_ports({"metrics": 0})["metrics"]
    return Rig(application, views[0], kafka, redis, services, environment, port)


def test_rows_wait_in_kafka_while_redis_is_killed_and_are_caught_up_with(rig: Rig) -> None:
    entities = [f"u{i}" for i in range(50)]
    with rig.working() as process:
        rig.produce(*rig.rows(50, end_us=T0_US))
        rig.until_caught_up(process)
        rig.services.kill("redis")
        newer = [row for n in range(1, 40) for row in rig.rows(50, end_us=T0_US + n)]
        rewound = rig.rows(50, end_us=T0_US - 1)
        rig.produce(*reversed(newer), *newer, *rewound)
        assert wait_until(lambda: rig.metric("headrace_store_retries_total") > 0, timeout_s=60, poll_s=0.2)
        assert process.poll() is None
        rig.services.start("redis")
        rig.until_caught_up(process)
        expected = [row["n"] for row in newer[-50:]]
        assert [value.features.get("n") for value in rig.read(entities)] == expected
        # What comes again, as after a restored snapshot of the state, finds newer values.
        rig.produce(*newer[:500])
        rig.until_caught_up(process)
        assert [value.features.get("n") for value in rig.read(entities)] == expected
    code, report = rig.freshness()
    assert (code, report["unreadable_rows"], report["breaches"]) == (0, 0, [])
    assert report["checked_rows"] == 200


@pytest.mark.parametrize("rig", ["5s"], indirect=True)
def test_a_breach_is_an_exit_code_whether_a_worker_tells_of_it_or_none_is_there(rig: Rig) -> None:
    hour_ago_us = time.time_ns() // 1_000 - 3_600_000_000
    with rig.working() as process:
        rig.produce(*rig.rows(50, end_us=T0_US, broker_time_us=hour_ago_us))
        rig.until_caught_up(process)
        code, report = rig.freshness()
        assert (code, report["breaches"]) == (BREACHED, ["write", "read"])
        assert (report["written_rows"], report["checked_rows"], report["unreadable_rows"]) == (50, 50, 0)
    rig.produce(*rig.rows(50, end_us=T0_US + 1, broker_time_us=hour_ago_us))
    code, report = rig.freshness()
    assert (code, report["breaches"], report["written_rows"]) == (BREACHED, ["now"], None)
    assert (report["checked_rows"], report["unreadable_rows"]) == (100, 50)
    assert report["oldest_unreadable_ms"] >= 3_600_000
