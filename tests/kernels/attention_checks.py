"""Paged decode, prefill and cascade attention against float64, for any device and size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels import hopper_launch
from engine.kernels.cascade_attention import CascadePlan
from engine.kernels.cascade_plan import CascadeCost
from engine.kernels.decode_attention import DecodePlan, paged_decode
from engine.kernels.prefill_attention import paged_prefill
from tests.kernels.paged_inputs import NAN, Paged, randn, relative_error, tolerance


def check_decode(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int], heads: tuple[int, int, int], block_size: int,
    window: int | None = None, chunks: int | None = None, block_n: int = 32,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, dtype, device)
    plan = DecodePlan(len(lengths) + 3, num_heads, num_kv_heads, head_dim, device, chunks)
    plan.partial.fill_(NAN)
    plan.update(paged.seq_lens, window)
    q = randn(len(lengths), 2 * num_heads, head_dim, dtype=dtype, device=device)[:, ::2]  # strided heads
    expected = paged.expected(q, range(len(lengths) + 1), head_dim**-0.5, window)
    for _ in range(2):  # the second run finds the counters as the first left them
        out = torch.full((len(lengths), num_heads, head_dim), NAN, dtype=dtype, device=device)
        paged_decode(q, paged.kv, paged.table, paged.seq_lens, head_dim**-0.5, plan, out, block_n=block_n)
        alive = paged.seq_lens > 0
        assert relative_error(out[alive], expected[alive]) < tolerance(dtype)
        assert not out[~alive].any()


def check_prefill(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int], query_lens: Sequence[int], heads: tuple[int,
    int, int],
    block_size: int, window: int | None = None, *, portable: bool, block_m: int = 128, block_n: int = 64,
    key_scales: Sequence[float] = (1.0,), spare: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    """``spare``: tokens and requests that are not there, as in a graph: no query, no KV, no blocks; twice in a row."""
    num_heads, num_kv_heads, head_dim = heads
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, dtype, device)
    paged.scale_keys(key_scales)
    bounds = [0, *np.cumsum(query_lens).tolist()]
    tokens = bounds[-1] + spare[0]
    q = torch.full((tokens, num_heads, head_dim), NAN, dtype=dtype, device=device)
    q[: bounds[-1]] = randn(bounds[-1], num_heads, head_dim, dtype=dtype, device=device)
    cu = torch.tensor([*bounds, *[bounds[-1]] * spare[1]], dtype=torch.int32, device=device)
    seq_lens = F.pad(paged.seq_lens, (0, spare[1]))
    table = F.pad(paged.table, (0, 0, 0, spare[1]), value=1 << 30)
    most = tokens if any(spare) else max(query_lens)
    tickets = hopper_launch.new_tickets(device)
    for _ in range(2 if any(spare) else 1):
        out = torch.full_like(q, NAN)
        paged_prefill(
            q, paged.kv, table, cu, seq_lens, head_dim**-0.5, most, window, out, tickets,
            portable=portable, block_m=block_m, block_n=block_n,
        )  # fmt: skip
        expected = paged.expected(q[: bounds[-1]], bounds, head_dim**-0.5, window)
        assert relative_error(out[: bounds[-1]], expected) < tolerance(dtype)
        assert out[bounds[-1] :].isnan().all()


def check_cascade(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, shared_blocks: tuple[int,
    int],
    *, portable: bool, block_m: int = 128, block_n: int = 64, key_scales: Sequence[float] = (1.0,),
) -> None:  # fmt: skip
    """A tree: all but the last request share a prefix, the first three share more; one has no token of its own."""
    num_heads, num_kv_heads, head_dim = heads
    outer, inner = shared_blocks
    lengths = [
        inner * block_size + 5, inner * block_size + 40, inner * block_size, outer * block_size + 1,
        outer * block_size + 3 * block_size, 2 * block_size + 3,
    ]  # fmt: skip
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, dtype, device)
    paged.table[1:5, :outer] = paged.table[0, :outer]
    paged.table[1:3, :inner] = paged.table[0, :inner]
    cost = CascadeCost(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, launch_us=0.0, min_range_us=0.0,
        flat_bytes_per_us=1.0, stream_bytes_per_us=1e12, shared_flops_per_us=1e12, tile_rows=1,
    )  # fmt: skip  # sharing is nearly free, so that everything shared is taken
    paged.scale_keys(key_scales)  # shared blocks once for each that has them
    cascade = CascadePlan(len(lengths) + 2, cost, device, block_m=block_m, min_chunk_tokens=2 * block_size)
    cascade.regroup(paged.table.cpu().numpy(), paged.seq_lens.cpu().numpy(), block_size)
    assert cascade.prefix is not None
    covered = [inner * block_size] * 3 + [outer * block_size] * 2 + [0]
    assert cascade.prefix.kv_begin[: len(lengths)].tolist() == covered
    cascade.prefix.partial.fill_(NAN)
    plan = DecodePlan(len(lengths), num_heads, num_kv_heads, head_dim, device, chunks=4)
    plan.partial.fill_(NAN)
    plan.update(paged.seq_lens, prefix=cascade.prefix)
    q = randn(len(lengths), num_heads, head_dim, dtype=dtype, device=device)
    out = torch.full_like(q, NAN)
    cascade.run(q, paged.kv, paged.table, head_dim**-0.5, portable=portable, block_n=block_n)
    paged_decode(q, paged.kv, paged.table, paged.seq_lens, head_dim**-0.5, plan, out)
    expected = paged.expected(q, range(len(lengths) + 1), head_dim**-0.5, None)
    assert relative_error(out, expected) < tolerance(dtype)
