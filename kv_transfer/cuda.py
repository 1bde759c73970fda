"""The part of the CUDA runtime that transfers need: plain device memory, and letting other processes read it.

Owns the arena of device memory. Used by the backends of GPUs only; loads the runtime that torch brought along. Every
call first makes its device the current one of the calling thread: network threads have none.

    sender:    cudaMalloc --> CudaStaging, slots for segments --> handle (64 bytes) == to the receiver ==
    receiver:  == handle ==> open_handle --> an address here; reads of it go over NVLink, or stay on the device
"""

from __future__ import annotations

import ctypes
import secrets
import weakref

import torch

from kv_transfer.staging import DeviceView, SlotPool, StagingArena

HANDLE_BYTES = 64
NONCE_BYTES = 16
HEAD_BYTES = 4096
"""Before the first slot: the nonce by which a receiver sees that it has opened the right memory."""
_LAZY_PEER_ACCESS = 1
_PORTABLE_MAPPED = 1 | 2


class CudaError(Exception):
    """A call of the CUDA runtime failed; the message says which and why."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaRuntime:
    """Of one device. Thread-safe, as the runtime is."""

    def __init__(self, device: str) -> None:
        """Raises:
        ValueError: no such device here.
        """
        asked = torch.device(device)
        if asked.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(f"device {device!r}: these transfers need a CUDA device; use another --transfer")
        self.index = torch.cuda.current_device() if asked.index is None else asked.index
        self.uuid = str(torch.cuda.get_device_properties(self.index).uuid)
        """The same in every process, whatever it calls the device."""
        self._library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _IpcHandle, ctypes.c_uint]

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        self._let_go("cudaFree", ctypes.c_void_p(address))

    def handle_of(self, address: int) -> bytes:
        """By which another process of this host opens this allocation."""
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open_handle(self, handle: bytes) -> int:
        """Another process's allocation, readable by this device. Opened twice, closed twice."""
        address = ctypes.c_void_p()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        assert address.value is not None
        return address.value

    def close_handle(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def size_at(self, address: int) -> int:
        """Bytes of the allocation that begins here, an opened one, too: what the driver knows, not who offered it."""
        self.make_current()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if code or base.value != address:
            raise CudaError(f"cuMemGetAddressRange on cuda:{self.index}: no memory begins at {address:#x} ({code})")
        return size.value

    def read(self, address: int, num_bytes: int) -> bytes:
        """A few bytes, to the host. Waits for nothing but this copy."""
        out = ctypes.create_string_buffer(num_bytes)
        self._copy(ctypes.addressof(out), address, num_bytes)
        return out.raw

    def write(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self._copy(address, ctypes.addressof(source), len(data))

    def pin(self, arena: StagingArena) -> None:
        """Let the device read and write this host memory directly, as long as the arena lives."""
        address = ctypes.c_void_p(arena.address)
        size = ctypes.c_size_t(arena.limit_bytes)
        self._call("cudaHostRegister", address, size, ctypes.c_uint(_PORTABLE_MAPPED))
        at_end = weakref.finalize(arena, self._let_go, "cudaHostUnregister", address)
        at_end.atexit = False  # the driver unpins what is left when the process ends

    def make_stream(self) -> torch.cuda.ExternalStream:
        """One of its own. Those that torch makes are 32 a device, given out in turn: a kernel that waits for another
        process would some day wait on the stream of the engine's steps."""
        stream = ctypes.c_void_p()
        non_blocking = 1
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(non_blocking))
        return torch.cuda.ExternalStream(stream.value, device=torch.device("cuda", self.index))  # type: ignore[no-untyped-call]

    def end_stream(self, stream: torch.cuda.ExternalStream) -> None:
        """Nothing is launched on it any more; what was, ends."""
        self._call("cudaStreamDestroy", ctypes.c_void_p(stream.cuda_stream))

    def make_current(self) -> None:
        """For the calling thread."""
        self._check("cudaSetDevice", self._library.cudaSetDevice(self.index))

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        self.make_current()
        stream = ctypes.c_void_p()
        non_blocking, any_direction = 1, 4
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(non_blocking))
        try:
            size = ctypes.c_size_t(num_bytes)
            self._call("cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), size, any_direction, stream)
            self._call("cudaStreamSynchronize", stream)
        finally:
            self._call("cudaStreamDestroy", stream)

    def _call(self, name: str, *arguments: object) -> None:
        self.make_current()
        self._check(name, getattr(self._library, name)(*arguments))

    def _let_go(self, name: str, *arguments: object) -> None:
        """When the collector says so, in the middle of anything: that must find its device as it left it."""
        current = ctypes.c_int()
        self._check("cudaGetDevice", self._library.cudaGetDevice(ctypes.byref(current)))
        self._call(name, *arguments)
        if current.value != self.index:
            self._check("cudaSetDevice", self._library.cudaSetDevice(current))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = self._library.cudaGetErrorString(code).decode()
            self._library.cudaGetLastError()  # else the next, innocent call of this thread reports it again
            raise CudaError(f"{name} on cuda:{self.index}: {text} ({code})")


class CudaStaging(SlotPool):
    """One plain allocation of a device, which other processes may open to read."""

    def __init__(self, runtime: CudaRuntime, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        if slot_bytes % 256:
            raise ValueError(f"slots of {slot_bytes} bytes: the device's accesses need a multiple of 256")
        self.runtime = runtime
        self.num_bytes = HEAD_BYTES + num_slots * slot_bytes
        self._address = runtime.allocate(self.num_bytes)
        at_end = weakref.finalize(self, runtime.free, self._address)
        at_end.atexit = False  # the driver frees what is left when the process ends
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        runtime.write(self._address, self.nonce)
        self.handle = runtime.handle_of(self._address)

    def offset(self, view: DeviceView) -> int:
        """Where a part of a slot is in the allocation."""
        return view.address - self._address if len(view) else 0

    def _view(self, start: int) -> DeviceView:
        return DeviceView(self._address + HEAD_BYTES + start, self.slot_bytes)
