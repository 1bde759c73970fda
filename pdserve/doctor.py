"""``pdserve doctor``: what this machine has and lacks for pdserve, each lack with its remedy.

Every check is a function that returns one :class:`Finding`; a check never raises and takes at most a few seconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.cache import cache_dir
from pdserve.model_store import NEEDED_BYTES, default_model_path
from pdserve.redis_server import RedisMissingError, redis_binary
from pdserve.redis_url import without_password
from pdserve.up.devices import count_gpus
from pdserve.up.errors import UpError
from pdserve.up.preflight import available_bytes, check_platform, check_port
from pdserve.up.user_redis import check_redis

_PACKAGES = ("grpc", "zmq", "msgspec", "fastapi", "uvicorn", "redis", "safetensors", "transformers", "xxhash")
_MIN_MEMORY_BYTES = 4 << 30
_MIN_SHM_BYTES = 64 << 20
_MIN_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """``ok`` False: pdserve does not work without it; None: something optional is missing."""

    what: str
    ok: bool | None
    detail: str
    remedy: str = ""


def doctor(redis_url: str | None, port: int) -> int:
    """Print every finding; 0 when nothing needed is missing, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    findings = examine(redis_url, port)
    table = Table(box=None, padding=(0, 1), show_header=False)
    marks = {True: "[green]✓[/]", None: "[yellow]![/]", False: "[red]✗[/]"}
    for finding in findings:
        table.add_row(marks[finding.ok], finding.what, escape(finding.detail))
        if finding.remedy:
            table.add_row("", "", f"[italic]{escape(finding.remedy)}[/]")
    Console(highlight=False).print(table)
    return 0 if all(finding.ok is not False for finding in findings) else 1


def examine(redis_url: str | None, port: int) -> list[Finding]:
    """All checks, in the order in which they are worth reading."""
    checks: list[Callable[[], Finding]] = [
        _platform,
        _packages,
        _torch,
        _gpu,
        _compiler,
        _transport_tcp,
        _transport_shm,
        _transport_ucx,
        lambda: _redis(redis_url),
        lambda: _port(port),
        _memory,
        _cache,
    ]
    return [check() for check in checks]


def _platform() -> Finding:
    detail = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    try:
        check_platform()
    except UpError as error:
        return Finding("platform", False, detail, str(error))
    return Finding("platform", True, detail)


def _packages() -> Finding:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("packages", False, f"missing: {', '.join(missing)}", "pip install -e '.[serve]'")
    return Finding("packages", True, f"{len(_PACKAGES)} of {len(_PACKAGES)}")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", False, "missing", "run `make up`, or pip install torch")
    return Finding("torch", True, importlib.metadata.version("torch"))


def _gpu() -> Finding:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return Finding("GPU", None, "no NVIDIA driver: engines run on the CPU")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("GPU", None, f"nvidia-smi fails ({error})", "repair the driver, or let the engines use the CPU")
    names = "; ".join(output.splitlines())
    if not count_gpus():
        return Finding("GPU", None, f"{names}: unused, torch is built without CUDA", "install a CUDA build of torch")
    return Finding("GPU", True, names)


def _compiler() -> Finding:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return Finding("C compiler", None, "none: kernels that compile when first used are off", "apt-get install gcc")
    return Finding("C compiler", True, compiler)


def _transport_tcp() -> Finding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return Finding("transport tcp", True, "loopback connects")
    except OSError as error:
        return Finding("transport tcp", False, f"loopback does not connect ({error})", "bring the interface lo up")


def _transport_shm() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        return Finding("transport shm", None, "/dev/shm cannot be written", "mount a tmpfs there; tcp works without it")
    free = shutil.disk_usage(shm).free
    if free < _MIN_SHM_BYTES:
        return Finding("transport shm", None, f"/dev/shm has {free >> 20} MiB free", "containers: raise --shm-size")
    return Finding("transport shm", True, f"/dev/shm has {free / (1 << 30):.1f} GiB free")


def _transport_ucx() -> Finding:
    if importlib.util.find_spec("ucxx") is None:
        return Finding("transport ucx", None, "package ucxx is missing", "pip install -e '.[ucx]' (optional)")
    rdma = "set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true with a system UCX to have InfiniBand and RoCE"
    if os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() in ("1", "true", "yes"):
        return Finding("transport ucx", True, "ucxx with the system's UCX")
    return Finding("transport ucx", True, "ucxx with pip's libucx: tcp, shared memory, CUDA; no RDMA", rdma)


def _redis(url: str | None) -> Finding:
    if url is not None:
        try:
            workers = check_redis(url)
        except UpError as error:
            return Finding("Redis", False, without_password(url), str(error))
        registered = f"workers registered: {', '.join(workers)}" if workers else "no worker is registered"
        return Finding("Redis", True, f"{without_password(url)} answers; {registered}")
    try:
        binary = redis_binary()
        version = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (RedisMissingError, OSError, subprocess.SubprocessError) as error:
        return Finding("Redis", False, "no server to start", str(error))
    return Finding("Redis", True, f"our own: {' '.join(version.split()[:3])}")


def _port(port: int) -> Finding:
    try:
        check_port("127.0.0.1", port)
    except UpError as error:
        return Finding("HTTP port", None, f"{port} cannot be used now", str(error))
    return Finding("HTTP port", True, f"{port} is free")


def _memory() -> Finding:
    available = available_bytes()
    detail = f"{available / (1 << 30):.1f} GiB free"
    if available < _MIN_MEMORY_BYTES:
        return Finding("memory", None, detail, "lower --kv-cache-bytes, or use --aggregated")
    return Finding("memory", True, detail)


def _cache() -> Finding:
    path = cache_dir()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache", False, f"{path} cannot be written", "set PDSERVE_CACHE to a directory that can")
    is_prepared = default_model_path() is not None
    free = shutil.disk_usage(existing).free
    prepared = "default model ready" if is_prepared else "default model not prepared yet"
    detail = f"{path}, {free / (1 << 30):.1f} GiB free, {prepared}"
    if free < (_MIN_LOG_BYTES if is_prepared else NEEDED_BYTES):
        return Finding("cache", False, detail, "make room there, or set PDSERVE_CACHE to a larger disk")
    return Finding("cache", True, detail)


if __name__ == "__main__":
    sys.exit(doctor(None, 8000))
