import urllib.error
import urllib.request

import pytest

from schemas.errors import ConfigError
from streams.observability.metrics import Metrics, serve_metrics


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # a server of this test
        text: str = answer.read().decode()
        return text


def test_metrics_are_served_on_any_free_port() -> None:
    metrics = Metrics()
    with serve_metrics(metrics, port=0) as server:
        metrics.lineage_sent()
        assert server.port > 0
        assert "headrace_lineage_events_total 1.0" in scrape(server.url)


def test_a_process_may_serve_several_roles() -> None:
    first, second = Metrics(), Metrics()
    first.online_written("v", written=1, superseded=0)
    with serve_metrics(first, port=0) as one, serve_metrics(second, port=0) as other:
        assert "headrace_online_rows_total{" in scrape(one.url)
        assert "headrace_online_rows_total{" not in scrape(other.url)


def test_a_port_that_is_taken_is_refused_with_the_remedy() -> None:
    with (
        serve_metrics(Metrics(), port=0) as server,
        pytest.raises(ConfigError, match=f":{server.port} .*Address already in use.*0 takes any"),
    ):
        serve_metrics(Metrics(), port=server.port)


def test_a_closed_server_frees_its_port() -> None:
    server = serve_metrics(Metrics(), port=0)
    server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server.url)
    with serve_metrics(Metrics(), port=server.port) as again:
        assert scrape(again.url)
