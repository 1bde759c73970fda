"""What bench.gpu_serve sends, and what it makes of a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_loads import Load, Trace, capacity, parse
from bench.gpu_serve import Row, clusters


def write_azure(path: Path, seconds: list[int]) -> str:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:00:{second:02},100,5" for second in seconds]
    lines += ["2023-11-16 18:00:01,40000,5"]  # does not fit
    path.write_text("\n".join(lines))
    return str(path)


def flag(load: Load, name: str) -> float:
    return float(load.flags[load.flags.index(name) + 1])


def test_loads(tmp_path: Path) -> None:
    poisson = parse("poisson:2048:256:4", seconds=20)
    assert isinstance(poisson, Load)
    assert poisson.flags[:2] == ("--num-prompts", "80")
    longer = parse("poisson:2048:256:4:50", seconds=20)
    assert isinstance(longer, Load)
    assert longer.flags[:2] == ("--num-prompts", "200")
    azure = parse(f"azure:{write_azure(tmp_path / 'azure.csv', [0, 10, 20, 30, 40])}:0.5", seconds=12)
    # Those that come within 24 s of the trace, but not the one that is too long.
    assert isinstance(azure, Load)
    assert azure.flags[:4] == ("--dataset-name", "azure", "--num-prompts", "3")
    with pytest.raises(ValueError, match="use poisson:INPUT:OUTPUT:RATE"):
        parse("burst:4", seconds=1)


def test_a_trace_at_a_share_of_the_capacity(tmp_path: Path) -> None:
    trace = parse(f"azure:{write_azure(tmp_path / 'azure.csv', list(range(0, 60, 2)))}", seconds=10)
    assert isinstance(trace, Trace)
    load = trace.at_share(0.5, capacity=4.0, seconds=10)
    # 2/s for 10 s: the first 20, which took 40 s when they were recorded.
    assert (flag(load, "--num-prompts"), flag(load, "--time-stretch")) == (20, 0.25)
    assert load.name == "azure at 50%, 2.0/s"
    with pytest.raises(ValueError, match="has 30 requests"):
        trace.at_share(1.0, capacity=4.0, seconds=10)
    burst = trace.burst(gpus=1)
    assert (flag(burst, "--num-prompts"), flag(burst, "--time-stretch") < 1e-3) == (30, True)


def test_a_share_of_a_trace_whose_requests_come_in_groups(tmp_path: Path) -> None:
    """Ten of one moment, then ten 10 s later: 2/s for 4 s are the first eight, of which the ninth came 8 s after the
    first once they are spread."""
    trace = parse(f"azure:{write_azure(tmp_path / 'azure.csv', [5] * 10 + [15] * 10)}", seconds=4)
    assert isinstance(trace, Trace)
    load = trace.at_share(0.5, capacity=4.0, seconds=4)
    # The request that does not fit came before them all, and is left out.
    assert (flag(load, "--num-prompts"), flag(load, "--time-stretch")) == (8, 0.5)
    assert "--trace-spread" in load.flags


def test_capacity_is_the_rate_of_a_burst_without_its_last_requests() -> None:
    # The first after 3 s, then 4/s: 90 in 25.25 s; the last one's output is long.
    ends_s = [3 + 0.25 * i for i in range(99)] + [90.0]
    requests = [{"outcome": "ok", "last_s": end_s} for end_s in ends_s]
    assert capacity({"requests": requests}) == pytest.approx(90 / 25.25)
    with pytest.raises(ValueError, match="100 requests 50 were answered"):
        capacity({"requests": requests[:50] + [{"outcome": "refused", "last_s": 0.0}] * 50})


def test_shares_count_requests_that_were_not_answered() -> None:
    def request(outcome: str, ttft_s: float, tpot_s: float | None, itl_p99_s: float) -> dict[str, object]:
        times = {"ttft_s": ttft_s, "tpot_s": tpot_s, "itl_p99_s": itl_p99_s}
        return {"outcome": outcome, "input_tokens": 100, "output_tokens": 5, **times}

    names = [f"{kind}_{what}_ms" for kind in ("median", "p99") for what in ("ttft", "tpot", "itl")]
    result = dict.fromkeys([*names, "request_throughput", "output_throughput", "client_cpu_share"], 1.0)
    answers = [
        request("ok", 0.2, 0.05, 0.02),
        request("ok", 0.2, None, 0.03),
        request("ok", 1.5, 0.05, 0.02),
        request("refused", 0.0, 0.0, 0.0),
    ]
    row = Row.of("apart", "load", {**result, "total_cached_tokens": 0, "requests": answers}, {"transfer": 1.5}, {})
    assert row.exposed_transfer_ms == 1.5
    assert (row.sent, row.done, row.share_steady, row.share_prompt) == (4, 3, 0.5, 0.5)
    assert row.requests[1] == (100, 5, 200.0, 0.0, 30.0)
    assert len(row.requests) == 3


def test_two_gpus_are_two_aggregated_workers_or_one_of_each() -> None:
    found = clusters(2, ["aggregated", "apart", "apart@2048"], [])
    assert found["aggregated"][:3] == ["--aggregated", "--decode", "2"]
    assert found["apart"][:4] == ["--prefill", "1", "--decode", "1"]
    assert found["apart@2048"] == [*found["apart"], "--max-num-batched-tokens", "2048"]
    assert clusters(2, ["apart@2048@20"], [])["apart@2048@20"] == [*found["apart@2048"], "--itl-budget-ms", "20"]
