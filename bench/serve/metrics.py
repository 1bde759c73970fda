"""From a run's records to its figures. Pure functions; the definitions are those that engines' users compare by.

TTFT    from sending a request to its first text
TPOT    (last chunk - first text) / (output tokens - 1), of each request with more than one token
ITL     every gap between two chunks with text, over all requests
goodput requests a second that met every limit; refused and failed ones meet none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.serve.records import Outcome, Record
from bench.serve.runner import Run

_GOODPUT_KEYS = ("ttft", "tpot", "itl_p99", "e2el")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one latency, in milliseconds; all 0 without values."""

    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not len(seconds):
            return cls()
        values = np.asarray(seconds, float) * 1e3
        median, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(values.mean()), float(median), float(values.std()), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must meet to be good, in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    itl_p99: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, text: str) -> Limits:
        """``ttft:500,tpot:50,itl_p99:100`` (or with spaces between). Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.replace(",", " ").split():
            name, _, value = part.partition(":")
            if name not in _GOODPUT_KEYS or not value:
                raise ValueError(f"goodput limit {part!r}: use {', '.join(f'{key}:MS' for key in _GOODPUT_KEYS)}")
            try:
                limits[name] = float(value)
            except ValueError:
                raise ValueError(f"goodput limit {part!r}: {value!r} is no number of milliseconds") from None
            if not 0 < limits[name] < math.inf:
                raise ValueError(f"goodput limit {part!r}: milliseconds are more than 0, and not infinite")
        return cls(**limits)

    @property
    def is_set(self) -> bool:
        return any(getattr(self, key) is not None for key in _GOODPUT_KEYS)

    def are_met(self, record: Record) -> bool:
        if record.outcome is not Outcome.OK:
            return False
        values = {
            "ttft": record.ttft_s,
            "tpot": record.tpot_s or 0.0,
            "itl_p99": record.itl_p99_s,
            "e2el": record.e2e_s,
        }
        return all((limit := getattr(self, key)) is None or value * 1e3 <= limit for key, value in values.items())


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run."""

    duration_s: float
    completed: int
    refused: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    peak_open_requests: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    send_lag: Spread
    """How late the client was; large without a concurrency limit, it could not keep up."""
    client_cpu_share: float
    """Of one core; near 1, the client was the bottleneck."""
    is_counted: bool
    """False where the server gave no usage for some request: its chunks were counted instead."""


def summarize(run: Run, limits: Limits) -> Summary:
    """Latencies, token counts and throughput are of the requests that were answered whole."""
    good = [record for record in run.records if record.outcome is Outcome.OK]
    duration_s = max(run.duration_s, 1e-9)
    input_tokens = sum(record.input_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    met = sum(limits.are_met(record) for record in run.records)
    return Summary(
        duration_s=run.duration_s,
        completed=len(good),
        refused=sum(record.outcome is Outcome.REFUSED for record in run.records),
        failed=sum(record.outcome is Outcome.FAILED for record in run.records),
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        total_cached_tokens=sum(record.cached_tokens for record in good),
        request_throughput=len(good) / duration_s,
        request_goodput=met / duration_s if limits.is_set else None,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        peak_open_requests=run.peak_open,
        ttft=Spread.of([record.ttft_s for record in good]),
        tpot=Spread.of([tpot_s for record in good if (tpot_s := record.tpot_s) is not None]),
        itl=Spread.of(run.itls.values),
        e2el=Spread.of([record.e2e_s for record in good]),
        send_lag=Spread.of([record.sent_s - record.scheduled_s for record in run.records]),
        client_cpu_share=run.client_cpu_s / duration_s,
        is_counted=all(record.is_counted for record in good),
    )
