"""NIXL and Mooncake's transfer engine in the same measurement as our backends: host memory to host memory, one host.

Optional installs: ``pip install nixl`` (or nixl-cu12 alone), ``pip install mooncake-transfer-engine-non-cuda`` (which
wants the system's libibverbs, Debian's libibverbs1, RDMA devices or not). Both write into the other's registered
memory; a window of slots is one request of theirs, and the time runs until the last one is done.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.transfer import SPAWN, TIMEOUT_S, answer, count_of, idle_cpu, slots_of

NIXL_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")

Write = Callable[[], None]
"""All slots once."""


def measure_nixl(size: int, repeats: int) -> tuple[float, float]:
    """GB/s and idle CPU, with its UCX backend. Raises ImportError."""
    _nixl()
    return _measure(_serve_nixl, _connect_nixl, size, repeats)


def measure_mooncake(size: int, repeats: int) -> tuple[float, float]:
    """GB/s and idle CPU, over its TCP transport: the only one without RDMA devices. Raises ImportError."""
    importlib.import_module("mooncake.engine")
    return _measure(_serve_mooncake, _connect_mooncake, size, repeats)


PEERS = {"NIXL, ucx": measure_nixl, "Mooncake, tcp": measure_mooncake}


def _measure(
    serve: Callable[[Connection, int], None],
    connect: Callable[[Any, np.ndarray, int], tuple[Write, object]],
    size: int,
    repeats: int,
) -> tuple[float, float]:
    conn, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(theirs, size), daemon=True)
    process.start()
    content = np.frombuffer(bytearray(os.urandom(1 << 10) * (size * slots_of(size) >> 10)), np.uint8)
    try:
        write, keep = connect(answer(conn), content, size)
        rounds = max(1, count_of(size) // slots_of(size))

        def run() -> float:
            since_s = time.perf_counter()
            for _ in range(rounds):
                write()
            return rounds * content.nbytes / (time.perf_counter() - since_s) / 1e9

        run()
        rate = max(run() for _ in range(repeats))
        conn.send("idle")
        idle = max(idle_cpu(), float(answer(conn)))
        conn.send("sum")
        if answer(conn) != int(content.sum(dtype=np.int64)):
            raise ValueError("the other side has not what was written")
        conn.send("end")
        del keep
    finally:
        process.join(5)
        process.kill()
    return rate, idle


def _attend(conn: Connection, content: np.ndarray) -> None:
    """The receiving side has nothing to do but to be there."""
    while (command := conn.recv()) != "end":
        conn.send(idle_cpu() if command == "idle" else int(content.sum(dtype=np.int64)))


# ---- NIXL


def _nixl() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else its log lines stand in the table
    for name in NIXL_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            last = error
    raise last


def _nixl_agent(name: str, content: np.ndarray) -> Any:
    api = _nixl()
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(content.ctypes.data, content.nbytes, 0, "")], "DRAM")
    return agent


def _serve_nixl(conn: Connection, size: int) -> None:
    content = np.zeros(size * slots_of(size), np.uint8)
    agent = _nixl_agent("d", content)
    conn.send((agent.get_agent_metadata(), content.ctypes.data))
    _attend(conn, content)


def _connect_nixl(address: Any, content: np.ndarray, size: int) -> tuple[Write, object]:
    metadata, remote = address
    agent = _nixl_agent("p", content)
    peer = agent.add_remote_agent(metadata)
    ours, theirs = (
        agent.get_xfer_descs([(start + n * size, size, 0) for n in range(slots_of(size))], "DRAM")
        for start in (content.ctypes.data, remote)
    )
    handle = agent.initialize_xfer("WRITE", ours, theirs, peer)

    def write() -> None:
        state, deadline_s = agent.transfer(handle), time.monotonic() + TIMEOUT_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline_s:
                raise ConnectionError(f"NIXL: {state}")
            state = agent.check_xfer_state(handle)

    return write, (agent, handle)


# ---- Mooncake


def _mooncake_engine(content: np.ndarray) -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise ConnectionError("Mooncake: the engine does not start")
    if engine.register_memory(content.ctypes.data, content.nbytes):
        raise ConnectionError("Mooncake: the memory is not registered")
    return engine


def _serve_mooncake(conn: Connection, size: int) -> None:
    content = np.zeros(size * slots_of(size), np.uint8)
    engine = _mooncake_engine(content)
    conn.send((f"127.0.0.1:{engine.get_rpc_port()}", content.ctypes.data))
    _attend(conn, content)


def _connect_mooncake(address: Any, content: np.ndarray, size: int) -> tuple[Write, object]:
    peer, remote = address
    engine = _mooncake_engine(content)
    ours, theirs = ([start + n * size for n in range(slots_of(size))] for start in (content.ctypes.data, remote))
    sizes = [size] * slots_of(size)

    def write() -> None:
        if engine.batch_transfer_sync_write(peer, ours, theirs, sizes):
            raise ConnectionError("Mooncake: a write failed")

    return write, engine
