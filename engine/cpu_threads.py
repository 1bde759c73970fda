"""How many compute threads this engine may use in its next step: engines on one host lend each other idle cores.

Owns one slot in a small file that all engines of a user on this host map into memory. Called by the model runner around
every step. Two engines with as many threads each as there are cores run many times slower than with half of them, yet
while one is idle its cores should not be.

    slot = moment (time.monotonic_ns) until which its engine counts as at work
           0 or past: idle | a step begins: now + 2 s | it ends: now + 10 ms (the next step usually follows)
           nothing is left to do: 0, at once (a decode's last step and the next prompt's prefill are no 10 ms apart)

A mark runs out by itself, so an engine that was killed is forgotten within 2 s. Its slot is free at once: it was held
by a lock on its bytes of the file, which ends with the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

import structlog

log = structlog.get_logger()

_NUM_SLOTS = 64
_SLOT_BYTES = 8
_STEP_NS = 2_000_000_000
_LINGER_NS = 10_000_000


class CpuThreads:
    """One engine's place among those of the host; not shared between threads."""

    def __init__(self, num_threads: int | None, directory: Path | None = None) -> None:
        """``num_threads``: a fixed number, or None for the host's cores shared among the engines at work."""
        self._fixed = num_threads
        self._cores = available_cores()
        self._marks: memoryview | None = None
        self._slot = 0
        if num_threads is None:
            try:
                self._join(directory or Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}")
            except OSError as error:
                log.warning("cores_not_shared", error=str(error), remedy="set --num-threads")

    def begin_step(self) -> int:
        """Mark this engine as at work; returns how many threads it may use."""
        if self._marks is None:
            return self._fixed or self._cores
        now = time.monotonic_ns()
        self._marks[self._slot] = now + _STEP_NS
        at_work = [slot for slot, until in enumerate(self._marks) if until > now]
        share, rest = divmod(self._cores, len(at_work))
        return max(1, share + (at_work.index(self._slot) < rest))

    def end_step(self) -> None:
        """The step is over; more will probably follow."""
        if self._marks is not None:
            self._marks[self._slot] = time.monotonic_ns() + _LINGER_NS

    def rest(self) -> None:
        """There is nothing to do until something comes."""
        if self._marks is not None:
            self._marks[self._slot] = 0

    def _join(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory / "engines_at_work", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, _NUM_SLOTS * _SLOT_BYTES)
        for slot in range(_NUM_SLOTS):
            # An open-file-description lock: unlike lockf's it also tells two engines in one process apart.
            lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, slot * _SLOT_BYTES, _SLOT_BYTES, 0)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
            except BlockingIOError:
                continue
            self._fd, self._slot = fd, slot
            self._marks = memoryview(mmap.mmap(fd, _NUM_SLOTS * _SLOT_BYTES)).cast("q")
            self._marks[slot] = 0
            return
        os.close(fd)
        raise OSError(f"all {_NUM_SLOTS} slots of {directory} are taken")

    def close(self) -> None:
        """Leave; the slot is free for another engine."""
        if self._marks is not None:
            self._marks[self._slot] = 0
            self._marks = None
            os.close(self._fd)


def available_cores() -> int:
    """Cores that this process may run on, by its affinity and by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
