"""Engines held still by signals: a fault comes in the state that a test names, however fast or busy the host is.

An engine that runs for a moment at a time is in no hurry: between two moments the other processes say what is so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.e2e.cluster import Member

MOMENT_S = 0.02
HEARD_AFTER_S = 0.7
"""An engine reports twice a second, whatever happens."""
MAX_MOMENTS = 200


class Held:
    """Engines of these workers, stopped until ``let_go``."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._pids = [member.engine_pid() for member in members]
        self.stop()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def let_go(self) -> None:
        """Whoever of them still lives."""
        self._signal(signal.SIGCONT)

    def run_until(self, what: str, is_so: Callable[[], bool], moment_s: float = MOMENT_S) -> None:
        """Let them work a moment at a time until it is so, which others than they say; then they stand still."""
        for _ in range(MAX_MOMENTS):
            self.run_a_moment(moment_s)
            deadline_s = time.monotonic() + HEARD_AFTER_S
            while time.monotonic() < deadline_s:
                if is_so():
                    return
                time.sleep(0.05)
        self.let_go()
        raise AssertionError(f"not within {MAX_MOMENTS} moments of {moment_s} s: {what}")

    def run_a_moment(self, moment_s: float = MOMENT_S) -> None:
        self.let_go()
        time.sleep(moment_s)
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def is_in_a_handoff(decode: Member) -> Callable[[], bool]:
    """Whether a hand-off to it has begun since now, and brought something, and is not over. Ask it only while the
    sender's engine stands still."""
    before = decode.metrics()

    def is_so() -> bool:
        now = decode.metrics()
        grown = {
            name: now[f"pdserve_{name}_total"] - before[f"pdserve_{name}_total"]
            for name in ("transfer_segments", "transfers_done")
        }
        assert not grown["transfers_done"], "the hand-off was over before the fault: take a longer prompt"
        return grown["transfer_segments"] > 0 and now["pdserve_leases"] == 1

    return is_so
