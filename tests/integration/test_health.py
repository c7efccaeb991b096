"""A worker that stands still is told from one at rest, ends by itself, and the next one goes on."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.process import exit_code, wait_until
from streams.agents.watch import INTERVAL_S
from tests.support.kafka import TIMEOUT_S
from tests.support.stuck_worker import ROWS
from tests.support.workbench import Workbench

STALL_S = 4


@pytest.fixture
def bench(kafka: str, tmp_path: Path) -> Iterator[Workbench]:
    made = Workbench(kafka, tmp_path)
    made.settings["HEADRACE_STALL_TIMEOUT"] = f"{STALL_S}s"
    made.define("a")
    yield made
    if made.worker is not None and made.worker.is_alive():
        made.worker.end(grace_s=TIMEOUT_S)


def asked(bench: Workbench, path: str) -> tuple[int, list[str]]:
    """Ask the worker of its health; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{bench.port}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read())["reasons"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["reasons"]
    except OSError:
        return 0, []


def test_a_worker_that_stands_still_while_rows_wait_ends_and_the_next_one_loses_nothing(bench: Workbench) -> None:
    bench.start(module="tests.support.stuck_worker")
    bench.send(ROWS)
    bench.until(lambda: len(bench.as_of("a")) == ROWS, "what comes before is processed")
    bench.until(lambda: asked(bench, "/readyz") == (200, []), "the worker is ready")
    worker = bench.worker
    assert worker is not None
    bench.send(50)
    assert wait_until(lambda: not worker.is_alive(), timeout_s=TIMEOUT_S), bench.log.read_text()[-2_000:]
    assert exit_code(worker.pid) == 1
    said = bench.log.read_text()
    assert f"{bench.topic}-0 has stood at offset {ROWS} for {STALL_S} s, 50 offsets" in said, said[-2_000:]
    assert "Thread 0x" in said, "what its threads did is told"
    bench.start()
    bench.drain()
    assert bench.as_of("a") == bench.each_once(ROWS + 50)


def test_a_worker_at_rest_is_live_and_ready_and_not_ready_once_it_ends(bench: Workbench) -> None:
    bench.start()
    bench.send(10)
    bench.drain()
    bench.until(lambda: asked(bench, "/readyz") == (200, []), "the worker is ready")
    # Its last record lies before the marker of a transaction: to have nothing to do is no standstill.
    rested_s = time.monotonic() + STALL_S + 2 * INTERVAL_S
    bench.until(lambda: time.monotonic() > rested_s, "the watch has had the time to take it for one")
    assert asked(bench, "/livez") == (200, [])
    assert asked(bench, "/readyz") == (200, [])
    bench.stop()
    assert asked(bench, "/livez") == (0, [])
