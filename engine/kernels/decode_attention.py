# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged decode attention with split-KV: one query token a request, GQA heads packed into one tile.

``DecodePlan`` cuts the step's KV into nearly equal chunks on the device (no host sync, grid fixed by the maxima, so
it replays in a CUDA graph); it is made once a step and serves every layer. ``paged_decode`` runs one program a (KV
head, chunk). A chunk's partial result goes to the workspace; the program that arrives last at a request's counter
merges them, so attention is one launch a layer.

    seq_lens --plan--> work[w] = (request, begin, end)     first_chunk[b], num_chunks[b]
    program (k, w): partial[w, k*G:(k+1)*G], lse --last of the request's chunks--> out[b, k*G:(k+1)*G]

With ``plan.prefix`` (cascade) the requests' first ``kv_begin[b]`` tokens were attended to by ``cascade_attention``
and its partials join the merge. Every tensor's last dimension must be contiguous; 16-byte aligned rows keep the loads
wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_core import FLOOR, LOG2E, MASKED, load_tile, softmax_step, token_offsets
from engine.kernels.dependent_launch import await_inputs, pdl
from engine.kernels.launch import launch


@triton.jit(do_not_specialize=["B", "W", "target_chunks", "min_chunk", "window"])
def _plan_kernel(
    seq_lens_ptr,
    kv_begin_ptr,
    work_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    B,
    W,
    target_chunks,
    min_chunk,
    window,
    ALIGN: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    b = tl.arange(0, BLOCK_B)
    length = tl.load(seq_lens_ptr + b, mask=b < B, other=0)
    begin = tl.zeros([BLOCK_B], tl.int32)
    if HAS_BEGIN:
        begin = tl.load(kv_begin_ptr + b, mask=b < B, other=0)
    begin = tl.maximum(begin, (length - window) // ALIGN * ALIGN)
    span = tl.maximum(length - begin, 0)
    # Even chunks, their number rounded to the nearest: a short last one would start a second wave of programs.
    per_chunk = tl.maximum(min_chunk, tl.cdiv(tl.sum(span.to(tl.int64)), target_chunks).to(tl.int32))
    pieces = tl.maximum((2 * span + per_chunk) // (2 * per_chunk), 1)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(span, pieces), ALIGN), 1) * ALIGN
    count = tl.where(
        b < B, tl.maximum(tl.cdiv(span, chunk), 1), 0
    )  # one at least: an empty request's row is written too
    last = tl.cumsum(count, 0)
    first = last - count
    if tl.program_id(0) == 0:
        tl.store(first_chunk_ptr + b, first, mask=b < B)
        tl.store(num_chunks_ptr + b, count, mask=b < B)
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    request = tl.sum((last[None, :] <= w[:, None]).to(tl.int32), 1)
    mine = b[None, :] == request[:, None]
    # Rows past B have count 0 and last == total, so a slot past the total counts all of them.
    idle = w >= tl.max(last, 0)
    item_chunk = tl.sum(tl.where(mine, chunk[None, :], 0), 1)
    item_begin = (
        tl.sum(tl.where(mine, begin[None, :], 0), 1) + (w - tl.sum(tl.where(mine, first[None, :], 0), 1)) * item_chunk
    )
    item_end = tl.minimum(item_begin + item_chunk, tl.sum(tl.where(mine, length[None, :], 0), 1))
    tl.store(work_ptr + w * 4, tl.where(idle, -1, request), mask=w < W)
    tl.store(work_ptr + w * 4 + 1, item_begin, mask=w < W)
    tl.store(work_ptr + w * 4 + 2, item_end, mask=w < W)


@triton.jit
def _merge(
    acc, m, total, partial_ptr, lse_ptr, row, chunk_stride, count, G,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fold ``count`` partials of G rows, chunk c's from row + c * chunk_stride on, into (acc [G, D], m, total [G])."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    for c0 in range(0, count, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        valid = (c[:, None] < count) & (g[None, :] < G)
        index = row + c[:, None].to(tl.int64) * chunk_stride + g[None, :]
        lse = tl.load(lse_ptr + index, mask=valid, other=MASKED, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.math.exp2(lse - m_new[None, :])
        part = tl.load(
            partial_ptr + index[:, :, None] * D + d[None, None, :],
            mask=valid[:, :, None] & (d[None, None, :] < D),
            other=0.0,
            cache_modifier=".cg",
        )
        alpha = tl.math.exp2(m - m_new)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * alpha + tl.sum(tl.where(valid, weight, 0.0), 0)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=["prefix_stride", "window", "stride_table"])
def _decode_kernel(
    q_ptr, kv_ptr, table_ptr, work_ptr, first_chunk_ptr, num_chunks_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr,
    prefix_count_ptr, prefix_partial_ptr, prefix_lse_ptr, prefix_stride,
    seq_lens_ptr, scale_log2, window,
    stride_qt, stride_qh, stride_n, stride_kv, stride_h, stride_s, stride_table, stride_ot, stride_oh,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    head = tl.program_id(0)
    slot = tl.program_id(1)
    request = tl.load(work_ptr + slot * 4)
    if request < 0:
        return
    begin = tl.load(work_ptr + slot * 4 + 1)
    end = tl.load(work_ptr + slot * 4 + 2)

    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + request.to(tl.int64) * stride_qt + (head * G + g)[:, None] * stride_qh
    q = tl.load(q_rows + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)
    k_ptr = kv_ptr + head * stride_h
    v_ptr = k_ptr + stride_kv
    table = table_ptr + request.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    full_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    if WINDOW:
        oldest = tl.load(seq_lens_ptr + request) - window
    for start in tl.range(begin, full_end, BLOCK_N, num_stages=STAGES):
        offsets = token_offsets(table, start, end, stride_n, stride_s, S, BLOCK_N, False)
        k = load_tile(k_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if WINDOW:
            scores = tl.where((start + tl.arange(0, BLOCK_N))[None, :] >= oldest, scores, MASKED)
        v = load_tile(v_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, False)
        acc, m, total = softmax_step(acc, m, total, scores, v, scale_log2)
    if full_end < end:
        offsets = token_offsets(table, full_end, end, stride_n, stride_s, S, BLOCK_N, True)
        k = load_tile(k_ptr, offsets, full_end, end, BLOCK_N, D, BLOCK_D, True)
        v = load_tile(v_ptr, offsets, full_end, end, BLOCK_N, D, BLOCK_D, True)
        n = full_end + tl.arange(0, BLOCK_N)[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        valid = n < end
        if WINDOW:
            valid = valid & (n >= oldest)
        scores = tl.where(valid, scores, MASKED)
        acc, m, total = softmax_step(acc, m, total, scores, v, scale_log2)

    count = tl.load(num_chunks_ptr + request)
    prefix_count = 0
    if PREFIX:
        prefix_count = tl.load(prefix_count_ptr + request)
    out_rows = out_ptr + request.to(tl.int64) * stride_ot + head * G * stride_oh
    if count == 1:
        # The whole request is in these registers, but for the partials of its shared prefixes.
        if PREFIX:
            for c in range(prefix_count):
                index = c * prefix_stride + (request.to(tl.int64) * K + head) * G + g
                lse = tl.load(prefix_lse_ptr + index, mask=g < G, other=MASKED)
                part = tl.load(
                    prefix_partial_ptr + index[:, None] * D + d[None, :],
                    mask=(g[:, None] < G) & (d[None, :] < D),
                    other=0.0,
                )
                m_new = tl.maximum(m, lse)
                alpha = tl.math.exp2(m - m_new)
                weight = tl.math.exp2(lse - m_new)
                acc = acc * alpha[:, None] + part * weight[:, None]
                total = total * alpha + weight
                m = m_new
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_rows + g[:, None] * stride_oh + d[None, :], out.to(out_ptr.dtype.element_ty),
                 mask=(g[:, None] < G) & (d[None, :] < D))  # fmt: skip
    else:
        row = slot.to(tl.int64) * K * G + head * G
        lse = tl.where(total > 0, m + tl.math.log2(total), MASKED)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(lse_ptr + row + g, lse, mask=g < G)
        tl.store(partial_ptr + (row + g)[:, None] * D + d[None, :], acc, mask=(g[:, None] < G) & (d[None, :] < D))
        tl.debug_barrier()  # every thread's stores before the one thread that counts
        arrived = tl.atomic_add(counter_ptr + request * K + head, 1, sem="acq_rel", scope="gpu")
        if arrived == count - 1:
            tl.store(counter_ptr + request * K + head, 0)  # ready for the next layer
            gg = tl.arange(0, BLOCK_G)
            merged = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            tm = tl.full([BLOCK_G], FLOOR, tl.float32)
            tt = tl.zeros([BLOCK_G], tl.float32)
            first = tl.load(first_chunk_ptr + request).to(tl.int64)
            merged, tm, tt = _merge(merged, tm, tt, partial_ptr, lse_ptr, first * K * G + head * G, K * G, count, G, D,
                                    BLOCK_G, BLOCK_D, BLOCK_C)  # fmt: skip
            if PREFIX:
                prefix_row = (request.to(tl.int64) * K + head) * G
                merged, tm, tt = _merge(merged, tm, tt, prefix_partial_ptr, prefix_lse_ptr, prefix_row, prefix_stride,
                                        prefix_count, G, D, BLOCK_G, BLOCK_D, BLOCK_C)  # fmt: skip
            merged = merged / tl.where(tt > 0, tt, 1.0)[:, None]
            tl.store(out_rows + gg[:, None] * stride_oh + d[None, :], merged.to(out_ptr.dtype.element_ty),
                     mask=(gg[:, None] < G) & (d[None, :] < D))  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefixPartials:
    """What a cascade computed for the shared prefixes of this step: dense by (chunk, request, head)."""

    kv_begin: torch.Tensor  # [B] int32: tokens of each request that the partials cover
    count: torch.Tensor  # [B] int32: partials of each request (0: none)
    partial: torch.Tensor  # [C, B, H, D] float32
    lse: torch.Tensor  # [C, B, H] float32


NO_WINDOW = 1 << 30


class DecodePlan:
    """Workspace and work list of a step's decode attention; kept per largest batch, ``update``d each step."""

    ALIGN = 32
    """Tokens. Chunks begin at multiples of it, hence of BLOCK_N, as the scalar block-id path needs."""

    def __init__(
        self,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        chunks: int | None = None,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads do not divide over {num_kv_heads} KV heads: check the model's config"
            )
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        # About 4 programs an SM (one wave) when few requests are cut; many requests make more by themselves.
        self.target_chunks = chunks or max(1, sm_count * 4 // num_kv_heads)
        # Of few short requests: a program does little but wait for its first tile.
        self.min_chunk = 64
        self.max_requests = max_requests
        slots = max_requests + self.target_chunks
        self.slots = slots
        self.work = torch.empty(slots, 4, dtype=torch.int32, device=device)
        self.first_chunk = torch.empty(max_requests, dtype=torch.int32, device=device)
        self.num_chunks = torch.empty(max_requests, dtype=torch.int32, device=device)
        self.partial = torch.empty(slots, num_heads, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(slots, num_heads, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_requests, num_kv_heads, dtype=torch.int32, device=device)
        self.prefix: PrefixPartials | None = None
        self.window: int | None = None

    def update(self, seq_lens: torch.Tensor, window: int | None = None, prefix: PrefixPartials | None = None) -> None:
        """Cut this step's KV (seq_lens [B] int32, on the device) into chunks; launches one small kernel."""
        requests = seq_lens.shape[0]
        if requests > self.max_requests:
            raise ValueError(
                f"{requests} requests, planned for {self.max_requests}: make the plan with a larger max_requests"
            )
        self.prefix, self.window = prefix, window
        slots = requests + self.target_chunks
        block_w = 32
        launch(_plan_kernel, (triton.cdiv(slots, block_w),),
            seq_lens, seq_lens if prefix is None else prefix.kv_begin, self.work, self.first_chunk, self.num_chunks,
            requests, slots, self.target_chunks, self.min_chunk, NO_WINDOW if window is None else window,
            ALIGN=self.ALIGN, HAS_BEGIN=prefix is not None, BLOCK_B=triton.next_power_of_2(max(requests, 16)),
            BLOCK_W=block_w,
        )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    out: torch.Tensor | None = None,
    *,
    block_n: int = 32,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> torch.Tensor:
    """q [B, H, D], the newest token of each request, over its paged KV -> out [B, H, D]; ``plan`` is this step's."""
    if DecodePlan.ALIGN % block_n:
        raise ValueError(f"block_n={block_n} does not divide {DecodePlan.ALIGN}, the multiple at which chunks begin")
    requests, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q) if out is None else out
    prefix, window = plan.prefix, plan.window
    # What a shared prefix leaves is short: many small programs hide each other's start; else fewer with more in flight.
    num_warps = num_warps or (2 if prefix is None else 1)
    num_stages = num_stages or (6 if prefix is None else 4)
    block_d = triton.next_power_of_2(head_dim)
    launch(_decode_kernel, (num_kv_heads, requests + plan.target_chunks),
        q, kv_layer, block_table, plan.work, plan.first_chunk, plan.num_chunks, plan.partial, plan.lse,
        plan.counters, out,
        seq_lens if prefix is None else prefix.count, plan.partial if prefix is None else prefix.partial,
        plan.lse if prefix is None else prefix.lse, 0 if prefix is None else prefix.lse.stride(0),
        seq_lens, scale * LOG2E, NO_WINDOW if window is None else window,
        q.stride(0), q.stride(1), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
        block_table.stride(0), out.stride(0), out.stride(1),
        K=num_kv_heads, G=group, S=block_size, D=head_dim, BLOCK_D=block_d,
        BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_N=block_n, BLOCK_G=triton.next_power_of_2(group),
        BLOCK_C=max(4, 64 // triton.next_power_of_2(group)),
        WINDOW=window is not None, PREFIX=prefix is not None, STAGES=num_stages, num_warps=num_warps, **pdl(q.device),
    )  # fmt: skip
    return out
