"""Staging memory: bounded arenas of equal slots, between the KV pool and the network.

    sender:    engine thread packs KV into a slot -> network thread sends it -> free
    receiver:  network thread receives into a slot -> engine thread verifies and unpacks it -> free

A slot belongs to whoever took it until that one gives it back: a slot that a receive is pending on stays taken,
whatever became of its transfer. Only plain bytes here; no network thread ever touches the KV pool.

``StagingArena`` is host memory, a memfd: it has no name to clean up, is gone with its last user, and does not count
against /dev/shm. Its seals let another process map it, but not write or resize it (backends/shm.py). That of a GPU is
``kv_transfer.cuda.CudaStaging``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

DEFAULT_SLOT_BYTES = 8 << 20
"""Large enough that a message's fixed costs vanish, small enough that a segment is soon on its way."""
DEFAULT_NUM_SLOTS = 16

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1; not in ``fcntl`` before Python 3.13."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class DeviceView:
    """A piece of a device's memory, as ``memoryview`` is one of the host's: it can be measured, cut and passed on."""

    __slots__ = ("address", "num_bytes")

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes

    def __len__(self) -> int:
        return self.num_bytes

    def __getitem__(self, part: slice) -> DeviceView:
        start, end, step = part.indices(self.num_bytes)
        if step != 1:
            raise ValueError("only contiguous parts of device memory can be taken")
        return DeviceView(self.address + start, max(0, end - start))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class StagingSlot:
    """A piece of an arena, all of it writable through ``view``."""

    __slots__ = ("_give_back", "index", "view")

    def __init__(self, index: int, view: Any, give_back: Callable[[Sequence[StagingSlot]], None]) -> None:
        """``view``: a memoryview, or a DeviceView. ``give_back``: the owner's, for several of its slots at once."""
        self.index = index
        self.view = view
        self._give_back = give_back

    def give_back(self) -> None:
        """Once; nothing touches its memory any more."""
        self._give_back((self,))

    @staticmethod
    def give_all_back(slots: Sequence[StagingSlot]) -> None:
        """The same for many, whoever owns each: less work, since they are told of together."""
        for owner, given in groupby(slots, attrgetter("_give_back")):
            owner(list(given))


class SlotPool:
    """Abstract: ``_view``. Which slots are free. Thread-safe."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"staging needs at least one slot of one byte, not {num_slots} of {slot_bytes}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
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
        self._take_back((slot,))

    def _take_back(self, slots: Sequence[StagingSlot]) -> None:
        with self._freed:
            for slot in slots:
                if slot.index in self._free:
                    raise RuntimeError(f"staging slot {slot.index} was given back twice")
                self._free.append(slot.index)
            self._freed.notify(len(slots))

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
        return StagingSlot(index, self._view(index * self.slot_bytes), self._take_back)

    def _view(self, start: int) -> memoryview | DeviceView:
        raise NotImplementedError


class StagingArena(SlotPool):
    """Pages are touched on first use, so an idle arena costs address space only."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self.fileno, memory = _sealed_memory(num_slots * slot_bytes)
        """Whoever has a copy of this file descriptor can read all slots, and write none."""
        weakref.finalize(self, os.close, self.fileno)
        self._memory = memoryview(memory)
        self.address = address_of(self._memory)

    def offset(self, view: memoryview) -> int:
        """Where a part of a slot is in the arena.

        Raises:
            ValueError: it is no part of this arena.
        """
        offset = address_of(view) - self.address if len(view) else 0
        if not 0 <= offset <= self.limit_bytes - len(view):
            raise ValueError("this memory is not in the sender's staging")
        return offset

    def _view(self, start: int) -> memoryview:
        return self._memory[start : start + self.slot_bytes]


def _sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    fileno = os.memfd_create("pdserve-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fileno, size)
    memory = mmap.mmap(fileno, size)
    fcntl.fcntl(fileno, fcntl.F_ADD_SEALS, SEALS)  # after our own mapping, which stays writable
    return fileno, memory


def address_of(view: memoryview | DeviceView) -> int:
    if isinstance(view, DeviceView):
        return view.address
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
