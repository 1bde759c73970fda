"""Where the time of a burst goes on a GPU: many requests at once, step by step, and some of the steps under a profiler.

    python -m bench.gpu_burst --model llama-3.1-8b --output burst.json [--budgets 8192,16384] [--no-trace]

Each step's time is that between its results and those of the step before; beside it stands what its products and its
reading of KV would take at the device's ceilings, one after the other. ``--budgets``: tokens a step, one burst for
each; the engine is made for the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu_engine import Bench
from bench.gpu_trace import by_kind, by_step, device_spans, gaps, new_profiler
from bench.random_models import SHAPES
from engine.batch import SampledBatch, ScheduledBatch
from engine.core import EngineCore
from engine.gpu_runner import GpuRunner
from engine.itl_budget import StepLoad
from engine.model_runner import OnLayers
from engine.runner import PendingStep

_FLOPS_PER_MS = 700e9
_BYTES_PER_MS = 4.2e9
_TRACED_STEPS = 3


@dataclass(slots=True)
class Step:
    """One launched step."""

    load: StepLoad
    launch_ms: float
    """Of the host."""
    done_s: float = 0.0
    took_ms: float = 0.0
    limit_ms: float = 0.0
    """Its products and then its KV, at the ceilings."""
    is_traced: bool = False

    @property
    def kind(self) -> str:
        if self.load.prefill_tokens:
            return "with prompts"
        return "decodes, 900 or more" if self.load.decodes >= 900 else "decodes, fewer"


class _WatchedStep:
    def __init__(self, pending: PendingStep, step: Step) -> None:
        self._pending, self._step = pending, step

    def is_done(self) -> bool:
        return self._pending.is_done()

    def result(self) -> SampledBatch:
        sampled = self._pending.result()
        self._step.done_s = time.perf_counter()
        return sampled


class WatchedRunner(GpuRunner):
    """Keeps what each step had to do, and when it was done."""

    steps: list[Step]

    def launch(self, batch: ScheduledBatch, on_layers: OnLayers | None = None) -> PendingStep:  # type: ignore[override]
        began_s = time.perf_counter()
        pending = super().launch(batch, on_layers)
        step = Step(batch.load(), 1e3 * (time.perf_counter() - began_s))
        self.steps.append(step)
        return _WatchedStep(pending, step)


@dataclass(slots=True)
class Slice:
    """Some steps to trace, from the first one that is ``wanted`` on."""

    name: str
    wanted: Callable[[StepLoad], bool]
    loads: list[StepLoad] = field(default_factory=list)
    profiler: Any = None


class Tracer:
    """Traces one slice after the other; called after each step."""

    def __init__(self, runner: WatchedRunner) -> None:
        self._runner = runner
        self.slices = [
            Slice("prompts beside 300 decodes", lambda load: load.prefill_tokens > 0 and load.decodes >= 300),
            Slice("prompts beside 700 decodes", lambda load: load.prefill_tokens > 0 and load.decodes >= 700),
            Slice("1000 decodes", lambda load: load.prefill_tokens == 0 and load.decodes >= 900),
            Slice("600 decodes", lambda load: load.prefill_tokens == 0 and load.decodes <= 620),
            Slice("200 decodes", lambda load: load.prefill_tokens == 0 and load.decodes <= 210),
        ]
        self._left = list(self.slices)
        self._steps_left = 0
        with new_profiler():  # the first one takes a second
            torch.zeros(1, device=runner.device)

    def __call__(self) -> None:
        if not self._left or not self._runner.steps:
            return
        now, last = self._left[0], self._runner.steps[-1]
        if now.profiler is None:
            if now.wanted(last.load):
                now.profiler = new_profiler()
                now.profiler.start()
                self._steps_left = _TRACED_STEPS + 1  # the first one was launched before, and its start is not seen
                last.is_traced = True
            return
        last.is_traced = True
        now.loads.append(last.load)
        self._steps_left -= 1
        if not self._steps_left:
            torch.cuda.synchronize()
            now.profiler.stop()
            self._left.pop(0)


def limit_ms(shape: dict[str, Any], load: StepLoad) -> float:
    """Products at their ceiling (or the weights' bytes), then the KV of decodes."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    kv_heads, head_dim, layers = shape["num_key_value_heads"], shape["head_dim"], shape["num_hidden_layers"]
    weights = layers * hidden * ((2 * heads + 2 * kv_heads) * head_dim + 3 * inner)
    head = shape["vocab_size"] * hidden
    drawn = load.decodes + load.prefill_tokens / 512
    products = max(
        2 * (weights * (load.decodes + load.prefill_tokens) + head * drawn) / _FLOPS_PER_MS,
        2 * (weights + head) / _BYTES_PER_MS,
    )
    attention = 4 * load.prefill_pairs * heads * head_dim * layers / _FLOPS_PER_MS
    kv_bytes = load.kv_tokens * 4 * layers * kv_heads * head_dim
    return float(products + attention + kv_bytes / _BYTES_PER_MS)


def finish(steps: Sequence[Step], shape: dict[str, Any]) -> None:
    """Fill in what is known when all is over."""
    for before, step in itertools.pairwise(steps):
        step.took_ms = 1e3 * (step.done_s - before.done_s)
    for step in steps:
        step.limit_ms = limit_ms(shape, step.load)


def print_sums(steps: Sequence[Step]) -> None:
    """By kind, means of the steps that were not traced, and those times all of the kind."""
    print(
        f"{'steps':<22}{'count':>6}{'s':>8}{'limit s':>9}{'ms':>9}{'decodes':>9}{'prompt tokens':>14}{'launch ms':>11}"
    )
    for kind in dict.fromkeys(step.kind for step in steps):
        count = sum(step.kind == kind for step in steps)
        plain = [step for step in steps if step.kind == kind and not step.is_traced]
        columns = [(s.took_ms, s.limit_ms, s.load.decodes, s.load.prefill_tokens, s.launch_ms) for s in plain]
        took, limit, decodes, tokens, launch = (sum(column) / len(plain) for column in zip(*columns, strict=True))
        print(
            f"{kind:<22}{count:>6}{count * took / 1e3:>8.2f}{count * limit / 1e3:>9.2f}{took:>9.2f}{decodes:>9.0f}"
            f"{tokens:>14.0f}{launch:>11.2f}",
            flush=True,
        )


def print_slice(part: Slice) -> list[dict[str, float]]:
    spans = device_spans(part.profiler)
    steps = by_step(spans)
    tables = [by_kind(step) for step in steps]
    print(f"{part.name}: {len(steps)} whole steps of {[(load.decodes, load.prefill_tokens) for load in part.loads]}")
    for step, table in zip(steps, tables, strict=True):
        waits = gaps(step)
        kinds = ", ".join(f"{kind} {us / 1e3:.2f}" for kind, us in table.items())
        idle = f"idle {(waits.span_us - waits.busy_us) / 1e3:.2f}, of it for the host {waits.host_us / 1e3:.2f}"
        print(f"  {waits.span_us / 1e3:8.2f} ms: {kinds}; {idle}")
    for begin, end in itertools.pairwise(steps):
        print(f"  to the next step {end[0].start - max(span.end for span in begin):.1f} us")
    if steps:
        print(gaps(steps[-1], top=24), flush=True)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--budgets", default="8192", help="tokens a step; a burst for each")
    parser.add_argument("--no-trace", action="store_true")
    args = parser.parse_args()
    budgets = [int(part) for part in args.budgets.split(",")]
    WatchedRunner.steps = []
    bench = Bench(args.model, args.output, runner_class=WatchedRunner, max_num_batched_tokens=max(budgets))
    runner = bench.runner
    assert isinstance(runner, WatchedRunner)
    raw = []
    for budget in budgets:
        core = EngineCore(dataclasses.replace(bench.config, max_num_batched_tokens=budget), runner)
        runner.steps = []
        tracer = None if args.no_trace else Tracer(runner)
        prompts = [bench.prompt(args.input_tokens) for _ in range(args.requests)]
        elapsed_s = bench.run(core, prompts, args.output_tokens, after_step=tracer)
        finish(runner.steps, SHAPES[args.model])
        print(f"{budget} tokens a step: {elapsed_s:.2f} s, {args.requests * args.output_tokens / elapsed_s:.0f} tok/s")
        print_sums(runner.steps)
        traced = [] if tracer is None else [(part.name, print_slice(part)) for part in tracer.slices if part.loads]
        raw.append({"budget": budget, "s": elapsed_s, "steps": [asdict(s) for s in runner.steps], "traced": traced})
        args.output.write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
