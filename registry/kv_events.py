"""KV events as they lie in a stream: what changed in one worker's prefix cache, numbered.

Owns the types and their encoding (msgpack). Written by a worker, read by routers; what cannot be read counts as lost.
Hashes travel joined (16 bytes each): a list of objects would cost more than its content.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

HASH_BYTES = 16
DEVICE_TIER = "device"
"""Where a block lies: in the memory that the engine computes with."""


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, tag="s"):
    """These blocks can be reused. A chain after ``parent``, if that is not empty."""

    hashes: bytes
    parent: bytes = b""
    tier: str = DEVICE_TIER


class Removed(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, tag="r"):
    hashes: bytes


class Cleared(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, tag="c"):
    """No block is there: a new life, or the beginning of a snapshot."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True):
    """Events ``first_seq``, ``first_seq + 1``, ... of one incarnation of a worker."""

    incarnation: int
    first_seq: int
    events: list[Event]

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1

    @property
    def begins_anew(self) -> bool:
        """Whether it can be understood without what was before."""
        return isinstance(self.events[0], Cleared)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


def encode_events(events: list[Event]) -> bytes:
    return _encoder.encode(events)


def decode_events(payload: bytes) -> list[Event]:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(payload)


def join(hashes: Iterable[bytes]) -> bytes:
    return b"".join(hashes)


def split(joined: bytes) -> list[bytes]:
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]
