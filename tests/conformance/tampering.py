"""A network that is out to get us: segments that are bent, dropped, repeated or late on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.backends.base import Channel, OnDone, OnLost, SegmentSender
from kv_transfer.segment import SealedSegment
from kv_transfer.staging import DeviceView
from pdserve.v1 import kv_pb2


class Tampering:
    """A SegmentSender whose network is out to get us: bends the second segment, then behaves."""

    def __init__(self, inner: SegmentSender, what: str) -> None:
        self._inner = inner
        self.arena, self.probe = inner.arena, inner.probe
        self.close = inner.close
        self.what = what
        self.count = 0
        self.held: list[tuple[SealedSegment, OnDone]] = []

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> Channel:
        return TamperingChannel(self._inner.connect(endpoint, hello, on_lost), self)


@dataclass
class TamperingChannel:
    inner: Channel
    plan: Tampering

    def send(self, segment: SealedSegment, on_done: OnDone) -> None:
        self.plan.count += 1
        if self.plan.count != 2:
            self.inner.send(segment, on_done)
            while self.plan.held:  # now it is late
                self.inner.send(*self.plan.held.pop())
            return
        match self.plan.what:
            case "flip":
                flip_byte(segment.payload[len(segment.payload) // 2 :][:1])
                self.inner.send(segment, on_done)
            case "header":
                header = bytearray(segment.header)
                header[-1] ^= 1
                self.inner.send(SealedSegment(bytes(header), segment.digest, segment.payload), on_done)
            case "drop":
                on_done(None)
            case "repeat":
                self.inner.send(segment, lambda error: None)
                self.inner.send(segment, on_done)
            case "swap":
                self.plan.held.append((segment, on_done))

    def send_all(self, segments: Sequence[tuple[SealedSegment, OnDone]]) -> None:
        for segment, on_done in segments:
            self.send(segment, on_done)

    def close(self) -> None:
        self.inner.close()


def flip_byte(view: memoryview | DeviceView) -> None:
    if isinstance(view, memoryview):
        view[0] ^= 1
        return
    from kv_transfer.cuda import CudaRuntime

    runtime = CudaRuntime("cuda")
    runtime.write(view.address, bytes([runtime.read(view.address, 1)[0] ^ 1]))
