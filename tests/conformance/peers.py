"""The two ends of a transfer as real processes: real Sender and Receiver, real backend, real KV memory, a toy engine.

On a GPU the KV memory is there, and packed and unpacked by it, as in the engines.

Driven by the test through a pipe (``pair.Pair``), which also carries the control stream's frames. Blocks are given out
in random order and scribbled over when they are freed, so that whatever is read or written too late shows. A process
lives through many configurations, one after the other: starting one takes seconds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from engine.kv_cache import KVCache
from engine.wire_memory import WireMemory
from kv_transfer import backends
from kv_transfer.backends.base import Channel, Memory, OnDone, OnLost, SegmentSender
from kv_transfer.copies import DeviceCopy
from kv_transfer.layout import KVRange, make_layout
from kv_transfer.protocol import Frame
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_port import ReceiverSettings
from kv_transfer.segment import SealedSegment
from kv_transfer.sender import Sender
from kv_transfer.staging import DeviceView, SlotPool, StagingArena, address_of
from kv_transfer.transfer import Moved, TransferKey
from pdserve.v1 import kv_pb2

LAYERS, HEADS, DIM = 4, 2, 16
PEER = "peer"


@dataclass(frozen=True)
class Config:
    """Of one peer."""

    backend: str
    worker_id: str
    device: str = "cpu"
    incarnation: int = 1
    block_size: int = 16
    dtype: str = "float32"
    fingerprint: str = "model"
    num_blocks: int = 512
    slots: int = 4
    slot_bytes: int = 64 * 1024
    lease_s: float = 30.0
    stall_timeout_s: float = 2.0
    data_port: int = 0
    tamper: str = ""
    """What the sender's network does to one segment of each transfer: flip | drop | repeat | swap | epoch."""

    def layout(self) -> kv_pb2.KVLayout:
        return make_layout(
            model_fingerprint=self.fingerprint,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=DIM,
            hash_block_tokens=16,
            block_size=self.block_size,
            dtype=self.dtype,
        )

    def identity(self) -> kv_pb2.WorkerIdentity:
        return kv_pb2.WorkerIdentity(worker_id=self.worker_id, incarnation=self.incarnation)


@dataclass(frozen=True)
class Job:
    """One request, as both sides are told of it."""

    request_id: str
    tokens: int
    attempt: int = 1
    cached: int = 0
    """Tokens that D has already."""
    chunk: int = 32
    layers_at_once: int = 2
    hold_after: int | None = None
    """P stops computing after so many chunks, until told to go on."""
    finished: bool = False
    timeout_s: float = 60.0
    sender_incarnation: int = 1
    receiver_incarnation: int = 1

    @property
    def key(self) -> TransferKey:
        return TransferKey(f"transfer-{self.request_id}", self.attempt)

    @property
    def name(self) -> str:
        return f"{self.request_id}/{self.attempt}"

    def kv(self) -> torch.Tensor:
        """[L, 2, K, T, D] float32: what the model would compute."""
        generator = torch.Generator().manual_seed(sum(self.request_id.encode()) + self.tokens)
        return torch.randn(LAYERS, 2, HEADS, self.tokens, DIM, generator=generator)


class Pool:
    """KV memory with the simplest of block pools."""

    def __init__(self, config: Config) -> None:
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.block_size = config.block_size
        self.cache = KVCache(
            num_layers=LAYERS,
            num_blocks=config.num_blocks,
            num_kv_heads=HEADS,
            block_size=config.block_size,
            head_dim=DIM,
            dtype=self.dtype,
            device=torch.device(config.device),
        )
        self.free = list(range(config.num_blocks))
        random.Random(7).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}

    def take(self, name: str, tokens: int) -> bool:
        count = -(-tokens // self.block_size)
        if count > len(self.free):
            return False
        self.tables[name] = [self.free.pop() for _ in range(count)]
        return True

    def release(self, name: str) -> None:
        if name in self.tables and self.cache.copies is not None:
            self.cache.copies.join()
        for block in self.tables.pop(name, []):
            for layer in self.cache.layers:
                layer[block].fill_(float("nan"))
            self.free.append(block)

    def write(self, name: str, kv: torch.Tensor, start: int, end: int, layer_start: int, layer_end: int) -> None:
        part = kv[layer_start:layer_end, :, :, start:end].to(self.cache.layers[0]).contiguous()
        self.cache.unpack(
            self.tables[name], start, end, layer_start, layer_end, part.view(torch.uint8).flatten(), self.dtype
        )

    def read(self, name: str, tokens: int) -> bytes:
        """All of it, canonical, in the pool's own dtype."""
        size = self.cache.packed_bytes(tokens, LAYERS, self.dtype)
        out = torch.empty(size, dtype=torch.uint8, device=self.cache.layers[0].device)
        self.cache.pack(self.tables[name], 0, tokens, 0, LAYERS, out, self.dtype)
        return out.cpu().numpy().tobytes()


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


def flip_byte(view: memoryview | DeviceView) -> None:
    if isinstance(view, memoryview):
        view[0] ^= 1
        return
    from kv_transfer.cuda import CudaRuntime

    runtime = CudaRuntime("cuda")
    runtime.write(view.address, bytes([runtime.read(view.address, 1)[0] ^ 1]))


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
