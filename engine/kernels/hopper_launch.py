"""Launches ``hopper_attention``: whether it applies to some tensors, the TMA descriptor of a layer's KV, the grids.

Called by ``prefill_attention`` and ``cascade_attention``, which say what the arguments mean.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.attention_core import LOG2E
from engine.kernels.hopper_attention import hopper_kernel
from engine.kernels.launch import launch

TILE_ROWS = 128
_TILE_TOKENS = 128
_HALF = 64  # columns of a TMA box: the 128 bytes of its swizzle


def supports(q: torch.Tensor, kv_layer: torch.Tensor) -> bool:
    """Whether this kernel runs for these tensors: Hopper, 16-bit, head dim 64 or 128, block size 16 to 128."""
    group = q.shape[1] // kv_layer.shape[2]
    return (
        q.device.type == "cuda"
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv_layer.dtype == q.dtype
        and kv_layer.shape[4] in (64, 128)
        and kv_layer.shape[3] in (16, 32, 64, 128)
        and kv_layer.is_contiguous()
        and group & (group - 1) == 0
        and group <= 64
    )


def _programs(device: torch.device) -> int:
    """One an SM: shared memory and registers fit no second one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def new_tickets(device: torch.device) -> torch.Tensor:
    """What deals out a launch's items: the next one, and how many programs are through. Zeros between launches; two
    launches at once must not share it.
    """
    return torch.zeros(2, dtype=torch.int32, device=device)


@cache  # a stream's launches come one after the other
def _tickets(device: torch.device, stream: int) -> torch.Tensor:
    return new_tickets(device)


def _descriptor(kv_layer: torch.Tensor) -> Any:
    rows = kv_layer.view(-1, kv_layer.shape[4])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(rows, [kv_layer.shape[3], _HALF], layout)


def hopper_prefill(
    q: torch.Tensor, kv_layer: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_q_len: int, window: int | None, out: torch.Tensor,
    tickets: torch.Tensor | None = None, *, stages: int = 2,
) -> None:  # fmt: skip
    """See ``prefill_attention.paged_prefill``. ``tickets`` None: the stream's, or the captured graph's own."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, requests = kv_layer.shape[2], seq_lens.shape[0]
    group = num_heads // num_kv_heads
    tile_tokens = TILE_ROWS // group
    max_tiles = min(tokens // tile_tokens + requests, requests * triton.cdiv(max_q_len, tile_tokens))
    if tickets is not None:
        pass
    elif torch.cuda.is_current_stream_capturing():
        tickets = new_tickets(q.device)
    else:
        tickets = _tickets(q.device, torch.cuda.current_stream(q.device).cuda_stream)
    launch(hopper_kernel, (min(_programs(q.device), num_kv_heads * max_tiles),),
        # Tickets stand in for what only shared ranges have: they lie where any tensor does, lengths of a step's later
        # requests do not, and each alignment is a kernel of its own.
        q, _descriptor(kv_layer), block_table, cu_seqlens_q, seq_lens, tickets, tickets, tickets, tickets, out, out,
        requests, max_tiles, num_heads, scale * LOG2E, window or 0, q.stride(0), q.stride(1), block_table.stride(0),
        out.stride(0), out.stride(1),
        K=num_kv_heads, G=group, S=kv_layer.shape[3], N=_TILE_TOKENS, STAGES=stages, D=head_dim,
        BLOCK_B=max(32, triton.next_power_of_2(requests)), SHARED=False, WINDOW=window is not None, num_warps=4,
    )  # fmt: skip


def hopper_shared(
    q: torch.Tensor, kv_layer: torch.Tensor, block_table: torch.Tensor, items: torch.Tensor,
    num_items: torch.Tensor, members: torch.Tensor, tickets: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor,
    scale: float, *, stages: int = 2,
) -> None:  # fmt: skip
    """The shared ranges of a cascade: see ``cascade_attention``; items' rows are for tiles of 128 rows."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_layer.shape[2]
    launch(hopper_kernel, (_programs(q.device),),
        q, _descriptor(kv_layer), block_table, items, items, items, num_items, members, tickets, partial, lse,
        partial.shape[1], 0, num_heads, scale * LOG2E, 0, q.stride(0), q.stride(1), block_table.stride(0), 0, 0,
        K=num_kv_heads, G=num_heads // num_kv_heads, S=kv_layer.shape[3], N=_TILE_TOKENS, STAGES=stages,
        D=head_dim, BLOCK_B=32, SHARED=True, WINDOW=False, num_warps=4,
    )  # fmt: skip
