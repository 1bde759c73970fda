"""Timing of kernels on a CUDA device: graph replays between events, medians. ``bench/kernels.py`` uses it.

Owns how a time is taken; not what is timed. Launches are captured, so a time holds the kernel and the gap that a
captured step has, not the host's launch. Callers pass several calls over different buffers when one buffer would fit
into the L2 cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Call = Callable[[], object]


def median_us(calls: Sequence[Call], *, min_ms: float = 4.0, repeats: int = 7) -> float:
    """Microseconds a call: the calls are captured one after the other, repeated to ``min_ms`` a replay."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(50, int(min_ms / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times)) * 1e3 / rounds / len(calls)


def precompile(calls: Sequence[Call], threads: int = 12) -> None:
    """Compile what the calls would launch, in parallel, launching nothing."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda call: _guarded(call), calls))
    finally:
        JITFunction.run = launch


def _guarded(call: Call) -> None:
    """A variant that does not compile is reported, and the others go on."""
    try:
        call()
    except Exception as error:
        print(f"does not compile: {type(error).__name__}: {str(error)[:200]}")
