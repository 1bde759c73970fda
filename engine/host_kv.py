"""Host memory for the KV of preempted requests: the bytes, and the copies to and from the device's blocks.

Owns one bounded allocation of slots, each as large as a block in all layers; pinned when the device is a GPU. Which
slot belongs to whom is ``offload``'s business. Copies go on the runner's own stream, in order with its steps, so that
nothing has to wait for them; only who writes into blocks beside that stream (hand-offs on a GPU) is told when some were
left, and comes after. Only the engine's thread touches it.

    blocks --copy_out--> slots --copy_in--> blocks        through a buffer of a few blocks on the device
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

_GROUP_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Of the buffer on the device: it should stay in a CPU's cache, and give a GPU work for longer than a launch takes."""
_PROBE_BLOCKS = 8


class KVLayers(Protocol):
    """What is asked of ``KVCache``."""

    @property
    def layers(self) -> list[torch.Tensor]:
        """Per layer, by block id."""
        ...


class HostKV:
    """As many slots as ``num_bytes`` holds."""

    def __init__(self, cache: KVLayers, num_bytes: int, left: Callable[[], None] | None = None) -> None:
        """Allocate, and measure how fast copies are. ``left``: called when copies out of blocks are on their way; the
        blocks are free already, and may be written to by what comes after those copies only.

        Raises:
            ValueError: not even one block fits.
        """
        self._layers = cache.layers
        self._left = left
        block = self._layers[0][0]
        self.block_bytes = block.nbytes * len(self._layers)
        self.num_blocks = num_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ValueError(
                f"host_kv_bytes={num_bytes} holds no block of {self.block_bytes} bytes: "
                f"use --host-kv-bytes {16 * self.block_bytes} or more, or 0 for none"
            )
        self._group = max(1, _GROUP_BYTES[block.device.type] // self.block_bytes)
        shape = (self.num_blocks, len(self._layers), *block.shape)
        # calloc: on a CPU pages cost nothing until they are written.
        data = np.zeros(self.num_blocks * self.block_bytes, np.uint8)
        self._slots = torch.from_numpy(data).view(block.dtype).view(shape)
        if block.device.type != "cpu":
            self._pin()
        self.bytes_per_s = self._measure()
        """One way."""

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """What these blocks hold, to these slots."""
        for at in range(0, len(block_ids), self._group):
            ids = self._ids(block_ids[at : at + self._group])
            gathered = torch.stack([layer.index_select(0, ids) for layer in self._layers], 1)
            for index, slot in enumerate(slots[at : at + self._group]):
                self._slots[slot].copy_(gathered[index], non_blocking=True)
        if self._left is not None:
            self._left()

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """What these slots hold, to these blocks."""
        for at in range(0, len(block_ids), self._group):
            ids = self._ids(block_ids[at : at + self._group])
            gathered = torch.empty((len(ids), *self._slots.shape[1:]), dtype=self._slots.dtype, device=ids.device)
            for index, slot in enumerate(slots[at : at + self._group]):
                gathered[index].copy_(self._slots[slot], non_blocking=True)
            for number, layer in enumerate(self._layers):
                layer.index_copy_(0, ids, gathered[:, number])

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        ids, device = torch.tensor(block_ids), self._layers[0].device
        # From pageable memory the copy would wait for the step that runs, and each group for the one before it.
        return ids if device.type == "cpu" else ids.pin_memory().to(device, non_blocking=True)

    def _measure(self) -> float:
        """Out and in again, so that nothing changes; the first round brings the pages."""
        count = min(_PROBE_BLOCKS, self.num_blocks, len(self._layers[0]))
        ids = list(range(count))
        seconds = 0.0
        for _ in range(2):
            self._wait()
            started_s = time.perf_counter()
            self.copy_out(ids, ids)
            self.copy_in(ids, ids)
            self._wait()
            seconds = time.perf_counter() - started_s
        return 2 * count * self.block_bytes / max(seconds, 1e-9)

    def _pin(self) -> None:
        """In place: torch's own pinned memory is rounded up to the next power of two, 40 GiB to 64."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, num_bytes = self._slots.data_ptr(), self._slots.nbytes
        code = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if code:
            raise ValueError(
                f"{num_bytes} bytes of host memory cannot be pinned (CUDA error {code}): use a lower --host-kv-bytes"
            )
        at_end = weakref.finalize(self, runtime.cudaHostUnregister, address)
        at_end.atexit = False  # the driver unpins what is left when the process ends

    def _wait(self) -> None:
        if self._layers[0].is_cuda:
            torch.cuda.synchronize(self._layers[0].device)
