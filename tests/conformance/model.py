"""A small world around the real Sender and Receiver, to be searched exhaustively: what can happen, what must hold.

Not a second description of the protocol: the states, the table of edges, the leases, epochs and tombstones searched are
those of ``kv_transfer``. The world adds what surrounds them: two engines, a control stream that may lose, repeat and
reorder frames, data channels that may break, a clock, processes that stop, wake and restart as new incarnations.

A prompt has one token and two layers, a staging slot holds one layer: two segments. Every payload says which
incarnation of P packed it for which request, so that KV from anywhere else shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.backends.base import Arrived, ChannelLost
from kv_transfer.protocol import Frame
from kv_transfer.segment import parse_header
from kv_transfer.send_transfer import SendTransfer
from kv_transfer.transfer import TransferKey, TransferState
from tests.conformance.model_sides import LAYERS, LEASE_S, Channel, D, P, Violation, require

Action = tuple[str, ...]


@dataclass(frozen=True)
class Scenario:
    """What may happen in a search."""

    requests: tuple[str, ...] = ("r/1",)
    room: int = 2
    faults: int = 0
    """How many of them."""
    finished: bool = False
    """The first token ends the request."""
    second_sender: bool = False
    """Second attempts come from another prefill worker, q, to the same decode worker."""
    kinds: frozenset[str] = frozenset()
    """lose | repeat | reorder | break | abort | stop | restart | die (P alone restarts)."""


class World:
    """``actions`` can be done in any order; ``do`` one, and look at ``fingerprint``."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 1000.0
        self.deadline = self.now_s + 1000 * LEASE_S
        self.faults = scenario.faults
        self.p = P(self, "p", 1)
        self.q = P(self, "q", 1) if scenario.second_sender else None
        self.d = D(self, 1, scenario.room)
        self.dead_channels: list[Channel] = []
        """Of P's incarnations that are gone: what they sent may still come."""
        self.to_d: list[tuple[str, Frame]] = []
        self.to_p: list[tuple[str, Frame]] = []
        self.untold: list[tuple[str, str]] = []
        """Sides that do not know yet that a stream is gone."""
        self.edges: set[tuple[TransferState, TransferState]] = set()

    def clock(self) -> float:
        return self.now_s

    def stream_of(self, p: P) -> str:
        return f"{p.worker_id}{p.incarnation}-{self.d.incarnation}"

    def is_up(self, stream: str) -> bool:
        return stream in map(self.stream_of, self.ps)

    @property
    def ps(self) -> list[P]:
        return [self.p] if self.q is None else [self.p, self.q]

    def p_of(self, name: str) -> P:
        return self.q if self.q is not None and name[2] == "2" else self.p

    @property
    def channels(self) -> list[Channel]:
        return [*self.dead_channels, *(channel for p in self.ps for channel in p.channels)]

    # ---- what can happen

    def actions(self) -> list[Action]:
        out: list[Action] = []
        for name in self.scenario.requests:
            if not self._may_start(name):
                continue
            first = f"{name[:2]}1"
            if self.q is not None and name != first and first in self.d.expected and first not in self.d.ended:
                out.append(("d_retry", first))  # as a router does, before it tries again
                continue
            if name not in self.d.expected and name not in self.d.ended:
                out.append(("d_add", name))
            p = self.p_of(name)
            if name not in p.waiting and name not in p.blocks and name not in p.ended:
                out.append(("p_ask", name))
        for p in self.ps:
            out += [("p_ask", name) for name in sorted(p.deferred)]
            out += [("p_compute", name) for name, layers in p.blocks.items() if layers <= LAYERS]
        for way, frames in (("to_d", self.to_d), ("to_p", self.to_p)):
            out += [("frame", way, str(index)) for index in _firsts(frames)]
        if self.d.arena.free:
            out += [("segment", str(n)) for n, channel in enumerate(self.channels) if channel.segments]
        if self.d.backend.arrivals:
            out.append(("d_poll",))
        out += [("lost", *untold) for untold in self.untold]
        if self.faults:
            out += [("fault", *action) for action in self._faults()]
        return out

    def _may_start(self, name: str) -> bool:
        """A second attempt comes after the first has failed somewhere."""
        return name[2] == "1" or bool(
            {"failed", "aborted"} & {side.ended.get(name[:2] + "1", "") for side in (self.p, self.d)}
            or self.p.incarnation > 1
            or self.d.incarnation > 1
        )

    def _faults(self) -> list[Action]:
        kinds = self.scenario.kinds
        out: list[Action] = []
        for way, frames in (("to_d", self.to_d), ("to_p", self.to_p)):
            if frames and "lose" in kinds:
                out.append(("lose", way))
            if frames and "repeat" in kinds:
                out.append(("repeat", way))
            if "reorder" in kinds:
                out += [("frame", way, str(n)) for n in range(len(frames)) if n not in _firsts(frames)]
        if "break" in kinds:
            out += [("break", str(n)) for n, channel in enumerate(self.channels) if channel.is_open]
        if "abort" in kinds:
            out += [("p_abort", name) for p in self.ps for name in [*sorted(p.waiting), *p.blocks]]
            out += [("d_abort", name) for name in self.d.expected if name not in self.d.ended]
        if "stop" in kinds:
            out += [("silence", awake) for awake in ("p", "d", "pd", "")]
        if "restart" in kinds:
            out += [("restart", "p"), ("restart", "d")]
        if "die" in kinds:
            out.append(("restart", "p"))
        return out

    def do(self, action: Action) -> None:
        before = self._states()
        self._do(action)
        for key, state in before.items():
            side, transfer = key[0], key[1]
            after = self._states().get(key)
            if after is None:
                after = TransferState.DONE if self._ended_well(side, transfer) else TransferState.FAILED
            if after is not state and action[0] != "restart" and action[:2] != ("fault", "restart"):
                self.edges.add((state, after))

    def _do(self, action: Action) -> None:
        match action:
            case ("fault", *fault):
                self.faults -= 1
                self._do(tuple(fault))
            case ("d_add", name):
                self.d.add(name, self.p_of(name))
            case ("d_retry", name):
                self.d.retry(name)
            case ("p_ask", name):
                self.p_of(name).ask(name, self.d.incarnation)
            case ("p_compute", name):
                self.p_of(name).compute(name, self.scenario.finished)
            case ("frame", way, index):
                self._deliver(way, int(index))
            case ("segment", index):
                self._arrive(self.channels[int(index)])
            case ("d_poll",):
                self.d.receiver.poll()
            case ("lost", side, stream):
                self.untold.remove((side, stream))
                if side == "d":
                    self.d.receiver.on_peer_lost(stream, "gone")
                for p in self.ps if side == "p" else []:
                    p.sender.on_peer_lost(stream, "gone")
            case ("lose", way):
                self._queue(way).pop(0)
            case ("repeat", way):
                self._queue(way).insert(0, self._queue(way)[0])
            case ("break", index):
                self._break(self.channels[int(index)])
            case ("p_abort", name):
                self.p_of(name).abort(name)
            case ("d_abort", name):
                self.d.abort(name)
            case ("silence", awake):
                self._silence(awake)
            case ("restart", "p"):
                self._restart_p()
            case ("restart", "d"):
                self._restart_d()
            case other:
                raise ValueError(other)

    def _queue(self, way: str) -> list[tuple[str, Frame]]:
        return self.to_d if way == "to_d" else self.to_p

    def _deliver(self, way: str, index: int) -> None:
        stream, frame = self._queue(way).pop(index)
        if way == "to_d":
            self.d.receiver.on_frame(stream, frame)
        for p in self.ps if way == "to_p" else []:
            if self.stream_of(p) == stream:
                p.sender.on_frame(stream, frame)
                p.sender.poll()

    def _arrive(self, channel: Channel) -> None:
        if channel.hello.receiver_incarnation != self.d.incarnation:
            self._break(channel)  # the data plane refuses it
            return
        slot = self.d.arena.try_take()
        assert slot is not None
        segment, on_done = channel.segments.pop(0)
        slot.view[:] = segment.payload
        header = parse_header(segment.header)
        self.d.backend.arrivals.append(Arrived(channel.origin, segment.header, header, segment.digest, slot))
        on_done(None)
        self._poll_senders()

    def _poll_senders(self) -> None:
        for p in self.ps:
            p.sender.poll()

    def _break(self, channel: Channel) -> None:
        channel.close()
        if channel not in self.dead_channels:
            channel.on_lost("broken")
            self._poll_senders()
        if channel.hello.receiver_incarnation == self.d.incarnation:
            self.d.backend.arrivals.append(ChannelLost(channel.origin, "broken"))

    def _silence(self, awake: str) -> None:
        """Longer than a lease nothing is heard, and only these sides run; the others stand still, to wake later."""
        self.now_s += 1.5 * LEASE_S
        if "p" in awake:
            self._poll_senders()
        if "d" in awake:
            self.d.receiver.poll()

    def _restart_p(self) -> None:
        stream = self.stream_of(self.p)
        self.untold.append(("d", stream))
        self.dead_channels += self.p.channels
        for channel in self.p.channels:
            channel.segments = [(segment, lambda error: None) for segment, _ in channel.segments]
        self.to_p = [(to, frame) for to, frame in self.to_p if to != stream]
        self.p = P(self, "p", self.p.incarnation + 1)

    def _restart_d(self) -> None:
        self.untold += [("p", self.stream_of(p)) for p in self.ps]
        self.to_d.clear()
        self.d = D(self, self.d.incarnation + 1, self.scenario.room)

    # ---- what must hold

    def check(self) -> None:
        for p in self.ps:
            transfers = p.sender._by_request
            for name in p.blocks:
                require(
                    name in transfers and transfers[name].ticket is not None,
                    "no hold-and-wait: P holds blocks only with a ticket, that is, when D has reserved its own",
                )
            for name in p.waiting:
                require(
                    name in transfers and transfers[name].link is None, "who waits for a ticket has nothing in staging"
                )
        for name in self.d.reserved:
            transfer = self.d.receiver._by_request.get(name)
            require(transfer is not None and transfer.lease is not None, "law 2: every reservation has a lease")
        for name in self.d.kept:
            require(self.d.receiver._kept.is_parked(TransferKey(name, 0)), "law 2: what is kept is kept for a time")
        require(len(self.d.reserved) + len(self.d.kept) <= self.d.room, "D has no more than it has")

    def check_end(self) -> None:
        """From here on nothing is heard any more. Destroys this world."""
        self.now_s += 3 * LEASE_S
        self.d.receiver.poll()
        self._poll_senders()
        require(not self.d.reserved, "law 2: D's lease frees its blocks without a peer")
        require(not self.d.kept, "law 2: nobody keeps blocks for an attempt that does not come")
        require(not any(p.blocks for p in self.ps), "law 2: P's lease frees its blocks without a peer")
        require(self.d.receiver.leases == sum(p.sender.leases for p in self.ps) == 0, "no lease is left")
        for p in self.ps:
            for name in [*p.waiting]:
                p.abort(name)  # the request's deadline
        for name in [name for name in self.d.expected if name not in self.d.ended]:
            self.d.abort(name)
        open_transfers = self.d.receiver.open_transfers + sum(p.sender.open_transfers for p in self.ps)
        require(open_transfers == 0, "law 1: every transfer ends")
        for p in self.ps:
            for channel in p.channels:
                channel.close()
            p.sender.poll()
            require(len(p.arena.free) == p.arena.num_slots, "P's staging is free")
        require(len(self.d.arena.free) == self.d.arena.num_slots, "D's staging is free")

    def run_fairly(self) -> None:
        """Without faults, whatever comes first comes first."""
        for _ in range(1000):
            actions = [action for action in self.actions() if action[0] != "fault"]
            progress = [a for a in actions if a[0] != "p_ask" or a[1] not in self.p_of(a[1]).deferred]
            if not actions:
                return
            self.do((progress or actions)[0])
        raise Violation("law 1: it never comes to an end")

    # ---- what tells states apart

    def fingerprint(self) -> tuple[object, ...]:
        receiver = self.d.receiver
        origins = {channel.origin: n for n, channel in enumerate(self.channels)}
        return (
            self.faults,
            self.d.incarnation,
            tuple(self._fingerprint_of(p) for p in self.ps),
            tuple(
                (
                    t.key,
                    t.state,
                    t.peer,
                    t.busy_since_s is None,
                    t.took_over,
                    None if t.lease is None else t.lease.expires_s - self.now_s,
                    None if t.ticket is None else t.ticket.epoch - receiver._epochs._last,
                    tuple(t.parts),
                    t.origin and origins.get(t.origin),
                    t.end is None,
                    t.last_segment_s and t.last_segment_s - self.now_s,
                )
                for t in receiver._by_key.values()
            ),
            tuple((k, g[0], g[1] - self.now_s) for k, g in receiver._tombstones._graves.items()),
            tuple((k, p[0] - self.now_s) for k, p in receiver._parked._parked.items()),
            tuple((k, p[0] - self.now_s) for k, p in receiver._kept._parked.items()),
            tuple((stream, frame.key, type(frame.body).__name__, _epoch(frame)) for stream, frame in self.to_d),
            tuple((stream, frame.key, type(frame.body).__name__, _epoch(frame)) for stream, frame in self.to_p),
            tuple(
                (
                    c.is_open,
                    c.hello.sender.worker_id,
                    c.hello.sender.incarnation,
                    c.hello.receiver_incarnation,
                    tuple(s.header for s, _ in c.segments),
                )
                for c in self.channels
            ),
            tuple((isinstance(a, Arrived) and a.header_bytes, origins.get(a.origin)) for a in self.d.backend.arrivals),
            tuple(self.untold),
            tuple(self.d.expected.items()),
            tuple((name, tuple(layers)) for name, layers in self.d.reserved.items()),
            tuple(sorted(self.d.ended.items())),
        )

    def _fingerprint_of(self, p: P) -> tuple[object, ...]:
        sender = p.sender
        return (
            p.incarnation,
            tuple(
                (t.key, t.state, t.asked_s is None, _age(self, t), t.ended, _sent(t)) for t in sender._by_key.values()
            ),
            tuple(len(link.pending) for link in sender._links.values()),
            frozenset(p.waiting),
            frozenset(p.deferred),
            tuple(p.blocks.items()),
            tuple(sorted(p.ended.items())),
            len(p.arena.free),
        )

    def _states(self) -> dict[tuple[str, TransferKey], TransferState]:
        states = {("p", t.key): t.state for p in self.ps for t in p.sender._by_key.values()}
        return states | {("d", t.key): t.state for t in self.d.receiver._by_key.values()}

    def _ended_well(self, side: str, key: TransferKey) -> bool:
        name = f"{key.transfer_id}/{key.attempt}"
        how = (self.p_of(name) if side == "p" else self.d).ended.get(name)
        return how in ("done", "published", "finished")


def _firsts(frames: list[tuple[str, Frame]]) -> list[int]:
    """The frame that comes next on each stream, by its index."""
    seen: dict[str, int] = {}
    for index, (stream, _) in enumerate(frames):
        seen.setdefault(stream, index)
    return list(seen.values())


def _age(world: World, transfer: SendTransfer) -> tuple[float | None, float, int | None]:
    asked = None if transfer.asked_s is None else transfer.asked_s - world.now_s
    epoch = None if transfer.ticket is None else transfer.ticket.epoch
    return asked, transfer.lease.expires_s - world.now_s, epoch


def _sent(transfer: SendTransfer) -> tuple[int, int]:
    return transfer.segments_planned, transfer.segments_sent


def _epoch(frame: Frame) -> object:
    return getattr(frame.body, "epoch", None) or getattr(frame.body, "num_segments", None)
