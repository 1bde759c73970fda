# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Cascade attention: shared prefixes once for all their requests, the rest as decode, merged by log-sum-exp.

``CascadePlan`` turns the chosen ranges (``cascade_plan``) into a work list on the device; ``run`` computes the shared
ranges as multi-query attention: a program takes BLOCK_M rows (members x the G query heads of a KV head) and one chunk
of a range, and writes a normalised partial and its log-sum-exp, dense by (chunk of the request, request, head).
Decode attention with the plan's ``prefix`` reads the rest of every request and merges. The lists have fixed capacity
and an unused item ends at once, so a captured graph serves any grouping. Cascade inference: Ye et al., FlashInfer,
2024; Hydragen: Juravsky et al., 2024.

    items[i] = (first member, members, table row, begin, end, partial index of the first member's chunk)
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine.kernels import hopper_launch
from engine.kernels.attention_core import FLOOR, LOG2E, MASKED, load_tile, softmax_step, token_offsets
from engine.kernels.cascade_plan import CascadeCost, SharedRange, choose_groups, find_groups
from engine.kernels.decode_attention import PrefixPartials
from engine.kernels.launch import launch

_ITEM_FIELDS = 8


@triton.jit(do_not_specialize=["B", "stride_table"])
def _shared_kernel(
    q_ptr, kv_ptr, table_ptr, items_ptr, members_ptr, partial_ptr, lse_ptr, scale_log2, B, H,
    stride_qt, stride_qh, stride_n, stride_kv, stride_h, stride_s, stride_table,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    item = items_ptr + tl.program_id(1) * 8
    count = tl.load(item + 1)
    if count == 0:
        return
    first = tl.load(item)
    owner = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    chunk = tl.load(item + 5).to(tl.int64)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    g = r % BLOCK_G
    row_valid = (r // BLOCK_G < count) & (g < G)
    request = tl.load(members_ptr + first + r // BLOCK_G, mask=r // BLOCK_G < count, other=0).to(tl.int64)
    valid = row_valid[:, None] & (d[None, :] < D)
    rows = request * stride_qt + (head * G + g) * stride_qh
    q = tl.load(q_ptr + rows[:, None] + d[None, :], mask=valid, other=0.0)
    k_ptr = kv_ptr + head * stride_h
    v_ptr = k_ptr + stride_kv
    table = table_ptr + owner.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    full_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, full_end, BLOCK_N, num_stages=STAGES):
        offsets = token_offsets(table, start, end, stride_n, stride_s, S, BLOCK_N, False)
        k = load_tile(k_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = load_tile(v_ptr, offsets, start, end, BLOCK_N, D, BLOCK_D, False)
        acc, m, total = softmax_step(acc, m, total, scores, v, scale_log2)
    if full_end < end:
        offsets = token_offsets(table, full_end, end, stride_n, stride_s, S, BLOCK_N, True)
        k = load_tile(k_ptr, offsets, full_end, end, BLOCK_N, D, BLOCK_D, True)
        v = load_tile(v_ptr, offsets, full_end, end, BLOCK_N, D, BLOCK_D, True)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((full_end + tl.arange(0, BLOCK_N))[None, :] < end, scores, MASKED)
        acc, m, total = softmax_step(acc, m, total, scores, v, scale_log2)
    acc = acc / total[:, None]
    index = (chunk * B + request) * H + head * G + g
    tl.store(lse_ptr + index, m + tl.math.log2(total), mask=row_valid)
    tl.store(partial_ptr + index[:, None] * D + d[None, :], acc, mask=valid)


class CascadePlan:
    """Work list and workspace of a batch's shared ranges; made once, ``regroup``ed when requests join or leave."""

    def __init__(
        self,
        max_requests: int,
        cost: CascadeCost,
        device: torch.device,
        *,
        max_chunks: int = 16,
        block_m: int = 128,
        min_chunk_tokens: int = 256,
    ) -> None:
        self.cost = cost
        self.max_requests, self.max_chunks = max_requests, max_chunks
        self.block_m, self.min_chunk_tokens = block_m, min_chunk_tokens
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self._block_g = triton.next_power_of_2(cost.num_heads // cost.num_kv_heads)
        self.max_items = 2 * self.sm_count + max_requests
        self.items = torch.zeros(self.max_items, _ITEM_FIELDS, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self.members = torch.zeros(max_requests * max_chunks, dtype=torch.int32, device=device)
        self._tickets = hopper_launch.new_tickets(device)
        kv_begin = torch.zeros(max_requests, dtype=torch.int32, device=device)
        count = torch.zeros(max_requests, dtype=torch.int32, device=device)
        partial = torch.empty(max_chunks, max_requests, cost.num_heads, cost.head_dim, device=device)
        lse = torch.empty(max_chunks, max_requests, cost.num_heads, device=device)
        self._buffers = PrefixPartials(kv_begin, count, partial, lse)
        self.prefix: PrefixPartials | None = None
        """None: this batch is better off flat."""

    def regroup(
        self,
        block_table: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_size: int,
        ranges: list[SharedRange] | None = None,
    ) -> None:
        """Choose the ranges of this batch (host arrays), or take ``ranges``, and upload the work list."""
        if ranges is None:
            ranges = choose_groups(find_groups(block_table, seq_lens, block_size), block_size, self.cost)
        fitted = self._lay_out(ranges, len(seq_lens))
        if fitted is None:
            self.prefix = None
            return
        items, members, kv_begin, count = fitted
        self.items.zero_()
        self.num_items.fill_(len(items))
        for target, source in (
            (self.items, items),
            (self.members, members),
            (self._buffers.kv_begin, kv_begin),
            (self._buffers.count, count),
        ):
            host = torch.from_numpy(source)
            # Pinned, or the copy would wait for the steps in flight.
            host = host.pin_memory() if target.device.type == "cuda" else host
            target[: len(source)].copy_(host, non_blocking=True)
        self.prefix = self._buffers

    def _lay_out(
        self, ranges: list[SharedRange], requests: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]] | None:
        """Items, members, kv_begin, count as the kernels read them; None: nothing to share, or no room for it."""
        if not ranges:
            return None
        tile_members = self.block_m // self._block_g
        tiles = [-(-len(r.members) // tile_members) for r in ranges]
        lengths = [r.end - r.begin for r in ranges]
        chunk_tokens = self._chunk_tokens(tiles, lengths)
        kv_begin = np.zeros(requests, np.int32)
        count = np.zeros(requests, np.int32)
        members: list[NDArray[np.int64]] = []
        items: list[tuple[int, ...]] = []
        offset = 0
        for shared in sorted(ranges, key=lambda r: r.begin):
            chunks = -(-(shared.end - shared.begin) // chunk_tokens)
            at = int(count[shared.members].max())
            chunks = min(chunks, self.max_chunks - at)
            if chunks < 1 or (kv_begin[shared.members] != shared.begin).any():
                return None
            per_chunk = -(-(shared.end - shared.begin) // chunks // 128) * 128
            starts = range(shared.begin, shared.end, per_chunk)
            for start in starts:
                for tile in range(0, len(shared.members), tile_members):
                    size = min(tile_members, len(shared.members) - tile)
                    end = min(start + per_chunk, shared.end)
                    items.append((offset + tile, size, int(shared.members[0]), start, end, at, 0, 0))
                at += 1
            # Members that came by different ways would leave holes among their partials, so all must count alike.
            if (count[shared.members] != at - len(starts)).any():
                return None
            count[shared.members] = at
            kv_begin[shared.members] = shared.end
            members.append(shared.members)
            offset += len(shared.members)
        if len(items) > self.max_items or offset > self.members.numel():
            return None
        return np.array(items, np.int32), np.concatenate(members).astype(np.int32), kv_begin, count

    def _chunk_tokens(self, tiles: list[int], lengths: list[int]) -> int:
        """Tokens of a program, for the least time of the busiest SM: whole waves of programs, each at a fixed cost."""
        heads = self.cost.num_kv_heads
        total = sum(t * length for t, length in zip(tiles, lengths, strict=True)) * heads
        fixed_tokens = 256  # what starting a program costs, in tokens of its loop
        best, best_time = max(lengths), float("inf")
        for pieces in range(1, self.max_chunks + 1):
            for tokens in {-(-max(lengths) // pieces), -(-total // (pieces * self.sm_count))}:
                tokens = max(self.min_chunk_tokens, -(-tokens // 128) * 128)
                programs = sum(t * -(-length // tokens) for t, length in zip(tiles, lengths, strict=True)) * heads
                time = -(-programs // self.sm_count) * (min(tokens, max(lengths)) + fixed_tokens)
                if time < best_time:
                    best, best_time = tokens, time
        return best

    def run(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        *,
        portable: bool = False,
        block_n: int = 128,
    ) -> None:
        """The shared ranges' partials of one layer, for ``paged_decode`` with a plan that was given ``prefix``."""
        buffers, cost = self._buffers, self.cost
        if not portable and self.block_m == hopper_launch.TILE_ROWS and hopper_launch.supports(q, kv_layer):
            hopper_launch.hopper_shared(
                q, kv_layer, block_table, self.items, self.num_items, self.members, self._tickets, buffers.partial,
                buffers.lse, scale,
            )  # fmt: skip
            return
        launch(_shared_kernel, (cost.num_kv_heads, self.max_items),
            q, kv_layer, block_table, self.items, self.members, buffers.partial, buffers.lse, scale * LOG2E,
            self.max_requests, cost.num_heads,
            q.stride(0), q.stride(1), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
            block_table.stride(0), G=cost.num_heads // cost.num_kv_heads, S=kv_layer.shape[3], D=cost.head_dim,
            BLOCK_D=triton.next_power_of_2(cost.head_dim), BLOCK_G=self._block_g, BLOCK_M=self.block_m, BLOCK_N=block_n,
            STAGES=3, num_warps=8 if self.block_m >= 64 else 4,
        )  # fmt: skip
