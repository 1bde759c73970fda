"""The two ends of a transfer as real processes: real Sender and Receiver, real backend, real KV memory, a toy engine.

On a GPU the KV memory is there, and packed and unpacked by it, as in the engines.

Driven by the test through a pipe (``pair.Pair``), which also carries the control stream's frames. A process lives
through many configurations (``jobs.Config``), one after the other: starting one takes seconds.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection, wait

import torch

from engine.wire_memory import WireMemory
from kv_transfer import backends
from kv_transfer.backends.base import Memory
from kv_transfer.copies import DeviceCopy
from kv_transfer.layout import KVRange
from kv_transfer.protocol import Frame
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_port import ReceiverSettings
from kv_transfer.sender import Sender
from kv_transfer.staging import DeviceView, SlotPool, StagingArena, address_of
from kv_transfer.transfer import Moved
from tests.conformance.jobs import LAYERS, Config, Job
from tests.conformance.pool import Pool
from tests.conformance.tampering import Tampering

PEER = "peer"


class Peer:
    """What both processes share: the pipe, the wake-up, the loop."""

    def __init__(self, conn: Connection, config: Config) -> None:
        self.conn = conn
        self.config = config
        if config.device != "cpu":
            torch.cuda.set_device(config.device)
        self.pool = Pool(config)
        self.copies = self.pool.cache.copies
        self.backend = backends.load(config.backend, config.device, config.data_port)
        self.arena: SlotPool | None = None
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.jobs: dict[str, Job] = {}
        self.next_config: Config | None = None

    def wakeup(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def send(self, peer: str, frame: Frame) -> None:
        self.conn.send(("frame", frame))

    def tell(self, *event: object) -> None:
        self.conn.send(event)

    def loop(self) -> None:
        while self.next_config is None:
            ready = wait([self.conn, self.wake_fd], self.timeout_s())
            if self.wake_fd in ready:
                os.eventfd_read(self.wake_fd)
            if self.conn in ready:
                command, *arguments = self.conn.recv()
                getattr(self, f"do_{command}")(*arguments)
            self.turn()

    def timeout_s(self) -> float:
        return 0.05

    def turn(self) -> None:
        raise NotImplementedError

    def do_configure(self, config: Config) -> None:
        self.next_config = config

    def do_forget(self) -> None:
        """What the test's own side of this process keeps of jobs that are over."""
        self.jobs.clear()

    def close(self) -> None:
        os.close(self.wake_fd)


class SenderPeer(Peer):
    def __init__(self, conn: Connection, config: Config) -> None:
        super().__init__(conn, config)
        self.arena = make_arena(self.backend.sender_memory, config)
        backend = self.backend.sender(self.arena)
        if config.tamper:
            backend = Tampering(backend, config.tamper)
        self.sender = Sender(
            config.identity(),
            config.layout(),
            self,
            {config.backend: backend},
            self.wakeup,
            time.monotonic,
            lease_s=config.lease_s,
        )
        self.computed: dict[str, int] = {}
        self.held: dict[str, int] = {}
        tell_ready(conn)

    def timeout_s(self) -> float:
        return 0.0 if any(self.can_compute(name) for name in self.computed) else 0.05

    def turn(self) -> None:
        self.sender.poll()
        for name in list(self.computed):
            if self.can_compute(name):
                self.compute(name)

    def can_compute(self, name: str) -> bool:
        job = self.jobs[name]
        chunks = self.computed[name] // job.chunk
        return self.computed[name] < job.tokens and (self.held.get(name) is None or chunks < self.held[name])

    def compute(self, name: str) -> None:
        """One chunk, group of layers by group of layers, as the model runner does."""
        job = self.jobs[name]
        kv, start = job.kv(), self.computed[name]
        end = min(start + job.chunk, job.tokens)
        for layer in range(0, LAYERS, job.layers_at_once):
            layer_end = min(layer + job.layers_at_once, LAYERS)
            self.pool.write(name, kv, start, end, layer, layer_end)
            after = None if self.copies is None else self.copies.mark()
            self.sender.kv_computed(name, KVRange(start, end, layer, layer_end), after)
        if name not in self.computed:
            return  # failed meanwhile
        self.computed[name] = end
        if end == job.tokens:
            self.tell("kv", name, self.pool.read(name, job.tokens))
            self.sender.prefill_ended(name, b"first token", job.finished)

    # ---- commands

    def do_start(self, job: Job) -> None:
        self.jobs[job.name] = job
        self.ask(job)

    def ask(self, job: Job) -> None:
        deadline_s = time.monotonic() + job.timeout_s
        self.sender.want_ticket(job.name, job.key, PEER, job.receiver_incarnation, job.tokens, deadline_s)

    def do_go_on(self, name: str) -> None:
        self.held.pop(name, None)

    def do_abort(self, name: str) -> None:
        self.end(name)
        self.sender.request_ended(name, self.jobs[name].key, PEER, "client")
        self.tell("aborted", name)

    def do_frame(self, frame: Frame) -> None:
        self.sender.on_frame(PEER, frame)

    def do_alive(self) -> None:
        self.sender.on_peer_alive(PEER)

    def do_peer_lost(self) -> None:
        self.sender.on_peer_lost(PEER, "told by the test")

    def do_again(self, name: str) -> None:
        self.ask(self.jobs[name])

    def close(self) -> None:
        self.pool.tables.clear()
        self.computed.clear()
        self.sender.close()
        super().close()

    def do_stats(self) -> None:
        self.tell("stats", report(self, self.sender.open_transfers, self.sender.leases))

    # ---- port

    def ticket_granted(self, request_id: str, cached_tokens: int) -> None:
        job = self.jobs[request_id]
        if not self.pool.take(request_id, job.tokens):
            raise RuntimeError("the test's sender pool is too small")
        self.computed[request_id] = 0
        if job.hold_after is not None:
            self.held[request_id] = job.hold_after
        self.tell("granted", request_id, cached_tokens)

    def ticket_deferred(self, request_id: str, retry_after_s: float) -> None:
        self.tell("busy", request_id)

    def pack(
        self, request_id: str, part: KVRange, out: memoryview | DeviceView, after: torch.cuda.Event | None
    ) -> DeviceCopy | None:
        table = self.pool.tables[request_id]
        if self.copies is not None:
            return self.copies.pack(table, *part, WireMemory(address_of(out), len(out)), after)
        assert isinstance(out, memoryview)
        self.pool.cache.pack(table, *part, torch.frombuffer(out, dtype=torch.uint8), self.pool.dtype)
        return None

    def start_copies(self) -> None:
        assert self.copies is not None
        self.copies.start()

    def transfer_done(self, request_id: str) -> None:
        self.end(request_id)
        self.tell("done", request_id)

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self.end(request_id)
        self.tell("failed", request_id, reason)

    def end(self, name: str) -> None:
        self.computed.pop(name, None)
        self.held.pop(name, None)
        self.pool.release(name)


class ReceiverPeer(Peer):
    def __init__(self, conn: Connection, config: Config) -> None:
        super().__init__(conn, config)
        if self.backend.receiver_memory is not None:
            self.arena = make_arena(self.backend.receiver_memory, config)
        receiver = self.backend.receiver(config.identity(), config.layout(), self.arena, self.wakeup)
        endpoint = receiver.listen("127.0.0.1", "127.0.0.1")
        self.receiver = Receiver(
            config.identity(),
            config.layout(),
            self,
            {config.backend: (receiver, endpoint)},
            self.wakeup,
            time.monotonic,
            ReceiverSettings(lease_s=config.lease_s, stall_timeout_s=config.stall_timeout_s),
            device_writes=self.copies is not None,
        )
        self.is_deaf = False
        tell_ready(conn)

    def turn(self) -> None:
        if not self.is_deaf:
            self.receiver.poll()

    # ---- commands

    def do_start(self, job: Job) -> None:
        self.jobs[job.name] = job
        deadline_s = time.monotonic() + job.timeout_s
        self.receiver.request_added(job.name, job.key, "p", job.sender_incarnation, job.tokens, deadline_s)

    def do_abort(self, name: str) -> None:
        self.pool.release(name)
        self.receiver.request_ended(name, "client")
        self.tell("aborted", name)

    def do_frame(self, frame: Frame) -> None:
        self.receiver.on_frame(PEER, frame)

    def do_alive(self) -> None:
        self.receiver.on_peer_alive(PEER)

    def do_peer_lost(self) -> None:
        self.receiver.on_peer_lost(PEER, "told by the test")
        self.receiver.drop_sender("p", 1)

    def do_deaf(self, is_deaf: bool) -> None:
        """An engine in a long step: it takes nothing from staging."""
        self.is_deaf = is_deaf

    def close(self) -> None:
        self.receiver.close()
        super().close()

    def do_stats(self) -> None:
        dropped = dict(self.receiver.counters.segments_dropped)
        self.tell("stats", report(self, self.receiver.open_transfers, self.receiver.leases) | {"dropped": dropped})

    # ---- port

    def reserve(self, request_id: str) -> int | None:
        job = self.jobs[request_id]
        if not self.pool.take(request_id, job.tokens):
            return None
        if job.cached:
            self.pool.write(request_id, job.kv(), 0, job.cached, 0, LAYERS)
        return job.cached

    def write_kv(
        self, request_id: str, part: KVRange, payload: memoryview | DeviceView, dtype: str
    ) -> DeviceCopy | None:
        wire = payload if self.copies is None else WireMemory(address_of(payload), len(payload))
        return self.pool.cache.unpack(self.pool.tables[request_id], *part, wire, getattr(torch, dtype))

    def start_copies(self) -> None:
        assert self.copies is not None
        self.copies.start()

    def publish(self, request_id: str, first_output: bytes, moved: Moved) -> None:
        self.tell("published", request_id, self.pool.read(request_id, self.jobs[request_id].tokens), first_output)
        self.pool.release(request_id)

    def finish(self, request_id: str, first_output: bytes) -> None:
        self.pool.release(request_id)
        self.tell("finished", request_id, first_output)

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self.pool.release(request_id)
        self.tell("failed", request_id, reason)

    def keep(self, request_id: str) -> bool:
        return False  # no second attempts here

    def take_over(self, request_id: str) -> bool:
        raise AssertionError("nothing was kept")

    def drop_kept(self, transfer_id: str) -> None:
        raise AssertionError("nothing was kept")

    def release(self, request_id: str) -> None:
        raise AssertionError("nothing was taken over")


def make_arena(memory: Memory, config: Config) -> SlotPool:
    if config.device == "cpu":
        return StagingArena(config.slots, config.slot_bytes)
    from kv_transfer.cuda import CudaRuntime, CudaStaging

    runtime = CudaRuntime(config.device)
    if memory == "device":
        return CudaStaging(runtime, config.slots, config.slot_bytes)
    arena = StagingArena(config.slots, config.slot_bytes)
    runtime.pin(arena)
    return arena


def tell_ready(conn: Connection) -> None:
    conn.send(("ready",))


def report(peer: Peer, open_transfers: int, leases: int) -> dict[str, object]:
    return {
        "open": open_transfers,
        "leases": leases,
        "staging_bytes": 0 if peer.arena is None else peer.arena.used_bytes,
        "used_blocks": peer.config.num_blocks - len(peer.pool.free),
        "resident_bytes": int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "cpu_s": time.process_time(),
        "threads": len(os.listdir("/proc/self/task")),
    }


def main(conn: Connection, role: str) -> None:
    """Of the process: one peer after the other, until it is killed."""
    torch.set_num_threads(1)
    command, config = conn.recv()
    while command == "configure":
        peer = SenderPeer(conn, config) if role == "p" else ReceiverPeer(conn, config)
        peer.loop()
        peer.close()
        assert peer.next_config is not None
        config = peer.next_config
