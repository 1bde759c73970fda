"""The memory that keys and values live in, and its packing to and from the wire.

Owns one allocation, seen per layer as ``[num_blocks, 2, K, S, D]`` (0: keys, 1: values). Which block belongs to whom is
the block pool's business; when bytes move is the hand-off's. Only the engine's thread touches it. On a CUDA device
``copies`` packs and unpacks beside the steps; what is here for tensors is plain, and waits.

The wire layout is ``[layer, 2, kv_head, token, head_dim]``, contiguous, in token order: it names no block, so that two
engines with different block sizes (or dtypes) understand each other.

Shape letters: N blocks in the pool, S tokens a block, K KV heads, D head dim.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.wire_memory import WireMemory

if TYPE_CHECKING:
    from engine.kv_copies import KVCopies, KVCopy


class KVCache:
    """Keys and values of all blocks and layers."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim)
        if device.type == "cpu":
            # calloc: pages cost nothing until they are written (torch.zeros would touch them all).
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            self._data = torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
        else:
            self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[torch.Tensor] = list(self._data.unbind(0))
        """Per layer [N, 2, K, S, D]."""

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    @cached_property
    def copies(self) -> KVCopies | None:
        """Of a CUDA device; None on others, where packing is the host's work."""
        if self._data.device.type != "cuda":
            return None
        from engine.kv_copies import KVCopies  # imports triton, which a host without a GPU may lack

        copies = KVCopies(self._data)
        copies.warm_up()
        return copies

    @staticmethod
    def bytes_per_block(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize

    def packed_bytes(self, num_tokens: int, num_layers: int, dtype: torch.dtype) -> int:
        """Size on the wire of that many tokens of that many layers."""
        return num_layers * 2 * self.num_kv_heads * num_tokens * self.head_dim * dtype.itemsize

    def pack(
        self,
        block_table: list[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        out: torch.Tensor,
        dtype: torch.dtype,
    ) -> int:
        """Copy a token range of a layer range into ``out`` (uint8, at least as large), converted to ``dtype``.

        Returns:
            The number of bytes written, from the start of ``out``.
        """
        num_bytes = self.packed_bytes(token_end - token_start, layer_end - layer_start, dtype)
        if not num_bytes:
            return 0
        if out.nbytes < num_bytes:
            raise ValueError(f"the staging buffer has {out.nbytes} bytes, {num_bytes} are needed")
        wire = self._wire_view(out[:num_bytes], token_end - token_start, layer_end - layer_start, dtype)
        for block_id, offset, length, at in self._spans(block_table, token_start, token_end):
            source = self._data[layer_start:layer_end, block_id, :, :, offset : offset + length]
            wire[:, :, :, at : at + length].copy_(source)
        return num_bytes

    def unpack(
        self,
        block_table: list[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        payload: torch.Tensor | bytes | bytearray | memoryview | WireMemory,
        dtype: torch.dtype,
    ) -> KVCopy | None:
        """The inverse of :meth:`pack`: copy ``payload`` (of ``dtype``) into the blocks, converted to their dtype.

        None: done. From ``WireMemory`` the device copies, after ``copies.start()``: the payload must stay until that is
        over.
        """
        num_bytes = self.packed_bytes(token_end - token_start, layer_end - layer_start, dtype)
        if not num_bytes:
            return None
        if isinstance(payload, WireMemory):
            if self.copies is None:
                raise ValueError("packed KV in a device's memory cannot be unpacked by the host")
            return self.copies.unpack(block_table, token_start, token_end, layer_start, layer_end, payload, dtype)
        if not isinstance(payload, torch.Tensor):
            # torch takes no read-only memory (it could not keep the promise): a bytes object costs one more copy.
            view = memoryview(payload)
            payload = torch.from_numpy(np.frombuffer(bytearray(view) if view.readonly else view, np.uint8))
        if payload.nbytes != num_bytes:
            raise ValueError(f"the payload has {payload.nbytes} bytes, {num_bytes} are expected")
        wire = self._wire_view(payload, token_end - token_start, layer_end - layer_start, dtype)
        for block_id, offset, length, at in self._spans(block_table, token_start, token_end):
            target = self._data[layer_start:layer_end, block_id, :, :, offset : offset + length]
            target.copy_(wire[:, :, :, at : at + length])
        return None

    def _wire_view(self, data: torch.Tensor, num_tokens: int, num_layers: int, dtype: torch.dtype) -> torch.Tensor:
        return data.view(torch.uint8).view(dtype).view(num_layers, 2, self.num_kv_heads, num_tokens, self.head_dim)

    def _spans(self, block_table: list[int], token_start: int, token_end: int) -> list[tuple[int, int, int, int]]:
        """(block id, offset in it, tokens, offset on the wire) of each block that the token range touches."""
        if not 0 <= token_start <= token_end <= len(block_table) * self.block_size:
            raise ValueError(
                f"tokens {token_start}..{token_end} are not within the {len(block_table)} blocks of {self.block_size}"
            )
        spans = []
        position = token_start
        while position < token_end:
            offset = position % self.block_size
            length = min(self.block_size - offset, token_end - position)
            spans.append((block_table[position // self.block_size], offset, length, position - token_start))
            position += length
        return spans
