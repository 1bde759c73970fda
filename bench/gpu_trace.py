"""Where the device waits: a profiler trace of some work, and the sum of the gaps between its kernels and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_STEP_GAP_US = 10.0
"""Within a graph kernels follow each other in less; a longer wait is one for the host."""


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


def trace_gaps(work: Callable[[], object], top: int = 14) -> Gaps:
    """Run ``work`` under the profiler; the middle 80 % of its device time counts, so that its start and end do not."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and event.time_range.end > event.time_range.start
    )
    first, last = spans[0][0], max(end for _, end, _ in spans)
    low, high = first + 0.1 * (last - first), last - 0.1 * (last - first)
    spans = [span for span in spans if low <= span[0] <= high]
    busy, host, reached = 0.0, 0.0, spans[0][0]
    micros: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for start, end, name in spans:
        if start > reached + _STEP_GAP_US:
            host += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        micros[name] += end - start
        counts[name] += 1
    kernels = [(name, float(us), counts[name]) for name, us in micros.most_common(top)]
    return Gaps(reached - spans[0][0], busy, host, kernels)
