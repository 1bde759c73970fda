"""Where the device waits, and what it works on: profiler traces of some work on a CUDA device.

Owns the reading of traces: the gaps between kernels and copies, their sums by kind of work, the cut into steps.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_STEP_GAP_US = 10.0
"""Within a graph kernels follow each other in less; a longer wait is one for the host."""
_FIRST_OF_STEP = "_prepare_kernel"
_KINDS = {
    "products": r"gemm|nvjet|cutlass|xmma|swiglu_kernel|_skinny|splitK",
    "prefill attention": r"hopper_kernel|_prefill_kernel",
    "decode attention": r"_decode_kernel|_plan_kernel|_shared_kernel",
    "norms, rope, SwiGLU": r"_add_rms_norm|_rope_kv_write|_silu_and_mul",
    "sampling": r"_argmax_kernel|_threshold_kernel|_penalise_kernel|_commit_kernel",
    "inputs and copies": r"_prepare_kernel|_update_kernel|[Mm]emcpy|[Mm]emset|index|elementwise|gather|copy",
}


class Span(NamedTuple):
    """A kernel or copy, in microseconds."""

    start: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Gaps:
    span_us: float
    busy_us: float
    host_us: float
    """Sum of the waits above ``_STEP_GAP_US``."""
    kernels: list[tuple[str, float, int]]
    """The longest in sum: name, microseconds, launches."""

    @property
    def percent(self) -> float:
        return 100 * self.host_us / self.span_us

    def __str__(self) -> str:
        lines = [
            f"  device: {self.span_us / 1e3:.1f} ms, busy {100 * self.busy_us / self.span_us:.1f} %, "
            f"waiting for the host {self.percent:.2f} %"
        ]
        lines += [
            f"  {us / 1e3:9.2f} ms {count:6d} x {us / count:8.1f} us  {name[:70]}" for name, us, count in self.kernels
        ]
        return "\n".join(lines)


def new_profiler() -> Any:
    """Of the device only: the host is not slowed down by a record of each of its calls."""
    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)


def device_spans(profiler: Any) -> list[Span]:
    """What ran on the device, in order; ``profiler`` has been stopped."""
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and event.time_range.end > event.time_range.start
    )


def trace_gaps(work: Callable[[], object], top: int = 14) -> Gaps:
    """Run ``work`` under the profiler; the middle 80 % of its device time counts, so that its start and end do not."""
    with new_profiler() as profiler:
        work()
        torch.cuda.synchronize()
    spans = device_spans(profiler)
    first, last = spans[0].start, max(span.end for span in spans)
    low, high = first + 0.1 * (last - first), last - 0.1 * (last - first)
    return gaps([span for span in spans if low <= span.start <= high], top)


def gaps(spans: Sequence[Span], top: int = 14) -> Gaps:
    busy, host, reached = 0.0, 0.0, spans[0].start
    micros: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for start, end, name in spans:
        if start > reached + _STEP_GAP_US:
            host += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        micros[name] += end - start
        counts[name] += 1
    longest = sorted(micros.items(), key=lambda item: -item[1])[:top]
    kernels = [(name, us, counts[name]) for name, us in longest]
    return Gaps(reached - spans[0].start, busy, host, kernels)


def by_step(spans: Sequence[Span]) -> list[list[Span]]:
    """Whole steps of an engine: from one's first kernel to the next one's, which was traced, too."""
    starts = [index for index, span in enumerate(spans) if span.name == _FIRST_OF_STEP]
    return [list(spans[begin:end]) for begin, end in itertools.pairwise(starts)]


def by_kind(spans: Sequence[Span]) -> dict[str, float]:
    """Microseconds by kind of work; of what runs beside something that began before, what it takes longer."""
    micros: defaultdict[str, float] = defaultdict(float)
    reached = spans[0].start
    for start, end, name in spans:
        kind = next((kind for kind, names in _KINDS.items() if re.search(names, name)), "other")
        micros[kind] += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return dict(sorted(micros.items(), key=lambda item: -item[1]))
