# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged chunked prefill attention: causal, over the request's cached tokens and its chunk, which is cached already.

A program takes a tile of BLOCK_M rows of one KV head: BLOCK_M / G tokens of a request times the G query heads that
share the head (packed GQA: K and V are read once for all of them, and the causal edge of a tile is narrow). Tiles of
all requests form one list that the programs search in ``cu_seqlens_q``, so the grid depends on host-known maxima
only; later tiles, which attend to more, start first. Tiles below the causal edge run without a mask. This is the
portable kernel (any dtype, head dim and block size; the pipeline is the compiler's); Hopper has its own in
``hopper_attention``.

    row r of a tile: token = first + r // G, head = k*G + r % G, position = seq_len - q_len + token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import hopper_launch
from engine.kernels.attention_core import FLOOR, LOG2E, MASKED, load_tile, softmax_step, token_offsets
from engine.kernels.launch import launch


@triton.jit(
    do_not_specialize=["B", "window", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "cu_ptr", "seq_lens_ptr"],
)
def _prefill_kernel(
    q_ptr, kv_ptr, table_ptr, cu_ptr, seq_lens_ptr, out_ptr, B, scale_log2, window,
    stride_qt, stride_qh, stride_n, stride_kv, stride_h, stride_s, stride_table, stride_ot, stride_oh,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // BLOCK_G
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    q_lens = tl.load(cu_ptr + b + 1, mask=b < B, other=0) - tl.load(cu_ptr + b, mask=b < B, other=0)
    tiles = tl.where(b < B, tl.cdiv(q_lens, TOKENS), 0)
    last = tl.cumsum(tiles, 0)
    request = tl.sum((last <= tile).to(tl.int32))
    if request >= B:
        return
    first = (tile - tl.sum(tl.where(b == request, last - tiles, 0))) * TOKENS
    q_start = tl.load(cu_ptr + request)
    q_len = tl.load(cu_ptr + request + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + request)
    history = seq_len - q_len

    r = tl.arange(0, BLOCK_M)
    token = first + r // BLOCK_G
    g = r % BLOCK_G
    d = tl.arange(0, BLOCK_D)
    row_valid = (token < q_len) & (g < G)
    rows = (q_start + token).to(tl.int64) * stride_qt + (head * G + g) * stride_qh
    valid = row_valid[:, None] & (d[None, :] < D)
    q = tl.load(q_ptr + rows[:, None] + d[None, :], mask=valid, other=0.0)
    position = history + token
    k_ptr = kv_ptr + head * stride_h
    v_ptr = k_ptr + stride_kv
    table = table_ptr + request.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    end = tl.minimum(history + first + TOKENS, seq_len)  # one past the newest position of the tile
    begin = 0
    if WINDOW:
        begin = tl.maximum(history + first - window + 1, 0) // BLOCK_N * BLOCK_N
    edge = (history + first + 1) // BLOCK_N * BLOCK_N  # below it every row sees every token
    edge = tl.maximum(edge, begin)
    for start in tl.range(begin, edge, BLOCK_N, num_stages=STAGES):
        offsets = token_offsets(table, start, end, stride_n, stride_s, S, BLOCK_N, False)
        k = load_tile(k_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if WINDOW:
            scores = tl.where((start + tl.arange(0, BLOCK_N))[None, :] > position[:, None] - window, scores, MASKED)
        v = load_tile(v_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, False)
        acc, m, total = softmax_step(acc, m, total, scores, v, scale_log2)
    for start in tl.range(edge, end, BLOCK_N, num_stages=1):
        offsets = token_offsets(table, start, end, stride_n, stride_s, S, BLOCK_N, True)
        k = load_tile(k_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, True)
        v = load_tile(v_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, True)
        n = start + tl.arange(0, BLOCK_N)
        visible = n[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee"), MASKED)
        acc, m, total = softmax_step(acc, m, total, scores, v, scale_log2)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = (q_start + token).to(tl.int64) * stride_ot + (head * G + g) * stride_oh
    tl.store(out_ptr + out_rows[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid)


def paged_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_q_len: int,
    window: int | None = None,
    out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    *,
    portable: bool = False,
    block_m: int = 128,
    block_n: int = 128,
    num_warps: int = 8,
    num_stages: int = 3,
) -> torch.Tensor:
    """q [T, H, D], the requests' newest tokens in a row, over their paged KV -> out [T, H, D]. No host sync.

    ``tickets``: see ``hopper_launch.new_tickets``; of a caller whose launches, and graphs of them, never overlap.
    """
    out = torch.empty_like(q) if out is None else out
    if not portable and hopper_launch.supports(q, kv_layer):
        hopper_launch.hopper_prefill(
            q, kv_layer, block_table, cu_seqlens_q, seq_lens, scale, max_q_len, window, out, tickets
        )
        return out
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    requests = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    block_g = triton.next_power_of_2(group)
    block_m = max(16, block_g, min(block_m, triton.next_power_of_2(max_q_len * block_g)))
    tile_tokens = block_m // block_g
    max_tiles = min(tokens // tile_tokens + requests, requests * triton.cdiv(max_q_len, tile_tokens))
    launch(_prefill_kernel, (num_kv_heads, max_tiles),
        q, kv_layer, block_table, cu_seqlens_q, seq_lens, out, requests, scale * LOG2E, window or 0,
        q.stride(0), q.stride(1), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
        block_table.stride(0), out.stride(0), out.stride(1),
        G=group, S=block_size, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_G=block_g,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_B=max(32, triton.next_power_of_2(requests)),
        WINDOW=window is not None, STAGES=num_stages, num_warps=num_warps if block_m >= 64 else 4,
    )  # fmt: skip
    return out
