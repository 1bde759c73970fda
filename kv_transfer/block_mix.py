"""The digest of a payload that a GPU packs or unpacks: order-free, so that every program adds its part.

A sum over the payload's 64-bit words, mod 2^64, of a mix of each word with its place. A GPU computes it while it moves
the words; here is the same number by numpy. It tells corruption and misplacement, not forgery.

    mix(i, w):  h = (w + (i + 1) * P1) * P2;  h ^= h >> 32;  h *= P3;  h ^= h >> 29
    block_mix64 = sum over i of mix(i, w[i])
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Odd constants with balanced bits: of xxHash64 (Collet) and splitmix64 (Steele, Lea and Flood 2014).
P1, P2, P3 = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x94D049BB133111EB
WORD_BYTES = 8
WORDS_AT_ONCE = 1 << 16
"""Fits the cache."""


def block_mix64(payload: memoryview | bytes) -> int:
    """Of bytes in host memory; a last word that is not whole is filled up with zeros."""
    whole = len(payload) - len(payload) % WORD_BYTES
    total = mix_words(np.frombuffer(payload[:whole], np.uint64))
    if whole < len(payload):
        last = bytes(payload[whole:]).ljust(WORD_BYTES, b"\0")
        total += mix_words(np.frombuffer(last, np.uint64), whole // WORD_BYTES)
    return total & 0xFFFFFFFFFFFFFFFF


def mix_words(words: NDArray[np.uint64], first_index: int = 0) -> int:
    """Of some words of a payload, the first of which is word ``first_index``; parts add up mod 2^64."""
    total = 0
    for start in range(0, len(words), WORDS_AT_ONCE):
        part = words[start : start + WORDS_AT_ONCE]
        h = np.arange(first_index + start + 1, first_index + start + 1 + len(part), dtype=np.uint64)
        h *= np.uint64(P1)
        h += part
        h *= np.uint64(P2)
        h ^= h >> np.uint64(32)
        h *= np.uint64(P3)
        h ^= h >> np.uint64(29)
        total += int(h.sum(dtype=np.uint64))
    return total & 0xFFFFFFFFFFFFFFFF
