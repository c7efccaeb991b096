"""A real Prometheus over the files of ``infra/prometheus``."""

import json
import os
import shutil
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

import infra
from infra.local.process import wait_until
from infra.local.prometheus import PrometheusPrograms, find_prometheus, run_prometheus, run_promtool
from jobs.role import Role
from jobs.settings import Settings
from schemas.errors import ServiceError
from streams.observability.endpoint import serve
from streams.observability.health import Health
from streams.observability.serving import ServingMetrics
from tests.support.exercise import report_everything

FILES = Path(infra.__path__[0]) / "prometheus"
DASHBOARD = Path(infra.__path__[0]) / "grafana" / "dashboards" / "freshness.json"


@pytest.fixture(scope="session")
def programs() -> PrometheusPrograms:
    return find_prometheus(environment=os.environ, cache=Settings.from_environment(os.environ).cache)


def ask(url: str, path: str, **parameters: str) -> Any:
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=10) as answer:  # noqa: S310  # our own server
        return json.loads(answer.read())["data"]


@pytest.fixture(scope="module")
def scraping(programs: PrometheusPrograms, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped five live roles often enough for rates; yields its URL.

    It runs the project's own files, but scrapes each second, from the ports that the roles got. A scrape that times out
    takes all series of its role away until the next one.
    """
    directory = tmp_path_factory.mktemp("prometheus")
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(FILES / name, directory)
    config = yaml.safe_load((directory / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "200ms"}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with ExitStack() as stack:
        roles = {role: ServingMetrics() for role in Role}
        servers = {role: stack.enter_context(serve(metrics, Health(), port=0)) for role, metrics in roles.items()}
        targets = [
            {"targets": [f"127.0.0.1:{server.port}"], "labels": {"role": str(role)}} for role, server in servers.items()
        ]
        (directory / "targets.yml").write_text(yaml.safe_dump(targets))
        url = stack.enter_context(
            run_prometheus(
                programs, directory / "prometheus.yml", directory=directory / "server", environment=os.environ
            )
        )
        stop = threading.Event()

        def report() -> None:
            while not stop.wait(0.1):
                for metrics in roles.values():
                    report_everything(metrics, now_us=time.time_ns() // 1_000)

        reporting = threading.Thread(target=report)
        reporting.start()
        stack.callback(reporting.join)
        stack.callback(stop.set)
        assert wait_until(lambda: has_rates(url), timeout_s=60)
        yield url


def has_rates(url: str) -> bool:
    found = ask(url, "query", query="count(rate(headrace_freshness_seconds_count[1m]) > 0)")["result"]
    return bool(found) and found[0]["value"][1] == "5"


def test_the_five_roles_are_scraped(scraping: str) -> None:
    def states() -> set[tuple[str, str, str]]:
        active = ask(scraping, "targets", state="active")["activeTargets"]
        return {(target["labels"]["role"], target["health"], target["lastError"]) for target in active}

    # A scrape has a second, which a busy machine may miss now and then.
    assert wait_until(lambda: states() == {(str(role), "up", "") for role in Role}, timeout_s=60), states()


def test_every_panel_shows_something(scraping: str) -> None:
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    empty = []
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$view", ".*")
            if not ask(scraping, "query", query=query)["result"]:
                empty.append((panel["title"], query))
    assert empty == []


def test_the_view_variable_finds_the_views(scraping: str) -> None:
    assert ask(scraping, "label/view/values", **{"match[]": "headrace_freshness_seconds_count"}) == ["flights"]


def test_shares_within_a_bound_are_exact(scraping: str) -> None:
    query = (
        'sum(rate(headrace_freshness_seconds_bucket{le="0.15"}[1m])) / sum(rate(headrace_freshness_seconds_count[1m]))'
    )
    (sample,) = ask(scraping, "query", query=query)["result"]
    assert float(sample["value"][1]) == pytest.approx(0.99)


def test_every_alert_is_evaluated_and_the_right_ones_wait_to_fire(scraping: str) -> None:
    def states() -> dict[str, str]:
        groups = ask(scraping, "rules", type="alert")["groups"]
        assert all(
            rule["health"] in {"ok", "unknown"} and not rule.get("lastError") for g in groups for rule in g["rules"]
        )
        return {rule["name"]: rule["state"] for group in groups for rule in group["rules"]}

    # Of what is reported all the time, 2 of 400 rows are dead letters and a lineage event is lost each round.
    assert wait_until(lambda: states()["HeadraceLineageLost"] == "firing", timeout_s=30)
    # A scrape that took too long is a worker that is down until the next one.
    quiet = ["HeadraceWorkerDown", "HeadraceScoresNotFresh"]
    assert wait_until(lambda: {states()[name] for name in quiet} == {"inactive"}, timeout_s=30)


def test_configuration_and_targets_are_sound(programs: PrometheusPrograms) -> None:
    said = run_promtool(programs, "check", "config", "prometheus.yml", cwd=FILES)
    assert "1 rule files found" in said
    assert "rules found" in said


def test_each_alert_has_an_example_that_passes(programs: PrometheusPrograms) -> None:
    assert "SUCCESS" in run_promtool(programs, "test", "rules", "alerts_test.yml", cwd=FILES)
    rules = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((FILES / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules}


def test_metrics_keep_the_conventions(programs: PrometheusPrograms) -> None:
    metrics = ServingMetrics()
    report_everything(metrics, now_us=time.time_ns() // 1_000)
    run_promtool(programs, "check", "metrics", text=generate_latest(metrics.registry).decode())


def test_promtool_tells_what_is_wrong(programs: PrometheusPrograms) -> None:
    with pytest.raises(ServiceError, match=r"promtool check metrics found faults:[\s\S]*no help text"):
        run_promtool(programs, "check", "metrics", text="# TYPE x counter\nx 1\n")


def test_a_server_that_cannot_start_says_why(programs: PrometheusPrograms, tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yml"
    config.write_text("global: {scrape_interval: never}\n")
    with (
        pytest.raises(ServiceError, match=r"did not become ready \(exit code [1-9][\s\S]*Error loading config"),
        run_prometheus(programs, config, directory=tmp_path, environment=os.environ),
    ):
        pass


def test_where_there_is_neither_prometheus_nor_apt_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"no `prometheus` and `promtool` on the PATH.*apt-get install prometheus"):
        find_prometheus(environment={"PATH": str(tmp_path)}, cache=tmp_path)


def test_programs_on_the_path_are_taken(programs: PrometheusPrograms, tmp_path: Path) -> None:
    found = find_prometheus(environment={"PATH": str(programs.prometheus.parent)}, cache=tmp_path / "unused")
    assert found == programs
    assert not (tmp_path / "unused").exists()
