"""One child process: started so that it cannot outlive us, ended within a bound.

Owns the process and its group; not when to start or restart it (``supervisor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_BYTES = 64 << 10
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child and how to tell that it is ready."""

    name: str
    argv: list[str]
    log: Path
    is_healthy: Callable[[], Awaitable[bool]]


class Child:
    """A running process with its output in ``spec.log``."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self._process = process

    @classmethod
    async def spawn(cls, spec: ChildSpec) -> Child:
        """Start it in its own session (so that the terminal's Ctrl-C reaches only us), and killed when we die."""
        with spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        return cls(spec, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit status, negative when a signal ended it."""
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL after ``timeout_s``; True when SIGTERM was enough."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
            return True
        except TimeoutError:
            return False
        finally:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group: also whatever the process itself had started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def die_with_parent(parent_pid: int) -> None:
    """Called in a new child before its program starts."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def python_argv(module: str, *flags: str) -> list[str]:
    """Command line of one of our services."""
    return [sys.executable, "-m", module, *flags]


def last_words(log: Path) -> str:
    """Why a process that has just ended could not go on, or one that is late is not ready, by its log: the last reason
    that it gave, else its last line that is no event, else its last warning. Empty when it said nothing."""
    reasons: list[str] = []
    warnings: list[str] = []
    text: list[str] = []
    lines = log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").splitlines() if log.exists() else []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            text.append(line.strip())
            continue
        if not isinstance(event, dict):
            continue
        if isinstance(reason := event.get("reason"), str):
            reasons.append(reason.strip())
        if event.get("level") in ("warning", "error"):
            warnings.append(": ".join(str(event[key]) for key in ("event", "error") if key in event))
    if reasons:
        return reasons[-1]
    last = next((line for line in reversed(text) if line), "")
    if not last and warnings:
        return warnings[-1]
    if last.startswith("╰"):  # a wrong flag, as typer draws it
        return " ".join(line.strip("│ ") for line in text if line.startswith("│"))
    return last


def describe_exit(status: int) -> str:
    """``exited with 3`` or ``was ended by SIGKILL``."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
