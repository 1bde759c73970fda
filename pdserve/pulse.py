"""The pulse of one stream: when to write, and when the other side has been silent for too long.

Both ends of a session and of a hand-off stream use one: the writing task waits in :meth:`Pulse.beat`, the reading task
reports each frame with :meth:`Pulse.heard`. Silence is counted in the owner's own beats, so that a stall of its own
event loop (or a stop and continue of its process) is not taken for the peer's: frames that wait are read first.
"""

from __future__ import annotations

import asyncio

HEARTBEAT_S = 0.5
LOST_AFTER_S = 2.0


class PeerSilent(ConnectionError):
    """Nothing was heard from the peer for LOST_AFTER_S."""


class Pulse:
    """Wakes the writer for news (:meth:`ring`) and for heartbeats, and counts the silence of the peer."""

    def __init__(self, heartbeat_s: float = HEARTBEAT_S, lost_after_s: float = LOST_AFTER_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._silent_beats_limit = max(1, round(lost_after_s / heartbeat_s))
        self._silent_beats = 0
        self._news = asyncio.Event()
        self._next_beat_s = asyncio.get_running_loop().time() + heartbeat_s

    def ring(self) -> None:
        """There is something to write."""
        self._news.set()

    def heard(self) -> None:
        """The peer said something."""
        self._silent_beats = 0

    async def beat(self) -> bool:
        """Wait for news or for the next heartbeat; True when a heartbeat is due.

        Raises PeerSilent when the peer was silent for too many heartbeats.
        """
        loop = asyncio.get_running_loop()
        if not self._news.is_set():
            try:
                async with asyncio.timeout_at(self._next_beat_s):
                    await self._news.wait()
            except TimeoutError:
                pass
        self._news.clear()
        now_s = loop.time()
        if now_s < self._next_beat_s:
            return False
        self._next_beat_s = now_s + self._heartbeat_s
        if self._silent_beats >= self._silent_beats_limit:
            raise PeerSilent(f"heard nothing for {self._silent_beats * self._heartbeat_s:.1f} s")
        self._silent_beats += 1
        return True
