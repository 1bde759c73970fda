"""What preemption costs: a decode engine whose pool is too small, with host memory for the preempted and without.

    python -m bench.preemption [--model DIR] [--dtype float32] [--requests 8] [--pool-fraction 0.6] [--only-one]

First what becomes of one request, best of five: its KV copied out and back, or its tokens computed again. Then whole
runs, best of two, in turn: one engine in this process, every request at once. The pool holds ``--pool-fraction`` of
what all of them need at their end. Outputs are compared: a way that changes a token is an error, not a row.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass

import structlog

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.host_kv import HostKV
from engine.messages import AddRequest, EngineStats, SamplingParams
from engine.runners import build_runner
from pdserve.model_store import prepare_default_model

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256


def one_request(model: str, dtype: str) -> tuple[float, float]:
    """Seconds: (copies out and back, computing again), of a request at its end."""
    num_tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    config = EngineConfig(model=model, dtype=dtype, enable_prefix_caching=False)
    runner = build_runner(config)
    blocks = list(range(-(-num_tokens // config.block_size)))
    host = HostKV(runner.kv_cache, 1 << 30)
    core = EngineCore(config, runner)
    copied, computed = [], []
    for index in range(6):  # the first warms it up
        started_s = time.perf_counter()
        host.copy_out(blocks, blocks)
        host.copy_in(blocks, blocks)
        copied.append(time.perf_counter() - started_s)
        prompt = [(7 * index + 13 * at) % 1000 + 10 for at in range(num_tokens)]
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        core.add(AddRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling, timeout_s=3600.0))
        started_s = time.perf_counter()
        while core.has_work():
            core.step()
        computed.append(time.perf_counter() - started_s)
    return min(copied), min(computed)


@dataclass
class Run:
    seconds: float
    stats: EngineStats
    tokens: dict[str, list[int]]


def run(model: str, dtype: str, requests: int, num_blocks: int, host_kv_bytes: int) -> Run:
    config = EngineConfig(model=model, dtype=dtype, num_blocks=num_blocks, host_kv_bytes=host_kv_bytes)
    runner = build_runner(config)
    host = HostKV(runner.kv_cache, host_kv_bytes) if host_kv_bytes else None
    core = EngineCore(config, runner, host_memory=host)
    tokens: dict[str, list[int]] = {}
    for index in range(-1, requests):  # the first warms it up
        if index == 0:
            while core.has_work():
                core.step()
            started_s = time.perf_counter()
        prompt = [(7 * index + 13 * at) % 1000 + 10 for at in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        tokens[f"r{index}"] = []
        core.add(AddRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling, timeout_s=3600.0))
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
    return Run(time.perf_counter() - started_s, core.stats(), tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--pool-fraction", type=float, default=0.6)
    parser.add_argument("--only-one", action="store_true", help="Not the whole runs.")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    model = arguments.model or str(prepare_default_model())
    copied_s, computed_s = one_request(model, arguments.dtype)
    num_tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    print(f"{num_tokens} tokens: {copied_s * 1000:.1f} ms out and back, {computed_s * 1000:.0f} ms computed again\n")
    if arguments.only_one:
        return
    whole = arguments.requests * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // EngineConfig(model=model).block_size)
    small = int(whole * arguments.pool_fraction)
    rows = [("pool for all", whole, 0), ("computed again", small, 0), ("host memory", small, 1 << 30)]
    print("| | tok/s | preemptions | blocks to the host and back | prefill chunks |")
    print("| --- | ---: | ---: | ---: | ---: |")
    runs: dict[str, list[Run]] = {name: [] for name, _, _ in rows}
    for name, num_blocks, host_kv_bytes in rows * 2:
        runs[name].append(run(model, arguments.dtype, arguments.requests, num_blocks, host_kv_bytes))
        if runs[name][-1].tokens != runs[rows[0][0]][0].tokens:
            raise SystemExit(f"{name}: other tokens than with a pool for all")
    for name, done in runs.items():
        rate, stats = arguments.requests * OUTPUT_TOKENS / min(run.seconds for run in done), done[-1].stats
        copied = f"{stats.offloaded_blocks_total} / {stats.restored_blocks_total}"
        print(f"| {name} | {rate:.0f} | {stats.preemptions_total} | {copied} | {stats.prefill_chunks_total} |")


if __name__ == "__main__":
    main()
