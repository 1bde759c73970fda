"""Compiles the C kernels in ``native/`` on the machine that runs them, once, and loads them.

Owns the compiler call and the cache of its results (a file per source, compiler and processor, so that an upgrade or
another host with the same home directory compiles anew). Raises ``KernelsUnavailableError`` where it cannot; the caller
then takes the torch kernels.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from engine.kernels import KernelsUnavailableError

log = structlog.get_logger()

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
    version = _run([compiler, "--version"])
    digest = hashlib.sha256("\n".join([version, _processor(), *_FLAGS]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:20]}.so"
    directory = _cache_directory()
    library = directory / name
    if library.is_file():
        return library
    with _one_at_a_time(directory / "compiling.lock"):
        if not library.is_file():
            _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    log.info("compiling_kernels", compiler=compiler, to=str(library))
    # To a name of its own, then renamed: a killed compiler leaves nothing that looks like a library.
    with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as file:
        made = Path(file.name)
    try:
        _run([compiler, *_FLAGS, *map(str, sorted(_SOURCES.glob("*.c"))), "-o", str(made), "-lm"])
        made.chmod(0o755)
        made.replace(library)
    finally:
        made.unlink(missing_ok=True)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Engines that start together wait for the first one's compiler instead of running their own."""
    deadline = time.monotonic() + _COMPILE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelsUnavailableError(f"another process has held {path} for too long: end it") from None
                time.sleep(0.1)
        yield


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
