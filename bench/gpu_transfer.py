"""GB/s of KV between two processes' GPUs, beside a plain copy of the same bytes, in one run.

    python -m bench.gpu_transfer                                  # on one GPU, and between two where there are two
    python -m bench.gpu_transfer --only cuda_ipc --output rates.json

What moves is KV of the Llama-3.1-8B shape (131,072 bytes a token), one segment a message, a few of them at once, as in
the engines. "moved" begins with packed segments and ends in the receiver's blocks; "packed and verified" adds the
sender's packing and both digests. Best of the repeats.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from engine.kv_cache import KVCache
from engine.kv_copies import KVCopies, KVCopy
from engine.wire_memory import WireMemory
from kv_transfer import backends
from kv_transfer.backends.base import Arrived, ChannelLost, OnDone
from kv_transfer.copies import AT_ONCE, CopyWaiter
from kv_transfer.cuda import CudaRuntime, CudaStaging
from kv_transfer.layout import make_layout
from kv_transfer.segment import mixed_digest, seal_mixed
from kv_transfer.staging import StagingSlot
from pdserve.v1 import kv_pb2

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "64 KiB": 64 * KIB,
    "1 MiB": MIB,
    "16 MiB": 16 * MIB,
    "32 MiB": 32 * MIB,
    "128 MiB": 128 * MIB,
    "1 GiB": 1024 * MIB,
}
LAYERS, HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
TOKENS = 8192
CELL_BYTES = 2 * HEADS * HEAD_DIM * 2
STAGING_BYTES = 4 << 30
MAX_SLOTS = 16
BYTES_AT_ONCE = 8 << 30
MAX_SEGMENTS = 500
TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")
ME = kv_pb2.WorkerIdentity(worker_id="d", incarnation=1)
LAYOUT = make_layout(
    model_fingerprint="bench",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    hash_block_tokens=16,
    block_size=BLOCK,
    dtype="bfloat16",
)
HELLO = kv_pb2.DataHello(
    sender=kv_pb2.WorkerIdentity(worker_id="p", incarnation=1), layout=LAYOUT, receiver_incarnation=1
)


def cells_of(size: int) -> tuple[int, int]:
    """Tokens and layers of a segment of so many bytes: one layer up to 1 MiB, a group of 8 after that."""
    layers = 1 if size <= MIB else 8 if size <= 256 * MIB else LAYERS
    return size // (CELL_BYTES * layers), layers


def count_of(size: int) -> int:
    return max(8, min(MAX_SEGMENTS, BYTES_AT_ONCE // size))


def slots_of(size: int) -> int:
    return min(MAX_SLOTS, STAGING_BYTES // size)


def make_cache(device: str) -> KVCopies:
    torch.cuda.set_device(device)
    cache = KVCache(
        num_layers=LAYERS,
        num_blocks=TOKENS // BLOCK,
        num_kv_heads=HEADS,
        block_size=BLOCK,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device(device),
    )
    for layer in cache.layers:
        layer.normal_()
    torch.cuda.synchronize()
    assert cache.copies is not None
    return cache.copies


TABLE = [(7 * block) % (TOKENS // BLOCK) for block in range(TOKENS // BLOCK)]
"""Blocks in no order."""


# ---- the receiving process


def receive(conn: Connection, name: str, device: str) -> None:
    """For each size: where it listens; for each measurement: when all segments are in the blocks, and checked."""
    copies = make_cache(device)
    backend = backends.load(name, device)
    while (size := conn.recv()) is not None:
        arena = None
        if backend.receiver_memory is not None:
            arena = CudaStaging(CudaRuntime(device), slots_of(size), size)
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        receiver = backend.receiver(ME, LAYOUT, arena, partial(os.eventfd_write, wake_fd, 1))
        conn.send(receiver.listen("127.0.0.1", "127.0.0.1"))
        while (count := conn.recv()) is not None:
            take(count, receiver, copies, wake_fd, *cells_of(size))
            conn.send("all")
        receiver.close()
        del receiver, arena


def take(count: int, receiver: Any, copies: KVCopies, wake_fd: int, tokens: int, layers: int) -> None:
    done = threading.Semaphore(0)
    waiter = CopyWaiter(lambda: None)
    wrong: list[int] = []

    def written(came: list[Arrived], mixes: list[int]) -> None:
        StagingSlot.give_all_back([arrived.slot for arrived in came])
        for arrived, mix in zip(came, mixes, strict=True):
            if mixed_digest(arrived.header_bytes, mix) != arrived.digest:
                wrong.append(arrived.header.index)
            done.release()

    left = count
    while left:
        if not select.select([wake_fd], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"{left} segments are missing")
        os.eventfd_read(wake_fd)
        begun: list[KVCopy] = []
        came: list[Arrived] = []
        for arrived in receiver.poll():
            if isinstance(arrived, ChannelLost):
                raise ConnectionError(arrived.reason)
            payload = arrived.payload
            wire = WireMemory(payload.address, len(payload))
            begun.append(copies.unpack(TABLE, 0, tokens, 0, layers, wire, torch.bfloat16))
            came.append(arrived)
            left -= 1
            if len(begun) == AT_ONCE:
                copies.start()
                waiter.when_done(begun, partial(written, came))
                begun, came = [], []
        if begun:
            copies.start()
            waiter.when_done(begun, partial(written, came))
    for _ in range(count):
        if not done.acquire(timeout=TIMEOUT_S):
            raise TimeoutError("the device does not end its copies")
    waiter.close()
    if wrong:
        raise ValueError(f"segments that are not what was sent: {wrong}")


# ---- the sending process


@dataclass(frozen=True)
class Rate:
    lane: str
    size: str
    what: str
    gb_per_s: float


class Sending:
    def __init__(self, name: str, sender_device: str, receiver_device: str) -> None:
        self.conn, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=receive, args=(theirs, name, receiver_device), daemon=True)
        self.process.start()
        theirs.close()
        self.copies = make_cache(sender_device)
        self.runtime = CudaRuntime(sender_device)
        self.backend = backends.load(name, sender_device)

    def measure(self, size: int, repeats: int) -> tuple[float, float]:
        """GB/s of moved, and of packed and verified."""
        tokens, layers = cells_of(size)
        arena = CudaStaging(self.runtime, slots_of(size), size)
        sender = self.backend.sender(arena)
        self.conn.send(size)
        lost: list[str] = []
        channel = sender.connect(answer(self.conn), HELLO, lost.append)
        waiter = CopyWaiter(lambda: None)

        def send_all(items: list[tuple[kv_pb2.SegmentHeader, Any, OnDone]], mixes: list[int]) -> None:
            channel.send_all(
                [
                    (seal_mixed(header, payload, mix), on_done)
                    for (header, payload, on_done), mix in zip(items, mixes, strict=True)
                ]
            )

        def run(packs: bool) -> float:
            count = count_of(size)
            self.conn.send(count)
            since_s = time.perf_counter()
            index = 0
            while index < count:  # some that have a slot in one go, as in the engines
                slots = [arena.take(TIMEOUT_S)]
                while len(slots) < min(AT_ONCE, count - index) and (slot := arena.try_take()) is not None:
                    slots.append(slot)
                begun: list[KVCopy] = []
                packing: list[tuple[kv_pb2.SegmentHeader, Any, OnDone]] = []
                for slot in slots:
                    if slot is None or lost:
                        raise ConnectionError(f"{lost or 'no slot is free'}")
                    payload = slot.view[:size]
                    header = kv_pb2.SegmentHeader(
                        transfer_id="bench", index=slot.index, dtype="bfloat16", payload_bytes=size
                    )

                    def on_done(error: str | None, slot: StagingSlot = slot) -> None:
                        slot.give_back()

                    if packs:
                        begun.append(self.copies.pack(TABLE, 0, tokens, 0, layers, WireMemory(payload.address, size)))
                    packing.append((header, payload, on_done))
                if packs:
                    self.copies.start()
                    waiter.when_done(begun, partial(send_all, packing))
                else:
                    send_all(packing, [packed] * len(packing))
                index += len(slots)
            answer(self.conn)
            return size * count / (time.perf_counter() - since_s) / 1e9

        packed = self.pack_all(arena, size)
        run(packs=True)
        moved = max(run(packs=False) for _ in range(repeats))
        verified = max(run(packs=True) for _ in range(repeats))
        channel.close()
        sender.close()
        waiter.close()
        self.conn.send(None)
        return moved, verified

    def pack_all(self, arena: CudaStaging, size: int) -> int:
        """Every slot holds the same segment; its block mix."""
        tokens, layers = cells_of(size)
        slots = [arena.take(0.0) for _ in range(arena.num_slots)]
        mix = 0
        for slot in slots:
            assert slot is not None
            copy = self.copies.pack(TABLE, 0, tokens, 0, layers, WireMemory(slot.view.address, size))
            self.copies.start()
            mix = copy.wait()
            slot.give_back()
        return mix

    def close(self) -> None:
        self.conn.send(None)
        self.process.join(5)
        self.process.kill()


def answer(conn: Connection) -> Any:
    if not conn.poll(TIMEOUT_S):
        raise TimeoutError("the receiving process says nothing")
    return conn.recv()


def measure_copy(source_device: str, target_device: str, size: int, repeats: int) -> float:
    """GB/s of a plain copy, several in a row: what the device, or the link, can do."""
    count = min(8, slots_of(size))
    sources = [torch.empty(size, dtype=torch.uint8, device=source_device).random_() for _ in range(count)]
    targets = [torch.empty(size, dtype=torch.uint8, device=target_device) for _ in range(count)]
    best_s = float("inf")
    for _ in range(repeats + 1):
        for device in {source_device, target_device}:
            torch.cuda.synchronize(device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(source_device):
            began.record()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            ended.record()
        ended.synchronize()
        best_s = min(best_s, began.elapsed_time(ended) / 1000)
    return size * count / best_s / 1e9


def main(
    only: Annotated[str, typer.Option(help="Backends, separated by commas.")] = "cuda_ipc,nccl,ucx",
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 3,
    where: Annotated[str, typer.Option(help="On one GPU, between two, or both.")] = "one,two",
    output: Annotated[Path | None, typer.Option(help="JSON of all rates.")] = None,
) -> None:
    """GB/s of KV from one process's GPU to another's."""
    pairs = {"one GPU": ("cuda:0", "cuda:0")} if "one" in where.split(",") else {}
    if torch.cuda.device_count() > 1 and "two" in where.split(","):
        pairs["two GPUs"] = ("cuda:0", "cuda:1")
    rates: list[Rate] = []

    def row(lane: str, what: str, figures: list[float]) -> None:
        rates.extend(Rate(lane, size, what, figure) for size, figure in zip(SIZES, figures, strict=True))
        print(f"| {lane} | {what} | {' | '.join(f'{figure:.1f}' for figure in figures)} |", flush=True)
        if output is not None:  # after each row: an interrupted run leaves what it has
            output.write_text(json.dumps([asdict(rate) for rate in rates], indent=1))

    print(f"| lane | what | {' | '.join(SIZES)} |\n| --- | --- |{' --- |' * len(SIZES)}")
    for where, (source, target) in pairs.items():
        row(where, "plain copy", [measure_copy(source, target, size, repeats) for size in SIZES.values()])
        for name in only.split(","):
            if name == "nccl" and source == target:
                continue  # it takes no two ranks on one GPU
            try:
                sending = Sending(name, source, target)
                figures = [sending.measure(size, repeats) for size in SIZES.values()]
            except (ValueError, ConnectionError, TimeoutError) as error:
                print(f"| {name}, {where} | not measured: {error} |", flush=True)
                continue
            row(f"{name}, {where}", "moved", [moved for moved, _ in figures])
            row(f"{name}, {where}", "packed and verified", [verified for _, verified in figures])
            sending.close()


if __name__ == "__main__":
    typer.run(main)
