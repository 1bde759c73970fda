"""What bench.gpu_serve sends, and what it makes of a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_serve import Load, Row, clusters


def test_loads(tmp_path: Path) -> None:
    poisson = Load.parse("poisson:2048:256:4", seconds=20)
    assert poisson.flags[:2] == ("--num-prompts", "80")
    trace = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:00:{second:02},100,5" for second in range(0, 50, 10)]
    lines += ["2023-11-16 18:00:01,40000,5"]
    trace.write_text("\n".join(lines))
    azure = Load.parse(f"azure:{trace}:0.5", seconds=12)
    # Those that come within 24 s of the trace, but not the one that is too long.
    assert azure.flags[:4] == ("--dataset-name", "azure", "--num-prompts", "3")
    with pytest.raises(ValueError, match="use poisson:INPUT:OUTPUT:RATE"):
        Load.parse("burst:4", seconds=1)


def test_shares_count_requests_that_were_not_answered() -> None:
    def request(outcome: str, ttft_s: float, tpot_s: float | None, itl_p99_s: float) -> dict[str, object]:
        return {"outcome": outcome, "ttft_s": ttft_s, "tpot_s": tpot_s, "itl_p99_s": itl_p99_s}

    names = [f"{kind}_{what}_ms" for kind in ("median", "p99") for what in ("ttft", "tpot", "itl")]
    result = dict.fromkeys([*names, "request_throughput", "output_throughput", "client_cpu_share"], 1.0)
    answers = [
        request("ok", 0.2, 0.05, 0.02),
        request("ok", 0.2, None, 0.03),
        request("ok", 1.5, 0.05, 0.02),
        request("refused", 0.0, 0.0, 0.0),
    ]
    row = Row.of("apart", "load", {**result, "total_cached_tokens": 0, "requests": answers}, 1.5)
    assert (row.sent, row.done, row.share_steady, row.share_prompt) == (4, 3, 0.5, 0.5)


def test_two_gpus_are_two_aggregated_workers_or_one_of_each() -> None:
    found = clusters(2, ["aggregated", "apart", "apart@2048"], [])
    assert found["aggregated"][:3] == ["--aggregated", "--decode", "2"]
    assert found["apart"][:4] == ["--prefill", "1", "--decode", "1"]
    assert found["apart@2048"] == [*found["apart"], "--max-num-batched-tokens", "2048"]
