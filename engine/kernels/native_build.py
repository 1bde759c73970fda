"""Compiles the C kernels in ``native/`` on the machine that runs them, once, and loads them.

Owns the compiler call and the cache of its results (a file per source, compiler and processor, so that an upgrade or
another host with the same home directory compiles anew). Raises ``KernelsUnavailableError`` where it cannot; the caller
then takes the torch kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from engine.kernels import KernelsUnavailableError

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ["-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
_COMPILE_TIMEOUT_S = 180


def load_library() -> ctypes.CDLL:
    """The compiled kernels. Their threads are their own: torch's may stay at one."""
    if platform.system() != "Linux":
        raise KernelsUnavailableError("native kernels are for Linux only")
    library = _compiled()
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailableError(f"{library} cannot be loaded ({error}): remove it to compile it anew") from error


def _compiled() -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise KernelsUnavailableError("no C compiler: install gcc")
    sources = sorted(_SOURCES.glob("*.c"))
    version = _run([compiler, "--version"])
    digest = hashlib.sha256("\n".join([version, _processor(), *_FLAGS]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:20]}.so"
    directory = _cache_directory()
    library = directory / name
    if library.is_file():
        return library
    # To a name of its own, then renamed: two engines that start together both succeed.
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".so", delete=False) as file:
        made = Path(file.name)
    try:
        _run([compiler, *_FLAGS, *map(str, sources), "-o", str(made), "-lm"])
        made.chmod(0o755)
        made.replace(library)
    finally:
        made.unlink(missing_ok=True)
    return library


def _cache_directory() -> Path:
    configured = os.environ.get("PDSERVE_CACHE")
    base = (Path(configured).expanduser() if configured else Path.home() / ".cache" / "pdserve") / "kernels"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    private = Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.stat().st_uid != os.getuid():
        raise KernelsUnavailableError(f"{base} is not writable and {private} is someone else's")
    return private


def _processor() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kept = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), *kept])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise KernelsUnavailableError(f"{command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout
