"""A run's figures for people (the table that users of engines know) and for programs (JSON with its field names)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from bench.serve.metrics import Spread, Summary
from bench.serve.records import Outcome, Record

WIDTH = 50
_LATENCIES = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
)


def table(summary: Summary, *, request_rate: float | None, max_concurrency: int | None) -> str:
    """The lines, without a newline at the end."""
    lines = [_banner(" Serving Benchmark Result ", "=")]
    lines += [_count("Successful requests:", summary.completed)]
    lines += [_count("Refused requests:", summary.refused), _count("Failed requests:", summary.failed)]
    if max_concurrency is not None:
        lines.append(_count("Maximum request concurrency:", max_concurrency))
    if request_rate is not None and math.isfinite(request_rate):
        lines.append(_value("Request rate configured (RPS):", request_rate))
    lines += [
        _value("Benchmark duration (s):", summary.duration_s),
        _count("Total input tokens:", summary.total_input_tokens),
        _count("Total generated tokens:", summary.total_output_tokens),
        _count("Cached input tokens:", summary.total_cached_tokens),
        _value("Request throughput (req/s):", summary.request_throughput),
    ]
    if summary.request_goodput is not None:
        lines.append(_value("Request goodput (req/s):", summary.request_goodput))
    lines += [
        _value("Output token throughput (tok/s):", summary.output_throughput),
        _count("Peak concurrent requests:", summary.peak_open_requests),
        _value("Total Token throughput (tok/s):", summary.total_token_throughput),
    ]
    for title, short, name in _LATENCIES:
        spread: Spread = getattr(summary, name)
        lines.append(_banner(title, "-"))
        lines.append(_value(f"Mean {short} (ms):", spread.mean))
        lines.append(_value(f"Median {short} (ms):", spread.median))
        lines.append(_value(f"P99 {short} (ms):", spread.p99))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def remarks(summary: Summary, records: list[Record], max_concurrency: int | None) -> list[str]:
    """What a reader of the table must know, if anything."""
    found: list[str] = []
    errors = Counter(record.error for record in records if record.outcome is Outcome.FAILED)
    found += [f"{count} failed: {error}" for error, count in errors.most_common(3)]
    if not summary.is_counted:
        found.append("the server gave no usage for some requests: for those, output tokens are chunks, input tokens 0")
    if summary.client_cpu_share > 0.8:
        found.append(f"this client used {summary.client_cpu_share:.0%} of a core: it may have been the bottleneck")
    if max_concurrency is None and summary.send_lag.p99 > 50:
        found.append(f"requests were sent up to {summary.send_lag.p99:.0f} ms late (P99): the client could not keep up")
    return found


def as_json(summary: Summary, settings: dict[str, Any], records: list[Record], *, detailed: bool) -> dict[str, Any]:
    """One flat object: ``settings``, then the figures."""
    data: dict[str, Any] = dict(settings)
    for name, value in asdict(summary).items():
        if isinstance(value, dict):
            data |= {f"{kind}_{name}_ms": number for kind, number in value.items()}
        else:
            data["duration" if name == "duration_s" else name] = value
    data["errors"] = dict(Counter(record.error for record in records if record.error).most_common(20))
    if detailed:
        data["requests"] = [
            {**asdict(record), "ttft_s": record.ttft_s, "tpot_s": record.tpot_s, "e2e_s": record.e2e_s}
            for record in records
        ]
    return data


def _banner(text: str, char: str) -> str:
    return f"{text:{char}^{WIDTH}}"


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}"


def _value(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}"
