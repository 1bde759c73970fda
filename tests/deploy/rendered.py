"""The manifests as Kubernetes gets them: rendered by kubectl's own kustomize, and what the tests ask of them."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu-demo", "multi-node", "multi-node-tls")
ROLE = "pdserve.io/role"
ROLES = ("gateway", "router", "prefill", "decode")

Manifest = dict[str, Any]


@functools.cache
def render(overlay: str) -> list[Manifest]:
    kubectl = Path(sys.executable).parent / "kubectl"
    argv = [str(kubectl), "kustomize", str(ROOT / "deploy/kubernetes/overlays" / overlay)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [manifest for manifest in render(overlay) if manifest["kind"] in kinds]


def workloads(overlay: str) -> dict[str, Manifest]:
    """By role."""
    return {workload_labels(w)[ROLE]: w for w in of_kind(overlay, "Deployment", "StatefulSet")}


def workload_labels(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


@dataclass(frozen=True)
class Pod:
    """One workload's pod, with the one container that it has."""

    overlay: str
    role: str
    spec: dict[str, Any]
    container: dict[str, Any]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def flags(self) -> dict[str, str]:
        """--name=value, as given."""
        return dict(arg.removeprefix("--").split("=", 1) for arg in self.container["args"][1:])

    @property
    def pre_stop_s(self) -> float:
        """How long preStop takes: it is a sleep, or there is none."""
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is None:
            return 0.0
        program, seconds = hook["exec"]["command"]
        assert program == "sleep"
        return float(seconds)

    @property
    def probes(self) -> dict[str, tuple[str, int]]:
        """Kind -> path and port number."""
        found = {}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = self.container[kind]["httpGet"]
            found[kind] = (get["path"], self.ports[get["port"]])
        return found

    def environment(self, fields: dict[str, str]) -> dict[str, str]:
        """Variables that its args may name. ``fields``: what Kubernetes fills in, by fieldPath."""
        values: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            [config_map] = [
                manifest
                for manifest in of_kind(self.overlay, "ConfigMap")
                if manifest["metadata"]["name"] == source["configMapRef"]["name"]
            ]
            values |= config_map["data"]
        for entry in self.container.get("env", []):
            values[entry["name"]] = entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return values

    def args(self, fields: dict[str, str]) -> list[str]:
        """With $(NAME) put in, as the kubelet does."""
        values = self.environment(fields)
        return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], arg) for arg in self.container["args"]]


def pods(overlay: str) -> Iterator[Pod]:
    """Of our own roles."""
    for role, workload in workloads(overlay).items():
        if role in ROLES:
            spec = workload["spec"]["template"]["spec"]
            [container] = spec["containers"]
            yield Pod(overlay, role, spec, container)


def pod(overlay: str, role: str) -> Pod:
    return next(pod for pod in pods(overlay) if pod.role == role)
