"""A step's inputs as one block of memory that goes to the device in one copy.

Owns the slots (a running request keeps one, with its block table and sampling parameters, from its first step here to
its last), the layout of the block, and the packing of a scheduled batch into it. No CUDA: arrays are numpy, so all of
it runs and is tested on a CPU. Called by the GPU runner.

    batch --pack_step--> staging block (tokens, positions, slots, lengths, ...)  + changed block-table entries

What a token is may be unknown here, because the step that draws it is still running: such an input is -1 - slot, and
the device puts the slot's last token there. Rows past the batch are padding: length 0, KV written nowhere.

Shape letters: T tokens, R rows (requests), M blocks of the longest request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import ScheduledBatch
from engine.kernels.noise import splitmix64_array
from engine.request import Request, RequestStatus

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
_ALIGN_WORDS = 4


class StepLayout:
    """Where the inputs of a shape (``tokens``, ``rows``) lie, in words of 32 bits; each begins at 16 bytes."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens, self.rows = tokens, rows
        sizes = {
            "token_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "cu_seqlens_q": rows + 1,
            "seq_lens": rows,
            "slots": rows,
            "logits_index": rows,
            "sample_slots": rows,
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
            "keys": 2 * rows,
        }
        self.fields: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self.fields[name] = slice(at, at + size)
            at += -(-size // _ALIGN_WORDS) * _ALIGN_WORDS
        self.words = at

    def arrays(self, block: Ints) -> dict[str, Ints]:
        return {name: block[where] for name, where in self.fields.items()}


class RequestSlots:
    """Slots 0 .. num_slots-1; slot ``num_slots`` is padding's. Slots of requests that run no longer are taken back."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.num_slots, self.max_blocks, self.block_size = num_slots, max_blocks, block_size
        self.table: Ints = np.zeros((num_slots + 1, max_blocks), np.int32)
        """The block tables, as the device has them once ``changes`` are applied."""
        self.stamp = np.zeros(num_slots + 1, np.int64)
        """Changes when a slot gets another request, or its request other blocks."""
        self.temperature: Floats = np.zeros(num_slots + 1, np.float32)
        self.top_k: Ints = np.zeros(num_slots + 1, np.int32)
        self.top_p: Floats = np.ones(num_slots + 1, np.float32)
        self.min_p: Floats = np.zeros(num_slots + 1, np.float32)
        self.seed_hash = np.zeros(num_slots + 1, np.uint64)
        self.num_prompt = np.zeros(num_slots + 1, np.int64)
        self.special = np.zeros(num_slots + 1, np.bool_)
        """More than temperature and cuts is asked for: see ``gpu_sampler``."""
        self.changes_at: list[int] = []
        self.changes_id: list[int] = []
        """Entries of ``table`` (flat index, block id) that changed since ``take_changes``."""
        self._slot_of: dict[Request, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._num_known = [0] * num_slots
        self._stamps = 0

    def place(self, request: Request) -> int:
        """The request's slot, with its blocks brought up to date."""
        slot = self._slot_of.get(request)
        if slot is None:
            slot = self._assign(request)
        blocks = request.block_table
        known = self._num_known[slot]
        # A table only grows while the request holds blocks; it is another list after a preemption.
        if blocks is self._blocks[slot]:
            if len(blocks) == known:
                return slot
        else:
            self._blocks[slot] = blocks
            self._stamps += 1
            self.stamp[slot] = self._stamps
            known = 0
        fresh = blocks[known:]
        self.table[slot, known : len(blocks)] = fresh
        first = slot * self.max_blocks + known
        self.changes_at += range(first, first + len(fresh))
        self.changes_id += fresh
        self._num_known[slot] = len(blocks)
        return slot

    def take_changes(self) -> tuple[list[int], list[int]]:
        changes = self.changes_at, self.changes_id
        self.changes_at, self.changes_id = [], []
        return changes

    def _assign(self, request: Request) -> int:
        if not self._free:
            for other in [r for r in self._slot_of if r.status is not RequestStatus.RUNNING]:
                self._free.append(self._slot_of.pop(other))
        slot = self._free.pop()
        self._slot_of[request] = slot
        self._blocks[slot] = []
        self._num_known[slot] = 0
        sampling = request.sampling
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed_hash[slot] = splitmix64_array(np.array([sampling.seed & (1 << 64) - 1], np.uint64))[0]
        self.num_prompt[slot] = len(request.prompt_token_ids)
        self.special[slot] = bool(
            sampling.uses_history or sampling.logit_bias or sampling.min_tokens or sampling.logprobs is not None
        )
        return slot


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What the host knows of a packed step."""

    num_requests: int
    num_tokens: int
    num_decodes: int
    """Leading requests with one token."""
    max_q_len: int
    slots: NDArray[np.int64]
    """[num_requests]"""
    seq_lens: NDArray[np.int64]
    sampled: list[int]
    """Items that draw a token, by index."""
    greedy: bool
    """No request of the step has a temperature."""
    cut: bool
    """Some request has a top_k, top_p or min_p."""
    special: list[int]
    """Rows of the logits (indices into ``sampled``) whose slot is special."""


def pack_step(batch: ScheduledBatch, slots: RequestSlots, layout: StepLayout, block: Ints) -> PackedStep:
    """Write the batch into ``block``, laid out and padded as ``layout`` says; block-table changes wait in ``slots``."""
    items = batch.items
    count = len(items)
    out = layout.arrays(block)
    size = slots.block_size

    of_item, starts, lens, sampled, first_tokens = [], [], [], [], []
    for index, item in enumerate(items):
        request = item.request
        slot = slots.place(request)
        of_item.append(slot)
        starts.append(item.start)
        lens.append(item.num_tokens)
        if item.needs_sample:
            sampled.append(index)
        if item.num_tokens == 1:
            known = request.all_token_ids
            first_tokens.append(known[item.start] if item.start < len(known) else -1 - slot)
    num_decodes = len(first_tokens)
    slot_of, start, length = np.array(of_item), np.array(starts), np.array(lens)
    seq_lens = start + length

    cu = out["cu_seqlens_q"]
    cu[0] = 0
    np.cumsum(length, out=cu[1 : count + 1])
    num_tokens = int(cu[count])
    cu[count + 1 :] = num_tokens
    _fill(out["seq_lens"], seq_lens, 0)
    _fill(out["slots"], slot_of, slots.num_slots)

    token_ids = out["token_ids"]
    token_ids[:num_decodes] = first_tokens
    for index in range(num_decodes, count):
        item = items[index]
        at = int(cu[index])
        token_ids[at : at + item.num_tokens] = item.request.all_token_ids[item.start : item.start + item.num_tokens]
    token_ids[num_tokens:] = 0
    if num_tokens == count:
        positions, owner = start, slot_of
    else:
        item_of = np.repeat(np.arange(count), length)
        positions = np.arange(num_tokens) - cu[item_of] + start[item_of]
        owner = slot_of[item_of]
    _fill(out["positions"], positions, 0)
    _fill(out["slot_mapping"], slots.table[owner, positions // size] * size + positions % size, -1)

    rows = np.array(sampled, np.int64)
    of_row = slot_of[rows]
    _fill(out["logits_index"], cu[rows + 1] - 1, 0)
    _fill(out["sample_slots"], of_row, slots.num_slots)
    temperature = slots.temperature[of_row]
    greedy = not temperature.any()
    cut = False
    if not greedy:
        top_k, top_p, min_p = slots.top_k[of_row], slots.top_p[of_row], slots.min_p[of_row]
        cut = bool(((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).any())
        _fill(out["temperature"].view(np.float32), temperature, 0)
        _fill(out["top_k"], top_k, 0)
        _fill(out["top_p"].view(np.float32), top_p, 1)
        _fill(out["min_p"].view(np.float32), min_p, 0)
        # The output position of the token that is drawn: all tokens up to this step's last, but the prompt.
        drawn_at = (seq_lens[rows] - slots.num_prompt[of_row]).astype(np.uint64)
        keys = splitmix64_array(slots.seed_hash[of_row] + drawn_at)
        _fill(out["keys"], keys.view(np.int32), 0)
    special = np.flatnonzero(slots.special[of_row]).tolist()
    return PackedStep(
        num_requests=count,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        max_q_len=int(length.max()),
        slots=slot_of,
        seq_lens=seq_lens,
        sampled=sampled,
        greedy=greedy,
        cut=cut,
        special=special,
    )


def _fill(target: NDArray[np.int32] | NDArray[np.float32], values: NDArray[Any], padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding
