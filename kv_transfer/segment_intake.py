"""A segment's way into a reservation, on the receiving side: whose it is, whether it fits, whether it is intact.

Owns the segments that have come and are not verified. Whose transfers there are, and how they end, is their owner's
business (receiver.py). Driven by the engine's thread.

    arrivals --> stale, double: dropped
             --> corrupt, out of range: the transfer fails
             --> written --> verified                           the host writes: the digest is checked before
             --> begun --[kv-copies]--> written --> verified    a device writes, a few at once:
                                                                the digest is of what it wrote, and checked after

A device may still write into blocks of a transfer that failed: who frees them orders that after the writes that were
begun (the port's business).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.copies import AT_ONCE, CopyWaiter, DeviceCopy
from kv_transfer.layout import BLOCK_MIX64, DIGEST_KINDS
from kv_transfer.lease import Clock
from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.receiver_port import ReceiverPort
from kv_transfer.segment import is_intact, key_of, mixed_digest, range_of
from kv_transfer.staging import StagingSlot
from kv_transfer.transfer import TransferCounters, TransferKey, TransferState
from pdserve.v1 import kv_pb2


class TransferOwner(Protocol):
    def find(self, key: TransferKey) -> ReceiveTransfer | None: ...

    def fail(self, transfer: ReceiveTransfer, kind: str, reason: str) -> None: ...

    def segment_verified(self, transfer: ReceiveTransfer) -> None: ...

    def channel_lost(self, lost: ChannelLost) -> None: ...


Writing = tuple[ReceiveTransfer, Arrived]
"""A segment that a device writes."""


class SegmentIntake:
    def __init__(
        self,
        owner: TransferOwner,
        port: ReceiverPort,
        layout: kv_pb2.KVLayout,
        counters: TransferCounters,
        clock: Clock,
        wakeup: Callable[[], None],
        *,
        device_writes: bool,
    ) -> None:
        self._owner = owner
        self._port = port
        self._layout = layout
        self._counters = counters
        self._clock = clock
        self._wakeup = wakeup
        self._device_writes = device_writes
        self._begun: list[tuple[DeviceCopy, Writing]] = []
        """Asked for and not started."""
        self._copies = CopyWaiter(wakeup)
        self._written: queue.SimpleQueue[tuple[list[Writing], list[int]]] = queue.SimpleQueue()
        """What a device has written, and the block mix of it; bounded by the slots."""

    def poll(self) -> None:
        """What a device has written since the last call."""
        self._copies.check()
        while not self._written.empty():
            for (transfer, arrived), mix in zip(*self._written.get_nowait(), strict=True):
                self._on_written(transfer, arrived, mix)

    def take(self, arrivals: Iterable[Arrived | ChannelLost]) -> None:
        for arrival in arrivals:
            if isinstance(arrival, ChannelLost):
                self._owner.channel_lost(arrival)
            elif not self._on_segment(arrival):
                arrival.slot.give_back()
        self._start_writing()

    def _start_writing(self) -> None:
        if self._begun:
            self._port.start_copies()
            copies, writing = map(list, zip(*self._begun, strict=True))
            self._begun = []
            self._copies.when_done(copies, partial(self._let_go, writing))

    def close(self) -> None:
        self._copies.close()

    def _on_segment(self, arrived: Arrived) -> bool:
        """Whether its memory is still read."""
        header = arrived.header
        transfer = self._owner.find(key_of(header))
        if transfer is None or not transfer.owns(header, arrived.origin.sender):
            self._counters.count_dropped("stale")
            return False
        checks_after = self._device_writes and header.digest_kind == BLOCK_MIX64
        if not checks_after and not (
            isinstance(arrived.payload, memoryview)
            and is_intact(header.digest_kind, arrived.header_bytes, arrived.payload, arrived.digest)
        ):
            self._on_corrupt(transfer, header)
            return False
        part = range_of(header)
        if header.index in transfer.parts:
            self._counters.count_dropped("duplicate")
            return False
        problem = transfer.range_problem(header, part, self._layout)
        if problem is not None:
            self._counters.count_dropped("range")
            self._owner.fail(transfer, "range", f"segment {header.index}: {problem}")
            return False
        if transfer.state is TransferState.READY:
            transfer.move(TransferState.TRANSFERRING)
            transfer.origin = arrived.origin
            transfer.first_segment_s = self._clock()
            self._counters.streamed += transfer.end is None
        transfer.parts[header.index] = part
        copy = self._port.write_kv(transfer.request_id, part, arrived.payload, header.dtype)
        if copy is None:
            self._on_verified(transfer, header)
            return False
        self._begun.append((copy, (transfer, arrived)))
        if len(self._begun) == AT_ONCE:
            self._start_writing()
        return True

    def _let_go(self, writing: list[Writing], mixes: list[int]) -> None:
        """On the copies' thread: nothing reads these segments any more."""
        StagingSlot.give_all_back([arrived.slot for _, arrived in writing])
        self._written.put((writing, mixes))
        self._wakeup()

    def _on_written(self, transfer: ReceiveTransfer, arrived: Arrived, mix: int) -> None:
        if not transfer.is_open:
            return
        header = arrived.header
        if header.digest_kind == BLOCK_MIX64 and mixed_digest(arrived.header_bytes, mix) != arrived.digest:
            self._on_corrupt(transfer, header)
        else:
            self._on_verified(transfer, header)

    def _on_corrupt(self, transfer: ReceiveTransfer, header: kv_pb2.SegmentHeader) -> None:
        self._counters.count_dropped("corrupt")
        known = header.digest_kind in DIGEST_KINDS
        what = "does not match its digest" if known else f"has a digest of unknown kind {header.digest_kind!r}"
        self._owner.fail(transfer, "corrupt", f"segment {header.index} {what}")

    def _on_verified(self, transfer: ReceiveTransfer, header: kv_pb2.SegmentHeader) -> None:
        transfer.verified += 1
        transfer.cells += transfer.parts[header.index].cells
        transfer.last_segment_s = self._clock()
        self._counters.segments += 1
        self._counters.bytes += header.payload_bytes
        transfer.num_bytes += header.payload_bytes
        self._owner.segment_verified(transfer)
