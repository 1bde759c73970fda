"""Times the whole engine on one GPU, from ``EngineCore.add`` to the last output, against vLLM's figures.

    python -m bench.gpu_engine --model llama-3.1-8b --output engine.json [--only prefill,decode,burst,prefix]

Also in ``--only``: prefix-cost (the prefix cache on and off where nothing hits), trace, trace-prefill. Random weights
of the true shape, greedy unless said, output lengths fixed. Every prompt is new, so nothing is cached unless it says
so. A decode row is (time of n + 1 tokens - time of one token) / n, where both runs find the prompts' KV in the prefix
cache, so that prefill weighs little in either. vLLM's figures, limits and targets are in ``goals``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.goals import BURST, DECODE, NO_GOAL, PREFILL, PREFIX, PREFIX_COST, SAMPLED_BURST, START, Goal, is_met
from bench.gpu_trace import trace_gaps
from bench.random_models import SHAPES, write_model
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gpu_runner import GpuRunner
from engine.messages import AddRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    work: str
    unit: str
    ours: float
    goal: Goal = NO_GOAL
    runs: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        cells = ["-" if value is None else f"{value:g}" for value in self.goal]
        met = {None: "", True: "met", False: "MISSED"}[is_met(self.unit, self.ours, self.goal.target)]
        return f"{self.work:<44}{self.ours:>10.3f} {self.unit:<8}{cells[0]:>10}{cells[1]:>9}{cells[2]:>9}  {met}"


class Bench:
    """One model's engine and what was measured with it."""

    def __init__(
        self, model: str, output: Path, *, runner_class: type[GpuRunner] = GpuRunner, **options: object
    ) -> None:
        self.model = model
        self._output = output
        self.rows: list[Row] = []
        self._vocab = SHAPES[model]["vocab_size"]
        self._rng = np.random.default_rng(1)
        self._made = 0
        with tempfile.TemporaryDirectory() as name:
            settings: dict[str, object] = {
                "model": write_model(model, Path(name)), "load_format": "dummy", "device": "cuda", "block_size": 64,
                "max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 36000,
                "max_waiting_requests": 4096, **options,
            }  # fmt: skip
            config = EngineConfig(**settings)  # type: ignore[arg-type]
            started_s = time.monotonic()
            self.runner = runner_class(config)
            self.add("start (weights made, not read)", "s", [time.monotonic() - started_s], START)
        self.config = config

    def add(self, work: str, unit: str, runs: Sequence[float], goal: Goal = NO_GOAL) -> None:
        row = Row(f"{self.model} {work}", unit, float(np.median(runs)), goal, list(runs))
        self.rows.append(row)
        print(row, flush=True)
        # After each row: an interrupted run leaves what it has.
        self._output.write_text(json.dumps([asdict(row) for row in self.rows], indent=1))

    def core(self, **options: Any) -> EngineCore:
        """With an empty prefix cache."""
        return EngineCore(dataclasses.replace(self.config, **options), self.runner)

    def prompt(self, length: int) -> list[int]:
        tokens: list[int] = self._rng.integers(0, self._vocab, length).tolist()
        return tokens

    def run(
        self,
        core: EngineCore,
        prompts: Sequence[list[int]],
        max_tokens: int,
        *,
        after_step: Callable[[], None] | None = None,
        **sampling: Any,
    ) -> float:
        """Seconds from the first ``add`` to the last output, all requests at once."""
        messages = []
        for prompt in prompts:
            self._made += 1
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=self._made, **sampling)
            messages.append(
                AddRequest(request_id=f"{self._made}", prompt_token_ids=prompt, sampling=params, timeout_s=3600.0)
            )
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for message in messages:
            core.add(message)
        count = 0
        while core.has_work():
            for output in core.step().outputs:
                assert not output.error_message, output.error_message
                count += len(output.token_ids)
            if after_step is not None:
                after_step()
        elapsed_s = time.perf_counter() - started_s
        assert count == len(prompts) * max_tokens
        return elapsed_s

    def prefill(self, work: dict[tuple[int, int], Goal]) -> None:
        for (requests, length), goal in work.items():
            repeats = 7 if length * requests <= 8192 else (3 if length * requests < 100_000 else 1)
            core = self.core()
            self.run(core, [self.prompt(length) for _ in range(min(requests, 2))], 1)
            runs = [1e3 * self.run(core, [self.prompt(length) for _ in range(requests)], 1) for _ in range(repeats)]
            self.add(f"prefill {requests} x {length}", "ms", runs, goal)

    def decode(self, work: dict[tuple[int, int, int], Goal], num_tokens: int = 64) -> None:
        for (requests, context, shared), goal in work.items():
            core = self.core()
            prefix = self.prompt(shared)
            prompts = [prefix + self.prompt(context - shared) for _ in range(requests)]
            self.run(core, prompts, 2)
            self.run(core, prompts, 1)  # as the measured ones, from the prefix cache: compiles what is new in that
            runs = []
            for _ in range(3):
                one_s = self.run(core, prompts, 1)
                runs.append(1e3 * (self.run(core, prompts, num_tokens + 1) - one_s) / num_tokens)
            what = f"decode b={requests} ctx {context}" + (f" ({shared} shared)" if shared else "")
            self.add(what, "ms", runs, goal)

    def burst(self, requests: int = 1000) -> None:
        sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
        for what, goal, sampling in (
            ("greedy", BURST[self.model], {}), ("t 0.8, p 0.95, k 50", SAMPLED_BURST.get(self.model, NO_GOAL), sampled),
        ):  # fmt: skip
            core = self.core()
            elapsed_s = self.run(core, [self.prompt(512) for _ in range(requests)], 128, **sampling)
            self.add(f"{requests} x (512 -> 128), {what}", "tok/s", [requests * 128 / elapsed_s], goal)

    def prefix(self, requests: int = 128) -> None:
        """Each prompt's head is in the prefix cache: its own, or one that all have."""
        for (percent, goal), heads in itertools.product(PREFIX.items(), (requests, 1)):
            if not percent and heads == 1:
                continue
            core = self.core()
            cached = [self.prompt(2048 * percent // 100) for _ in range(heads)]
            if percent:
                self.run(core, cached, 1)
            prompts = [cached[i % heads] + self.prompt(2048 - len(cached[0])) for i in range(requests)]
            elapsed_s = self.run(core, prompts, 128)
            given = goal if self.model == "llama-3.1-8b" else NO_GOAL
            what = f"{percent} % cached" + (", one prefix" if heads == 1 else "")
            self.add(f"{requests} x (2048 -> 128), {what}", "req/s", [requests / elapsed_s], given)

    def prefix_cost(self, pairs: int, loads: Sequence[tuple[int, int]]) -> None:
        """What the prefix cache costs where it hits nothing: each load with it and without, in turns."""
        for requests, length in loads:
            lost = []
            for _ in range(pairs):
                took_s = [
                    self.run(self.core(enable_prefix_caching=on), [self.prompt(length) for _ in range(requests)], 128)
                    for on in (False, True)
                ]
                lost.append(100 * (1 - took_s[0] / took_s[1]))
            self.add(f"{requests} x ({length} -> 128), lost to the prefix cache", "%", lost, PREFIX_COST)

    def trace_prefill(self, length: int = 8192) -> None:
        core = self.core()
        self.run(core, [self.prompt(length)], 1)
        print(trace_gaps(lambda: self.run(core, [self.prompt(length) for _ in range(4)], 1)), flush=True)

    def trace(self, requests: int, context: int, steps: int = 60) -> None:
        """How much of a steady decode's time the device waits."""
        core = self.core()
        prompts = [self.prompt(context) for _ in range(requests)]
        self.run(core, prompts, 2)
        gaps = trace_gaps(lambda: self.run(core, prompts, steps))
        self.add(f"b={requests}: device waits for the host", "%", [gaps.percent])
        print(gaps, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="prefill,decode,burst,prefix,trace")
    parser.add_argument("--pairs", type=int, default=2, help="of prefix-cost: runs with and without the cache")
    parser.add_argument("--cost-loads", default="128x2048,1000x512", help="of prefix-cost: requests x prompt tokens")
    parser.add_argument("--trace-requests", type=int, default=1)
    parser.add_argument("--requests", default="", help="only decode rows of these batch sizes, as 1,8")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=INT", help="fields of EngineConfig")
    args = parser.parse_args()
    options: dict[str, Any] = {name: int(value) for name, value in (pair.split("=") for pair in args.set)}
    bench = Bench(args.model, args.output, **options)
    print(f"{'work':<44}{'ours':>10} {'':<8}{'vLLM':>10}{'limit':>9}{'target':>9}")
    chosen = args.only.split(",")
    if "prefill" in chosen:
        bench.prefill(PREFILL[args.model])
    if "decode" in chosen:
        rows = DECODE[args.model]
        wanted = {int(requests) for requests in args.requests.split(",")} if args.requests else {row[0] for row in rows}
        bench.decode({row: goal for row, goal in rows.items() if row[0] in wanted})
    if "burst" in chosen:
        bench.burst()
    if "prefix" in chosen:
        bench.prefix()
    if "prefix-cost" in chosen:
        loads = [part.split("x") for part in args.cost_loads.split(",")]
        bench.prefix_cost(args.pairs, [(int(requests), int(length)) for requests, length in loads])
    if "trace" in chosen:
        bench.trace(args.trace_requests, 1024)
    if "trace-prefill" in chosen:
        bench.trace_prefill()
    print("\n".join(str(row) for row in bench.rows))


if __name__ == "__main__":
    main()
