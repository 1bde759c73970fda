"""A segment on the wire: a small header, a payload, and a digest over both.

The header says which transfer, attempt, epoch and incarnation the payload belongs to and which range it holds, so that
a receiver decides from the segment itself, whatever the order in which the control stream and the data come.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from kv_transfer.layout import KVRange
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
    payload: memoryview


def digest(header: bytes, payload: memoryview) -> bytes:
    """xxh3_128 over the header's bytes, then the payload."""
    state = xxhash.xxh3_128(header)
    state.update(payload)
    return state.digest()


def seal(header: kv_pb2.SegmentHeader, payload: memoryview) -> SealedSegment:
    """Digest header and payload. The payload must not change until the segment is sent."""
    data = header.SerializeToString(deterministic=True)
    return SealedSegment(data, digest(data, payload), payload)


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
