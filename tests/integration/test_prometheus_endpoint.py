import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from schemas.errors import ConfigError
from streams.observability.endpoint import Endpoint, serve
from streams.observability.health import Health
from streams.observability.metrics import Metrics


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # a server of this test
        text: str = answer.read().decode()
        return text


def test_metrics_are_served_on_any_free_port() -> None:
    metrics = Metrics()
    with serve(metrics, Health(), port=0) as server:
        metrics.lineage_sent()
        assert server.port > 0
        assert "headrace_lineage_events_total 1.0" in scrape(server.url)


def test_a_process_may_serve_several_roles() -> None:
    first, second = Metrics(), Metrics()
    first.online_written("v", written=1, superseded=0)
    with serve(first, Health(), port=0) as one, serve(second, Health(), port=0) as other:
        assert "headrace_online_rows_total{" in scrape(one.url)
        assert "headrace_online_rows_total{" not in scrape(other.url)


def test_a_port_that_is_taken_is_refused_with_the_remedy() -> None:
    with (
        serve(Metrics(), Health(), port=0) as server,
        pytest.raises(ConfigError, match=f":{server.port} .*Address already in use.*0 takes any"),
    ):
        serve(Metrics(), Health(), port=server.port)


def test_a_closed_server_frees_its_port() -> None:
    server = serve(Metrics(), Health(), port=0)
    server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server.url)
    with serve(Metrics(), Health(), port=server.port) as again:
        assert scrape(again.url)


def ask(server: Endpoint, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_health_is_told_with_the_reasons() -> None:
    health = Health()
    with serve(Metrics(), health, port=0) as server:
        assert ask(server, "/livez") == (200, {"status": "ok", "reasons": []})
        assert ask(server, "/readyz") == (503, {"status": "not ok", "reasons": ["the worker is starting"]})
        health.waits_for([])
        assert ask(server, "/readyz") == (200, {"status": "ok", "reasons": []})
        health.stalled(["t-0 stands still"])
        assert ask(server, "/livez") == (503, {"status": "not ok", "reasons": ["t-0 stands still"]})
        assert ask(server, "/readyz?verbose=1") == (503, {"status": "not ok", "reasons": ["t-0 stands still"]})


def test_a_path_that_is_not_there_is_told_with_those_that_are() -> None:
    with serve(Metrics(), Health(), port=0) as server:
        assert ask(server, "/health") == (404, {"error": "there is no /health, expected /metrics, /livez or /readyz"})


def test_an_address_of_the_next_protocol_is_served_too() -> None:
    with serve(Metrics(), Health(), port=0, address="::1") as server:
        assert "# HELP" in scrape(f"http://[::1]:{server.port}/metrics")
