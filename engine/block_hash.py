"""Names of KV blocks by content: a chained 128-bit hash, the same in every process and on every host.

The hash of a unit (``hash_block_tokens`` tokens, one value in the whole fleet) covers the parent's hash and the unit's
token ids; the first unit's parent is ``root_hash(model_fingerprint, cache_salt)``. So an equal hash means: equal tokens
from the start of the prompt, same model, same tenant. A worker's block holds one or more units and is named by the
hash of its last one.

Standard library only: the router computes the same values. Called by the scheduler and by the router's prefix index.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
_TOKEN_BYTES = 4


def root_hash(model_fingerprint: str, cache_salt: str = "") -> bytes:
    """The parent of a prompt's first unit. ``cache_salt`` keeps tenants from seeing each other's cache hits."""
    fingerprint = model_fingerprint.encode()
    # The length in front keeps ("ab", "c") and ("a", "bc") apart.
    seed = len(fingerprint).to_bytes(8, "little") + fingerprint + cache_salt.encode()
    return blake2b(seed, digest_size=HASH_BYTES, person=b"pdserve root").digest()


def hash_tokens(
    token_ids: Sequence[int], hash_block_tokens: int, parent: bytes, start: int = 0, stop: int | None = None
) -> list[bytes]:
    """One hash for each full unit of ``token_ids[start:stop]``; ``parent`` is the hash of what lies before ``start``.

    Incremental: hashing a longer list from where the last call ended gives the same values as hashing it whole.
    """
    encoded = array("I", token_ids[start:stop])
    if sys.byteorder == "big":
        encoded.byteswap()
    data = memoryview(encoded.tobytes())
    unit_bytes = hash_block_tokens * _TOKEN_BYTES
    hashes = []
    for offset in range(0, len(data) - unit_bytes + 1, unit_bytes):
        parent = blake2b(parent + data[offset : offset + unit_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
