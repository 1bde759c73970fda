"""Inputs of the kernels' checks, paged ones among them, and how far from float64 a result may be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from engine.kernels import reference

NAN = float("nan")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


class Paged:
    """A KV layer with requests of the given lengths in shuffled blocks; slots that hold no token are NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        blocks = [-(-length // block_size) for length in lengths]
        self.block_size = block_size
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.kv = randn(sum(blocks) + 3, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
        ids = torch.randperm(len(self.kv)).int().tolist()
        self.table = torch.zeros(len(lengths), max(blocks) + 1, dtype=torch.int32)
        for row, (length, used) in enumerate(zip(lengths, blocks, strict=True)):
            self.table[row, :used] = torch.tensor([ids.pop() for _ in range(used)], dtype=torch.int32)
            if length % block_size:
                self.kv[int(self.table[row, used - 1]), :, :, length % block_size :] = NAN
        self.table = self.table.to(device)

    def scale_keys(self, scales: Sequence[float]) -> None:
        """Each request's keys, its first part by the first scale and so on: maxima of the scores that rise or fall."""
        for row, length in enumerate(self.seq_lens.tolist()):
            blocks = -(-length // self.block_size)
            of_block = torch.tensor([scales[i * len(scales) // blocks] for i in range(blocks)])
            ids = self.table[row, :blocks].long()
            self.kv[ids, 0] *= of_block.to(self.kv)[:, None, None, None]

    def expected(self, q: torch.Tensor, bounds: Sequence[int], scale: float, window: int | None) -> torch.Tensor:
        kv = torch.nan_to_num(self.kv.double())
        cu = torch.tensor(bounds, dtype=torch.int32)
        longest = max(b - a for a, b in pairwise(bounds))
        return reference.paged_attention(q.double(), kv, self.table, cu, self.seq_lens, scale, longest, window)
