# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What only the device can do to a step's inputs and outputs: small kernels around a forward pass.

Owns three moves: changed entries into the table of all requests' blocks; tokens drawn by the step before into this
step's inputs, and each row's blocks into the step's own table; drawn tokens to where the next step and the host find
them. Called by the GPU runner; what the arrays mean is ``engine.gpu_batch``'s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["id_ptr"])
def _update_kernel(table_ptr, at_ptr, id_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(at_ptr + i, mask=mask, other=0)
    tl.store(table_ptr + at, tl.load(id_ptr + i, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["tokens", "rows", "stride"])
def _prepare_kernel(
    token_ids_ptr, slots_ptr, seq_lens_ptr, last_tokens_ptr, table_ptr, step_table_ptr, tokens, rows, stride,
    S: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if pid < rows * PARTS:
        row = pid // PARTS
        column = pid % PARTS * BLOCK + i
        mask = column < tl.cdiv(tl.load(seq_lens_ptr + row), S)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        ids = tl.load(table_ptr + slot * stride + column, mask=mask, other=0)
        tl.store(step_table_ptr + row.to(tl.int64) * stride + column, ids, mask=mask)
    else:
        t = (pid - rows * PARTS) * BLOCK + i
        token = tl.load(token_ids_ptr + t, mask=t < tokens, other=0)
        drawn = token < 0
        tl.store(token_ids_ptr + t, tl.load(last_tokens_ptr - 1 - token, mask=drawn, other=0), mask=drawn)


@triton.jit(do_not_specialize=["rows"])
def _commit_kernel(drawn_ptr, slots_ptr, last_tokens_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < rows
    token = tl.load(drawn_ptr + i, mask=mask, other=0).to(tl.int32)
    tl.store(last_tokens_ptr + tl.load(slots_ptr + i, mask=mask, other=0), token, mask=mask)
    tl.store(out_ptr + i, token, mask=mask)


def update_table(table: torch.Tensor, at: torch.Tensor, ids: torch.Tensor) -> None:
    """``table.view(-1)[at] = ids``, all int32."""
    count = at.shape[0]
    launch(_update_kernel, (triton.cdiv(count, _BLOCK),), table, at, ids, count, BLOCK=_BLOCK)


def prepare(
    token_ids: torch.Tensor,  # [T] int32; -1 - slot: what that slot's request drew last. Replaced in place
    slots: torch.Tensor,  # [R] int32
    seq_lens: torch.Tensor,  # [R] int32
    last_tokens: torch.Tensor,  # [slots] int32
    table: torch.Tensor,  # [slots, M] int32
    step_table: torch.Tensor,  # [>= R, M] int32: row r becomes slot slots[r]'s blocks, as many as seq_lens[r] needs
    block_size: int,
) -> None:
    tokens, rows, columns = token_ids.shape[0], slots.shape[0], table.shape[1]
    parts = triton.cdiv(columns, _BLOCK)
    launch(_prepare_kernel, (rows * parts + triton.cdiv(tokens, _BLOCK),),
        token_ids, slots, seq_lens, last_tokens, table, step_table, tokens, rows, table.stride(0),
        S=block_size, PARTS=parts, BLOCK=_BLOCK,
    )  # fmt: skip


def commit(drawn: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, out: torch.Tensor) -> None:
    """``last_tokens[slots] = out = drawn`` ([R] int64, else int32)."""
    rows = drawn.shape[0]
    launch(_commit_kernel, (triton.cdiv(rows, 256),), drawn, slots, last_tokens, out, rows, BLOCK=256)
