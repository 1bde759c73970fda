"""Staging memory: a bounded arena of equal slots, between the KV pool and the network.

    sender:    engine thread packs KV into a slot -> network thread sends it -> free
    receiver:  network thread receives into a slot -> engine thread verifies and unpacks it -> free

A slot belongs to whoever took it until that one gives it back: a slot that a receive is pending on stays taken,
whatever became of its transfer. Only plain bytes here; no network thread ever touches the KV pool.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque

DEFAULT_SLOT_BYTES = 8 << 20
"""Large enough that a message's fixed costs vanish, small enough that a segment is soon on its way."""
DEFAULT_NUM_SLOTS = 16


class StagingSlot:
    """A piece of the arena, all of it writable through ``view``."""

    __slots__ = ("index", "view")

    def __init__(self, index: int, view: memoryview) -> None:
        self.index = index
        self.view = view


class StagingArena:
    """Thread-safe. Pages are touched on first use, so an idle arena costs address space only."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"staging needs at least one slot of one byte, not {num_slots} of {slot_bytes}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._memory = memoryview(mmap.mmap(-1, num_slots * slot_bytes))
        self._free = deque(range(num_slots))
        self._freed = threading.Condition()

    def try_take(self) -> StagingSlot | None:
        with self._freed:
            return self._pop() if self._free else None

    def take(self, timeout_s: float) -> StagingSlot | None:
        """Wait for a free slot; None when there was none in time."""
        with self._freed:
            if not self._freed.wait_for(lambda: bool(self._free), timeout_s):
                return None
            return self._pop()

    def give_back(self, slot: StagingSlot) -> None:
        with self._freed:
            if slot.index in self._free:
                raise RuntimeError(f"staging slot {slot.index} was given back twice")
            self._free.append(slot.index)
            self._freed.notify()

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        return (self.num_slots - len(self._free)) * self.slot_bytes

    @property
    def limit_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def _pop(self) -> StagingSlot:
        index = self._free.popleft()
        start = index * self.slot_bytes
        return StagingSlot(index, self._memory[start : start + self.slot_bytes])
