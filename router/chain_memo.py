"""Hashes of chains that were hashed before: prompts mostly begin as others did, and looking up is cheaper than hashing.

A chain is taken in parts of PART_UNITS; a part is remembered under what its hashes depend on, whole: the parent's hash
and the tokens. So an answer is exactly what hashing would give. The least recently used parts go first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.block_hash import hash_tokens

PART_UNITS = 128
MAX_BYTES = 64 << 20
_HASH_BYTES = 64
"""Of an entry, with the object around it."""


class ChainMemo:
    """Of one router."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: OrderedDict[tuple[bytes, int, bytes], list[bytes]] = OrderedDict()

    def hash(self, token_ids: Sequence[int], unit: int, parent: bytes, start: int, stop: int) -> list[bytes]:
        """As ``engine.block_hash.hash_tokens``."""
        tokens = array("I", token_ids[start:stop])
        part_tokens = PART_UNITS * unit
        hashes: list[bytes] = []
        end = 0
        for begin in range(0, len(tokens) - part_tokens + 1, part_tokens):
            end = begin + part_tokens
            part = self._part(tokens[begin:end], unit, parent)
            hashes += part
            parent = part[-1]
        return hashes + hash_tokens(tokens[end:], unit, parent)

    def _part(self, tokens: array[int], unit: int, parent: bytes) -> list[bytes]:
        key = (parent, unit, tokens.tobytes())
        part = self._parts.get(key)
        if part is not None:
            self._parts.move_to_end(key)
            return part
        part = self._parts[key] = hash_tokens(tokens, unit, parent)
        self._bytes += self._size(key)
        while self._bytes > self._max_bytes:
            oldest, _ = self._parts.popitem(last=False)
            self._bytes -= self._size(oldest)
        return part

    @staticmethod
    def _size(key: tuple[bytes, int, bytes]) -> int:
        return len(key[2]) + PART_UNITS * _HASH_BYTES
