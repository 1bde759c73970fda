"""A forward pass as CUDA graphs: whole (decodes alone, prompts alone), or in pieces between the attention calls.

Owns capture and replay; what is captured and when is the GPU runner's business. Attention has a fixed grid and reads
everything else from the device, so a graph of it serves any batch of its size. Not so where decodes and prompts are
mixed, as where one kind of attention ends and the other begins is the host's choice; and layers whose KV leaves one by
one must be launched one by one. There the graphs end before each layer's attention and go on after it:

    whole:   [ prepare, layer 0, ..., layer n ]
    pieces:  [ prepare, layer 0 up to rope ] attend [ rest of layer 0, layer 1 up to rope ] ... [ rest of layer n ]

All graphs share one memory pool: only one of them runs at a time, and what a later one reads is in static buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.triton_gpu import TritonKernels

Attend = Callable[[torch.Tensor, float, "int | None"], None]
"""``(kv_layer, scale, window)``: from the query buffer into the output buffer, for the batch at hand."""
AfterLayer = Callable[[int], None]
"""``(layer)``: what writes its KV is launched."""


@dataclass(frozen=True, slots=True)
class _Piece:
    graph: torch.cuda.CUDAGraph
    kv_layer: torch.Tensor
    scale: float
    window: int | None


class CapturedForward:
    """Captured once from a function that launches kernels on the current stream; replayed at will."""

    def __init__(self, run: Callable[[], None], pool: Any) -> None:
        """Capture ``run`` whole. It was run before, so that everything is compiled and allocated."""
        self._pool = pool
        self._pieces: list[_Piece] = []
        self._out: torch.Tensor | None = None
        self._queries: torch.Tensor | None = None
        self._capture(run)

    @classmethod
    def in_pieces(
        cls, run: Callable[[], None], pool: Any, kernels: TritonKernels, queries: torch.Tensor, out: torch.Tensor
    ) -> CapturedForward:
        """Capture ``run`` between attention calls, which read ``queries`` and write ``out``, both [T, H, D]."""
        self = cls.__new__(cls)
        self._pool, self._pieces, self._queries, self._out = pool, [], queries, out
        kernels.seam = self
        try:
            self._capture(run)
        finally:
            kernels.seam = None
        return self

    def replay(self, attend: Attend | None = None, after_layer: AfterLayer | None = None) -> None:
        for layer, piece in enumerate(self._pieces):
            piece.graph.replay()
            assert attend is not None
            attend(piece.kv_layer, piece.scale, piece.window)
            if after_layer is not None:
                after_layer(layer)
        self._last.replay()

    # --- as the seam of ``TritonKernels`` during a capture in pieces ---

    def queries(self) -> torch.Tensor:
        assert self._queries is not None
        return self._queries

    def attend(self, kv_layer: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        assert self._out is not None
        self._last.capture_end()
        self._pieces.append(_Piece(self._last, kv_layer, scale, window))
        self._begin()
        return self._out

    def _capture(self, run: Callable[[], None]) -> None:
        collecting = gc.isenabled()
        gc.disable()  # a tensor or graph freed by the collector in between would break the capture
        try:
            self._begin()
            run()
            self._last.capture_end()
        finally:
            if collecting:
                gc.enable()

    def _begin(self) -> None:
        self._last = torch.cuda.CUDAGraph()
        self._last.capture_begin(pool=self._pool, capture_error_mode="thread_local")


def decode_buckets(most: int) -> list[int]:
    """Batch sizes of decode graphs up to ``most``: a step pads to the next one, by a quarter at most from 32 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, most + 64, 64)]
    kept = [size for size in sizes if size < most]
    return [*kept, most]


def token_buckets(most: int) -> list[int]:
    """Token counts of piecewise graphs up to ``most``, by a quarter at most from 64 on."""
    steps = ((16, 128, 16), (128, 256, 32), (256, 512, 64), (512, 1024, 128), (1024, most + 1, 256))
    return [size for start, stop, step in steps for size in range(start, stop, step) if size <= most]
