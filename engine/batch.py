"""What one step computes: the scheduler's choice, its tensors, and what was sampled from it.

Owns four value types and the translation from requests to tensors; decides nothing. The scheduler makes a
``ScheduledBatch``, the model runner turns it into a ``ForwardBatch`` and answers with a ``SampledBatch``.

    scheduler --ScheduledBatch--> model_runner --ForwardBatch--> model
        ^                              |
        '-------- SampledBatch --------'

Shape letters: T tokens of the step, B requests of the step, M blocks of the longest block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.itl_budget import StepLoad
from engine.messages import TokenLogprobs
from engine.offload import BlockCopy
from engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """``num_tokens`` tokens of one request, from position ``start`` on; their slots are in its block table already."""

    request: Request
    num_tokens: int
    start: int
    """``request.num_computed_tokens`` when scheduled."""
    needs_sample: bool
    """The last known token is among them (``start + num_tokens == request.num_tokens``): draw the next one."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work, ordered: decodes (``num_tokens == 1``) first. Every rank sees the same order."""

    items: list[ScheduledItem]
    step: int
    copies: Sequence[BlockCopy] = ()
    """To and from host memory, before anything is computed, in this order."""

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    def load(self) -> StepLoad:
        decodes = kv_tokens = tokens = pairs = 0
        for item in self.items:
            if item.num_tokens == 1:
                decodes += 1
                kv_tokens += item.start
            else:
                tokens += item.num_tokens
                pairs += item.num_tokens * (2 * item.start + item.num_tokens) // 2
        return StepLoad(decodes, kv_tokens, tokens, pairs)


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Parallel to ``ScheduledBatch.items``; None where nothing was to be drawn (or no logprobs were asked for)."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The step as tensors: all that a model needs besides its weights and the KV cache."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset
    cu_seqlens_q: torch.Tensor  # [B+1] int32
    seq_lens: torch.Tensor  # [B] int32: tokens in the cache after this step
    block_table: torch.Tensor  # [B, M] int32; 0 beyond a request's last block
    logits_index: torch.Tensor  # [number of needs_sample items] int64: rows of the hidden states to turn into logits
    max_q_len: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


def build_forward_batch(batch: ScheduledBatch, block_size: int, device: torch.device) -> ForwardBatch:
    """Lay the batch out as tensors. Built with numpy: a dozen small torch operations would cost more than all of it."""
    items = batch.items
    num_requests = len(items)
    starts = np.fromiter((item.start for item in items), np.int64, num_requests)
    lens = np.fromiter((item.num_tokens for item in items), np.int64, num_requests)
    cu_seqlens = np.zeros(num_requests + 1, np.int32)
    np.cumsum(lens, out=cu_seqlens[1:])
    seq_lens = starts + lens

    num_blocks = -(-seq_lens // block_size)
    block_table = np.zeros((num_requests, int(num_blocks.max())), np.int32)
    for row, item in enumerate(items):
        used = int(num_blocks[row])
        block_table[row, :used] = item.request.block_table[:used]

    owner = np.repeat(np.arange(num_requests), lens)
    positions = np.arange(int(cu_seqlens[-1])) - cu_seqlens[owner] + starts[owner]
    slot_mapping = block_table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size

    token_ids = np.empty(int(cu_seqlens[-1]), np.int64)
    for row, item in enumerate(items):
        token_ids[cu_seqlens[row] : cu_seqlens[row + 1]] = _token_slice(item.request, item.start, item.num_tokens)
    sampled_rows = [row for row, item in enumerate(items) if item.needs_sample]
    logits_index = cu_seqlens[1:][sampled_rows].astype(np.int64) - 1

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slot_mapping=tensor(slot_mapping),
        cu_seqlens_q=tensor(cu_seqlens),
        seq_lens=tensor(seq_lens.astype(np.int32)),
        block_table=tensor(block_table),
        logits_index=tensor(logits_index),
        max_q_len=int(lens.max()),
    )


def _token_slice(request: Request, start: int, num_tokens: int) -> list[int]:
    """``request.all_token_ids[start : start + num_tokens]`` without joining prompt and output."""
    num_prompt = len(request.prompt_token_ids)
    if start >= num_prompt:
        return request.output_token_ids[start - num_prompt : start - num_prompt + num_tokens]
    head = request.prompt_token_ids[start : start + num_tokens]
    return head + request.output_token_ids[: num_tokens - len(head)]
