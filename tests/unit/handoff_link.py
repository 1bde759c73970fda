"""Two engine cores in one process, P and D, and the shortest possible hand-off between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.core import EngineCore
from engine.messages import ErrorCode, ReceiveKV, RequestOutput, SendKV
from engine.request import Request
from tests.unit.fake_runner import FakeKVMemory


class Clock:
    """Goes on by a little with every look at it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


def send_kv(peer: str = "d") -> SendKV:
    return SendKV(transfer_id="t", attempt=0, peer_address="", peer_id=peer, peer_incarnation=1)


def receive_kv() -> ReceiveKV:
    return ReceiveKV(transfer_id="t", attempt=0, peer_id="p", peer_incarnation=1)


class Link:
    """Both ends. What one says lies in ``wire`` until ``deliver``; a request has the same id on both sides."""

    def __init__(self, p: EngineCore, d: EngineCore, retry_after_s: float = 0.01) -> None:
        self.p, self.d = p, d
        self.retry_after_s = retry_after_s
        self.wire: deque[Callable[[], None]] = deque()
        self.wanted: dict[str, Request] = {}
        self.received: dict[str, set[tuple[int, int]]] = {}
        """(token, layer) of each request's reservation."""
        self.cached: dict[str, int] = {}
        self.busy = 0
        self.sent_tokens = 0
        p.sender = Sender(self)
        d.receiver = Receiver(self)

    def deliver(self, count: int = 1 << 30) -> None:
        while self.wire and count:
            self.wire.popleft()()
            count -= 1

    def open(self, request_id: str) -> None:
        if request_id not in self.wanted:
            self.p.fail_request(request_id, ErrorCode.HANDOFF_FAILED, "refused", True)
            return
        cached = self.d.reserve_kv(request_id)
        if cached is None:
            self.busy += 1
            self.wire.append(lambda: self.p.defer_ticket(request_id, self.retry_after_s))
        else:
            self.received[request_id], self.cached[request_id] = set(), cached
            self.wire.append(lambda: self.p.grant_ticket(request_id, cached))

    def segment(
        self, request_id: str, token_start: int, token_end: int, layer_start: int, layer_end: int, payload: list[int]
    ) -> None:
        if request_id not in self.received:
            return
        slots = {(t, y) for t in range(token_start, token_end) for y in range(layer_start, layer_end)}
        assert not slots & self.received[request_id], "sent twice"
        self.received[request_id] |= slots
        self.sent_tokens += len(slots)
        self.d.write_kv(request_id, token_start, token_end, layer_start, layer_end, payload, None)

    def end(self, request_id: str, num_layers: int, output: RequestOutput) -> None:
        request = self.wanted.pop(request_id, None)
        if request is None:
            return
        if output.finish_reason is None:
            expected = {(t, y) for t in range(self.cached[request_id], request.num_tokens) for y in range(num_layers)}
            assert self.received[request_id] == expected, "a part is missing, or too much came"
        self.close(request_id)
        self.d.kv_ready(request_id, output)
        self.wire.append(lambda: self.p.release_kv(request_id, None))

    def close(self, request_id: str) -> None:
        self.wanted.pop(request_id, None)
        self.received.pop(request_id, None)
        self.cached.pop(request_id, None)


class Sender:
    def __init__(self, link: Link) -> None:
        self.link = link

    def want_ticket(self, request: Request) -> None:
        assert not request.block_table, "it must hold nothing while it asks"
        self.link.wire.append(lambda: self.link.open(request.request_id))

    def kv_computed(self, request: Request, token_start: int, token_end: int, layer_start: int, layer_end: int) -> None:
        memory = self.link.p.runner.kv_cache
        assert isinstance(memory, FakeKVMemory)
        payload = memory.pack(request.block_table, token_start, token_end, layer_start, layer_end)
        where = (request.request_id, token_start, token_end, layer_start, layer_end)
        self.link.wire.append(lambda: self.link.segment(*where, payload))

    def prefill_ended(self, request: Request, output: RequestOutput) -> None:
        num_layers = self.link.p.runner.kv_cache.num_layers
        self.link.wire.append(lambda: self.link.end(request.request_id, num_layers, output))

    def request_ended(self, request: Request) -> None:
        def abort() -> None:
            self.link.close(request.request_id)
            if request.request_id in self.link.d.scheduler.waiting_for_kv:
                self.link.d.fail_request(request.request_id, ErrorCode.HANDOFF_FAILED, "the sender gave up", True)

        self.link.wire.append(abort)


class Receiver:
    def __init__(self, link: Link) -> None:
        self.link = link

    def want_kv(self, request: Request) -> None:
        self.link.wanted[request.request_id] = request

    def attempt_ends(self, request: Request) -> None:
        self.link.d.keep_reservation(request.request_id)

    def request_ended(self, request: Request) -> None:
        self.link.close(request.request_id)
        error = (ErrorCode.HANDOFF_FAILED, "the receiver gave up", True)
        self.link.wire.append(lambda: self.link.p.release_kv(request.request_id, error))
