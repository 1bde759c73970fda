"""A segment on the wire: a small header, a payload, and a digest over both.

Two kinds of digest, named in the header; any side can check either. ``xxh3_128`` is over the header's bytes and the
payload. ``block_mix64`` is what a GPU computes of the payload while it packs it (block_mix.py); xxh3 then seals that
number together with the header.

The header says which transfer, attempt, epoch and incarnation the payload belongs to and which range it holds, so that
a receiver decides from the segment itself, whatever the order in which the control stream and the data come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from kv_transfer import layout
from kv_transfer.block_mix import block_mix64
from kv_transfer.layout import BLOCK_MIX64, XXH3_128, KVRange
from kv_transfer.staging import DeviceView
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2

DIGEST_BYTES = 16
MAX_HEADER_BYTES = 4096


class MalformedSegment(Exception):
    """The header cannot be read: framing is lost, the connection must end."""


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """Ready for a backend: three pieces of bytes that travel together."""

    header: bytes
    digest: bytes
    payload: Any
    """A memoryview, or a DeviceView."""


def digest(header: bytes, payload: memoryview) -> bytes:
    """xxh3_128 over the header's bytes, then the payload."""
    state = xxhash.xxh3_128(header)
    state.update(payload)
    return state.digest()


def mixed_digest(header: bytes, mix: int) -> bytes:
    """For a payload with this block mix."""
    return digest(header, memoryview(mix.to_bytes(8, "little")))


def seal(header: kv_pb2.SegmentHeader, payload: memoryview) -> SealedSegment:
    """Digest header and payload. The payload must not change until the segment is sent."""
    header.digest_kind = XXH3_128
    data = header.SerializeToString(deterministic=True)
    return SealedSegment(data, digest(data, payload), payload)


def seal_mixed(header: kv_pb2.SegmentHeader, payload: memoryview | DeviceView, mix: int) -> SealedSegment:
    """As ``seal``, for a payload whose block mix is known."""
    header.digest_kind = BLOCK_MIX64
    data = header.SerializeToString(deterministic=True)
    return SealedSegment(data, mixed_digest(data, mix), payload)


def is_intact(kind: str, header: bytes, payload: memoryview, expected: bytes) -> bool:
    """Whether header and payload are what was sealed."""
    match kind:
        case layout.XXH3_128:
            return digest(header, payload) == expected
        case layout.BLOCK_MIX64:
            return mixed_digest(header, block_mix64(payload)) == expected
        case _:
            return False


def parse_header(data: bytes) -> kv_pb2.SegmentHeader:
    """Raises:
    MalformedSegment: not a segment header.
    """
    try:
        return kv_pb2.SegmentHeader.FromString(data)
    except DecodeError as error:
        raise MalformedSegment(f"segment header of {len(data)} bytes cannot be read: {error}") from error


def key_of(header: kv_pb2.SegmentHeader) -> TransferKey:
    return TransferKey(header.transfer_id, header.attempt)


def range_of(header: kv_pb2.SegmentHeader) -> KVRange:
    return KVRange(header.token_start, header.token_end, header.layer_start, header.layer_end)
