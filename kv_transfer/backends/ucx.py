"""Segments through UCX (the ``ucxx`` package): payloads as tagged messages, over shared memory, TCP or RDMA.

    sender's thread: prefix, header == TCP connection ====================> receiver's thread: takes a slot,
                     payload        == UCX message, tag = its number ====>  receives into it

Each channel has a UCP worker of its own, driven by the channel's thread and by no other: no progress thread, no event
loop, no lock. While messages are on their way the thread drives them: quickly at first, then with ever longer naps;
with nothing on its way it sleeps in the kernel on the TCP connection. That connection also does what UCX does badly
from here: it is bound to the right host, greets, and shows at once that the peer is gone. Stopped peers are the
deadlines' business.

A few receives are pending at once. A slot stays taken while one into it is: if that cannot be cancelled, for ever.

Between GPUs the payloads stay on the devices, if UCX has its ``cuda_ipc`` lane there; without it, UCX would carry them
through the host at a hundredth of the speed and say nothing. So a channel between devices measures itself first, and is
lost with the reason when it is that slow.

UCX is configured by the environment before it is loaded (``SETTINGS``; what is set already stays). Its defaults with
error handling would avoid shared memory, and without error handling a dead peer aborts the process. The wheel's UCX
knows no RDMA; RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true takes the system's.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from kv_transfer.backends import has_rdma
from kv_transfer.backends.base import Memory, OnDone, OnLost, Wakeup
from kv_transfer.backends.network_receiver import NetworkReceiver
from kv_transfer.backends.socket_channel import PREFIX, SocketChannel, SocketSettings
from kv_transfer.backends.sockets import ConnectionLost, receive, send_pieces
from kv_transfer.segment import SealedSegment
from kv_transfer.staging import DeviceView, SlotPool
from pdserve.v1 import kv_pb2

if TYPE_CHECKING:
    from kv_transfer.cuda import CudaRuntime

log = structlog.get_logger()

SETTINGS = {
    "UCX_MM_ERROR_HANDLING": "y",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_LOG_FILE": "stderr",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
WITHOUT_RDMA = {"UCX_TLS": "posix,tcp,self"}
WITH_CUDA = {"UCX_TLS": "cuda_ipc,cuda_copy,posix,tcp,self"}
TRIAL_BYTES = 8 << 20
TRIALS = 4
"""The first opens the memory; the fastest counts."""
MIN_GB_PER_S = 4.0
"""cuda_ipc moves such messages at tens of GB/s, the host path at less than one."""
TRIAL_TIMEOUT_S = 10.0
ADDRESS = struct.Struct("!I")
MAX_ADDRESS_BYTES = 65536
WINDOW = 8
"""Messages on their way on one channel: so many that a link stays full while each is begun, told of and ended."""
SPIN_S = 300e-6
"""Without progress; then naps begin, which are as long as a segment takes a GPU."""
NAP_S = 50e-6
LONG_NAP_S = 1e-3
LONG_NAPS_AFTER_S = 0.02
CANCEL_S = 1.0


def load_ucx(device: str = "cpu") -> Any:
    """The bindings of UCX, with our settings for that device. Call it in engine processes only.

    Raises:
        ValueError: not installed.
    """
    lanes = {} if has_rdma() else WITHOUT_RDMA if device == "cpu" else WITH_CUDA
    for name, value in (SETTINGS | lanes).items():
        os.environ.setdefault(name, value)
    try:
        from ucxx._lib import libucxx
    except ImportError as error:
        raise ValueError(
            f"transfer backend ucx cannot be loaded ({error}): install 'pdserve[ucx]', or use another --transfer"
        ) from error
    return libucxx


class UcxBackend:
    """Registered as ``ucx``. One UCP context for all channels."""

    def __init__(self, device: str = "cpu", settings: SocketSettings | None = None) -> None:
        self._settings = settings or SocketSettings()
        self._runtime: CudaRuntime | None = None
        if device != "cpu":
            from kv_transfer.cuda import CudaRuntime  # imports torch

            self._runtime = CudaRuntime(device)
        self.sender_memory: Memory = "host" if self._runtime is None else "device"
        self.receiver_memory: Memory | None = self.sender_memory
        self._trial: DeviceView | None = None
        if self._runtime is not None:
            self._trial = DeviceView(self._runtime.allocate(TRIAL_BYTES), TRIAL_BYTES)
        self._ucx = load_ucx(device)
        features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        self._context = self._ucx.UCXContext(feature_flags=features)

    def sender(self, arena: SlotPool) -> UcxSender:
        return UcxSender(arena, self._settings, self._worker, self._trial)

    def receiver(
        self, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, arena: SlotPool, wakeup: Wakeup
    ) -> NetworkReceiver:
        return NetworkReceiver(me, layout, arena, wakeup, self._settings, self._payloads)

    def _worker(self, connected: socket.socket) -> UcxWorker:
        if self._runtime is not None:
            self._runtime.make_current()
        return UcxWorker(self._ucx, self._context, connected, self._settings.stall_timeout_s)

    @contextlib.contextmanager
    def _payloads(self, connected: socket.socket) -> Iterator[UcxWorker]:
        """The receiver's part of a channel."""
        with contextlib.closing(self._worker(connected)) as worker:
            worker.meet(connected, self._settings.handshake_timeout_s)
            if self._trial is not None:
                for _ in range(TRIALS):
                    worker.begin(self._trial, time.monotonic() + TRIAL_TIMEOUT_S)
                    worker.finish()
            yield worker


@dataclass(slots=True, eq=False)
class OnItsWay:
    request: Any
    on_done: OnDone


class UcxWorker:
    """A UCP worker, used by one thread. Of a receiver, it is what is coming, too (``Payloads``)."""

    window = WINDOW

    def __init__(self, ucx: Any, context: Any, connected: socket.socket, stall_timeout_s: float) -> None:
        from ucxx._lib.arr import Array

        self._ucx = ucx
        self._array = Array
        self._worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._stall_timeout_s = stall_timeout_s
        self._count = 0
        self._receives: deque[tuple[Any, float]] = deque()
        """Requests and their deadlines."""
        self._hang_up = select.poll()
        self._hang_up.register(connected, select.POLLRDHUP)

    def meet(self, connected: socket.socket, timeout_s: float) -> None:
        """Exchange addresses and make an endpoint. The receiver has one too: closing it cancels what is pending."""
        ours = bytes(self._worker.address.tobytes())
        deadline_s = time.monotonic() + timeout_s
        send_pieces(connected, [ADDRESS.pack(len(ours)), ours], deadline_s)
        (length,) = ADDRESS.unpack(receive(connected, ADDRESS.size, deadline_s))
        if length > MAX_ADDRESS_BYTES:
            raise ConnectionLost(f"a UCX address of {length} bytes")
        theirs = receive(connected, length, deadline_s)
        with self._errors():
            remote = self._ucx.UCXAddress.create_from_buffer(theirs)
            self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)

    def send(self, view: memoryview | DeviceView) -> Any:
        """Begin to send; the request."""
        self._count += 1
        with self._errors():
            return self._endpoint.tag_send(self._array(view), self._ucx.UCXXTag(self._count))

    def begin(self, view: memoryview | DeviceView, deadline_s: float) -> None:
        self._count += 1
        with self._errors():
            request = self._endpoint.tag_recv(self._array(view), self._ucx.UCXXTag(self._count))
        self._receives.append((request, deadline_s))

    def finish(self) -> None:
        request, deadline_s = self._receives[0]
        self.wait(request, min(deadline_s, time.monotonic() + self._stall_timeout_s))
        self._receives.popleft()

    def give_up(self) -> list[bool]:
        requests = [request for request, _ in self._receives]
        self._receives.clear()
        if requests:
            self._close_endpoint()
        deadline_s = time.monotonic() + CANCEL_S
        while not all(request.completed for request in requests) and time.monotonic() < deadline_s:
            self._worker.progress()
            time.sleep(LONG_NAP_S)
        return [not request.completed for request in requests]

    def wait(self, request: Any, deadline_s: float) -> None:
        """Drive all messages of this worker until this one is over."""
        progress_s = time.monotonic()
        while not request.completed:
            now_s = time.monotonic()
            if self._worker.progress_once():
                progress_s = now_s
                continue
            idle_s = now_s - progress_s
            if idle_s < SPIN_S:
                continue
            if now_s > deadline_s:
                raise ConnectionLost("stalled: a message did not arrive in time")
            if self._hang_up.poll(0):
                raise ConnectionLost("closed by the other end")
            time.sleep(NAP_S if idle_s < LONG_NAPS_AFTER_S else LONG_NAP_S)
        with self._errors():
            request.check_error()

    def close(self) -> None:
        self._close_endpoint()
        self._worker = None

    def _close_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            with contextlib.suppress(ConnectionLost), self._errors():
                endpoint.close_blocking(int(CANCEL_S * 1e9), 1)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._ucx.UCXError as error:
            raise ConnectionLost(f"UCX: {error}") from error


# ---- sender


class UcxSender:
    probe = ""

    def __init__(
        self,
        arena: SlotPool,
        settings: SocketSettings,
        make_worker: Callable[[socket.socket], UcxWorker],
        trial: DeviceView | None,
    ) -> None:
        self.arena = arena
        self._trial = trial
        self._settings = settings
        self._make_worker = make_worker

    def connect(self, endpoint: str, hello: kv_pb2.DataHello, on_lost: OnLost) -> UcxChannel:
        return UcxChannel(endpoint, hello, on_lost, self._settings, self._make_worker, self._trial)

    def close(self) -> None:
        """Nothing beside the channels."""


class UcxChannel(SocketChannel):
    """A few messages are on their way at once; they end in order."""

    def __init__(
        self,
        endpoint: str,
        hello: kv_pb2.DataHello,
        on_lost: OnLost,
        settings: SocketSettings,
        make_worker: Callable[[socket.socket], UcxWorker],
        trial: DeviceView | None,
    ) -> None:
        self._make_worker = make_worker
        self._trial = trial
        super().__init__(endpoint, hello, on_lost, settings)

    def _carry(self, connected: socket.socket) -> None:
        on_their_way: deque[OnItsWay] = deque()
        try:
            with contextlib.closing(self._make_worker(connected)) as worker:
                worker.meet(connected, self._settings.handshake_timeout_s)
                if self._trial is not None:
                    self._try_lane(worker, self._trial)
                while not self._closing:
                    self._turn(connected, worker, on_their_way)
        except (OSError, ConnectionLost) as error:
            for item in on_their_way:  # the worker is closed: nothing reads their memory any more
                item.on_done(self._why_lost(error))
            raise
        for item in on_their_way:
            item.on_done("closed")

    def _try_lane(self, worker: UcxWorker, trial: DeviceView) -> None:
        """Raises ConnectionLost when UCX moves device memory through the host."""
        best_s = float("inf")
        for _ in range(TRIALS):
            began_s = time.monotonic()
            worker.wait(worker.send(trial), began_s + TRIAL_TIMEOUT_S)
            best_s = min(best_s, time.monotonic() - began_s)
        gb_per_s = len(trial) / best_s / 1e9
        log.info("ucx_lane", gb_per_s=round(gb_per_s, 1), endpoint=self._endpoint, tls=os.environ.get("UCX_TLS"))
        if gb_per_s < MIN_GB_PER_S:
            raise ConnectionLost(
                f"UCX moves device memory at {gb_per_s:.1f} GB/s: it has no cuda_ipc lane between these two (UCX_TLS="
                f"{os.environ.get('UCX_TLS')}); use --transfer cuda_ipc, or tcp between hosts"
            )

    def _turn(self, connected: socket.socket, worker: UcxWorker, on_their_way: deque[OnItsWay]) -> None:
        while len(on_their_way) < WINDOW and (item := self._next()) is not None:
            on_their_way.append(self._begin(connected, worker, *item))
        if not on_their_way:
            self._idle(connected)
            return
        first = on_their_way[0]
        worker.wait(first.request, time.monotonic() + self._settings.stall_timeout_s)
        on_their_way.popleft()
        first.on_done(None)

    def _begin(self, connected: socket.socket, worker: UcxWorker, segment: SealedSegment, on_done: OnDone) -> OnItsWay:
        prefix = PREFIX.pack(len(segment.header), len(segment.payload), segment.digest)
        try:
            send_pieces(connected, [prefix, segment.header], time.monotonic() + self._settings.stall_timeout_s)
            request = worker.send(segment.payload)
        except (OSError, ConnectionLost) as error:
            on_done(self._why_lost(error))
            raise
        return OnItsWay(request, on_done)
