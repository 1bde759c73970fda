"""The sending side of KV transfers: one object for all transfers of a prefill engine.

Owns their states, leases and what waits to be packed. Knows no requests, sockets or tensors: it asks its port. Driven
by the engine's thread only (``on_*``, ``want_ticket``, ``kv_computed``, ``prefill_ended``, ...).

    want_ticket --Open--> HANDSHAKING --Ticket--> READY --first segment--> TRANSFERRING --End ... Done--> DONE
                             ^   | Busy (asked again when the engine wants it again)
                             '---'           any state --Abort, lost peer or channel, lease over--> FAILED

A computed range waits in its link's queue until a staging slot is free, is packed by the engine's thread, and belongs
to the network thread until it is sent. So the KV blocks themselves are touched by the engine's thread only, and may be
freed the moment a transfer ends; a late slot carries a copy that the receiver refuses. Where a device packs, the
engine's thread only starts that, and the segment is sealed and sent when it is over (copies.py); who then frees blocks
orders it after what was started (the port's business).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import structlog

from kv_transfer.backends.base import Channel, OnDone, SegmentSender
from kv_transfer.copies import AT_ONCE, CLOSE_S, CopyWaiter, DeviceCopy
from kv_transfer.layout import KVRange, cell_bytes, mismatch, split
from kv_transfer.lease import Clock, Lease
from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.segment import seal, seal_mixed
from kv_transfer.send_transfer import Link, SendTransfer
from kv_transfer.sender_port import SenderPort
from kv_transfer.staging import StagingSlot
from kv_transfer.transfer import TransferCounters, TransferKey, TransferState
from pdserve.v1 import kv_pb2

RECEIVER_LOST = frozenset({"peer_lost", "channel_lost", "lease_expired", "ticket_expired"})
"""Kinds of failure that are not this side's: another receiver may do better."""

log = structlog.get_logger()

Packing = tuple[Channel, kv_pb2.SegmentHeader, Any, OnDone]
"""A segment that a device packs: where it goes, and its payload."""


class Sender:
    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        port: SenderPort,
        backends: dict[str, SegmentSender],
        wakeup: Callable[[], None],
        clock: Clock,
        lease_s: float = 10.0,
        answer_timeout_s: float = 10.0,
    ) -> None:
        self._me = me
        self._layout = layout
        self._port = port
        self._backends = backends
        self._wakeup = wakeup
        self._clock = clock
        self._lease_s = lease_s
        self._answer_timeout_s = answer_timeout_s
        self._cell_bytes = cell_bytes(layout, layout.dtype)
        self._by_request: dict[str, SendTransfer] = {}
        self._by_key: dict[TransferKey, SendTransfer] = {}
        self._links: dict[str, Link] = {}
        self._closers: list[threading.Thread] = []
        """Of channels of links that were dropped."""
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """From network threads; bounded by the slots and the links."""
        self._begun: list[tuple[DeviceCopy, Packing]] = []
        """Packing that was asked for and not started."""
        self._copies = CopyWaiter(wakeup)
        self.counters = TransferCounters()

    # ---- from the engine

    def want_ticket(
        self,
        request_id: str,
        key: TransferKey,
        peer: str,
        receiver_incarnation: int,
        prompt_tokens: int,
        deadline_s: float,
        no_kv: bool = False,
    ) -> None:
        """The request could run now: ask the receiver. Asking twice is one question; a second request of one attempt,
        which a faulty router may send, fails."""
        transfer = self._by_request.get(request_id)
        if transfer is None and key in self._by_key:
            self.counters.count_failed("tombstone")
            self._port.transfer_failed(request_id, "this attempt has a request already", False)
            return
        if transfer is None:
            lease = Lease(self._clock, self._lease_s, deadline_s)
            transfer = SendTransfer(request_id, key, peer, receiver_incarnation, prompt_tokens, lease)
            self._by_request[request_id] = self._by_key[key] = transfer
            self.counters.started += 1
        if transfer.state is not TransferState.HANDSHAKING or transfer.asked_s is not None:
            return
        transfer.asked_s = self._clock()
        left_s = max(0.0, deadline_s - self._clock())
        probes = {name: backend.probe for name, backend in self._backends.items() if backend.probe}
        question = Open(self._me, self._layout, prompt_tokens, left_s, tuple(self._backends), no_kv, probes)
        self._port.send(peer, Frame(key, question))

    def kv_computed(self, request_id: str, part: KVRange, after: Any = None) -> None:
        """This range is in the engine's blocks, or will be ``after`` that: it leaves as soon as staging has room."""
        transfer = self._by_request.get(request_id)
        if transfer is None or transfer.ticket is None or transfer.link is None:
            return
        part = part._replace(
            token_start=max(part.token_start, transfer.ticket.cached_tokens),
            token_end=min(part.token_end, transfer.prompt_tokens),
        )
        if part.cells == 0:
            return
        limit = min(transfer.link.arena.slot_bytes, transfer.ticket.max_segment_bytes)
        for piece in split(part, self._cell_bytes, limit):
            transfer.link.pending.append((transfer, piece, after))
            transfer.segments_planned += 1
        self._pump()

    def prefill_ended(self, request_id: str, first_output: bytes, finished: bool) -> None:
        """Token 0 is drawn. What is packed later is counted already."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return
        transfer.ended = True
        if finished:
            self._drop_pending(transfer)
        self._port.send(transfer.peer, Frame(transfer.key, End(transfer.segments_planned, first_output, finished)))

    def request_ended(self, request_id: str, key: TransferKey, peer: str, reason: str) -> None:
        """The engine has ended the request by itself (abort, deadline): its blocks are not ours any more.

        The receiver is told even if it was never asked: its request may be waiting for our question.
        """
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            self.counters.count_failed("request_ended")
            self._close(transfer, TransferState.FAILED)
        self._port.send(peer, Frame(key, Abort(reason)))

    # ---- from the receiver

    def on_frame(self, peer: str, frame: Frame) -> None:
        self._expire()
        transfer = self._by_key.get(frame.key)
        body = frame.body
        if transfer is None or transfer.peer != peer:
            if isinstance(body, Ticket):  # for a transfer that is over here: let the receiver free its reservation
                self._port.send(peer, Frame(frame.key, Abort("the sender knows no such transfer (any more)")))
            return
        transfer.lease.renew()
        match body:
            case Ticket():
                self._on_ticket(transfer, body)
            case Busy(retry_after_s):
                if transfer.state is TransferState.HANDSHAKING:
                    transfer.asked_s = None
                    self._port.ticket_deferred(transfer.request_id, retry_after_s)
            case Refused(reason):
                self._fail(transfer, "refused", f"decode worker refused: {reason}", tell=False)
            case Abort(reason):
                self._fail(transfer, "aborted_by_peer", f"decode worker gave up: {reason}", tell=False)
            case Done():
                self._on_done(transfer)
            case _:
                self._fail(transfer, "protocol", f"a {type(body).__name__} from a receiver", tell=True)

    def on_peer_alive(self, peer: str) -> None:
        for transfer in self._by_request.values():
            if transfer.peer == peer:
                transfer.lease.renew()

    def on_peer_lost(self, peer: str, reason: str) -> None:
        lost = [transfer for transfer in self._by_request.values() if transfer.peer == peer]
        for transfer in lost:
            self._fail(transfer, "peer_lost", f"decode worker is lost: {reason}", tell=False)
        for link in [link for link in self._links.values() if link.peer == peer]:
            self._drop_link(link)

    # ---- time

    def poll(self) -> None:
        """Once an engine loop: what network threads report, what has expired, what can be packed now."""
        while not self._news.empty():
            self._news.get_nowait()()
        self._copies.check()
        self._expire()
        self._pump()

    @property
    def next_deadline_s(self) -> float | None:
        """When ``poll`` has something to expire."""
        return min((self._deadline(transfer) for transfer in self._by_request.values()), default=None)

    @property
    def open_transfers(self) -> int:
        return len(self._by_request)

    @property
    def leases(self) -> int:
        """Holds: transfers with a ticket."""
        return sum(transfer.ticket is not None for transfer in self._by_request.values())

    def close(self) -> None:
        for transfer in list(self._by_request.values()):
            self.request_ended(transfer.request_id, transfer.key, transfer.peer, "the prefill worker stops")
        self._copies.close()
        for link in list(self._links.values()):
            self._drop_link(link)
        for closer in self._closers:
            closer.join(CLOSE_S)
        for backend in self._backends.values():
            backend.close()

    # ---- inside

    def _on_ticket(self, transfer: SendTransfer, ticket: Ticket) -> None:
        if transfer.state is not TransferState.HANDSHAKING:
            return  # the same ticket again
        problem = mismatch(self._layout, ticket.layout)
        if problem is None and ticket.backend not in self._backends:
            problem = f"transfer backend {ticket.backend!r} is not one of {', '.join(self._backends)}"
        if problem is None and ticket.max_segment_bytes < self._cell_bytes:
            problem = (
                f"one token of one layer is {self._cell_bytes} bytes, the receiver's segments have "
                f"{ticket.max_segment_bytes}: give it larger staging slots"
            )
        if problem is not None:
            self._fail(transfer, "layout", problem, tell=True)
            return
        transfer.move(TransferState.READY)
        transfer.ticket = ticket
        transfer.asked_s = None
        transfer.link = self._link(ticket, transfer)
        self._port.ticket_granted(transfer.request_id, ticket.cached_tokens)

    def _on_done(self, transfer: SendTransfer) -> None:
        if not transfer.ended or transfer.state not in (TransferState.READY, TransferState.TRANSFERRING):
            self._fail(transfer, "protocol", "the receiver says done before the prefill ended", tell=True)
            return
        self.counters.done += 1
        if transfer.first_segment_s is not None:
            self.counters.seconds += self._clock() - transfer.first_segment_s
        self._close(transfer, TransferState.DONE)
        self._port.transfer_done(transfer.request_id)

    def _link(self, ticket: Ticket, transfer: SendTransfer) -> Link:
        name = f"{ticket.backend} {ticket.endpoint} {transfer.peer}"
        link = self._links.get(name)
        if link is None:
            backend = self._backends[ticket.backend]
            hello = kv_pb2.DataHello(
                sender=self._me, layout=self._layout, receiver_incarnation=transfer.receiver_incarnation
            )

            made: Link | None = None  # still so when it is lost while connecting, which then fails

            def on_lost(reason: str) -> None:  # on a network thread
                self._news.put(lambda: self._on_link_lost(made, reason))
                self._wakeup()

            channel = backend.connect(ticket.endpoint, hello, on_lost)
            made = link = self._links[name] = Link(name, transfer.peer, channel, backend.arena)
            log.info("kv_channel", lane=ticket.backend, endpoint=ticket.endpoint, peer=transfer.peer)
        return link

    def _on_link_lost(self, link: Link | None, reason: str) -> None:
        if link is None or self._links.get(link.name) is not link:  # dropped; there may be a new one
            return
        for transfer in [t for t in self._by_request.values() if t.link is link]:
            if not transfer.ended or transfer.segments_read < transfer.segments_planned:
                self._fail(transfer, "channel_lost", reason, tell=True)
        self._drop_link(link)

    def _drop_link(self, link: Link) -> None:
        link.pending.clear()
        if self._links.get(link.name) is link:
            del self._links[link.name]
        # It waits for its thread, up to a second: not here.
        closer = threading.Thread(target=link.channel.close, name="kv-close", daemon=True)
        closer.start()
        self._closers = [each for each in self._closers if each.is_alive()] + [closer]

    def _pump(self) -> None:
        """Pack what waits, link by link in turn, as far as staging has room. One slow receiver may hold half of it."""
        waiting = [link for link in self._links.values() if self._may_pack(link)]
        while waiting:
            for link in list(waiting):
                slot = link.arena.try_take()
                if slot is None:
                    waiting.remove(link)
                    continue
                transfer, piece, after = link.pending.popleft()
                self._pack_and_send(link, transfer, piece, after, slot)
                if not self._may_pack(link):
                    waiting.remove(link)
        self._start_packing()

    def _start_packing(self) -> None:
        if self._begun:
            self._port.start_copies()
            copies, packing = map(list, zip(*self._begun, strict=True))
            self._begun = []
            self._copies.when_done(copies, partial(_send_all, packing))

    def _may_pack(self, link: Link) -> bool:
        num_slots = link.arena.num_slots
        limit = max(1, num_slots // 2) if len(self._links) > 1 else num_slots
        return bool(link.pending) and link.slots_in_use < limit

    def _pack_and_send(self, link: Link, transfer: SendTransfer, piece: KVRange, after: Any, slot: StagingSlot) -> None:
        assert transfer.ticket is not None
        if transfer.state is TransferState.READY:
            transfer.move(TransferState.TRANSFERRING)
            transfer.first_segment_s = self._clock()
        size = piece.cells * self._cell_bytes
        payload = slot.view[:size]
        copy = self._port.pack(transfer.request_id, piece, payload, after)
        header = kv_pb2.SegmentHeader(
            transfer_id=transfer.key.transfer_id,
            attempt=transfer.key.attempt,
            epoch=transfer.ticket.epoch,
            sender_incarnation=self._me.incarnation,
            index=transfer.segments_sent,
            token_start=piece.token_start,
            token_end=piece.token_end,
            layer_start=piece.layer_start,
            layer_end=piece.layer_end,
            dtype=self._layout.dtype,
            payload_bytes=size,
        )
        transfer.segments_sent += 1
        link.slots_in_use += 1
        self.counters.segments += 1
        self.counters.bytes += size

        def on_done(error: str | None) -> None:  # on a network thread, or here when the channel is lost
            slot.give_back()
            self._news.put(lambda: self._slot_is_back(link, transfer, error))
            self._wakeup()

        if copy is None:
            link.channel.send(seal(header, payload), on_done)
        else:
            self._begun.append((copy, (link.channel, header, payload, on_done)))
            if len(self._begun) == AT_ONCE:
                self._start_packing()

    def _slot_is_back(self, link: Link, transfer: SendTransfer, error: str | None) -> None:
        link.slots_in_use -= 1
        transfer.segments_read += error is None
        if error is not None:  # also where the channel goes on: its queue was full
            self._fail(transfer, "channel_lost", error, tell=True)

    def _expire(self) -> None:
        now = self._clock()
        for transfer in [t for t in self._by_request.values() if self._deadline(t) <= now]:
            what = "lease" if transfer.ticket is not None else "ticket"
            self._fail(transfer, f"{what}_expired", f"the decode worker was not heard in time ({what})", tell=True)

    def _deadline(self, transfer: SendTransfer) -> float:
        if transfer.ticket is not None:
            return transfer.lease.expires_s
        if transfer.asked_s is not None:
            return transfer.asked_s + self._answer_timeout_s
        return float("inf")  # deferred: the engine asks again, or ends the request at its deadline

    def _fail(self, transfer: SendTransfer, kind: str, reason: str, tell: bool) -> None:
        if self._by_key.get(transfer.key) is not transfer:
            return
        self.counters.count_failed(kind)
        self._close(transfer, TransferState.FAILED)
        if tell:
            self._port.send(transfer.peer, Frame(transfer.key, Abort(reason)))
        self._port.transfer_failed(transfer.request_id, reason, kind in RECEIVER_LOST)

    def _close(self, transfer: SendTransfer, state: TransferState) -> None:
        transfer.move(state)
        self._drop_pending(transfer)
        del self._by_request[transfer.request_id]
        del self._by_key[transfer.key]

    @staticmethod
    def _drop_pending(transfer: SendTransfer) -> None:
        if transfer.link is not None:
            transfer.link.pending = deque(item for item in transfer.link.pending if item[0] is not transfer)


def _send_all(packing: list[Packing], mixes: list[int]) -> None:
    """On the copies' thread: what is packed leaves."""
    for channel, group in groupby(zip(packing, mixes, strict=True), lambda item: item[0][0]):
        channel.send_all([(seal_mixed(header, payload, mix), on_done) for (_, header, payload, on_done), mix in group])
