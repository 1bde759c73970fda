"""The kernels of a CUDA device, as the layers call them.

Owns the choice between kernels (decode, prefill, cascade; own product or the library's) and the workspaces, which
live as long as the model. ``begin_step`` is called once a step, outside a captured graph's replay, before the layers:
it says how many leading requests are decodes and whether they share prefixes; the chunk plan is then made by the
first layer that attends (one small launch a step and window, captured with the rest).

    begin_step -> layer 0: plan, attend -> layer 1: attend -> ...

A ``seam`` stands in for attention while the rest of a forward pass is captured piece by piece (``engine.cuda_graphs``).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels import QKV, AddNorm, Linear, Normed, compose_qkv, elementwise
from engine.kernels.cascade_attention import CascadePlan
from engine.kernels.decode_attention import DecodePlan, paged_decode
from engine.kernels.hopper_launch import new_tickets
from engine.kernels.hopper_swiglu import HopperSwiGLU
from engine.kernels.prefill_attention import paged_prefill
from engine.kernels.skinny_gemm import SkinnyLinear, SkinnyTiling
from engine.kernels.skinny_qkv import SkinnyQKV

# Measured on an H200: up to this many rows the own product is as fast as cuBLAS or up to 12 % faster, and it fetches
# weights while the kernel before it still runs.
_SKINNY_ROWS = 32
_SKINNY_BLOCK_K = 256
_SKINNY_SPLIT_OUTPUTS = 2048
"""Up to this many a split of K pays: there are too few programs without it."""
_SKINNY_NARROW_OUTPUTS = 8192
"""Up to this many, tiles of 64 rows are fewer than SMs, and too few bytes are on their way."""
_HALF = (torch.bfloat16, torch.float16)


class AttentionSeam(Protocol):
    """What a capture puts in attention's place."""

    def queries(self) -> torch.Tensor:
        """Where the rotated queries of the batch go."""
        ...

    def attend(self, kv_layer: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Where this layer's attention output will be."""
        ...


class TritonKernels:
    """See ``engine.kernels.Kernels``. One stream: workspaces are shared by all calls."""

    name = "triton"

    def __init__(self, max_requests: int = 512) -> None:
        self._max_requests = max_requests
        self._plans: dict[tuple[int, int, int, int | None], DecodePlan] = {}
        self._planned: set[tuple[int, int, int, int | None]] = set()
        self._tickets: torch.Tensor | None = None
        self._stepwise = False
        self._num_decodes = 0
        self._is_mixed = False
        self._cascade: CascadePlan | None = None
        self.seam: AttentionSeam | None = None

    def begin_step(self, num_decodes: int, cascade: CascadePlan | None = None, *, is_mixed: bool = False) -> None:
        """The layers' next batch: its first ``num_decodes`` requests have one token; ``cascade`` is theirs.

        ``is_mixed``: there are others. A call for one token of each request is then for other requests than these.
        """
        self._stepwise = True
        self._planned.clear()
        self._num_decodes = num_decodes
        self._cascade = cascade
        self._is_mixed = is_mixed

    def set_num_threads(self, num_threads: int) -> None:
        """Nothing to set: the work is the device's."""

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        fused = HopperSwiGLU(weight, bias) if HopperSwiGLU.supports(weight) else None

        def multiply(x: torch.Tensor) -> torch.Tensor:
            if fused is not None and fused.pays(len(x)):
                return fused(x)
            return self.silu_and_mul(F.linear(x, weight, bias))

        skinny = _skinny(weight, bias, gated=True)
        return multiply if skinny is None else _by_rows(skinny, multiply)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        """Takes over ``weight`` [out, in]; it stays as it is."""
        if out_dtype not in (None, weight.dtype):
            if bias is None and weight.device.type == "cuda":
                # One for all steps, valid until the next one. (It is not what ended the waits of large steps: padding
                # their rows is, and the two were measured together.)
                out = torch.empty(self._max_requests, weight.shape[0], dtype=out_dtype, device=weight.device)

                # Straight from the float32 sums, without rounding between.
                def multiply(x: torch.Tensor) -> torch.Tensor:
                    return torch.mm(x, weight.t(), out_dtype=out_dtype, out=out[: len(x)])
            else:

                def multiply(x: torch.Tensor) -> torch.Tensor:
                    return F.linear(x, weight, bias).to(out_dtype)
        else:

            def multiply(x: torch.Tensor) -> torch.Tensor:
                return F.linear(x, weight, bias)

        skinny = _skinny(weight, bias, out_dtype)
        return multiply if skinny is None else _by_rows(skinny, multiply)

    def linear_add_norm(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, *, plain: bool
    ) -> AddNorm:
        def many(x: torch.Tensor, residual: torch.Tensor) -> tuple[Normed, torch.Tensor]:
            return self.fused_add_rms_norm(F.linear(x, weight, bias), residual, norm_weight, eps)

        skinny = _skinny(weight, bias, narrow=True)
        if skinny is None:
            return many
        # A norm can wait for a product that is our own, too; float16 might not hold what is not normed yet.
        defers = not plain and weight.dtype != torch.float16 and weight.shape[0] % _SKINNY_BLOCK_K == 0

        def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[Normed, torch.Tensor]:
            if len(x) > _SKINNY_ROWS:
                return many(x, residual)
            if defers:
                return skinny.add_norm(x, residual, norm_weight, eps), residual
            return self.fused_add_rms_norm(skinny(x), residual, norm_weight, eps)

        return run

    def qkv_rope_kv_write(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        cos_sin: torch.Tensor,
        q_norm_weight: torch.Tensor | None = None,
        k_norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> QKV:
        every = compose_qkv(self, weight, bias, num_heads, num_kv_heads, cos_sin, q_norm_weight, k_norm_weight, eps)
        head_dim = weight.shape[0] // (num_heads + 2 * num_kv_heads)
        cut = num_heads * head_dim
        q_bias, kv_bias = (None, None) if bias is None else (bias[:cut], bias[cut:])

        def many(
            normed: Normed,
            positions: torch.Tensor,
            slot_mapping: torch.Tensor,
            kv_layer: torch.Tensor,
            rows: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if rows is None or len(normed) <= _SKINNY_ROWS:
                return every(normed, positions, slot_mapping, kv_layer, rows)
            norms = (q_norm_weight, k_norm_weight, eps)
            kv = F.linear(normed, weight[cut:], kv_bias).view(len(normed), -1, head_dim)
            k, v = kv.tensor_split(2, dim=1)
            self.rope_kv_write(k[:, :0], k, v, cos_sin, positions, slot_mapping, kv_layer, *norms)
            q = F.linear(normed[rows], weight[:cut], q_bias).view(len(rows), num_heads, head_dim)
            if not len(rows):
                return q
            none = q[:, :0]
            return self.rope_kv_write(q, none, none, cos_sin, positions[rows], slot_mapping, kv_layer, *norms)

        tiling = _tiling(weight)
        half = head_dim // 2
        normed_heads = q_norm_weight is not None or k_norm_weight is not None
        if tiling is None or tiling.split > 1 or half % (tiling.block_n // 2) or normed_heads:
            return many
        skinny = SkinnyQKV(weight, bias, num_heads, num_kv_heads, cos_sin, tiling)

        def run(
            normed: Normed,
            positions: torch.Tensor,
            slot_mapping: torch.Tensor,
            kv_layer: torch.Tensor,
            rows: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if len(normed) > _SKINNY_ROWS:
                return many(normed, positions, slot_mapping, kv_layer, rows)
            out = None if self.seam is None else self.seam.queries()
            q = skinny(normed, positions, slot_mapping, kv_layer, out)
            return q if rows is None else q[rows]

        return run

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.fused_add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_and_mul(gate_up)

    def rope_kv_write(
        self,
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
    ) -> torch.Tensor:
        out = None if self.seam is None else self.seam.queries()
        return elementwise.rope_kv_write(
            q, k, v, cos_sin, positions, slot_mapping, kv_layer, q_norm_weight, k_norm_weight, eps, out
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        max_q_len: int,
        window: int | None = None,
    ) -> torch.Tensor:
        if self.seam is not None:
            return self.seam.attend(kv_layer, scale, window)
        out = torch.empty_like(q)
        self.attend(q, kv_layer, block_table, cu_seqlens_q, seq_lens, scale, max_q_len, window, out)
        return out

    def attend(
        self, q: torch.Tensor, kv_layer: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor, scale: float, max_q_len: int, window: int | None, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """``paged_attention`` into ``out``; rows past the last request's are left as they are."""
        requests = seq_lens.shape[0]
        decodes = requests if max_q_len == 1 else self._num_decodes
        if decodes:
            drawn = self._is_mixed and max_q_len == 1
            self._decode(q[:decodes], kv_layer, block_table, seq_lens[:decodes], scale, window, out[:decodes], drawn)
        if decodes < requests:
            if self._tickets is None:  # before a graph is captured: what is captured has been run
                self._tickets = new_tickets(q.device)
            # cu_seqlens_q keeps counting from the first request, so q and out stay whole.
            paged_prefill(
                q,
                kv_layer,
                block_table[decodes:],
                cu_seqlens_q[decodes:],
                seq_lens[decodes:],
                scale,
                max_q_len,
                window,
                out,
                self._tickets,
            )

    def _decode(
        self, q: torch.Tensor, kv_layer: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float,
        window: int | None, out: torch.Tensor, has_own_plan: bool,
    ) -> None:  # fmt: skip
        key = (q.shape[1], kv_layer.shape[2], q.shape[2], window)
        plan = self._plans.get(key)
        if plan is None:
            plan = DecodePlan(self._max_requests, *key[:3], q.device)
            self._plans[key] = plan
        # A window's first tokens are not attended to, so a shared prefix is worth nothing there.
        shares = window is None and not has_own_plan and self._cascade is not None and self._cascade.prefix
        cascade = self._cascade if shares else None
        if not self._stepwise or has_own_plan or key not in self._planned:
            plan.update(seq_lens, window, None if cascade is None else cascade.prefix)
            self._planned.add(key)
        if cascade is not None:
            cascade.run(q, kv_layer, block_table, scale)
        paged_decode(q, kv_layer, block_table, seq_lens, scale, plan, out)


def _tiling(weight: torch.Tensor, *, narrow: bool = False) -> SkinnyTiling | None:
    """How our own product for few rows cuts this weight, if it can; ``narrow``: to be read by as many SMs as can be."""
    outputs, inputs = weight.shape
    if inputs % _SKINNY_BLOCK_K or weight.dtype not in _HALF or weight.device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(weight.device)[0] == 12:
        return None  # 99 KB of shared memory; the tiles in flight take up to 160 there
    if outputs <= _SKINNY_SPLIT_OUTPUTS and inputs % (4 * _SKINNY_BLOCK_K) == 0:
        return SkinnyTiling(64, 128, split=4, num_stages=4, num_warps=4, tma=True)
    if narrow and outputs <= _SKINNY_NARROW_OUTPUTS:
        return SkinnyTiling(32, _SKINNY_BLOCK_K, num_stages=6, num_warps=4, tma=True)
    return SkinnyTiling(64, _SKINNY_BLOCK_K, num_stages=4, num_warps=4, tma=True)


def _skinny(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    *,
    gated: bool = False,
    narrow: bool = False,
) -> SkinnyLinear | None:
    tiling = _tiling(weight, narrow=narrow)
    return None if tiling is None else SkinnyLinear(weight, bias, tiling, out_dtype, gated=gated)


def _by_rows(skinny: SkinnyLinear, multiply: Linear) -> Linear:
    return lambda x: skinny(x) if len(x) <= _SKINNY_ROWS else multiply(x)
