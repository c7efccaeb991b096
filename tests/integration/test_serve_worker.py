"""The serve role as a process: started, asked, ended, and refused."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from asyncio.base_events import _set_nodelay  # type: ignore[attr-defined]
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from infra.local.port import choose_ports
from infra.local.process import wait_until
from jobs.serve import _listening
from tests.support.running import SHIPPED_MODELS


def environment(redis_url: str, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HEADRACE_HOME": str(home),
        "HEADRACE_REDIS": redis_url,
        "HEADRACE_MODEL_REPOSITORY": str(SHIPPED_MODELS),
    }


def command(*, api: int, metrics: int) -> list[str]:
    ports = ["--http-port", str(api), "--metrics-port", str(metrics)]
    return [sys.executable, "-m", "jobs.cli", "worker", "--role", "serve", *ports]


@contextlib.contextmanager
def running(redis_url: str, home: Path, **given: str) -> Iterator[tuple["subprocess.Popen[bytes]", str, str]]:
    ports = choose_ports({"api": 0, "metrics": 0})
    process = subprocess.Popen(command(**ports), env=environment(redis_url, home) | given)
    health = f"http://127.0.0.1:{ports['metrics']}"

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{health}/readyz").status_code == 200
        return False

    try:
        assert wait_until(lambda: is_ready() or process.poll() is not None, timeout_s=60)
        yield process, f"http://127.0.0.1:{ports['api']}", health
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_the_application_until_it_is_told_to_end(
    redis_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with running(redis_url, tmp_path) as (process, api, health):
        answer = httpx.get(f"{api}/v1/views", timeout=30)
        assert {view["view"] for view in answer.json()["views"]} >= {"airport_departures", "carrier_departures"}
        assert answer.headers["X-Model-Version"].isdigit()
        document = httpx.get(f"{api}/openapi.json", timeout=30).json()
        assert "/v1/flights/{flight_id}/late-arrival" in document["paths"]
        missing: list[httpx.Response] = []

        def is_answered() -> bool:
            missing.append(httpx.get(f"{api}/v1/flights/none/late-arrival", timeout=30))
            return missing[-1].status_code == 200  # a busy machine may be too slow for the store's patience

        assert wait_until(is_answered, timeout_s=60)
        assert missing[-1].json()["score"]["status"] == "missing"
        assert "headrace_http_requests_total" in httpx.get(f"{health}/metrics", timeout=30).text
        process.send_signal(number)
        assert process.wait(30) == 0


def test_it_starts_while_redis_is_away_and_says_so_to_who_asks(tmp_path: Path) -> None:
    with running("redis://127.0.0.1:1/0", tmp_path) as (_, api, _health):
        answer = httpx.get(f"{api}/v1/flights/UA1/late-arrival", timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize(("is_open", "status"), [("0", 401), ("1", 415)])
def test_events_of_anybody_are_taken_where_that_is_allowed_alone(
    redis_url: str, kafka: str, tmp_path: Path, *, is_open: str, status: int
) -> None:
    given = {"HEADRACE_OPEN_EVENTS": is_open, "HEADRACE_KAFKA": kafka}
    with running(redis_url, tmp_path, **given) as (_, api, _health):
        paths = httpx.get(f"{api}/openapi.json", timeout=30).json()["paths"]
        answer = httpx.post(f"{api}/v1/events/flights.departed", timeout=30)
    assert "/v1/events/flights.departed" in paths
    assert answer.status_code == status


def test_events_of_anybody_are_allowed_on_loopback_alone(redis_url: str, kafka: str, tmp_path: Path) -> None:
    given = {"HEADRACE_HTTP_ADDRESS": "0.0.0.0", "HEADRACE_OPEN_EVENTS": "1", "HEADRACE_KAFKA": kafka}  # noqa: S104
    ended = subprocess.run(
        command(api=0, metrics=0),
        env=environment(redis_url, tmp_path) | given,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "HEADRACE_OPEN_EVENTS is set and HEADRACE_HTTP_ADDRESS is 0.0.0.0" in ended.stderr


def test_a_port_that_is_taken_is_a_wrong_setting(redis_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            command(api=port, metrics=0),
            env=environment(redis_url, tmp_path),
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 2
    assert f"the API cannot be served on 127.0.0.1:{port}" in ended.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_no_part_of_an_answer_waits_for_the_one_before_it_to_be_acknowledged(address: str) -> None:
    with _listening(address, 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
            _set_nodelay(accepted)  # as asyncio does with each connection
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
