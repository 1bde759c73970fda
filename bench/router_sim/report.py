"""What came out of a simulation: one row of the table, one object of the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.router_sim.simulation import Outcome, Setup

COLUMNS = (
    "trace",
    "workers",
    "policy",
    "hit_rate",
    "shared_lru",
    "ideal",
    "decode_hit_rate",
    "prefill_max_over_mean",
    "decode_max_over_mean",
    "helped_share",
    "decode_prefill_share",
    "ttft_p50_s",
    "ttft_p99_s",
    "decision_p50_us",
    "decision_p99_us",
    "index_blocks",
)


def row(trace: str, ideal: float, shared_lru: float, setup: Setup, outcome: Outcome) -> dict[str, object]:
    return {
        "trace": trace,
        "workers": setup.prefills + setup.decodes,
        "routers": setup.routers,
        "policy": setup.policy,
        "requests": len(outcome.ttft_s),
        "speedup": setup.speedup,
        "hash_block_tokens": setup.hash_block_tokens,
        "block_tokens": setup.block_tokens,
        "hit_rate": round(outcome.prefill_cached_tokens / outcome.prompt_tokens, 4),
        "shared_lru": round(shared_lru, 4),
        "ideal": round(ideal, 4),
        "decode_hit_rate": round(outcome.decode_cached_tokens / outcome.prompt_tokens, 4),
        "prefill_max_over_mean": _spread(outcome.computed_tokens),
        "decode_max_over_mean": _spread(outcome.decode_requests),
        "slow_prefills": setup.slow_prefills,
        "shared_tokens_per_s": setup.speed.shared_tokens_per_s,
        "helped_share": round(outcome.helped / len(outcome.ttft_s), 4),
        "decode_prefill_share": round(outcome.decode_prefill_share, 4),
        "learns": setup.learns,
        "ttft_mean_s": round(statistics.fmean(outcome.ttft_s), 3),
        "ttft_p50_s": round(percentile(outcome.ttft_s, 50), 3),
        "ttft_p99_s": round(percentile(outcome.ttft_s, 99), 3),
        "decision_p50_us": round(1e6 * percentile(outcome.decision_s, 50)),
        "decision_p99_us": round(1e6 * percentile(outcome.decision_s, 99)),
        "no_room": outcome.no_room,
        "index_blocks": outcome.index_blocks,
    }


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def print_table(rows: Sequence[dict[str, object]]) -> None:
    table = Table(*COLUMNS)
    for each in rows:
        table.add_row(*(str(each[column]) for column in COLUMNS))
    Console(width=200).print(table)


def _spread(values: Sequence[int]) -> float:
    mean = sum(values) / len(values)
    return round(max(values) / mean, 2) if mean else 0.0
