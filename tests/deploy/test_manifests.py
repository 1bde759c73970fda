"""The manifests against Kubernetes' own schemas, the real command lines, and one another."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import typer

from decode_service.__main__ import main as decode
from gateway.__main__ import main as gateway
from prefill_service.__main__ import main as prefill
from router.__main__ import main as router
from tests.deploy.rendered import OVERLAYS, ROLE, ROLES, ROOT, Manifest, Pod, of_kind, pod, pods, render, workloads

VERSIONS = ("1.27", "1.30", "1.33", "1.37")
MAINS = {"gateway": gateway, "router": router, "prefill": prefill, "decode": decode}
FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.0.0.7"}

every_pod = pytest.mark.parametrize(
    "pod", [p for o in OVERLAYS for p in pods(o)], ids=lambda p: f"{p.overlay}-{p.role}"
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@every_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(overlay: str, version: str) -> None:
    """Strict: an unknown field is an error."""
    for manifest in render(overlay):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_can_fail() -> None:
    manifest = {**render(OVERLAYS[0])[0], "speck": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@every_overlay
def test_every_role_is_there(overlay: str) -> None:
    assert set(workloads(overlay)) == {*ROLES, "redis"}
    assert {m["metadata"]["namespace"] for m in render(overlay)} == {"pdserve"}


@every_pod
def test_the_command_line_takes_every_flag(pod: Pod) -> None:
    role, *args = pod.args(FIELDS)
    assert role == pod.role
    app = typer.Typer(add_completion=False)
    app.command()(MAINS[role])
    context = typer.main.get_command(app).make_context(role, list(args))  # raises what a user would be told
    assert float(context.params["drain_timeout_s"]) == float(pod.flags["drain-timeout-s"])
    assert "$" not in " ".join(args)


@every_pod
def test_ports_are_those_of_the_flags(pod: Pod) -> None:
    if pod.role == "gateway":
        expected = {"http": int(pod.flags["port"]), "grpc": int(pod.flags["grpc-port"])}
    else:
        expected = {"grpc": int(pod.flags["port"]), "metrics": int(pod.flags["metrics-port"])}
        if pod.role == "decode":
            expected["kv"] = int(pod.flags["data-port"])
    assert pod.ports == expected
    for path, port in pod.probes.values():
        assert path in ("/live", "/health")
        assert port == pod.ports["http" if pod.role == "gateway" else "metrics"]
    assert pod.probes["readinessProbe"][0] == "/health"
    assert pod.probes["livenessProbe"][0] == "/live"


@every_pod
def test_the_grace_period_is_longer_than_the_drain(pod: Pod) -> None:
    drain_s = float(pod.flags["drain-timeout-s"])
    assert pod.spec["terminationGracePeriodSeconds"] > pod.pre_stop_s + drain_s
    labels = workloads(pod.overlay)[pod.role]["spec"]["template"]["metadata"]["labels"]
    assert float(labels["pdserve.io/drain-timeout-s"]) == drain_s
    # Only the gateway is found through a Service's endpoints, which take a moment to forget a pod.
    assert (pod.pre_stop_s > 0) == (pod.role == "gateway")


@every_pod
def test_pods_run_without_rights(pod: Pod) -> None:
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["automountServiceAccountToken"] is False
    context = pod.container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod.container["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert "memory" in pod.container["resources"]["limits"]
    mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod.spec["volumes"]}


def test_the_image_runs_as_the_user_of_the_manifests() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    users = {p.spec["securityContext"]["runAsUser"] for overlay in OVERLAYS for p in pods(overlay)}
    assert [f"USER {user}:{user}" in dockerfile for user in users] == [True]
    for line in dockerfile.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), f"{source} of the Dockerfile is not there"
                assert f"!{source}" in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()


@every_overlay
def test_selectors_find_what_they_mean(overlay: str) -> None:
    labels = {role: w["spec"]["template"]["metadata"]["labels"] for role, w in workloads(overlay).items()}
    for workload in workloads(overlay).values():
        assert matching(workload["spec"]["selector"], labels) == [workload["metadata"]["name"]]
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert matching(budget["spec"]["selector"], labels) == [budget["metadata"]["name"]]
    assert {b["metadata"]["name"] for b in of_kind(overlay, "PodDisruptionBudget")} == set(ROLES)
    for service in of_kind(overlay, "Service"):
        [role] = matching({"matchLabels": service["spec"]["selector"]}, labels)
        [container] = workloads(overlay)[role]["spec"]["template"]["spec"]["containers"]
        names = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@every_overlay
def test_routers_are_where_gateways_look(overlay: str) -> None:
    """NAME-N.SERVICE:PORT of every replica of the StatefulSet."""
    statefulset = workloads(overlay)["router"]
    assert statefulset["kind"] == "StatefulSet"
    name, service = statefulset["metadata"]["name"], statefulset["spec"]["serviceName"]
    [headless] = [s for s in of_kind(overlay, "Service") if s["metadata"]["name"] == service]
    assert headless["spec"]["clusterIP"] == "None"
    port = pod(overlay, "router").flags["port"]
    expected = [f"{name}-{n}.{service}:{port}" for n in range(statefulset["spec"]["replicas"])]
    assert pod(overlay, "gateway").flags["router"].split(",") == expected
    [redis] = [s for s in of_kind(overlay, "Service") if s["metadata"]["name"] == "redis"]
    url = f"redis://redis:{redis['spec']['ports'][0]['port']}"
    assert {pod(overlay, role).flags["redis"] for role in ("router", "prefill", "decode")} == {url}


@every_overlay
def test_network_policies_allow_what_is_needed_and_nothing_else(overlay: str) -> None:
    allowed = {
        (source, target)
        for source in (*ROLES, "redis", "elsewhere")
        for target in (*ROLES, "redis")
        if may_connect(overlay, source, target)
    }
    assert allowed == {
        ("gateway", "router"),
        ("router", "prefill"),
        ("router", "decode"),
        ("prefill", "decode"),
        ("decode", "prefill"),
        ("router", "redis"),
        ("prefill", "redis"),
        ("decode", "redis"),
        *((source, "gateway") for source in (*ROLES, "redis", "elsewhere")),
    }
    assert may_connect(overlay, "prefill", "decode", port="grpc")
    assert may_connect(overlay, "prefill", "decode", port="kv")
    assert not may_connect(overlay, "prefill", "decode", port="any other")
    assert not may_connect(overlay, "router", "decode", port="kv")


def may_connect(overlay: str, source: str, target: str, port: str | None = None) -> bool:
    """Whether some rule lets pods of one role in to pods of the other; None: on a port that the target names."""
    labels = {role: w["spec"]["template"]["metadata"]["labels"] for role, w in workloads(overlay).items()}
    policies = [p for p in of_kind(overlay, "NetworkPolicy") if target in matching(p["spec"]["podSelector"], labels)]
    assert policies, f"{target} is open to everybody"
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            sources = rule.get("from")
            selectors = [s["podSelector"] for s in sources or [] if "podSelector" in s]
            is_source = sources is None or any(source in matching(selector, labels) for selector in selectors)
            ports = [entry["port"] for entry in rule.get("ports", [])]
            if is_source and (not ports or port is None or port in ports):
                return True
    return False


def matching(selector: dict[str, Any], labels: dict[str, dict[str, str]]) -> list[str]:
    """Roles whose pods a selector finds."""

    def matches(of_pod: dict[str, str]) -> bool:
        if any(of_pod.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
            return False
        for expression in selector.get("matchExpressions", []):
            assert expression["operator"] == "In"
            if of_pod.get(expression["key"]) not in expression["values"]:
                return False
        return True

    return [role for role, of_pod in labels.items() if matches(of_pod)]


@every_overlay
def test_a_rollout_never_takes_more_than_it_brings(overlay: str) -> None:
    for role, workload in workloads(overlay).items():
        if role not in ROLES or workload["kind"] != "Deployment":
            continue
        update = workload["spec"]["strategy"]["rollingUpdate"]
        if update["maxUnavailable"]:  # no room for a surge: then the others must do meanwhile
            assert update == {"maxSurge": 0, "maxUnavailable": 1}
            assert workload["spec"]["replicas"] > 1
        else:
            assert update["maxSurge"] >= 1
    assert workloads(overlay)["router"]["spec"]["replicas"] > 1


def test_labels_are_written_once() -> None:
    for overlay in OVERLAYS:
        for role, workload in workloads(overlay).items():
            assert template_of(workload)["labels"][ROLE] == role == workload["metadata"]["name"]


def template_of(workload: Manifest) -> dict[str, Any]:
    metadata: dict[str, Any] = workload["spec"]["template"]["metadata"]
    return metadata
