"""The part of NCCL that transfers need: a communicator of two ranks, made when a pair meets and ended with its channel.

No world, no launcher, no environment: rank 0 makes an id, rank 1 hears it over the pair's own connection. Communicators
are non-blocking, so that no call waits for a peer that may be dead: while something is under way the caller is asked
(``still``) whether to go on. ``abort`` ends everything that is under way, on the device too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kv_transfer.cuda import CudaRuntime
from kv_transfer.staging import DeviceView

ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21700
"""2.17.0, whose fields ``_Config`` has."""
_UNDEFINED = -(2**31)
_SPIN_S = 300e-6
"""Most calls are over after so long; only then naps begin, which are as long as a segment takes."""
_NAP_S = 50e-6

Still = Callable[[], None]
"""Raises when there is no point in waiting any longer."""


class NcclError(Exception):
    """A call of NCCL failed; the message says which and why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]


class Nccl:
    """The library that torch brought along."""

    def __init__(self) -> None:
        """Raises:
        ValueError: there is none.
        """
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise ValueError(f"NCCL cannot be loaded ({error}): use another --transfer") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)
        ]  # fmt: skip

    def new_id(self) -> bytes:
        made = _UniqueId()
        self.check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made.internal)

    def call(self, name: str, *arguments: Any) -> None:
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, code: int) -> None:
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(f"{name}: {self._library.ncclGetErrorString(code).decode()} ({code})")

    def begin(self, unique_id: bytes, rank: int) -> ctypes.c_void_p:
        communicator = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, None)
        given = _UniqueId.from_buffer_copy(unique_id)
        self.call(
            "ncclCommInitRankConfig", ctypes.byref(communicator), 2, given, rank, ctypes.byref(config)
        )  # fmt: skip
        return communicator


class Move:
    """Messages that the device sends or receives, begun at once."""

    def __init__(self, done: torch.cuda.Event, runtime: CudaRuntime) -> None:
        self._done = done
        self._runtime = runtime

    def wait(self) -> int:
        """Until it is over, or aborted; nothing touches its memory any more. As ``DeviceCopy``: there is no mix."""
        self._runtime.make_current()
        self._done.synchronize()
        return 0


class Communicator:
    """Of this process and one other. Used by one thread, but for ``abort``."""

    def __init__(self, nccl: Nccl, runtime: CudaRuntime, unique_id: bytes, rank: int, still: Still) -> None:
        """Waits for the other rank to do the same."""
        torch.cuda.set_device(runtime.index)
        self._nccl = nccl
        self._runtime = runtime
        self._other = 1 - rank
        free_bytes = torch.cuda.mem_get_info(runtime.index)[0]
        self._stream: torch.cuda.ExternalStream | None = runtime.make_stream()
        self._handle: ctypes.c_void_p | None = None
        try:
            self._handle = nccl.begin(unique_id, rank)
            self._settle("ncclCommInitRankConfig", still)
        except BaseException:
            self.abort()
            raise
        self.num_bytes = max(0, free_bytes - torch.cuda.mem_get_info(runtime.index)[0])
        """Device memory that it took, as far as nobody else allocated at the same time."""

    def send(self, views: Sequence[DeviceView], still: Still) -> Move:
        """A message each. The other rank may receive them in other groups than these."""
        return self._start("ncclSend", views, still)

    def receive(self, views: Sequence[DeviceView], still: Still) -> Move:
        """What the other rank sends next, which has to be as long."""
        return self._start("ncclRecv", views, still)

    def abort(self) -> None:
        """What is under way ends, whatever the other rank does; it is over when this returns."""
        if self._stream is None:
            return
        handle, stream = self._handle, self._stream
        self._handle = self._stream = None
        try:
            if handle is not None:
                self._nccl.call("ncclCommAbort", handle)
                stream.synchronize()
        finally:
            self._runtime.end_stream(stream)

    def _start(self, name: str, views: Sequence[DeviceView], still: Still) -> Move:
        """As a group: one kernel for all of them."""
        assert self._stream is not None, "aborted"
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._nccl.call("ncclGroupStart")
        try:
            for view in views:
                address, size = ctypes.c_void_p(view.address), ctypes.c_size_t(len(view))
                self._nccl.call(name, address, size, _UINT8, self._other, self._handle, stream)
        finally:
            self._nccl.call("ncclGroupEnd")
        self._settle(name, still)  # the first message of a direction connects the two
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return Move(done, self._runtime)

    def _settle(self, name: str, still: Still) -> None:
        state = ctypes.c_int()
        spins_until_s = time.monotonic() + _SPIN_S
        while True:
            self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
            if state.value != _IN_PROGRESS:
                self._nccl.check(name, state.value)
                return
            if time.monotonic() > spins_until_s:
                still()
                time.sleep(_NAP_S)
