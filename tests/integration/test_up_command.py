"""``headrace up`` with a real Kafka and Redis, from a directory without a trained model."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from infra.local.process import wait_until
from infra.local.state import read_state, state_path

COMMAND = [sys.executable, "-m", "jobs.cli", "up"]


class Up:
    """A run in a home and a working directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.directory = directory / "elsewhere"
        self.directory.mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        project = str(Path(__file__).parents[2])
        self.environment = {
            **clean,
            "HEADRACE_HOME": str(self.home),
            "HEADRACE_HTTP_PORT": "0",
            "HEADRACE_METRICS_PORT": "0",
            "PYTHONPATH": project,
        }
        self.process = subprocess.Popen(
            COMMAND, env=self.environment, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def read_until(self, text: str) -> list[str]:
        """Read what it prints up to a line with ``text``."""
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line.rstrip())
            if text in line:
                return lines
        pytest.fail(f"it ended without {text!r}: {lines} {self.process.communicate()}")

    def processes(self) -> list[psutil.Process]:
        """All that runs of it: services, workers, guard."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [*children, *(psutil.Process(record.pid) for record in read_state(self.home).values())]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    run = Up(tmp_path)
    try:
        yield run
    finally:
        run.process.terminate()
        run.process.communicate(timeout=60)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=10).status_code == 200
    return False


@pytest.mark.timeout(180)
def test_without_a_model_the_other_roles_run_and_no_repository_is_made(up: Up) -> None:
    lines = up.read_until("Logs are in")

    assert [line.partition(":")[0] for line in lines if line.startswith("worker")] == [
        "worker features",
        "worker online",
        "worker offline",
        "worker serve",
        "worker serve",
        "worker scoring",
    ]
    (views,) = [line.partition("API on ")[2].partition(",")[0] for line in lines if "API on " in line]
    assert wait_until(lambda: answers(views), timeout_s=60)
    assert any("scoring: waits for `headrace train`" in line for line in lines)
    assert sorted(read_state(up.home)) == ["kafka", "redis"]
    assert list(up.directory.iterdir()) == []

    second = subprocess.run(
        COMMAND, env=up.environment, cwd=up.directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr.startswith(f"headrace: `headrace up` already runs here (pid {up.process.pid})")

    redis = read_state(up.home)["redis"]
    psutil.Process(redis.pid).kill()
    (told,) = up.read_until("redis (process")
    assert f"redis (process {redis.pid}) was killed by SIGKILL" in told
    assert f"started again at {redis.address}" in told

    running = up.processes()
    up.process.send_signal(signal.SIGHUP)
    assert up.process.wait(timeout=60) == 0
    _, left = psutil.wait_procs(running, timeout=60)
    assert left == []
    assert not state_path(up.home).exists()


@pytest.mark.timeout(120)
def test_nothing_outlives_a_run_that_is_killed(up: Up) -> None:
    up.read_until("Logs are in")
    running = up.processes()

    up.process.kill()

    _, left = psutil.wait_procs(running, timeout=60)
    assert left == []
    assert not state_path(up.home).exists()


@pytest.mark.timeout(120)
def test_ctrl_c_while_services_start_ends_it_and_them(up: Up) -> None:
    up.read_until("redis")  # Kafka takes seconds longer
    running = up.processes()

    up.process.send_signal(signal.SIGINT)

    output, errors = up.process.communicate(timeout=60)
    assert up.process.returncode == 0
    assert "worker" not in output
    assert errors == ""
    _, left = psutil.wait_procs(running, timeout=60)
    assert left == []
    assert not state_path(up.home).exists()
