"""The staging of one engine: host memory, device memory, or both, each made when the first backend asks for it.

On a CUDA device host memory is pinned, so that the device packs into it and unpacks from it by itself.
"""

from __future__ import annotations

from kv_transfer.backends.base import Memory
from kv_transfer.staging import DEFAULT_NUM_SLOTS, DEFAULT_SLOT_BYTES, SlotPool, StagingArena

DEVICE_SLOT_BYTES = 32 << 20
"""So much that moving it takes a GPU longer than saying so takes the host; and still a part of a layer group only."""
MIN_DEVICE_SLOTS = 8
MAX_DEVICE_SLOTS = 256
"""So many segments are queued on one channel, at most (``max_queued_segments``): more than that would be refused there,
and fail their transfers, instead of waiting for a slot."""


class EngineStaging:
    def __init__(self, device: str, staged_bytes: int = 0) -> None:
        """``staged_bytes``: of a device's memory, in full slots. A piece of a short prompt takes a whole one, too, so
        steps of many short prompts find less room, and what is left over is packed later."""
        self._device = device
        self._staged_bytes = staged_bytes
        self._arenas: dict[Memory, SlotPool] = {}

    def arena(self, memory: Memory) -> SlotPool:
        if memory not in self._arenas:
            self._arenas[memory] = self._host() if memory == "host" else self._of_device()
        return self._arenas[memory]

    @property
    def used_bytes(self) -> int:
        return sum(arena.used_bytes for arena in self._arenas.values())

    @property
    def limit_bytes(self) -> int:
        return sum(arena.limit_bytes for arena in self._arenas.values())

    def _host(self) -> StagingArena:
        arena = StagingArena(DEFAULT_NUM_SLOTS, DEFAULT_SLOT_BYTES)
        if self._device.startswith("cuda"):
            from kv_transfer.cuda import CudaRuntime

            CudaRuntime(self._device).pin(arena)
        return arena

    def _of_device(self) -> SlotPool:
        from kv_transfer.cuda import CudaRuntime, CudaStaging

        num_slots = min(max(MIN_DEVICE_SLOTS, self._staged_bytes // DEVICE_SLOT_BYTES), MAX_DEVICE_SLOTS)
        return CudaStaging(CudaRuntime(self._device), num_slots, DEVICE_SLOT_BYTES)
