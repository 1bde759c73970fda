# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""KV to and from the wire on a GPU, with the payload's digest computed in the same pass.

The cache is ``[L, N, 2, K, S, D]`` (one allocation, any layer slice of it), the wire ``[layer, 2, kv_head, token,
head_dim]``, contiguous. Bytes are moved as 64-bit words, so any dtype whose head row is a multiple of 8 bytes passes
through unchanged. The digest is a sum over the words, mod 2^64, of a mix of each word with its place on the wire; a
sum needs no order, so every program adds its part, and a CPU computes the same number with ``digest_words`` (numpy).
It tells corruption and misplacement, not forgery.

    mix(i, w):  h = (w + (i + 1) * P1) * P2;  h ^= h >> 32;  h *= P3;  h ^= h >> 29
    digest = sum over i of mix(i, w[i])
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

# Odd constants with balanced bits: of xxHash64 (Collet) and splitmix64 (Steele, Lea and Flood 2014).
_P1, _P2, _P3 = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x94D049BB133111EB
_DIGEST_SLOTS = 256  # programs add to different addresses: one would serialise them


def digest_words(words: NDArray[np.uint64], first_index: int = 0) -> int:
    """The digest of these words of a payload, the first of which is word ``first_index``; parts add up mod 2^64."""
    total = 0
    for start in range(0, len(words), 1 << 16):  # fits the cache
        part = words[start : start + (1 << 16)]
        h = np.arange(first_index + start + 1, first_index + start + 1 + len(part), dtype=np.uint64)
        h *= np.uint64(_P1)
        h += part
        h *= np.uint64(_P2)
        h ^= h >> np.uint64(32)
        h *= np.uint64(_P3)
        h ^= h >> np.uint64(29)
        total += int(h.sum(dtype=np.uint64))
    return total & 0xFFFFFFFFFFFFFFFF


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
    h = word.to(tl.uint64, bitcast=True) + (index + 1).to(tl.uint64) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    h *= tl.full((), 0xC2B2AE3D27D4EB4F, tl.uint64)
    h ^= h >> 32
    h *= tl.full((), 0x94D049BB133111EB, tl.uint64)
    h ^= h >> 29
    part = tl.sum(tl.sum(tl.where(mask, h, tl.full((), 0, tl.uint64)).to(tl.int64, bitcast=True), 1), 0)
    slot = (plane * tl.num_programs(1) + tl.program_id(1)) % SLOTS
    tl.atomic_add(digest_ptr + slot, part, sem="relaxed")


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
    num_layers, _, _, num_kv_heads, block_size, head_dim = layers.shape
    num_tokens = token_end - token_start
    row_bytes = head_dim * layers.dtype.itemsize
    if row_bytes % 8:
        raise ValueError(f"a head's row of {row_bytes} bytes is no multiple of 8: pack this cache on the CPU path")
    if wire.nbytes != num_layers * 2 * num_kv_heads * num_tokens * row_bytes:
        raise ValueError(
            f"the wire buffer has {wire.nbytes} bytes, not those of {num_tokens} tokens of {num_layers} layers"
        )
    digest = torch.zeros(_DIGEST_SLOTS, dtype=torch.int64, device=layers.device)
    if not num_tokens:
        return digest
    cache = layers.view(torch.int64)
    words = row_bytes // 8
    block_t = 64
    _move_kernel[(num_layers * 2 * num_kv_heads, triton.cdiv(num_tokens, block_t))](
        cache, wire.view(torch.uint8).view(torch.int64), block_table, digest, token_start, num_tokens,
        cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3), cache.stride(4),
        K=num_kv_heads, S=block_size, WORDS=words, BLOCK_W=triton.next_power_of_2(words), BLOCK_T=block_t, PACK=pack,
        SLOTS=_DIGEST_SLOTS,
    )  # fmt: skip
    return digest
