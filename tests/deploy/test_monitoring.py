"""Alerts and the dashboard are about metrics that there are, with labels that they have, in PromQL that parses.

That a running cluster exports them all is seen in tests/e2e/test_observability.py.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from engine.messages import EngineStats
from telemetry import metrics
from tests.deploy.queries import DASHBOARD, MONITORING, PANELS, RULES, matchers_in, metrics_in, panel_queries

SCRAPED = {"instance"}  # Prometheus adds it
MAX_UID = 40
COLUMNS = 24


def known() -> dict[str, set[str]]:
    """Sample name -> names of its labels, of every process's metrics."""
    found: dict[str, set[str]] = {}
    for make in (metrics.WorkerMetrics, metrics.RouterMetrics, metrics.GatewayMetrics):
        registry = CollectorRegistry()
        kept = make(registry)
        for name, collector in registry._names_to_collectors.items():
            found.setdefault(name, set()).update(getattr(collector, "_labelnames", ()))
        del kept
    registry = CollectorRegistry()
    metrics.EngineMetrics(registry, "model").update(EngineStats(transfers_failed_total={"refused": 1}))
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def assert_is_a_query_of_ours(query: str) -> None:
    names = known()
    promql_parser.parse(query)
    used = metrics_in(query)
    assert used
    assert used <= names.keys(), used - names.keys()
    for name, labels in matchers_in(query):
        assert labels <= names[name], f"{name} has labels {names[name]}"
    of_all = SCRAPED.union({"le"}, *(names[name] for name in used))
    for kept in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in kept.split(",")} <= of_all, f"{query}: by ({kept})"


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert(rule: dict[str, Any]) -> None:
    assert_is_a_query_of_ours(rule["expr"])
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    kept = set(re.findall(r"(?:by|on) \((\w+)\)", rule["expr"]))
    assert shown <= kept | SCRAPED
    assert rule["annotations"]["remedy"]


def test_the_checks_can_fail() -> None:
    with pytest.raises(ValueError, match=r"."):
        promql_parser.parse("sum by (instance (pdserve_leases)")
    for query in (
        "sum(pdserve_leases_of_nobody)", 'sum(pdserve_leases{colour="red"})', "sum by (colour) (pdserve_leases)"
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            assert_is_a_query_of_ours(query)


def test_queries_of_the_dashboard() -> None:
    for query in panel_queries():
        assert_is_a_query_of_ours(query)


def test_panels_show_labels_that_their_queries_keep() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"]))))
            assert shown <= kept, f"{panel['title']}: {target['legendFormat']}"


def test_the_dashboard_is_one_for_grafana() -> None:
    assert 0 < len(DASHBOARD["uid"]) <= MAX_UID
    assert DASHBOARD["schemaVersion"] >= 36  # the first with data sources as objects
    assert "id" not in DASHBOARD  # of the database of whoever exported it
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"] | {"type": "datasource", "query": "prometheus"} == variables["datasource"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    for name in re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)):
        assert name.startswith("__") or name in variables, f"${name} is no variable"


def test_panels_lie_beside_one_another() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= COLUMNS for place in places)
    for a, b in itertools.combinations(places, 2):
        is_apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert is_apart_x or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


def test_kustomize_gives_grafana_the_dashboard() -> None:
    kubectl = Path(sys.executable).parent / "kubectl"
    argv = [str(kubectl), "kustomize", str(MONITORING)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    maps = {manifest["metadata"]["name"]: manifest for manifest in yaml.safe_load_all(done.stdout)}
    dashboard = maps["pdserve-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["overview.json"]) == DASHBOARD
    assert yaml.safe_load(maps["pdserve-alerts"]["data"]["alerts.yaml"])["groups"][0]["rules"] == RULES
    # The network policies let in this namespace.
    assert {manifest["metadata"]["namespace"] for manifest in maps.values()} == {"monitoring"}
