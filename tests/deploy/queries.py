"""What the alerts and the dashboard ask Prometheus, and which metrics that names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.rendered import ROOT

MONITORING = ROOT / "deploy/monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "overview.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_NAME = r"\b(?:pdserve_|vllm:)\w+"


def panel_queries() -> Iterator[str]:
    """With something in place of what Grafana puts in."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")


def metrics_in(query: str) -> set[str]:
    return set(re.findall(_NAME, query))


def matchers_in(query: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that is narrowed, and by which labels."""
    for name, matchers in re.findall(rf"({_NAME})\{{([^}}]*)\}}", query):
        yield name, set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", matchers))


def all_metrics() -> set[str]:
    """That anybody is to look at."""
    queries = [*(rule["expr"] for rule in RULES), *panel_queries()]
    return set().union(*(metrics_in(query) for query in queries))
