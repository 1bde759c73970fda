"""Which processes a cluster consists of, with which command lines and ports.

Owns the layout: only the gateway's ports are the user's; the others are free ones of 127.0.0.1. Ports are chosen here,
not by the children, so that every child can start at once and knows where the others will be, and so that a restarted
one comes back where it was.
"""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdserve.model_store import name_in_api
from pdserve.redis_server import redis_argv
from pdserve.up.child import ChildSpec, python_argv
from pdserve.up.devices import assign_devices, count_gpus, memory_parts
from pdserve.up.errors import UpError
from pdserve.up.health import http_is_healthy, redis_is_healthy
from pdserve.up.settings import UpSettings

LOCALHOST = "127.0.0.1"
REDIS_SOCKET_NAME = "redis.sock"
_LOWEST_PORT = 12_000
_DRAIN = ("--drain-timeout-s", "5")  # all of the cluster ends: nothing can go on elsewhere
_ROUTER_POLL_S = 0.2  # Redis is on this host: look often, so that new workers are met soon


@dataclass(frozen=True, slots=True)
class Directories:
    """Of one run: ``logs`` stay, ``runtime`` (private, holds the Redis socket) goes when the run ends."""

    logs: Path
    runtime: Path


def plan_cluster(settings: UpSettings, model: Path, redis_binary: Path | None, dirs: Directories) -> list[ChildSpec]:
    """Every child of the cluster; Redis, when it is ours (``redis_binary``), is the first."""
    specs: list[ChildSpec] = []
    redis_url = redis_url_of(settings, dirs)
    if redis_binary is not None:
        redis_socket = dirs.runtime / REDIS_SOCKET_NAME
        argv = redis_argv(redis_binary, redis_socket)
        specs.append(ChildSpec("redis", argv, dirs.logs / "redis.log", partial(redis_is_healthy, redis_socket)))

    num_prefill = 0 if settings.aggregated else settings.prefill
    devices = assign_devices(settings.device, num_prefill + settings.decode, count_gpus())
    places = zip(devices, memory_parts(devices, settings.gpu_memory_utilization), strict=True)
    ports = iter(free_ports(2 * (1 + num_prefill + settings.decode)))

    def service(name: str, module: str, *flags: str) -> int:
        port, metrics_port = next(ports), next(ports)
        argv = python_argv(module, "--host", LOCALHOST, "--port", str(port), "--metrics-port", str(metrics_port))
        argv += ["--redis", redis_url, *_DRAIN, *flags]
        is_healthy = partial(http_is_healthy, LOCALHOST, metrics_port)
        specs.append(ChildSpec(name, argv, dirs.logs / f"{name}.log", is_healthy))
        return port

    def worker(name: str, module: str, *flags: str) -> None:
        device, memory_part = next(places)
        flags += ("--device", device)
        if device != "cpu":
            flags += ("--gpu-memory-utilization", str(memory_part))
        service(name, module, "--model", str(model), "--worker-id", name, *flags, *_worker_flags(settings))

    # The workers first: they take longest, and every process costs the ones after it a little.
    for i in range(num_prefill):
        worker(f"prefill-{i}", "prefill_service")
    role = "aggregated" if settings.aggregated else "decode"
    for i in range(settings.decode):
        worker(f"{role}-{i}", "decode_service", "--role", role, *_optional("--itl-budget-ms", settings.itl_budget_ms))
    router_port = service(
        "router",
        "router",
        *("--min-prefill-workers", str(num_prefill), "--min-decode-workers", str(settings.decode)),
        *("--poll-interval-s", str(_ROUTER_POLL_S)),
        *_optional("--policy", settings.policy),
        *_optional("--max-queue-s", settings.max_queue_s),
        *_optional("--local-prefill-tokens", settings.local_prefill_tokens),
    )
    gateway = python_argv("gateway", "--model", str(model), "--served-model-name", served_model_name(settings))
    gateway += ["--host", settings.host, "--port", str(settings.port), "--router", f"{LOCALHOST}:{router_port}"]
    gateway += ["--grpc-port", str(settings.sdk_port), *_DRAIN]
    gateway += _optional("--max-model-len", settings.max_model_len)
    # Alive is enough: that workers are reached is the router's to say, and the gateway hears it a heartbeat later.
    is_healthy = partial(http_is_healthy, reachable_host(settings.host), settings.port, "/live")
    specs.append(ChildSpec("gateway", gateway, dirs.logs / "gateway.log", is_healthy))
    return specs


def redis_url_of(settings: UpSettings, dirs: Directories) -> str:
    """Of the user's Redis, or of our own."""
    return settings.redis or f"unix://{dirs.runtime / REDIS_SOCKET_NAME}"


def served_model_name(settings: UpSettings) -> str:
    """The name that clients use."""
    return settings.served_model_name or name_in_api(settings.model)


def reachable_host(host: str) -> str:
    """An address to call a server at that listens on ``host``."""
    return LOCALHOST if host in ("", "0.0.0.0", "::") else host


def free_ports(count: int) -> list[int]:
    """``count`` different ports of 127.0.0.1 that are free now, and stay so unless somebody asks for them by number:
    below the range from which the kernel takes ports for connections."""
    ephemeral_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(_LOWEST_PORT, max(ephemeral_from, 2 * _LOWEST_PORT))
    ports: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((LOCALHOST, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise UpError(f"no {count} free ports from {_LOWEST_PORT} to {candidates[-1]}: end what uses them")


def _worker_flags(settings: UpSettings) -> list[str]:
    return [
        *("--dtype", settings.dtype),
        *_optional("--load-format", settings.load_format),
        *_optional("--kv-cache-bytes", settings.kv_cache_bytes),
        *_optional("--max-num-batched-tokens", settings.max_num_batched_tokens),
        *_optional("--max-model-len", settings.max_model_len),
        *_optional("--num-threads", settings.num_threads),
        *_optional("--transfer", settings.transfer),
    ]


def _optional(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]
