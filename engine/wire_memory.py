"""Where packed KV lies when it is not the host's own: an address, as the kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WireMemory:
    """Packed KV at an address that the device can reach: its own, a peer's, or pinned host memory."""

    address: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """As the kernels see it."""
        return torch.int64

    def data_ptr(self) -> int:
        return self.address
