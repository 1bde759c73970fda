"""Copies tensors from mapped files to a CUDA device.

Owns two pinned buffers. A plain copy of pageable memory goes through the driver's own small buffer, one page fault
after the other on one core; here all cores fill one buffer, reading the file as they touch its pages, while the other
is on its way:

    host    fill 0 | fill 1 | fill 0 ...
    device         | copy 0 | copy 1 | ...
"""

from __future__ import annotations

import torch

_BUFFER_BYTES = 64 << 20


class Uploader:
    """Used by one thread, on its current stream."""

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._next = 0

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values on the device; complete for whatever comes later on the stream."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = _as_bytes(tensor.contiguous()), _as_bytes(out)
        size = self._buffers[0].numel()
        for start in range(0, source.numel(), size):
            buffer, free = self._buffers[self._next], self._free[self._next]
            self._next = 1 - self._next
            part = source[start : start + size]
            free.synchronize()
            buffer[: part.numel()].copy_(part)
            target[start : start + size].copy_(buffer[: part.numel()], non_blocking=True)
            free.record()
        return out


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
