# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""KV to and from the wire on a GPU, with the payload's digest computed in the same pass.

The cache is ``[L, N, 2, K, S, D]`` (one allocation, any layer slice of it), the wire ``[layer, 2, kv_head, token,
head_dim]``, contiguous: any memory that the device can reach (its own, a peer's, pinned host memory). Bytes are moved
as 64-bit words, so any dtype whose head row is a multiple of 8 bytes passes through unchanged. The digest is a sum over
the words, mod 2^64, of a mix of each word with its place on the wire; a sum needs no order, so every program adds its
part. It tells corruption and misplacement, not forgery.

One launch moves many ranges (``Job``), each with a digest of its own, and leaves the digests where the host can read
them: no other launch is needed.

    mix(i, w):  h = (w + (i + 1) * P1) * P2;  h ^= h >> 32;  h *= P3;  h ^= h >> 29
    block_mix64 = sum over i of mix(i, w[i])
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch

DIGEST_SLOTS = 256
"""Programs add to different addresses: one would serialise them."""
WIRE_ALIGNMENT = 16
_BLOCK_TOKENS = 64
_COPY_WORDS = 2048


class Words(Protocol):
    """64-bit words that the device can reach; a tensor, or an address of another process's memory."""

    @property
    def dtype(self) -> torch.dtype: ...
    def data_ptr(self) -> int: ...


@triton.jit
def _mix(word, index):
    h = word.to(tl.uint64, bitcast=True) + (index + 1).to(tl.uint64) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    h *= tl.full((), 0xC2B2AE3D27D4EB4F, tl.uint64)
    h ^= h >> 32
    h *= tl.full((), 0x94D049BB133111EB, tl.uint64)
    return h ^ (h >> 29)


@triton.jit
def _add_to_digest(part, row_ptr, mix_ptr, slot, programs, SLOTS: tl.constexpr):
    """The last program that adds its part leaves the sum, and the row as it was: zeros."""
    tl.atomic_add(row_ptr + slot, part, sem="relaxed")
    if tl.atomic_add(row_ptr + SLOTS, 1, sem="acq_rel") == programs - 1:
        parts = tl.atomic_xchg(row_ptr + tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int64), sem="relaxed")
        tl.store(mix_ptr, tl.sum(parts, 0))
        tl.store(row_ptr + SLOTS, 0)


@triton.jit
def _move_kernel(
    cache_ptr, jobs_ptr, ids_ptr, rows_ptr, mixes_ptr,
    stride_l, stride_n, stride_kv, stride_h, stride_s,
    K: tl.constexpr, S: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    PACK: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, ROW: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)  # (layer, key or value, head)
    index_of_job = tl.program_id(2)
    job = jobs_ptr + index_of_job * FIELDS
    num_planes = tl.load(job + 1).to(tl.int32)
    num_tokens = tl.load(job + 3).to(tl.int32)
    if (plane < num_planes) & (tl.program_id(1) * BLOCK_T < num_tokens):
        wire_ptr = tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.int64)), ALIGNMENT)
        first_plane = tl.load(job + 2).to(tl.int32)
        token_start = tl.load(job + 4).to(tl.int32)
        table_ptr = ids_ptr + tl.load(job + 5)
        in_all = first_plane + plane
        base = (
            cache_ptr + (in_all // (2 * K)).to(tl.int64) * stride_l + (in_all // K % 2) * stride_kv
            + in_all % K * stride_h
        )  # fmt: skip
        t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
        w = tl.arange(0, BLOCK_W)
        mask = (t[:, None] < num_tokens) & (w[None, :] < WORDS)
        token = token_start + t
        block = tl.load(table_ptr + token // S, mask=t < num_tokens, other=0).to(tl.int64)
        in_cache = (block * stride_n + (token % S).to(tl.int64) * stride_s)[:, None] + w[None, :]
        index = (plane.to(tl.int64) * num_tokens + t)[:, None] * WORDS + w[None, :]
        if PACK:
            word = tl.load(base + in_cache, mask=mask, other=0)
            tl.store(wire_ptr + index, word, mask=mask)
        else:
            word = tl.load(wire_ptr + index, mask=mask, other=0)
            tl.store(base + in_cache, word, mask=mask)
        h = _mix(word, index)
        part = tl.sum(tl.sum(tl.where(mask, h, tl.full((), 0, tl.uint64)).to(tl.int64, bitcast=True), 1), 0)
        parts_a_plane = tl.cdiv(num_tokens, BLOCK_T)
        _add_to_digest(
            part, rows_ptr + index_of_job * ROW, mixes_ptr + index_of_job,
            (plane * parts_a_plane + tl.program_id(1)) % SLOTS, num_planes * parts_a_plane, SLOTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_words"])
def _copy_kernel(
    source_ptr, target_ptr, row_ptr, mix_ptr, num_words, BLOCK: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    word = tl.load(source_ptr + index, mask=mask, other=0)
    tl.store(target_ptr + index, word, mask=mask)
    h = tl.where(mask, _mix(word, index), tl.full((), 0, tl.uint64))
    part = tl.sum(h.to(tl.int64, bitcast=True), 0)
    _add_to_digest(part, row_ptr, mix_ptr, tl.program_id(0) % SLOTS, tl.num_programs(0), SLOTS)


class Job(NamedTuple):
    """One range to move: a row of ``jobs``."""

    wire_address: int
    """A multiple of WIRE_ALIGNMENT."""
    num_planes: int
    first_plane: int
    """Planes of the cache: (layer, key or value, head)."""
    num_tokens: int
    token_start: int
    """In its first block."""
    first_id: int
    """Where its blocks' ids begin."""


JOB_FIELDS = len(Job._fields)
ROW_WORDS = DIGEST_SLOTS + 1
"""A job's row of the digests: the parts, and how many programs have added theirs."""


def move_kv(
    cache: torch.Tensor,  # [L, N, 2, K, S, words] int64, all of it
    jobs: torch.Tensor,  # [n or more, JOB_FIELDS] int64, of each a Job
    ids: torch.Tensor,  # [M] int32: block ids of all jobs
    rows: torch.Tensor,  # [n or more, ROW_WORDS] int64, zeros; and zeros again afterwards
    mixes: torch.Tensor,  # [n or more] int64, of the device or pinned: the digests
    num_jobs: int,
    num_planes: int,
    num_tokens: int,
    *,
    pack: bool,
) -> None:
    """Launch n copies, to the wire or from there into the blocks. ``num_planes``, ``num_tokens``: the largest job's."""
    _, _, _, num_kv_heads, block_size, words = cache.shape
    launch(_move_kernel, (num_planes, triton.cdiv(num_tokens, _BLOCK_TOKENS), num_jobs),
        cache, jobs, ids, rows, mixes, *cache.stride()[:5],
        K=num_kv_heads, S=block_size, WORDS=words, BLOCK_W=triton.next_power_of_2(words), BLOCK_T=_BLOCK_TOKENS,
        PACK=pack, SLOTS=DIGEST_SLOTS, FIELDS=JOB_FIELDS, ROW=ROW_WORDS,
        ALIGNMENT=WIRE_ALIGNMENT,
    )  # fmt: skip


def copy_words(source: Words, target: torch.Tensor, row: torch.Tensor, mix: torch.Tensor) -> None:
    """Launch a copy of as many words as ``target`` (int64) has; ``row`` and ``mix`` as above, of one job."""
    num_words = target.numel()
    launch(_copy_kernel, (triton.cdiv(num_words, _COPY_WORDS),),
        source, target, row, mix, num_words, BLOCK=_COPY_WORDS, SLOTS=DIGEST_SLOTS,
    )  # fmt: skip


def words_of(cache: torch.Tensor) -> torch.Tensor:
    """[..., D] of any dtype -> [..., words] int64, the same memory.

    Raises:
        ValueError: a head's row is no whole number of words.
    """
    row_bytes = cache.shape[-1] * cache.dtype.itemsize
    if row_bytes % 8:
        raise ValueError(f"a head's row of {row_bytes} bytes is no multiple of 8: pack this cache on the CPU path")
    return cache.view(torch.int64)


def pack_kv(
    layers: torch.Tensor,  # [L, N, 2, K, S, D], a layer range of the cache
    block_table: torch.Tensor,  # [M] int32
    token_start: int,
    token_end: int,
    wire: torch.Tensor,  # contiguous, of the packed size; written
) -> torch.Tensor:
    """Copy tokens start .. end of all ``layers`` to the wire -> the digest on the device, for ``digest_value``."""
    return _move(layers, block_table, token_start, token_end, wire, pack=True)


def unpack_kv(
    layers: torch.Tensor, block_table: torch.Tensor, token_start: int, token_end: int, wire: torch.Tensor
) -> torch.Tensor:
    """The inverse; the digest is of the very words that were written into the blocks."""
    return _move(layers, block_table, token_start, token_end, wire, pack=False)


def digest_value(digest: torch.Tensor) -> int:
    """The number behind ``pack_kv``'s result; waits for the device."""
    return int(digest.item()) & 0xFFFFFFFFFFFFFFFF


def _move(
    layers: torch.Tensor, block_table: torch.Tensor, token_start: int, token_end: int, wire: torch.Tensor, *, pack: bool
) -> torch.Tensor:
    num_layers, _, _, num_kv_heads, _, head_dim = layers.shape
    num_tokens = token_end - token_start
    if wire.nbytes != num_layers * 2 * num_kv_heads * num_tokens * head_dim * layers.dtype.itemsize:
        raise ValueError(
            f"the wire buffer has {wire.nbytes} bytes, not those of {num_tokens} tokens of {num_layers} layers"
        )
    mix = torch.zeros(1, dtype=torch.int64, device=layers.device)
    if num_tokens:
        num_planes = num_layers * 2 * num_kv_heads
        job = Job(wire.data_ptr(), num_planes, 0, num_tokens, token_start, 0)
        jobs = torch.tensor([job], dtype=torch.int64, device=layers.device)
        row = torch.zeros(1, ROW_WORDS, dtype=torch.int64, device=layers.device)
        move_kv(words_of(layers), jobs, block_table, row, mix, 1, num_planes, num_tokens, pack=pack)
    return mix
