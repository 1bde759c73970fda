"""The receiving side of KV transfers: one object for all transfers of a decode engine.

Owns their states, leases, epochs, tombstones and parked questions. Knows no requests, sockets or tensors: it asks its
port. Driven by the engine's thread only.

    request_added ---.
                      >-- both there: reserve --Ticket--> READY --segments--> TRANSFERRING --all verified--> DONE
    Open (parked) ---'        '--Busy--> (asked again)       any state --Abort, lost peer, lease over--> FAILED

A transfer that failed for its sender's sake leaves its reservation behind for a moment (``_kept``): the request's next
attempt, with another sender, takes it over as soon as its request is added, and holds it under a lease from then on.

A segment is dropped unless transfer, attempt, epoch and incarnation match an open reservation; it is written into the
reservation's unpublished blocks only after its range and its digest were checked; and nothing is published before every
layer of every token that was promised is there. Whatever ended leaves a tombstone, so that late news are refused.

A device that unpacks digests what it writes (``device_writes``). Then the range is checked before and the digest after,
between one poll and another; the blocks are unpublished all the while, and who frees them orders that after the writes
that were started (the port's business).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from functools import partial

from kv_transfer.backends.base import Arrived, ChannelLost, SegmentReceiver
from kv_transfer.copies import CopyWaiter
from kv_transfer.layout import BLOCK_MIX64, DIGEST_KINDS
from kv_transfer.lease import Clock, Epochs, Lease, Parking, Tombstones
from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.receiver_port import ReceiverPort, ReceiverSettings
from kv_transfer.segment import is_intact, key_of, mixed_digest, range_of
from kv_transfer.transfer import Moved, TransferCounters, TransferKey, TransferState
from pdserve.v1 import kv_pb2

SENDER_LOST = frozenset({"peer_lost", "channel_lost", "lease_expired", "stalled", "aborted_by_peer"})
"""Kinds of failure that are not this side's: another sender may do better."""


class Receiver:
    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        port: ReceiverPort,
        backends: dict[str, tuple[SegmentReceiver, str]],
        wakeup: Callable[[], None],
        clock: Clock,
        settings: ReceiverSettings | None = None,
        *,
        device_writes: bool = False,
    ) -> None:
        """``backends``: name -> the listening receiver and its endpoint, best first."""
        self._me = me
        self._layout = layout
        self._port = port
        self._backends = backends
        self._wakeup = wakeup
        self._device_writes = device_writes
        self._copies = CopyWaiter(wakeup)
        self._written: queue.SimpleQueue[tuple[ReceiveTransfer, Arrived, int]] = queue.SimpleQueue()
        """What a device has written, and the block mix of it; bounded by the slots."""
        self._clock = clock
        self._settings = settings or ReceiverSettings()
        self._epochs = Epochs(me.incarnation)
        self._tombstones = Tombstones(clock, self._settings.lease_s)
        self._parked: Parking[tuple[str, Open]] = Parking(clock, self._settings.park_s)
        self._kept: Parking[None] = Parking(clock, self._settings.keep_s)
        """Reservations of earlier attempts, by transfer (attempt 0)."""
        self._by_request: dict[str, ReceiveTransfer] = {}
        self._by_key: dict[TransferKey, ReceiveTransfer] = {}
        self.counters = TransferCounters()

    # ---- from the engine

    def request_added(
        self,
        request_id: str,
        key: TransferKey,
        sender_id: str,
        sender_incarnation: int,
        prompt_tokens: int,
        deadline_s: float,
    ) -> None:
        """A request waits for the KV of this transfer. Its Open may be parked here already, or the transfer over."""
        over = self._why_over(key)
        if over is None and key in self._by_key:
            over = "this attempt has a request already"
        if over is not None:
            self.counters.count_failed("tombstone")
            self._port.transfer_failed(request_id, f"transfer is over: {over}", False)
            return
        for older in [t for t in self._by_request.values() if t.key.transfer_id == key.transfer_id]:
            self._fail(older, "superseded", f"attempt {key.attempt} replaces attempt {older.key.attempt}")
        transfer = ReceiveTransfer(request_id, key, sender_id, sender_incarnation, prompt_tokens, deadline_s)
        self._by_request[request_id] = self._by_key[key] = transfer
        self.counters.started += 1
        held = _held_as(key)
        if self._kept.is_parked(held):
            self._kept.take(held)
            if self._port.take_over(request_id):
                transfer.took_over = True
                transfer.lease = Lease(self._clock, self._settings.lease_s, deadline_s)
        parked = self._parked.take(key)
        if parked is not None:
            self._on_open(transfer, *parked)

    def request_ended(self, request_id: str, reason: str) -> None:
        """The engine has ended the request by itself (abort, deadline): its blocks are not ours any more."""
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            self.counters.count_failed("request_ended")
            self._bury(transfer, TransferState.FAILED, reason)
            if transfer.peer is not None:
                self._port.send(transfer.peer, Frame(transfer.key, Abort(reason)))

    def keep_reservation(self, request_id: str) -> None:
        """The request is about to end because another attempt comes: let that one have its reservation."""
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            self._keep(transfer)

    # ---- from the sender

    def on_frame(self, peer: str, frame: Frame) -> None:
        self._expire()
        transfer = self._by_key.get(frame.key)
        body = frame.body
        if transfer is not None and transfer.lease is not None and transfer.peer == peer:
            transfer.lease.renew()
        match body:
            case Open():
                self._on_question(peer, frame.key, transfer, body)
            case End() if transfer is not None and transfer.peer == peer:
                self._on_end(transfer, body)
            case Abort(reason):
                self._on_abort(peer, frame.key, transfer, reason)
            case End():
                why = self._tombstones.reason(frame.key) or "no ticket was given"
                self._port.send(peer, Frame(frame.key, Abort(f"the receiver has no such transfer: {why}")))
            case _:
                self._port.send(peer, Frame(frame.key, Abort(f"a {type(body).__name__} from a sender")))

    def on_peer_alive(self, peer: str) -> None:
        for transfer in self._by_request.values():
            if transfer.peer == peer and transfer.lease is not None:
                transfer.lease.renew()

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self._parked.take_where(lambda parked: parked[0] == peer)
        lost = [transfer for transfer in self._by_request.values() if transfer.peer == peer]
        for transfer in lost:
            self._fail(transfer, "peer_lost", f"prefill worker is lost: {reason}", tell=False)

    def drop_sender(self, worker_id: str, incarnation: int) -> None:
        """Close the data channels of a prefill worker whose control stream is gone."""
        for receiver, _ in self._backends.values():
            receiver.drop_sender(worker_id, incarnation)

    # ---- time and data

    def poll(self) -> None:
        """Once an engine loop. What is over ends before what has come late is looked at."""
        self._expire()
        self._copies.check()
        while not self._written.empty():
            self._on_written(*self._written.get_nowait())
        for receiver, _ in self._backends.values():
            self._on_arrivals(receiver.poll())

    @property
    def next_deadline_s(self) -> float | None:
        """When ``poll`` has something to expire."""
        deadlines = [self._deadline(transfer) for transfer in self._by_request.values()]
        for parking_s in (self._parked.next_deadline_s, self._kept.next_deadline_s):
            if parking_s is not None:
                deadlines.append(parking_s)
        return min(deadlines, default=None)

    @property
    def open_transfers(self) -> int:
        return len(self._by_request)

    @property
    def leases(self) -> int:
        """Reservations, also those that are kept."""
        held = sum(transfer.is_open or transfer.took_over for transfer in self._by_request.values())
        return held + len(self._kept)

    @property
    def tombstones(self) -> int:
        return len(self._tombstones)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def close(self) -> None:
        for transfer in list(self._by_request.values()):
            self.request_ended(transfer.request_id, "the decode worker stops")
        self._copies.close()
        for key, _ in self._kept.take_where(lambda _: True):
            self._port.drop_kept(key.transfer_id)
        for receiver, _ in self._backends.values():
            receiver.close()

    # ---- tickets

    def _on_question(self, peer: str, key: TransferKey, transfer: ReceiveTransfer | None, question: Open) -> None:
        if transfer is not None:
            self._on_open(transfer, peer, question)
            return
        over = self._why_over(key)
        if over is not None:
            self._refuse(peer, key, over)
        elif not self._parked.park(key, (peer, question)):
            self._refuse(peer, key, "too many hand-offs wait for their request")

    def _why_over(self, key: TransferKey) -> str | None:
        newest = max((k.attempt for k in self._by_key if k.transfer_id == key.transfer_id), default=0)
        if key.attempt < newest:
            return f"stale attempt {key.attempt}: attempt {newest} is known"
        return self._tombstones.reason(key)

    def _on_open(self, transfer: ReceiveTransfer, peer: str, question: Open) -> None:
        reachable, unreachable = self._reachable(question)
        problem = transfer.question_problem(question, self._layout, reachable, unreachable)
        if problem is not None:
            self._refuse(peer, transfer.key, problem)
            if transfer.state is TransferState.HANDSHAKING:
                self._fail(transfer, "refused", problem, tell=False)
            return
        if transfer.is_open:
            if transfer.peer == peer and transfer.ticket is not None:
                self._port.send(peer, Frame(transfer.key, transfer.ticket))
            else:
                self._refuse(peer, transfer.key, "the reservation belongs to another stream")
            return
        transfer.peer = peer
        transfer.asked_s = self._clock()
        cached = self._reserve(transfer, question)
        if cached is None:
            transfer.busy_since_s = transfer.busy_since_s or transfer.asked_s
            self._port.send(peer, Frame(transfer.key, Busy(self._settings.busy_retry_s)))
            return
        transfer.busy_since_s = None
        transfer.took_over = False
        backend = reachable[0]
        transfer.no_kv = question.no_kv
        transfer.lease = Lease(self._clock, self._settings.lease_s, transfer.deadline_s)
        transfer.ticket = Ticket(
            epoch=self._epochs.next(),
            cached_tokens=cached,
            layout=self._layout,
            backend=backend,
            endpoint=self._backends[backend][1],
            lease_s=self._settings.lease_s,
            max_segment_bytes=self._backends[backend][0].max_segment_bytes,
        )
        transfer.move(TransferState.READY)
        self._port.send(peer, Frame(transfer.key, transfer.ticket))

    def _reachable(self, question: Open) -> tuple[list[str], list[str]]:
        """The backends of ours that reach the sender, best first; why the others do not."""
        reachable, unreachable = [], []
        for name, (backend, _) in self._backends.items():
            if name in question.backends:
                why = backend.unreachable(question.probes.get(name, ""))
            else:
                why = "the sender does not have it"
            if why:
                unreachable.append(f"{name}: {why}")
            else:
                reachable.append(name)
        return reachable, unreachable

    def _reserve(self, transfer: ReceiveTransfer, question: Open) -> int | None:
        """A large prompt must not wait for ever while small ones take every block that gets free."""
        if question.no_kv:
            return transfer.prompt_tokens
        if transfer.took_over:
            return self._port.reserve(transfer.request_id)
        now_s, settings = self._clock(), self._settings
        for other in self._by_request.values():  # oldest first
            if other is transfer:
                break
            if (
                other.busy_since_s is not None
                and now_s - other.busy_since_s >= settings.patience_s
                and now_s - other.asked_s <= settings.asks_again_within_s
            ):
                return None
        return self._port.reserve(transfer.request_id)

    def _refuse(self, peer: str, key: TransferKey, reason: str) -> None:
        if key not in self._by_key or self._by_key[key].state is TransferState.HANDSHAKING:
            self._tombstones.add(key, reason)
        self._port.send(peer, Frame(key, Refused(reason)))

    # ---- segments

    def _on_arrivals(self, arrivals: Iterable[Arrived | ChannelLost]) -> None:
        for arrival in arrivals:
            if isinstance(arrival, ChannelLost):
                self._on_channel_lost(arrival)
            elif not self._on_segment(arrival):
                arrival.slot.give_back()

    def _on_segment(self, arrived: Arrived) -> bool:
        """Whether its memory is still read."""
        header = arrived.header
        transfer = self._by_key.get(key_of(header))
        if transfer is None or not transfer.owns(header, arrived.sender):
            self.counters.count_dropped("stale")
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
            self.counters.count_dropped("duplicate")
            return False
        problem = transfer.range_problem(header, part, self._layout)
        if problem is not None:
            self.counters.count_dropped("range")
            self._fail(transfer, "range", f"segment {header.index}: {problem}")
            return False
        if transfer.state is TransferState.READY:
            transfer.move(TransferState.TRANSFERRING)
            transfer.first_segment_s = self._clock()
            self.counters.streamed += transfer.end is None
        transfer.parts[header.index] = part
        copy = self._port.write_kv(transfer.request_id, part, arrived.payload, header.dtype)
        if copy is None:
            self._on_verified(transfer, header)
            return False
        self._copies.when_done(copy, partial(self._let_go, transfer, arrived))
        return True

    def _let_go(self, transfer: ReceiveTransfer, arrived: Arrived, mix: int) -> None:
        """On the copies' thread: nothing reads the segment any more."""
        arrived.slot.give_back()
        self._written.put((transfer, arrived, mix))
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
        self.counters.count_dropped("corrupt")
        known = header.digest_kind in DIGEST_KINDS
        what = "does not match its digest" if known else f"has a digest of unknown kind {header.digest_kind!r}"
        self._fail(transfer, "corrupt", f"segment {header.index} {what}")

    def _on_verified(self, transfer: ReceiveTransfer, header: kv_pb2.SegmentHeader) -> None:
        transfer.verified += 1
        transfer.cells += transfer.parts[header.index].cells
        transfer.last_segment_s = self._clock()
        self.counters.segments += 1
        self.counters.bytes += header.payload_bytes
        transfer.num_bytes += header.payload_bytes
        self._complete(transfer)

    def _on_channel_lost(self, lost: ChannelLost) -> None:
        """Transfers that still need something from this sender, and got a part of it, will not get the rest."""
        sender = (lost.sender.worker_id, lost.sender.incarnation)
        for transfer in list(self._by_request.values()):
            if (transfer.sender_id, transfer.sender_incarnation) != sender:
                continue
            if transfer.state is TransferState.TRANSFERRING and transfer.cells < transfer.cells_needed(self._layout):
                self._fail(transfer, "channel_lost", lost.reason)

    # ---- the end

    def _on_end(self, transfer: ReceiveTransfer, end: End) -> None:
        if not transfer.is_open:
            self._fail(transfer, "protocol", "the prefill ended without a ticket")
            return
        if transfer.end is not None:
            return  # told twice
        transfer.end = end
        transfer.end_s = transfer.last_segment_s = self._clock()
        if end.finished:
            self._bury(transfer, TransferState.DONE, "done")
            self._port.finish(transfer.request_id, end.first_output)
            self._port.send(transfer.peer or "", Frame(transfer.key, Done()))
            self.counters.done += 1
        elif transfer.no_kv:
            self._fail(transfer, "protocol", "no KV was asked for, but the first token did not end the request")
        else:
            self._complete(transfer)

    def _complete(self, transfer: ReceiveTransfer) -> None:
        """Publish when all is there; fail when all came and it is not."""
        if transfer.end is None or transfer.verified < transfer.end.num_segments:
            return
        needed = transfer.cells_needed(self._layout)
        if len(transfer.parts) != transfer.end.num_segments or transfer.cells != needed:
            self._fail(
                transfer,
                "incomplete",
                f"{len(transfer.parts)} segments, {transfer.cells} cells; "
                f"{transfer.end.num_segments} segments, {needed} cells are expected",
            )
            return
        assert transfer.ticket is not None
        now = self._clock()
        total_s = 0.0 if transfer.first_segment_s is None else now - transfer.first_segment_s
        self.counters.seconds += total_s
        self.counters.done += 1
        self._bury(transfer, TransferState.DONE, "done")
        cached_tokens = transfer.ticket.cached_tokens
        moved = Moved(
            lane=transfer.ticket.backend,
            exposed_s=now - transfer.end_s,
            total_s=total_s,
            num_bytes=transfer.num_bytes,
            sent_tokens=transfer.prompt_tokens - cached_tokens,
            cached_tokens=cached_tokens,
        )
        self._port.publish(transfer.request_id, transfer.end.first_output, moved)
        self._port.send(transfer.peer or "", Frame(transfer.key, Done()))

    def _on_abort(self, peer: str, key: TransferKey, transfer: ReceiveTransfer | None, reason: str) -> None:
        if transfer is None:  # its request may still be on the way
            self._parked.take(key)
            self._tombstones.add(key, f"the sender gave up: {reason}")
        elif transfer.peer in (None, peer):
            self._fail(transfer, "aborted_by_peer", f"prefill worker gave up: {reason}", tell=False)

    def _expire(self) -> None:
        now = self._clock()
        self._tombstones.sweep()
        for key, (peer, _) in self._parked.take_expired():
            self._refuse(peer, key, f"unknown transfer: no request came within {self._settings.park_s} s")
        for key, _ in self._kept.take_expired():
            self._port.drop_kept(key.transfer_id)
        for transfer in [t for t in self._by_request.values() if self._deadline(t) <= now]:
            if transfer.took_over:  # no sender has asked for it
                transfer.took_over, transfer.lease = False, None
                self._port.release(transfer.request_id)
            elif transfer.lease is not None and transfer.lease.expired:
                self._fail(transfer, "lease_expired", "the prefill worker was not heard in time")
            else:
                came = f"{len(transfer.parts)} of {transfer.end.num_segments if transfer.end else 0}"
                self._fail(transfer, "stalled", f"segments are missing: {came} came")

    def _deadline(self, transfer: ReceiveTransfer) -> float:
        if transfer.lease is None:
            return float("inf")  # the request's own deadline ends it
        if transfer.end is None:
            return transfer.lease.expires_s
        return min(transfer.lease.expires_s, transfer.last_segment_s + self._settings.stall_timeout_s)

    def _fail(self, transfer: ReceiveTransfer, kind: str, reason: str, tell: bool = True) -> None:
        self.counters.count_failed(kind)
        if kind in SENDER_LOST or kind == "superseded":
            self._keep(transfer)
        self._bury(transfer, TransferState.FAILED, reason)
        if tell and transfer.peer is not None:
            self._port.send(transfer.peer, Frame(transfer.key, Abort(reason)))
        self._port.transfer_failed(transfer.request_id, reason, kind in SENDER_LOST)

    def _keep(self, transfer: ReceiveTransfer) -> None:
        """Not once its lease is over: we may have slept, and the request be somewhere else by now."""
        if transfer.lease is None or transfer.lease.expired or not self._port.keep(transfer.request_id):
            return
        key = _held_as(transfer.key)
        if not self._kept.park(key, None):
            self._port.drop_kept(key.transfer_id)

    def _bury(self, transfer: ReceiveTransfer, state: TransferState, reason: str) -> None:
        transfer.move(state)
        del self._by_request[transfer.request_id]
        del self._by_key[transfer.key]
        self._tombstones.add(transfer.key, reason)


def _held_as(key: TransferKey) -> TransferKey:
    """Which attempt had a reservation does not matter to the one that takes it over."""
    return TransferKey(key.transfer_id, 0)
