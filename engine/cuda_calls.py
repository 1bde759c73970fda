"""Calls of the CUDA runtime that only hand something to the driver, without letting go of the interpreter.

torch lets go of it around every such call. They take microseconds; to get it back from threads that are busy takes tens
of them. Waiting for the device is torch's business: there the interpreter must be free for others.
"""

from __future__ import annotations

import ctypes

import torch

_ANY_DIRECTION = 4


class CudaCalls:
    """Streams and events are those of one device, which has to be the current one."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        self._library.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
        self._library.cudaEventRecord.argtypes = [pointer, pointer]

    def copy(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Between addresses; host memory has to be pinned, and stay as it is until the copy is over."""
        self._check(self._library.cudaMemcpyAsync(target, source, num_bytes, _ANY_DIRECTION, stream.cuda_stream))

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """An event that was recorded by torch before: it makes them at first use."""
        self._check(self._library.cudaEventRecord(event.cuda_event, stream.cuda_stream))

    def _check(self, code: int) -> None:
        if code:
            text = self._library.cudaGetErrorString(code).decode()
            raise RuntimeError(f"the CUDA runtime says: {text} ({code})")
