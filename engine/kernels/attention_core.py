# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the attention kernels share: addresses of a tile of paged K or V, and one step of the online softmax.

KV of a layer is ``[N, 2, K, S, D]``: block, key or value, KV head, token in the block, element. A block of one head
is contiguous (S * D elements), so a tile of tokens is a few contiguous runs whatever the block table says.

Scores live in the base-2 domain (``exp2`` is one instruction): ``m`` is the running maximum of ``score * scale *
log2(e)``, ``total`` the sum of ``exp2(score - m)``, and a partial result's log-sum-exp is ``m + log2(total)``. Online
softmax: Milakov and Gimelshein, 2018; tiling: Dao et al., FlashAttention, 2022; split and merge: Flash-Decoding,
2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# A masked score, and where the running maximum starts. Finite and far apart: exp2(MASKED * scale - FLOOR) is exactly
# zero, so a tile that is all masked for some row adds nothing (with equal values the product's rounding would decide).
MASKED = tl.constexpr(-1.0e30)
FLOOR = tl.constexpr(-1.0e20)


@triton.jit
def token_offsets(
    table_ptr, start, end, stride_block, stride_token, S: tl.constexpr, BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr
):
    """Element offsets (int64) of tokens start .. start + BLOCK_N of one request; PARTIAL: the tile may pass ``end``."""
    n = tl.arange(0, BLOCK_N)
    if S % BLOCK_N == 0:
        # start is a multiple of BLOCK_N: the tile lies in one block, and its id is one scalar.
        block = tl.load(table_ptr + start // S).to(tl.int64)
        return block * stride_block + (start % S + n).to(tl.int64) * stride_token
    else:
        token = start + n
        if PARTIAL:
            block = tl.load(table_ptr + token // S, mask=token < end, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + token // S).to(tl.int64)
        return block * stride_block + (token % S).to(tl.int64) * stride_token


@triton.jit
def load_tile(
    base_ptr, offsets, start, end, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr
):
    """A [BLOCK_N, BLOCK_D] tile of K or V; rows past ``end`` are zero (not whatever the block holds: it may be NaN)."""
    d = tl.arange(0, BLOCK_D)
    pointers = base_ptr + offsets[:, None] + d[None, :]
    if PARTIAL:
        valid = (start + tl.arange(0, BLOCK_N))[:, None] < end
        if BLOCK_D != D:
            valid = valid & (d[None, :] < D)
        return tl.load(pointers, mask=valid, other=0.0)
    elif BLOCK_D != D:
        return tl.load(pointers, mask=d[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def softmax_step(acc, m, total, scores, v, scale_log2):
    """Fold a tile's raw scores [M, N] and values [N, D] into (acc [M, D], m [M], total [M])."""
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    p = tl.math.exp2(scores * scale_log2 - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, m_new, total
