import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import infra
from jobs.drift import Window, drift_metrics
from jobs.role import Role
from jobs.settings import Settings
from offline.card import read_card
from offline.drift import judge_inputs
from offline.profile import profile_feature
from streams.observability.freshness import FreshnessObjectives
from streams.observability.metrics import FRESHNESS_BUCKETS_S
from streams.observability.serving import ServingMetrics
from tests.support.exercise import report_everything

INFRA = Path(infra.__path__[0])
DASHBOARD = json.loads((INFRA / "grafana" / "dashboards" / "freshness.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule
    for group in yaml.safe_load((INFRA / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANEL_EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = PANEL_EXPRESSIONS + [rule["expr"] for rule in ALERTS]
_NAME = re.compile(r"\b(?:headrace|process|python)_[a-z_]+")


def defined() -> set[str]:
    """Names of all samples that a worker, once it has reported everything, and `headrace drift` expose."""
    metrics = ServingMetrics()
    report_everything(metrics, now_us=1_700_000_000_000_000)
    inputs = judge_inputs({"v.x": profile_feature(np.zeros(100))}, np.zeros((100, 1)))
    card = read_card(INFRA.parent / "model_repository", "late_arrival")
    window = Window(start_us=0, end_us=1, rows=100, inputs=inputs)
    registries = (metrics.registry, drift_metrics(card, [window], []))
    return {sample.name for registry in registries for family in registry.collect() for sample in family.samples}


def test_panels_and_alerts_use_only_metrics_that_there_are() -> None:
    used = {name for expression in EXPRESSIONS for name in _NAME.findall(expression)}
    assert used <= defined()


def test_every_metric_of_ours_that_the_roles_report_is_on_the_dashboard() -> None:
    used = {name for expression in PANEL_EXPRESSIONS for name in _NAME.findall(expression)}
    families = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in used}
    metrics = ServingMetrics()
    FreshnessObjectives([], metrics=metrics)
    ours = {family.name for family in metrics.registry.collect() if family.name.startswith("headrace_")}
    assert ours - families == set()


def test_promised_bounds_are_bucket_bounds() -> None:
    bounds = {float(bound) for expression in EXPRESSIONS for bound in re.findall(r'le="([0-9.]+)"', expression)}
    assert bounds == {0.15, 0.25}
    assert bounds <= set(FRESHNESS_BUCKETS_S)


def test_the_dashboard_is_the_one_called_freshness() -> None:
    assert (DASHBOARD["title"], DASHBOARD["uid"]) == ("Freshness", "headrace-freshness")
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert "id" not in DASHBOARD, "Grafana gives it one"


def test_panels_have_ids_of_their_own_and_say_what_they_show() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        assert panel["title"]
        assert len(panel["description"]) > 10
        assert panel["type"] in {"timeseries", "stat", "heatmap"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    rows = [panel["gridPos"]["y"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert all(before < after for before, after in pairwise(rows))


def test_variables_in_queries_are_declared() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD["panels"])
    used = set(re.findall(r"\$\{?([a-zA-Z_]+)", text)) - {"__rate_interval"}
    assert used == declared == {"datasource", "view"}


def test_provisioning_points_at_the_dashboard_and_at_prometheus() -> None:
    sources = yaml.safe_load((INFRA / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert [(source["type"], source["url"]) for source in sources] == [("prometheus", "http://prometheus:9090")]
    (provider,) = yaml.safe_load((INFRA / "grafana/provisioning/dashboards/headrace.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_say_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


def test_local_targets_are_where_the_roles_listen_by_default() -> None:
    first = Settings.from_environment({}).metrics_port
    targets = yaml.safe_load((INFRA / "prometheus" / "targets.yml").read_text())
    expected = [{"targets": [f"127.0.0.1:{first + n}"], "labels": {"role": str(role)}} for n, role in enumerate(Role)]
    assert targets == expected
