"""GB/s and idle CPU of the transfer backends between two processes of this host, beside memcpy and raw TCP, in one run.

    python -m bench.transfer                      # OMP_NUM_THREADS=1, an otherwise quiet machine
    python -m bench.transfer --only shm,ucx --repeats 5

Sixteen slots are sent round and round, as in a worker (fewer of the largest size). "bytes only" is the backend alone,
to compare with other libraries (NIXL and Mooncake, where they are installed: ``transfer_peers``); "verified" adds what
the engines do: a digest before, and one after, over header and payload. Best of the repeats: each is short, and
whatever else runs on the machine only takes away.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kv_transfer import backends
from kv_transfer.backends.base import ChannelLost
from kv_transfer.layout import make_layout
from kv_transfer.segment import SealedSegment, digest, seal
from kv_transfer.staging import StagingArena
from pdserve.v1 import kv_pb2

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "128 MiB": 128 << 20}
MAX_SLOTS = 16
STAGING_BYTES = 512 << 20
BYTES_AT_ONCE = 512 << 20
MAX_SEGMENTS = 4000
IDLE_S = 2.0
TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")
ME = kv_pb2.WorkerIdentity(worker_id="d", incarnation=1)
LAYOUT = make_layout(
    model_fingerprint="bench",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    hash_block_tokens=16,
    block_size=16,
    dtype="float32",
)
HELLO = kv_pb2.DataHello(
    sender=kv_pb2.WorkerIdentity(worker_id="p", incarnation=1), layout=LAYOUT, receiver_incarnation=1
)


def count_of(size: int) -> int:
    return max(12, min(MAX_SEGMENTS, BYTES_AT_ONCE // size))


def slots_of(size: int) -> int:
    return min(MAX_SLOTS, STAGING_BYTES // size)


# ---- the receiving process


def receive(conn: Connection, name: str, size: int) -> None:
    """Says where it listens, then, for each measurement, when all of its segments have come."""
    arena = StagingArena(slots_of(size), size)
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    receiver = backends.load(name).receiver(ME, LAYOUT, arena, lambda: os.eventfd_write(wake_fd, 1))
    conn.send(receiver.listen("127.0.0.1", "127.0.0.1"))
    while (command := conn.recv()) != "end":
        if command == "idle":
            conn.send(idle_cpu())
            continue
        count, verify = command
        while count:
            if not select.select([wake_fd], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"{name}: {count} segments are missing")
            os.eventfd_read(wake_fd)
            for arrived in receiver.poll():
                if isinstance(arrived, ChannelLost):
                    raise ConnectionError(arrived.reason)
                if verify and digest(arrived.header_bytes, arrived.payload) != arrived.digest:
                    raise ValueError(f"{name}: a segment is not what was sent")
                arena.give_back(arrived.slot)
                count -= 1
        conn.send("all")
    receiver.close()


def receive_raw(conn: Connection, size: int) -> None:
    """One TCP connection, blocking calls, no framing: what a socket can do from Python."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        conn.send(listener.getsockname()[1])
        connected, _ = listener.accept()
    views = [memoryview(bytearray(size)) for _ in range(slots_of(size))]
    while (command := conn.recv()) != "end":
        for n in range(command[0]):
            view = views[n % slots_of(size)]
            while len(view):
                view = view[connected.recv_into(view, 0, socket.MSG_WAITALL) :]
        conn.send("all")


def idle_cpu() -> float:
    """Share of a core that this process uses while nothing happens."""
    before_s = time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - before_s) / IDLE_S


# ---- the sending process


def measure_backend(name: str, size: int, repeats: int) -> tuple[float, float, float]:
    """GB/s of bytes only and verified; idle CPU of the busier side."""
    conn, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=receive, args=(theirs, name, size), daemon=True)
    process.start()
    arena = StagingArena(slots_of(size), size)
    content = os.urandom(1 << 10) * (size >> 10)
    for _ in range(slots_of(size)):
        slot = arena.take(0.0)
        assert slot is not None
        slot.view[:] = content
        arena.give_back(slot)  # at the end of the queue of free slots
    sender = backends.load(name).sender(arena)
    lost: list[str] = []
    channel = sender.connect(answer(conn), HELLO, lost.append)
    header = kv_pb2.SegmentHeader(transfer_id="bench", attempt=1, dtype="float32", token_end=1, payload_bytes=size)
    unverified = SealedSegment(header.SerializeToString(), bytes(16), memoryview(b""))

    def run(verify: bool) -> float:
        count = count_of(size)
        conn.send((count, verify))
        since_s = time.perf_counter()
        for _ in range(count):
            slot = arena.take(TIMEOUT_S)
            if slot is None or lost:
                raise ConnectionError(f"{name}: {lost or 'no slot is free'}")
            segment = seal(header, slot.view) if verify else SealedSegment(unverified.header, bytes(16), slot.view)
            channel.send(segment, lambda error, slot=slot: arena.give_back(slot))  # type: ignore[misc]
        answer(conn)
        return size * count / (time.perf_counter() - since_s) / 1e9

    run(verify=True)
    rates = [max(run(verify) for _ in range(repeats)) for verify in (False, True)]
    conn.send("idle")
    idle = max(idle_cpu(), float(answer(conn)))
    channel.close()
    sender.close()
    conn.send("end")
    process.join(5)
    process.kill()
    return rates[0], rates[1], idle


def measure_raw_tcp(size: int, repeats: int) -> float:
    conn, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=receive_raw, args=(theirs, size), daemon=True)
    process.start()
    connected = socket.create_connection(("127.0.0.1", answer(conn)), TIMEOUT_S)
    connected.settimeout(None)
    views = [memoryview(bytearray(size)) for _ in range(slots_of(size))]

    def run() -> float:
        count = count_of(size)
        conn.send((count, False))
        since_s = time.perf_counter()
        for n in range(count):
            connected.sendall(views[n % slots_of(size)])
        answer(conn)
        return size * count / (time.perf_counter() - since_s) / 1e9

    run()
    rate = max(run() for _ in range(repeats))
    connected.close()
    conn.send("end")
    process.join(5)
    process.kill()
    return rate


def measure_memcpy(size: int, repeats: int) -> float:
    sources = [np.ones(size, np.uint8) for _ in range(slots_of(size))]
    targets = [np.zeros(size, np.uint8) for _ in range(slots_of(size))]

    def run() -> float:
        count = count_of(size)
        since_s = time.perf_counter()
        for n in range(count):
            np.copyto(targets[n % slots_of(size)], sources[n % slots_of(size)])
        return size * count / (time.perf_counter() - since_s) / 1e9

    run()
    return max(run() for _ in range(repeats))


def answer(conn: Connection) -> Any:
    if not conn.poll(TIMEOUT_S):
        raise TimeoutError("the receiving process says nothing")
    return conn.recv()


# ---- the table


def main(
    only: Annotated[str, typer.Option(help="Backends, separated by commas.")] = "shm,ucx,tcp",
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 5,
    output: Annotated[Path | None, typer.Option(help="JSON of all rates.")] = None,
) -> None:
    """GB/s of each way to move KV between two processes of this host."""
    rates: dict[str, dict[str, float]] = {}

    def print_row(title: str, figures: Sequence[float], idle: str = "") -> None:
        rates[title] = dict(zip(SIZES, figures, strict=True))
        print(f"| {title} | {' | '.join(f'{figure:.1f}' for figure in figures)} | {idle} |", flush=True)

    print(f"| path | {' | '.join(SIZES)} | idle CPU |")
    print("| --- |" + " --- |" * (len(SIZES) + 1))
    print_row("memcpy, one process", [measure_memcpy(size, repeats) for size in SIZES.values()])
    print_row("raw TCP, blocking", [measure_raw_tcp(size, repeats) for size in SIZES.values()])
    for name in only.split(","):
        figures = [measure_backend(name, size, repeats) for size in SIZES.values()]
        print_row(f"{name}, bytes only", [f[0] for f in figures], f"{max(f[2] for f in figures):.1%}")
        print_row(f"{name}, verified", [f[1] for f in figures])
    from bench.transfer_peers import PEERS  # it takes the measuring from here

    for title, measure in PEERS.items():
        try:
            moved, idles = zip(*(measure(size, repeats) for size in SIZES.values()), strict=True)
        except ImportError as error:
            print(f"| {title}, bytes only | not installed ({error}) |" + " |" * len(SIZES), flush=True)
        else:
            print_row(f"{title}, bytes only", moved, f"{max(idles):.1%}")
    if output is not None:
        output.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    typer.run(main)
