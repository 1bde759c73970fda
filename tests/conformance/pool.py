"""KV memory of a toy engine, real on a CPU and on a GPU, with the simplest of block pools.

Blocks are given out in random order and scribbled over when they are freed, so that whatever is read or written too
late shows.
"""

from __future__ import annotations

import random

import torch

from engine.kv_cache import KVCache
from tests.conformance.jobs import DIM, HEADS, LAYERS, Config


class Pool:
    """KV memory with the simplest of block pools."""

    def __init__(self, config: Config) -> None:
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.block_size = config.block_size
        self.cache = KVCache(
            num_layers=LAYERS,
            num_blocks=config.num_blocks,
            num_kv_heads=HEADS,
            block_size=config.block_size,
            head_dim=DIM,
            dtype=self.dtype,
            device=torch.device(config.device),
        )
        self.free = list(range(config.num_blocks))
        random.Random(7).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}

    def take(self, name: str, tokens: int) -> bool:
        count = -(-tokens // self.block_size)
        if count > len(self.free):
            return False
        self.tables[name] = [self.free.pop() for _ in range(count)]
        return True

    def release(self, name: str) -> None:
        if name in self.tables and self.cache.copies is not None:
            self.cache.copies.join()
        for block in self.tables.pop(name, []):
            for layer in self.cache.layers:
                layer[block].fill_(float("nan"))
            self.free.append(block)

    def write(self, name: str, kv: torch.Tensor, start: int, end: int, layer_start: int, layer_end: int) -> None:
        part = kv[layer_start:layer_end, :, :, start:end].to(self.cache.layers[0]).contiguous()
        self.cache.unpack(
            self.tables[name], start, end, layer_start, layer_end, part.view(torch.uint8).flatten(), self.dtype
        )

    def read(self, name: str, tokens: int) -> bytes:
        """All of it, canonical, in the pool's own dtype."""
        size = self.cache.packed_bytes(tokens, LAYERS, self.dtype)
        out = torch.empty(size, dtype=torch.uint8, device=self.cache.layers[0].device)
        self.cache.pack(self.tables[name], 0, tokens, 0, LAYERS, out, self.dtype)
        return out.cpu().numpy().tobytes()
