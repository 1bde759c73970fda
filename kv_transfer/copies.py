"""Copies that a device makes by itself, and the thread that waits for them: the engine's own never does.

    engine: starts a copy --> [kv-copies] waits for it --> what comes next: seal and send (P), let go of the source (D)

Copies of one engine end in about the order in which they began, so one thread can wait for one after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

CLOSE_S = 1.0
AT_ONCE = 4
"""Copies that are started, waited for and told of together: enough to save launches, few enough that one side of a
transfer works while the other does."""


class DeviceCopy(Protocol):
    """Between the KV pool and staging, asked for and perhaps not over. Waited for when it is started."""

    def wait(self) -> int:
        """Until it is over; the block mix of what was copied. Called once, on any thread."""
        ...


Then = Callable[[list[int]], None]


class CopyWaiter:
    """Bounded by the staging slots that the copies are from or to."""

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._started: queue.SimpleQueue[tuple[Sequence[DeviceCopy], Then] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def when_done(self, copies: Sequence[DeviceCopy], then: Then) -> None:
        """Call ``then`` with their block mixes when all of them are over, on this object's thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
            thread.start()
            self._thread = thread  # not before: ``close`` joins what has started
        self._started.put((copies, then))

    def check(self) -> None:
        """Raises what went wrong: after an error of the device nothing that it holds can be trusted."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let what was started end."""
        if self._thread is not None:
            self._started.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (item := self._started.get()) is not None:
            copies, then = item
            try:
                then([copy.wait() for copy in copies])
            except Exception as error:  # of any library below: the engine's thread gets it from check()
                self._error = error
                self._wakeup()
                return
