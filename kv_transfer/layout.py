"""What the KV of two workers must have in common, and how big a piece of it is.

Owns the comparison of layouts and the arithmetic of ranges. Knows neither tensors nor blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdserve.v1 import kv_pb2

WIRE_VERSION = 1
XXH3_128 = "xxh3_128"
BLOCK_MIX64 = "block_mix64"
DIGEST_KINDS = (XXH3_128, BLOCK_MIX64)
"""That a receiver must be able to check: which one a segment has is said in its header."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MUST_BE_EQUAL = (
    "wire_version",
    "digest_kind",
    "model_fingerprint",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "hash_block_tokens",
)


class KVRange(NamedTuple):
    """Tokens [token_start, token_end) of layers [layer_start, layer_end)."""

    token_start: int
    token_end: int
    layer_start: int
    layer_end: int

    @property
    def cells(self) -> int:
        """Pairs of (token, layer)."""
        return max(0, self.token_end - self.token_start) * max(0, self.layer_end - self.layer_start)

    def overlaps(self, other: KVRange) -> bool:
        return (
            self.token_start < other.token_end
            and other.token_start < self.token_end
            and self.layer_start < other.layer_end
            and other.layer_start < self.layer_end
        )


def make_layout(
    *,
    model_fingerprint: str,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    hash_block_tokens: int,
    block_size: int,
    dtype: str,
) -> kv_pb2.KVLayout:
    """A layout as this version of the wire speaks it."""
    return kv_pb2.KVLayout(
        model_fingerprint=model_fingerprint,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hash_block_tokens=hash_block_tokens,
        wire_version=WIRE_VERSION,
        digest_kind=",".join(DIGEST_KINDS),
        block_size=block_size,
        dtype=dtype,
    )


def wire_of(layout: kv_pb2.KVLayout) -> str:
    """What two versions of the program must have in common, whatever the model."""
    return f"{layout.wire_version}/{layout.digest_kind}"


def mismatch(ours: kv_pb2.KVLayout, theirs: kv_pb2.KVLayout) -> str | None:
    """None when KV may move between the two; else every field that differs, with both values."""
    different = [
        f"{name}: ours {getattr(ours, name)!r}, theirs {getattr(theirs, name)!r}"
        for name in MUST_BE_EQUAL
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if theirs.dtype not in DTYPE_BYTES:
        different.append(f"dtype: ours {ours.dtype!r}, theirs {theirs.dtype!r} (known: {', '.join(DTYPE_BYTES)})")
    return "KV layouts differ (" + "; ".join(different) + ")" if different else None


def cell_bytes(layout: kv_pb2.KVLayout, dtype: str) -> int:
    """Key and value of all heads, of one token in one layer."""
    return 2 * layout.num_kv_heads * layout.head_dim * DTYPE_BYTES[dtype]


def split(whole: KVRange, bytes_per_cell: int, max_bytes: int) -> Iterator[KVRange]:
    """Cut a range into segments of at most ``max_bytes``: by tokens, and by layers only where one token is too big.

    Raises:
        ValueError: not even one token of one layer fits.
    """
    if bytes_per_cell > max_bytes:
        raise ValueError(
            f"one token of one layer is {bytes_per_cell} bytes, a segment holds {max_bytes}: use larger staging slots"
        )
    layers = min(whole.layer_end - whole.layer_start, max_bytes // bytes_per_cell)
    if layers < 1:
        return
    tokens = max_bytes // (bytes_per_cell * layers)
    for layer in range(whole.layer_start, whole.layer_end, layers):
        for token in range(whole.token_start, whole.token_end, tokens):
            yield KVRange(token, min(token + tokens, whole.token_end), layer, min(layer + layers, whole.layer_end))
