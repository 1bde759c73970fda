"""A forward pass as CUDA graphs: with attention (decodes alone, prompts alone), or in pieces between its calls.

Owns capture and replay; what is captured and when is the GPU runner's business. Attention has a fixed grid and reads
everything else from the device, so a graph of it serves any batch of its size. Not so where decodes and prompts are
mixed, as where one kind of attention ends and the other begins is known to the host only: there the graphs end before
each layer's attention and go on after it. A group of layers whose KV may leave together ends a graph of prompts.

    decodes:  [ prepare, layer 0, ..., layer n ]
    prompts:  [ prepare, first group of layers ] [ next group ] ... [ last group ]
    pieces:   [ prepare, layer 0 up to rope ] attend [ rest of layer 0, layer 1 up to rope ] ... [ rest of layer n ]

All graphs share one memory pool: only one of them runs at a time, and what a later one reads is in static buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.triton_gpu import TritonKernels

_Attention = tuple[torch.Tensor, float, "int | None"]
Attend = Callable[[torch.Tensor, float, "int | None"], None]
"""``(kv_layer, scale, window)``: from the query buffer into the output buffer, for the batch at hand."""
AfterLayer = Callable[[int], None]
"""``(layer)``: what writes its KV is launched."""


@dataclass(frozen=True, slots=True)
class _Part:
    graph: torch.cuda.CUDAGraph
    layers: Sequence[int]
    """Those whose KV is written when it has run."""
    attention: _Attention | None = None
    """(kv_layer, scale, window) of what is launched next."""


class CapturedForward:
    """Captured once from a function that launches kernels on the current stream; replayed at will."""

    _queries: torch.Tensor
    _out: torch.Tensor

    def __init__(self, run: Callable[[AfterLayer], None], pool: Any, groups: Sequence[Sequence[int]]) -> None:
        """Capture ``run`` with its attention: a graph for each group of layers, which ``run`` tells as they come.

        It was run before, so that everything is compiled and allocated.
        """
        self._pool = pool
        self._parts: list[_Part] = []
        ends = {layers[-1]: layers for layers in groups[:-1]}

        def after_layer(layer: int) -> None:
            if layer in ends:
                self._cut(ends[layer])

        self._capture(lambda: run(after_layer), groups[-1])

    @classmethod
    def in_pieces(
        cls, run: Callable[[], None], pool: Any, kernels: TritonKernels, queries: torch.Tensor, out: torch.Tensor
    ) -> CapturedForward:
        """Capture ``run`` between attention calls, which read ``queries`` and write ``out``, both [T, H, D]."""
        self = cls.__new__(cls)
        self._pool, self._parts, self._queries, self._out = pool, [], queries, out
        kernels.seam = self
        try:
            self._capture(run, ())
        finally:
            kernels.seam = None
        return self

    def replay(self, after_layer: AfterLayer | None = None, attend: Attend | None = None) -> None:
        for part in self._parts:
            part.graph.replay()
            if part.attention is not None:
                assert attend is not None
                attend(*part.attention)
            if after_layer is not None:
                for layer in part.layers:
                    after_layer(layer)

    # --- as the seam of ``TritonKernels`` during a capture in pieces ---

    def queries(self) -> torch.Tensor:
        return self._queries

    def attend(self, kv_layer: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        self._cut([len(self._parts)], (kv_layer, scale, window))
        return self._out

    def _capture(self, run: Callable[[], None], last_layers: Sequence[int]) -> None:
        collecting = gc.isenabled()
        gc.disable()  # a tensor or graph freed by the collector in between would break the capture
        try:
            self._begin()
            run()
            self._end(last_layers)
        finally:
            if collecting:
                gc.enable()

    def _cut(self, layers: Sequence[int], attention: _Attention | None = None) -> None:
        self._end(layers, attention)
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self, layers: Sequence[int], attention: _Attention | None = None) -> None:
        self._graph.capture_end()
        self._parts.append(_Part(self._graph, layers, attention))


def decode_buckets(most: int) -> list[int]:
    """Batch sizes of decode graphs up to ``most``: a step pads to the next one, by a quarter at most from 32 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, most + 64, 64)]
    kept = [size for size in sizes if size < most]
    return [*kept, most]


def token_buckets(most: int) -> list[int]:
    """Token counts of graphs of steps with prompts up to ``most``, by a third at most from 64 on. Not 224, 448: on an
    H200 an 8B model's products of so many rows take as long as those of 256, and longer than those of 512."""
    steps = (
        (16, 128, 16), (128, 224, 32), (256, 448, 64), (512, 1024, 128), (1024, 2048, 256), (2048, 8192, 512),
        (8192, most + 1, 2048),
    )  # fmt: skip
    return [size for start, stop, step in steps for size in range(start, stop, step) if size <= most]
