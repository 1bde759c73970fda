"""Alerts are about metrics that there are, with labels that they have, in PromQL that parses."""

from __future__ import annotations

import re
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from engine.messages import EngineStats
from telemetry import metrics
from tests.deploy.rendered import ROOT

RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
SCRAPED = {"instance"}  # Prometheus adds it


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


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert(rule: dict[str, Any]) -> None:
    names = known()
    promql_parser.parse(rule["expr"])
    used = set(re.findall(r"\b(?:pdserve_|vllm:)\w+", rule["expr"]))
    assert used
    assert used <= names.keys(), used - names.keys()
    for name, matchers in re.findall(r"\b((?:pdserve_|vllm:)\w+)\{([^}]*)\}", rule["expr"]):
        labels = set(re.findall(r"(\w+)\s*=", matchers))
        assert labels <= names[name], f"{name} has labels {names[name]}"
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    kept = set(re.findall(r"(?:by|on) \((\w+)\)", rule["expr"]))
    assert shown <= kept | SCRAPED
    assert rule["annotations"]["remedy"]


def test_the_parser_can_fail() -> None:
    with pytest.raises(ValueError, match=r"."):
        promql_parser.parse("sum by (instance (pdserve_leases)")
