"""The receiver's side of the socket backends: one accepting thread, one thread per connection, one queue of arrivals.

    listener --> [kv-accept] --> [kv-receive] handshake, then the backend's ``receive`` --> arrivals --poll--> engine

The backend says what a connection carries; this says whose connections there are and how they end.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable

import structlog

from kv_transfer.backends.base import Arrived, ChannelLost, Origin, Wakeup
from kv_transfer.backends.handshake import welcome
from kv_transfer.backends.sockets import ConnectionLost, configure, set_kernel_timeouts, shutdown
from kv_transfer.segment import MalformedSegment
from kv_transfer.staging import SlotPool, StagingSlot
from pdserve.v1 import kv_pb2

log = structlog.get_logger()

Receive = Callable[[socket.socket, Origin], None]
"""Takes what comes on a welcome connection until ``SocketServer.closing``; raises when the connection is lost."""
CLOSING_SEEN_S = 0.25
"""Who waits for a slot looks up so often: ``close`` has a second for all."""


class SocketServer:
    def __init__(
        self,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        wakeup: Wakeup,
        receive: Receive,
        *,
        max_connections: int,
        handshake_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self.wakeup = wakeup
        self.closing = False
        self._me = me
        self._layout = layout
        self._receive = receive
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._arrivals: queue.SimpleQueue[Arrived | ChannelLost] = queue.SimpleQueue()  # bounded by staging slots
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, tuple[socket.socket, Origin | None]] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def start(self, listener: socket.socket) -> None:
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="kv-accept", daemon=True)
        self._acceptor.start()

    def arrived(self, segment: Arrived) -> None:
        """From ``receive``, which also wakes the engine: once for several segments, if it likes."""
        self._arrivals.put(segment)

    def take_slot(self, arena: SlotPool) -> StagingSlot:
        """Waiting here is the back-pressure: the socket fills up, then the sender's staging. The engine frees slots."""
        while not self.closing:
            slot = arena.take(timeout_s=CLOSING_SEEN_S)
            if slot is not None:
                return slot
        raise ConnectionLost("closed")

    def poll(self) -> list[Arrived | ChannelLost]:
        arrivals: list[Arrived | ChannelLost] = []
        while not self._arrivals.empty():
            arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def drop_sender(self, worker_id: str, incarnation: int) -> None:
        with self._lock:
            for connected, origin in self._connections.values():
                sender = None if origin is None else origin.sender
                if sender is not None and (sender.worker_id, sender.incarnation) == (worker_id, incarnation):
                    shutdown(connected)

    def close(self) -> None:
        with self._lock:
            self.closing = True
        if self._listener is not None:
            shutdown(self._listener)
            self._listener.close()
        with self._lock:
            threads = list(self._connections)
            for connected, _ in self._connections.values():
                shutdown(connected)
        deadline_s = time.monotonic() + 1.0
        for thread in [self._acceptor, *threads]:
            if thread is not None:
                thread.join(timeout=max(0.0, deadline_s - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                if self.closing:
                    return
                time.sleep(0.05)  # out of file descriptors, or a client that left at once: neither ends the listener
                continue
            if not self._take(connected):
                connected.close()

    def _take(self, connected: socket.socket) -> bool:
        thread = threading.Thread(target=self._serve, args=(connected,), name="kv-receive", daemon=True)
        with self._lock:
            if self.closing or len(self._connections) >= self._max_connections:
                return False
            try:
                thread.start()  # under the lock: ``close`` joins what has started
            except RuntimeError as error:  # no threads left, for now: the sender sees it closed, and tries again
                log.warning("kv_connection_not_taken", reason=str(error))
                return False
            self._connections[thread] = (connected, None)
        return True

    def _serve(self, connected: socket.socket) -> None:
        origin: Origin | None = None
        reason = "closed"
        try:
            configure(connected, self._handshake_timeout_s)
            deadline_s = time.monotonic() + self._handshake_timeout_s
            origin = Origin(welcome(connected, self._me, self._layout, deadline_s))
            with self._lock:
                self._connections[threading.current_thread()] = (connected, origin)
            set_kernel_timeouts(connected, self._stall_timeout_s)
            self._receive(connected, origin)
        except (OSError, ConnectionLost, MalformedSegment) as error:
            reason = str(error)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
            connected.close()
            if origin is not None and not self.closing:
                why = f"data channel from {origin.sender.worker_id} is lost: {reason}"
                self._arrivals.put(ChannelLost(origin, why))
                self.wakeup()
