"""The receiving side of KV transfers: one object for all transfers of a decode engine.

Owns their states, leases, epochs, tombstones and parked questions. Knows no requests, sockets or tensors: it asks its
port. Driven by the engine's thread only.

    request_added ---.
                      >-- both there: reserve --Ticket--> READY --segments--> TRANSFERRING --all verified--> DONE
    Open (parked) ---'        '--Busy--> (asked again)       any state --Abort, lost peer, lease over--> FAILED

A transfer that failed for its sender's sake leaves its reservation behind for a moment (``_kept``): the request's next
attempt, with another sender, takes it over as soon as its request is added, and holds it under a lease from then on.

A segment (segment_intake.py) is dropped unless transfer, attempt, epoch and incarnation match an open reservation; it
is written into the reservation's unpublished blocks; and nothing is published before every layer of every token that
was promised is there and verified. Whatever ended leaves a tombstone, so that late news are refused.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.backends.base import ChannelLost, SegmentReceiver
from kv_transfer.lease import Clock, Epochs, Lease, Parking, Tombstones
from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.receiver_port import ReceiverPort, ReceiverSettings
from kv_transfer.segment_intake import SegmentIntake
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
        """``backends``: name -> the listening receiver and its endpoint, best first. ``device_writes``: a device
        unpacks, and digests what it writes."""
        self._me = me
        self._layout = layout
        self._port = port
        self._backends = backends
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
        self._intake = SegmentIntake(self, port, layout, self.counters, clock, wakeup, device_writes=device_writes)

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
        self._intake.poll()
        self._intake.take(arrival for receiver, _ in self._backends.values() for arrival in receiver.poll())

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
        self._intake.close()
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

    # ---- from the segments' intake

    def find(self, key: TransferKey) -> ReceiveTransfer | None:
        return self._by_key.get(key)

    def fail(self, transfer: ReceiveTransfer, kind: str, reason: str) -> None:
        self._fail(transfer, kind, reason)

    def segment_verified(self, transfer: ReceiveTransfer) -> None:
        self._complete(transfer)

    def channel_lost(self, lost: ChannelLost) -> None:
        """Transfers of which a part has come over this channel, and not all, will not get the rest."""
        for transfer in [t for t in self._by_request.values() if t.origin is lost.origin]:
            if transfer.cells_missing(self._layout):
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
