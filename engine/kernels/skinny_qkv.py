# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product with the merged q/k/v weight for a few rows, up to the rotated queries and the KV cache, in one launch.

Owns the epilogue that takes a head's two halves from one program: rotary embedding, and the write of keys and values to
their slots. The product itself is ``skinny_gemm``'s. Heads that are normed before they are rotated (Qwen3) need all of
a head in one program, and stay with ``elementwise.rope_kv_write``.

    program t: columns c.. of both halves of head h    h < H: rotate -> q    h < H + K: rotate -> keys    else -> values
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import await_inputs, pdl
from engine.kernels.launch import launch
from engine.kernels.skinny_gemm import (
    MAX_ROWS,
    DeferredNorm,
    SkinnyTiling,
    both_of_pair,
    load_squares,
    multiply,
    norm_scale,
    prefetch_weights,
)


@triton.jit(do_not_specialize=["M"])
def _skinny_qkv_kernel(
    x_ptr, squares_ptr, w_ptr, w_desc, bias_ptr, cos_sin_ptr, positions_ptr, slots_ptr, out_ptr, kv_ptr, M, eps,
    stride_x, stride_w, stride_n, stride_kv, stride_h, stride_s,
    H: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr,
    SQUARES: tl.constexpr, ROW_STRIDE: tl.constexpr, STAGES: tl.constexpr, LINES_AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = BLOCK_N // 2
    TILES: tl.constexpr = HALF // COLUMNS  # of a head
    tile = tl.program_id(0)
    head = tile // TILES
    column = tile % TILES * COLUMNS
    m = tl.arange(0, BLOCK_M)
    p = column + tl.arange(0, COLUMNS)
    cell_n = tl.arange(0, BLOCK_N)
    row = (2 * head + cell_n // COLUMNS) * HALF + column + cell_n % COLUMNS
    offsets = row.to(tl.int64) * stride_w
    live = m < M
    # A step's inputs: what wrote them is over before the step's first launch that may overlap with another.
    position = tl.load(positions_ptr + m, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + m, mask=live, other=-1).to(tl.int64)
    angles = cos_sin_ptr + position[None, :] * (2 * HALF) + p[:, None]
    cos = tl.load(angles).to(tl.float32)
    sin = tl.load(angles + HALF).to(tl.float32)
    if PDL:
        prefetch_weights(w_ptr, offsets, 0, K, LINES_AHEAD)
    await_inputs(PDL, EARLY=True)
    if SQUARES:
        squares = load_squares(squares_ptr, m, SQUARES, ROW_STRIDE)
    acc = multiply(
        x_ptr, w_ptr, w_desc, offsets, 2 * head, column, m, M, stride_x, 0,
        K, BLOCK_M, BLOCK_N, BLOCK_K, TMA, True, STAGES,
    )  # fmt: skip
    if SQUARES:
        acc *= norm_scale(squares, eps, K)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    first, second = both_of_pair(acc, BLOCK_M, COLUMNS)
    if head < H + KV_HEADS:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < H:
        at = out_ptr + (m[None, :] * H + head) * (2 * HALF) + p[:, None]
        tl.store(at, first.to(out_ptr.dtype.element_ty), mask=live[None, :])
        tl.store(at + HALF, second.to(out_ptr.dtype.element_ty), mask=live[None, :])
    else:
        kind = (head - H) // KV_HEADS
        line = slot // S * stride_n + slot % S * stride_s + kind * stride_kv + (head - H) % KV_HEADS * stride_h
        at = kv_ptr + line[None, :] + p[:, None]
        has_slot = (slot >= 0)[None, :]  # padding of a captured batch has none
        tl.store(at, first.to(kv_ptr.dtype.element_ty), mask=has_slot)
        tl.store(at + HALF, second.to(kv_ptr.dtype.element_ty), mask=has_slot)


class SkinnyQKV:
    """The merged weight [(H + 2 * K) * D, hidden] of one layer, and its table of rotations [P, D]."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        cos_sin: torch.Tensor,
        tiling: SkinnyTiling,
    ) -> None:
        self.weight, self.bias, self.tiling, self._cos_sin = weight, bias, tiling, cos_sin
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._half = weight.shape[0] // (num_heads + 2 * num_kv_heads) // 2
        columns = tiling.block_n // 2
        if self._half % columns or tiling.split != 1 or weight.shape[1] % tiling.block_k:
            raise ValueError(
                f"half a head of {self._half} does not divide into tiles of {columns}, or K into whole tiles, or K is "
                "split: use SkinnyLinear and rope_kv_write"
            )
        self._descriptor: object = weight
        if tiling.tma:
            from triton.tools.tensor_descriptor import TensorDescriptor

            halves = weight.view(-1, self._half, weight.shape[1])
            self._descriptor = TensorDescriptor.from_tensor(halves, [2, columns, tiling.block_k])

    def __call__(
        self,
        x: torch.Tensor | DeferredNorm,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_layer: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rotated queries [M, H, D], M <= 64; keys and values are in ``kv_layer`` (a negative slot: nowhere)."""
        deferred = x if isinstance(x, DeferredNorm) else None
        a = x.scaled if isinstance(x, DeferredNorm) else x
        rows, k = a.shape
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows: use a library product above {MAX_ROWS}")
        if out is None:
            out = torch.empty(rows, self._num_heads, 2 * self._half, dtype=a.dtype, device=a.device)
        t = self.tiling
        launch(_skinny_qkv_kernel, (self.weight.shape[0] // t.block_n,),
            a, a if deferred is None else deferred.squares, self.weight, self._descriptor,
            self.weight if self.bias is None else self.bias, self._cos_sin, positions, slot_mapping, out, kv_layer,
            rows, 0.0 if deferred is None else deferred.eps, a.stride(0), self.weight.stride(0),
            kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
            H=self._num_heads, KV_HEADS=self._num_kv_heads, HALF=self._half, S=kv_layer.shape[3], K=k,
            BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=t.block_n, BLOCK_K=t.block_k, TMA=t.tma,
            BIAS=self.bias is not None, SQUARES=0 if deferred is None else len(deferred.squares), ROW_STRIDE=MAX_ROWS,
            STAGES=t.num_stages, LINES_AHEAD=min(t.lines_ahead, triton.next_power_of_2(triton.cdiv(k, 64))),
            num_warps=t.num_warps, **pdl(a.device),
        )  # fmt: skip
        return out
