"""A sender process and a receiver process, and between them the test, which carries (or loses) the control stream."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait

import torch

from kv_transfer.protocol import Frame
from tests.conformance.jobs import DIM, HEADS, LAYERS, Config, Job
from tests.conformance.peers import main

TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")

Relay = Callable[[Frame], list[Frame]]


class Side:
    """One process, as the test sees it."""

    def __init__(self, role: str) -> None:
        self.config = Config("", role)
        self.conn, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=main, args=(theirs, role), daemon=True)
        self.process.start()
        theirs.close()
        self.events: list[tuple[object, ...]] = []
        self.is_stopped = False

    def configure(self, config: Config) -> None:
        """What the process was before is gone; "ready" comes when it is this."""
        self.config = config
        self.events = [("old",)]
        self.command("configure", config)

    def command(self, *command: object) -> None:
        if self.process.is_alive():
            self.conn.send(command)

    def of(self, kind: str, name: str | None = None) -> list[tuple[object, ...]]:
        return [e for e in self.events if e[0] == kind and (name is None or e[1] == name)]

    def log(self) -> list[str]:
        return [" ".join(str(part)[:80] for part in event if not isinstance(part, bytes)) for event in self.events]

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.is_stopped = number == signal.SIGSTOP

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(TIMEOUT_S)
        self.conn.close()


class Pair:
    """``run_until`` carries frames and heartbeats while it waits."""

    def __init__(self) -> None:
        self.p = Side("p")
        self.d = Side("d")
        self.to_d: Relay = lambda frame: [frame]
        self.to_p: Relay = lambda frame: [frame]
        self.heartbeats = True
        self._next_beat_s = 0.0

    def configure(self, sender: Config, receiver: Config) -> None:
        self.to_d = self.to_p = lambda frame: [frame]
        self.heartbeats = True
        for side, config in ((self.p, sender), (self.d, receiver)):
            side.configure(config)
        self.run_until(lambda: bool(self.p.of("ready") and self.d.of("ready")), "both are up")
        for side in (self.p, self.d):
            del side.events[: side.events.index(("ready",))]  # what came before was of the old configuration

    def replace(self, side: Side, config: Config) -> None:
        """A new process in the place of a killed one."""
        fresh = Side(config.worker_id)
        if side is self.p:
            self.p = fresh
        else:
            self.d = fresh
        fresh.configure(config)
        self.run_until(lambda: bool(fresh.of("ready")), "the new one is up")

    def run_until(self, holds: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, (
                f"not within {timeout_s} s: {what}; P: {self.p.log()}; D: {self.d.log()}"
            )
            self.turn(0.05)

    def run_for(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.turn(0.02)

    def turn(self, timeout_s: float) -> None:
        if self.heartbeats and time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + 0.1
            for side, other in ((self.p, self.d), (self.d, self.p)):
                if not other.is_stopped:
                    side.command("alive")
        for conn in wait([self.p.conn, self.d.conn], timeout_s):
            side, other, relay = (self.p, self.d, self.to_d) if conn is self.p.conn else (self.d, self.p, self.to_p)
            try:
                event = side.conn.recv()
            except (EOFError, ConnectionResetError):
                time.sleep(0.01)  # killed by the test
                continue
            if event[0] == "frame":
                for frame in relay(event[1]):
                    other.command("frame", frame)
            else:
                side.events.append(event)
                if event[0] == "busy":
                    side.command("again", event[1])

    def start(self, *jobs: Job) -> None:
        for job in jobs:
            self.d.command("start", job)
            self.p.command("start", job)

    def ended(self, side: Side, job: Job) -> bool:
        return any(side.of(kind, job.name) for kind in ("done", "failed", "aborted", "published", "finished"))

    def run_to_end(self, *jobs: Job) -> None:
        self.run_until(lambda: all(self.ended(side, job) for job in jobs for side in (self.p, self.d)), "all end")

    def stats(self, side: Side) -> dict[str, object]:
        before = len(side.of("stats"))
        side.command("stats")
        self.run_until(lambda: len(side.of("stats")) > before, "stats come")
        found = side.of("stats")[-1][1]
        assert isinstance(found, dict)
        return found

    def is_held_back(self) -> bool:
        """Staging is full: the receiver's, or, where segments stay with their sender until read, the sender's."""
        side = self.p if self.p.config.backend == "cuda_ipc" else self.d
        return self.stats(side)["staging_bytes"] == side.config.slots * side.config.slot_bytes

    def assert_published(self, job: Job) -> None:
        """D has what P had, to the bit, converted to D's dtype."""
        published = self.d.of("published", job.name)
        assert len(published) == 1, f"{job.name} was not published once; P: {self.p.log()}; D: {self.d.log()}"
        (event,) = published
        sent = self.p.of("kv", job.name)[-1][2]
        assert event[3] == b"first token"
        assert equal_kv(sent, self.p.config.dtype, event[2], self.d.config.dtype, job.tokens)
        assert self.p.of("done", job.name)

    def assert_at_rest(self, *sides: Side) -> None:
        for side in sides or (self.p, self.d):
            rest = {"open": 0, "leases": 0, "staging_bytes": 0, "used_blocks": 0}

            def is_at_rest(side: Side = side, rest: dict[str, int] = rest) -> bool:
                return {name: self.stats(side)[name] for name in rest} == rest

            self.run_until(is_at_rest, f"{side.config.worker_id} is at rest")

    def close(self) -> None:
        self.p.end()
        self.d.end()


def equal_kv(sent: object, sent_dtype: str, got: object, got_dtype: str, tokens: int) -> bool:
    shape = (LAYERS, 2, HEADS, tokens, DIM)
    assert isinstance(sent, bytes)
    assert isinstance(got, bytes)
    p = torch.frombuffer(bytearray(sent), dtype=getattr(torch, sent_dtype)).view(shape)
    d = torch.frombuffer(bytearray(got), dtype=getattr(torch, got_dtype)).view(shape)
    return torch.equal(p.to(d.dtype), d) and not bool(torch.isnan(d).any())
