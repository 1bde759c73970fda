"""What must hold before anything starts; each failure is one line that names the remedy.

Checks only; changes nothing but the directories that the run needs.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil

from pdserve.cache import cache_dir, runs_dir
from pdserve.up.devices import assign_devices, count_gpus
from pdserve.up.errors import UpError
from pdserve.up.plan import REDIS_SOCKET_NAME, Directories
from pdserve.up.settings import UpSettings

_KEPT_RUNS = 10
_MAX_SOCKET_PATH_BYTES = 107  # of a unix socket, on Linux
# Measured on Linux x86_64, without model: resident size of an engine process (Python, torch), and of the others.
_ENGINE_BYTES = 400 << 20
_OTHERS_BYTES = 700 << 20
_KV_CACHE_BYTES = 1 << 30
_HOST_KV_BYTES = 256 << 20
"""The engine's own defaults; the second is of decode and aggregated workers, for the KV of preempted requests."""
_BYTES_OF_DTYPE = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def check_platform() -> None:
    """Linux on x86_64 or aarch64, Python 3.11 to 3.13."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise UpError(
            f"{platform.system()} {platform.machine()} is not supported: pdserve runs on Linux x86_64 and aarch64"
        )
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise UpError(f"Python {platform.python_version()} is not supported: use 3.11, 3.12 or 3.13")


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """A port of the gateway can be listened on."""
    if not 1 <= port <= 65535:
        raise UpError(f"{flag} {port} is not a port: use 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UpError(f"port {port} is in use: end what uses it, or choose another with {flag}") from error
            reason = error.strerror or str(error)
            raise UpError(f"cannot listen on {host}:{port} ({reason}): use other --host or {flag}") from error


def check_memory(settings: UpSettings, model: Path) -> None:
    """Every engine's weights and KV pool fit into what is free now. On a GPU the engine itself checks."""
    if assign_devices(settings.device, 1, count_gpus()) != ["cpu"]:
        return
    needed = needed_bytes(settings, model)
    available = available_bytes()
    if needed > available:
        raise UpError(
            f"too little memory: {settings.num_engines} engines need about {_gib(needed)} and {_gib(available)} are "
            "free: lower --kv-cache-bytes, use fewer workers, or --aggregated"
        )


def needed_bytes(settings: UpSettings, model: Path) -> int:
    """Estimate for the whole cluster. Weights twice: as loaded, and packed for the CPU's matrix kernels."""
    on_disk = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    weights = on_disk * _BYTES_OF_DTYPE.get(settings.dtype, 2) // 2
    kv_cache_bytes = settings.kv_cache_bytes or _KV_CACHE_BYTES
    engines = settings.num_engines * (2 * weights + kv_cache_bytes + _ENGINE_BYTES)
    return engines + settings.decode * _HOST_KV_BYTES + _OTHERS_BYTES


def available_bytes() -> int:
    """Free memory of the host or of our cgroup, whichever is less."""
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def make_directories() -> Directories:
    """The log directory of this run, and in it a private one; those of older runs go, but for the last few."""
    runs = runs_dir()
    logs = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    runtime = logs / "private"
    try:
        logs.mkdir(parents=True)
        if len(os.fsencode(runtime / REDIS_SOCKET_NAME)) > _MAX_SOCKET_PATH_BYTES:
            runtime = Path(tempfile.mkdtemp(prefix="pdserve-"))
        else:
            runtime.mkdir(mode=0o700)
        for old in sorted(runs.glob("[0-9]*-[0-9]*-[0-9]*"))[:-_KEPT_RUNS]:
            if not psutil.pid_exists(int(old.name.rpartition("-")[2])):
                shutil.rmtree(old)
    except OSError as error:
        raise UpError(
            f"the cache {cache_dir()} cannot be written ({error.strerror or error}): "
            f"set PDSERVE_CACHE to a directory that can"
        ) from error
    return Directories(logs, runtime)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
