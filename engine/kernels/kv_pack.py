# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""KV to and from the wire on a GPU, with the payload's digest computed in the same pass.

The cache is ``[L, N, 2, K, S, D]`` (one allocation, any layer slice of it), the wire ``[layer, 2, kv_head, token,
head_dim]``, contiguous: any memory that the device can reach (its own, a peer's, pinned host memory). Bytes are moved
as 64-bit words, so any dtype whose head row is a multiple of 8 bytes passes through unchanged. The digest is a sum over
the words, mod 2^64, of a mix of each word with its place on the wire; a sum needs no order, so every program adds its
part. It tells corruption and misplacement, not forgery.

    mix(i, w):  h = (w + (i + 1) * P1) * P2;  h ^= h >> 32;  h *= P3;  h ^= h >> 29
    block_mix64 = sum over i of mix(i, w[i])
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

DIGEST_SLOTS = 256
"""Programs add to different addresses: one would serialise them."""
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


@triton.jit(do_not_specialize=["token_start", "num_tokens"])
def _move_kernel(
    cache_ptr, wire_ptr, table_ptr, digest_ptr, token_start, num_tokens,
    stride_l, stride_n, stride_kv, stride_h, stride_s,
    K: tl.constexpr, S: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    PACK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)  # (layer, key or value, head)
    head = plane % K
    base = cache_ptr + (plane // (2 * K)).to(tl.int64) * stride_l + (plane // K % 2) * stride_kv + head * stride_h
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
    slot = (plane * tl.num_programs(1) + tl.program_id(1)) % SLOTS
    tl.atomic_add(digest_ptr + slot, part, sem="relaxed")


@triton.jit(do_not_specialize=["num_words"])
def _copy_kernel(source_ptr, target_ptr, digest_ptr, num_words, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    word = tl.load(source_ptr + index, mask=mask, other=0)
    tl.store(target_ptr + index, word, mask=mask)
    h = tl.where(mask, _mix(word, index), tl.full((), 0, tl.uint64))
    tl.atomic_add(digest_ptr + tl.program_id(0) % SLOTS, tl.sum(h.to(tl.int64, bitcast=True), 0), sem="relaxed")


def move_kv(
    cache: torch.Tensor,  # [L, N, 2, K, S, words] int64, a layer range
    block_table: torch.Tensor,  # [M] int32
    token_start: int,
    token_end: int,
    wire: Words,  # contiguous, of the packed size
    sums: torch.Tensor,  # [DIGEST_SLOTS] int64: the digest's parts are added to it
    *,
    pack: bool,
) -> None:
    """Launch a copy of tokens start .. end of all layers to the wire, or from there into the blocks."""
    num_layers, _, _, num_kv_heads, block_size, words = cache.shape
    num_tokens = token_end - token_start
    _move_kernel[(num_layers * 2 * num_kv_heads, triton.cdiv(num_tokens, _BLOCK_TOKENS))](
        cache, wire, block_table, sums, token_start, num_tokens,
        cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3), cache.stride(4),
        K=num_kv_heads, S=block_size, WORDS=words, BLOCK_W=triton.next_power_of_2(words), BLOCK_T=_BLOCK_TOKENS,
        PACK=pack, SLOTS=DIGEST_SLOTS,
    )  # fmt: skip


def copy_words(source: Words, target: torch.Tensor, sums: torch.Tensor) -> None:
    """Launch a copy of as many words as ``target`` (int64) has; ``sums`` as above."""
    num_words = target.numel()
    _copy_kernel[(triton.cdiv(num_words, _COPY_WORDS),)](
        source, target, sums, num_words, BLOCK=_COPY_WORDS, SLOTS=DIGEST_SLOTS
    )


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
    return int(digest.sum().item()) & 0xFFFFFFFFFFFFFFFF


def _move(
    layers: torch.Tensor, block_table: torch.Tensor, token_start: int, token_end: int, wire: torch.Tensor, *, pack: bool
) -> torch.Tensor:
    num_layers, _, _, num_kv_heads, _, head_dim = layers.shape
    num_tokens = token_end - token_start
    cache = words_of(layers)
    if wire.nbytes != num_layers * 2 * num_kv_heads * num_tokens * head_dim * layers.dtype.itemsize:
        raise ValueError(
            f"the wire buffer has {wire.nbytes} bytes, not those of {num_tokens} tokens of {num_layers} layers"
        )
    digest = torch.zeros(DIGEST_SLOTS, dtype=torch.int64, device=layers.device)
    if num_tokens:
        words = wire.view(torch.uint8).view(torch.int64)
        move_kv(cache, block_table, token_start, token_end, words, digest, pack=pack)
    return digest
