"""The contract of a transfer backend: how sealed segments get from one worker's staging into another's.

A backend moves bytes; it knows no transfer, lease or epoch. Rules, all tested by tests/conformance for every backend:

- identity, wire version and layout of both sides are checked before any segment moves;
- segments of one channel arrive whole and in order, or the channel is lost, and both sides hear of it;
- ``on_done`` is called exactly once for each segment, when its payload may be written again;
- no call blocks the engine's thread; every wait of a network thread ends by itself;
- ``close`` returns within a second, whatever the peer does.

Callbacks come on a network thread; the engine's thread picks arrivals up with ``poll``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kv_transfer.segment import SealedSegment
from kv_transfer.staging import SlotPool, StagingSlot
from pdserve.v1 import kv_pb2

OnDone = Callable[[str | None], None]
"""Called with None when sent, else with the reason why not."""
OnLost = Callable[[str], None]
Memory = Literal["host", "device"]
Wakeup = Callable[[], None]


class Channel(Protocol):
    """From one sender to one receiver. ``send`` may be called before it is connected."""

    def send(self, segment: SealedSegment, on_done: OnDone) -> None: ...

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        """The same for several, in order; less work."""
        ...

    def close(self) -> None: ...


class SegmentSender(Protocol):
    """The sender's side of a backend."""

    arena: SlotPool
    """Where the payloads of its segments are."""
    probe: str
    """What receivers that this sender reaches, and no others, can open (``unreachable``); empty: none is needed."""

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> Channel:
        """Returns at once. ``on_lost`` is called at most once, also when it never connects; not after ``close``."""
        ...

    def close(self) -> None:
        """After the channels'."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """One channel, as its receiver knows it: no other one, of the same sender either, is the same."""

    sender: kv_pb2.WorkerIdentity


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole segment, in the receiver's staging or where it can read it. Whoever gets it gives the slot back."""

    origin: Origin
    header_bytes: bytes
    header: kv_pb2.SegmentHeader
    digest: bytes
    slot: StagingSlot

    @property
    def payload(self) -> Any:
        """A memoryview, or a DeviceView."""
        return self.slot.view[: self.header.payload_bytes]


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """Nothing more comes on this channel. The sender may have another one by now."""

    origin: Origin
    reason: str


class SegmentReceiver(Protocol):
    """The receiver's side of a backend."""

    max_segment_bytes: int
    """Payload of one segment."""

    def listen(self, host: str, advertised_host: str) -> str:
        """Start to take connections; returns the endpoint for tickets, as others reach it."""
        ...

    def unreachable(self, probe: str) -> str:
        """Why a sender with this probe cannot use this backend to us; empty: it can. Returns at once."""
        ...

    def poll(self) -> list[Arrived | ChannelLost]:
        """What came since the last call, in order for each channel."""
        ...

    def drop_sender(self, worker_id: str, incarnation: int) -> None:
        """Close this sender's channels: its control stream is gone."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """What a registered backend class offers."""

    sender_memory: Memory
    """Of which kind the sender's arena has to be."""
    receiver_memory: Memory | None
    """Likewise; None: segments stay with the sender until they are read."""

    def sender(self, arena: Any) -> SegmentSender:
        """``arena``: where the payloads of its segments are."""
        ...

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: Any, wakeup: Wakeup
    ) -> SegmentReceiver:
        """``arena``: where segments are received; None where ``receiver_memory`` is."""
        ...
