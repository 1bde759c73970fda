"""What sender and receiver say to each other on the control stream (drawn in worker.proto), as plain values.

The services' ``engine_main`` translate them to and from protobuf. ``first_output`` is opaque here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Open:
    """P asks D to reserve blocks."""

    sender: kv_pb2.WorkerIdentity
    layout: kv_pb2.KVLayout
    prompt_tokens: int
    timeout_s: float
    backends: tuple[str, ...]
    no_kv: bool = False
    probes: dict[str, str] = field(default_factory=dict)
    """By backend: what a receiver tries to open, to see whether this sender reaches it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """D has reserved blocks."""

    epoch: int
    cached_tokens: int
    layout: kv_pb2.KVLayout
    backend: str
    endpoint: str
    lease_s: float
    max_segment_bytes: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Never."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The prompt is computed. ``finished``: the first token ended the request, D needs no KV."""

    num_segments: int
    first_output: bytes
    finished: bool


@dataclass(frozen=True, slots=True)
class Done:
    """D has verified and published everything: P may free."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Either side gives up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One message about one transfer."""

    key: TransferKey
    body: Open | Ticket | Busy | Refused | End | Done | Abort
