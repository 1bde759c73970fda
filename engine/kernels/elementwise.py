# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The passes between the matrix products, each one read and one write of its tensors.

Owns fused residual add + RMSNorm, SwiGLU, and q/k norm + rotary embedding + KV write. Same rounding points as
``reference.py``: the sum of the residual and a normed head are rounded to the tensor's dtype, everything else is
float32. Rows may be views with any stride (q, k and v are slices of the merged product); the last dimension is
contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import await_inputs, pdl
from engine.kernels.launch import launch


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, sum_ptr, eps, stride_x, stride_r, hidden,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < hidden
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + d, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_r + d, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * hidden + d, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    tl.store(normed_ptr + row * hidden + d, (wide * scale * weight).to(normed_ptr.dtype.element_ty), mask=mask)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)`` of [T, hidden]; None: the residual stream starts with x."""
    rows, hidden = x.shape
    normed = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    other = x if residual is None else residual
    block = triton.next_power_of_2(hidden)
    launch(_add_rms_norm_kernel, (rows,),
        x, other, weight, normed, total, eps, x.stride(0), other.stride(0), hidden,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)), **pdl(x.device),
    )  # fmt: skip
    return normed, total


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> [T, I]: ``silu(gate) * up`` of the two halves."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    launch(_silu_and_mul_kernel, (rows, triton.cdiv(width, block)),
        gate_up, out, gate_up.stride(0), width, BLOCK=block, num_warps=max(1, block // 256), **pdl(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
def _norm_rotate(x_ptr, offsets, mask, weight_ptr, cos, sin, p, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of some heads: normed (if NORM) and rotated, float32."""
    raw = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    first = raw.to(tl.float32)
    second = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        scale = tl.math.rsqrt(mean + eps)[:, None]
        w_first = tl.load(weight_ptr + p, mask=p < HALF, other=0.0).to(tl.float32)[None, :]
        w_second = tl.load(weight_ptr + HALF + p, mask=p < HALF, other=0.0).to(tl.float32)[None, :]
        first = (first * scale * w_first).to(raw.dtype).to(tl.float32)
        second = (second * scale * w_second).to(raw.dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rope_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, positions_ptr, slots_ptr, kv_ptr, out_ptr, q_weight_ptr, k_weight_ptr, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_n, stride_kv, stride_h, stride_s,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, HALF: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    Q_PROGRAMS: tl.constexpr = (H + BLOCK_Q - 1) // BLOCK_Q
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + position * (2 * HALF) + p
    cos = tl.load(angles, mask=p < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF, mask=p < HALF, other=0.0).to(tl.float32)[None, :]
    if part < Q_PROGRAMS:
        head = part * BLOCK_Q + tl.arange(0, BLOCK_Q)
        mask = (head[:, None] < H) & (p[None, :] < HALF)
        offsets = token * stride_qt + head[:, None] * stride_qh + p[None, :]
        first, second = _norm_rotate(q_ptr, offsets, mask, q_weight_ptr, cos, sin, p, eps, HALF, Q_NORM)
        out = out_ptr + (token * H + head[:, None]) * (2 * HALF) + p[None, :]
        tl.store(out, first.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + HALF, second.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:  # padding of a captured batch has no slot
            head = (part - Q_PROGRAMS) * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = (head[:, None] < K) & (p[None, :] < HALF)
            target = kv_ptr + slot // S * stride_n + slot % S * stride_s + head[:, None] * stride_h + p[None, :]
            offsets = token * stride_kt + head[:, None] * stride_kh + p[None, :]
            first, second = _norm_rotate(k_ptr, offsets, mask, k_weight_ptr, cos, sin, p, eps, HALF, K_NORM)
            tl.store(target, first.to(kv_ptr.dtype.element_ty), mask=mask)
            tl.store(target + HALF, second.to(kv_ptr.dtype.element_ty), mask=mask)
            source = v_ptr + token * stride_vt + head[:, None] * stride_vh + p[None, :]
            first = tl.load(source, mask=mask, other=0.0)
            second = tl.load(source + HALF, mask=mask, other=0.0)
            tl.store(target + stride_kv, first.to(kv_ptr.dtype.element_ty), mask=mask)
            tl.store(target + stride_kv + HALF, second.to(kv_ptr.dtype.element_ty), mask=mask)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_layer: torch.Tensor,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate q [T, H, D] and k [T, K, D], write k and v to their slots (a negative slot: nowhere) -> q.

    H or K may be 0.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if out is None:
        out = torch.empty(tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    half = head_dim // 2
    block_q = max(1, min(16, triton.next_power_of_2(num_heads)))
    block_k = max(1, min(16, triton.next_power_of_2(num_kv_heads)))
    programs = triton.cdiv(num_heads, block_q) + triton.cdiv(num_kv_heads, block_k)
    launch(_rope_kv_write_kernel, (tokens, programs),
        q, k, v, cos_sin, positions, slot_mapping, kv_layer, out,
        cos_sin if q_norm_weight is None else q_norm_weight, cos_sin if k_norm_weight is None else k_norm_weight, eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
        H=num_heads, K=num_kv_heads, S=kv_layer.shape[3], HALF=half, BLOCK_P=triton.next_power_of_2(half),
        BLOCK_Q=block_q, BLOCK_K=block_k, Q_NORM=q_norm_weight is not None, K_NORM=k_norm_weight is not None,
        num_warps=4 if block_q * half >= 512 else 1, **pdl(q.device),
    )  # fmt: skip
    return out
