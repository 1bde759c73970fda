"""The engine's process: messages in, steps, news out. One thread does all of it.

Owns the two sockets, the loop and the ways to end; the core and the hand-off own what the messages mean. The service
binds both sockets before it starts this process and gives their addresses on the command line.

    service --PUSH--> PULL  engine  PUSH --PULL--> service          eventfd: ``wakeup()`` from data-plane threads

    loop:  wait (not at all while there is work; else until a message, a wakeup, a deadline or the next heartbeat)
           -> dispatch messages -> hand-off poll -> core.step -> send its outputs

    while core.step waits for a device (with a hand-off, whose news should not wait for a step):
           nap -> dispatch messages -> hand-off poll -> send what there is to say

Ends: SIGTERM (exit code 0), the service is gone (1; the kernel kills it too), an exception (1, after EngineFailed: the
service starts a new incarnation and fails this one's requests). ``main`` is in the services (``engine_main``).
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import msgspec
import structlog
import zmq

from engine.core import EngineCore
from engine.messages import (
    AbortRequests,
    AddRequest,
    Drain,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    PeerAlive,
    PeerFrame,
    PeerLost,
    SendKVSnapshot,
    ToEngine,
)

HEARTBEAT_S = 0.5
STATS_S = 0.1
"""Busy engines add their stats to an outputs message this often."""
MAX_MESSAGES_PER_STEP = 1000
"""Then a step comes first, so that a flood of messages cannot stop the decodes."""
MAX_QUEUED_MESSAGES = 10_000
NAP_S = 100e-6
"""While a step runs on a device; the next one is launched already, if there is one."""
SEND_TIMEOUT_S = 10.0
LAST_WORDS_S = 1.0
_PR_SET_PDEATHSIG = 1

log = structlog.get_logger()


class Handoff(Protocol):
    """The hand-off as the loop sees it; it calls the core by itself. Nothing here may block."""

    def on_frame(self, peer: str, payload: bytes) -> None: ...

    def on_peer_alive(self, peer: str) -> None: ...

    def on_peer_lost(self, peer: str, reason: str) -> None: ...

    def poll(self) -> None:
        """Before each step: take what the data plane has, expire leases."""

    def next_deadline_s(self) -> float | None:
        """time.monotonic of the next lease that may expire."""

    def fill_stats(self, stats: EngineStats) -> None: ...


@runtime_checkable
class SharesCores(Protocol):
    """A runner whose device other engines use, too."""

    def rest(self) -> None:
        """No step will follow soon."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What ``engine_main`` builds and the process drives."""

    core: EngineCore
    ready: EngineReady
    handoff: Handoff | None = None
    hears_while_computing: bool = True
    """With a hand-off: messages and the data plane do not wait for the end of a step. That costs the shortest steps a
    little: an engine that has a hand-off and no use for it does better without."""


class EngineProcess:
    """Made and run in the process's main thread."""

    def __init__(self, *, to_engine: str, from_engine: str, parent_pid: int) -> None:
        """``to_engine`` and ``from_engine`` are zmq addresses that the service, process ``parent_pid``, has bound."""
        self._parent_pid = parent_pid
        self._stopping = False
        self._context = zmq.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket, address in ((self._inbox, to_engine), (self._outbox, from_engine)):
            socket.set_hwm(MAX_QUEUED_MESSAGES)
            socket.linger = int(LAST_WORDS_S * 1000)
            socket.connect(address)
        self._outbox.sndtimeo = int(SEND_TIMEOUT_S * 1000)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._next_heartbeat_s = 0.0
        self._next_stats_s = 0.0

    def run(self, build: Callable[[EngineProcess], Engine]) -> int:
        """Build the engine and run it; the exit code. ``build`` gets this for ``send`` and ``wakeup``."""
        # Ctrl-C reaches the whole process group; it is the service that ends us then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(self._parent_pid)
        try:
            engine = build(self)
            if engine.handoff is not None and engine.hears_while_computing:
                engine.core.while_waiting = partial(self._while_step_runs, engine)
            # What start-up made lives as long as the process: collections between steps need not look at it again.
            gc.collect()
            gc.freeze()
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._send(engine.ready)
            while not self._stopping:
                self._turn(engine)
                if os.getppid() != self._parent_pid:
                    log.error("service_gone", parent_pid=self._parent_pid)
                    return 1
        except Exception as error:
            log.exception("engine_failed")
            return self._fail(error)
        finally:
            self._close()
        return 0

    def send(self, frame: PeerFrame) -> None:
        """A hand-off frame for a peer. From the engine's thread only."""
        self._send(frame)

    def wakeup(self) -> None:
        """End the loop's wait now. From any thread, and from signal handlers."""
        os.eventfd_write(self._wake_fd, 1)

    def _turn(self, engine: Engine) -> None:
        had_work = engine.core.has_work()
        self._take_in(engine, dict(self._poller.poll(0 if had_work else self._wait_ms(engine))))
        # What came just now may begin and end in this very step: a prompt of one step on a prefill worker.
        had_work = had_work or engine.core.has_work()
        outputs = engine.core.step()
        now_s = time.monotonic()
        # What the counters say at the end of a burst must not wait for the heartbeat.
        went_idle = had_work and not engine.core.has_work()
        if went_idle and isinstance(engine.core.runner, SharesCores):
            engine.core.runner.rest()
        is_news = outputs.outputs or outputs.kv_events
        if not is_news and not went_idle and now_s < self._next_heartbeat_s:
            return
        if went_idle or now_s >= min(self._next_stats_s, self._next_heartbeat_s):
            outputs.stats = engine.core.stats()
            if engine.handoff is not None:
                engine.handoff.fill_stats(outputs.stats)
            self._next_stats_s = now_s + STATS_S
        self._send(outputs)
        self._next_heartbeat_s = now_s + HEARTBEAT_S

    def _while_step_runs(self, engine: Engine) -> bool:
        """Whether a message has come. The data plane rings when it has something; what expires waits for the step."""
        time.sleep(NAP_S)
        events = dict(self._poller.poll(0))
        if events:
            self._take_in(engine, events)
        return self._inbox in events

    def _take_in(self, engine: Engine, events: dict[Any, int]) -> None:
        """Messages, and what the data plane has; what is to be said of it at once."""
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        if self._inbox in events:
            self._receive(engine)
        if engine.handoff is not None:
            engine.handoff.poll()
            news = engine.core.take_news()
            if news.outputs or news.kv_events:
                self._send(news)

    def _wait_ms(self, engine: Engine) -> int:
        deadlines = [self._next_heartbeat_s, engine.core.next_deadline_s()]
        if engine.handoff is not None:
            deadlines.append(engine.handoff.next_deadline_s())
        wait_s = min(deadline for deadline in deadlines if deadline is not None) - time.monotonic()
        # Rounded up: waking just before a deadline would spin until it has passed.
        return max(0, int(wait_s * 1000) + 1)

    def _receive(self, engine: Engine) -> None:
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                payload = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(engine, self._decoder.decode(payload))

    @staticmethod
    def _dispatch(engine: Engine, message: ToEngine) -> None:
        core, handoff = engine.core, engine.handoff
        match message:
            case AddRequest():
                core.add(message)
            case AbortRequests(request_ids=request_ids, reason=reason, is_retry=is_retry):
                core.abort(request_ids, reason, is_retry)
            case Drain():
                core.drain()
            case SendKVSnapshot():
                core.announce_kv()
            case PeerFrame() | PeerAlive() | PeerLost() if handoff is None:
                log.warning("peer_message_dropped", peer=message.peer, why="this engine takes part in no hand-off")
            case PeerFrame(peer=peer, payload=payload):
                handoff.on_frame(peer, payload)
            case PeerAlive(peer=peer):
                handoff.on_peer_alive(peer)
            case PeerLost(peer=peer, reason=reason):
                handoff.on_peer_lost(peer, reason)

    def _send(self, message: FromEngine) -> None:
        """Raises zmq.Again when the service has taken nothing for SEND_TIMEOUT_S: it hangs, and so would we."""
        self._outbox.send(self._encoder.encode(message))

    def _fail(self, error: Exception) -> int:
        text = " ".join(str(error).split()) or "no details"
        try:
            self._send(EngineFailed(f"{type(error).__name__}: {text}"))
        except zmq.ZMQError:
            log.exception("last_words_lost")
        return 1

    def _close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close()
        # Waits for what is queued, LAST_WORDS_S at most.
        self._context.term()
        # ``_wake_fd`` stays open: threads of the hand-off ring it until the process ends, and its number must not be
        # another file's by then.

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        self.wakeup()


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the service dies, so that no engine is ever left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the service (process {parent_pid}) is gone, or is not the parent of this process")
