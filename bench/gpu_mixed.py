"""What a step costs on a GPU that computes some prompt tokens beside decodes: what an ITL budget has to learn.

    python -m bench.gpu_mixed --model llama-3.1-8b --output mixed.json [--decodes 4,60] [--context 2200]

A number of requests decodes all the time; beside them a prompt is computed in steps of so many tokens, one size after
the other. A step's time is that between its results and those of the step before, as the engine itself sees it; beside
it stands how long the host took to launch it: a mixed step is launched in pieces, so a small one may wait for that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

from bench.gpu_burst import Step, WatchedRunner, finish
from bench.gpu_engine import Bench
from bench.random_models import SHAPES
from engine.core import EngineCore
from engine.messages import AddRequest, SamplingParams

SIZES = (0, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 768, 1024)
STEPS = 12
"""Of each size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--decodes", default="4,60")
    parser.add_argument("--context", type=int, default=2200, help="tokens that each of them has")
    args = parser.parse_args()
    WatchedRunner.steps = []
    bench = Bench(args.model, args.output, runner_class=WatchedRunner)
    raw = []
    print(f"{'decodes':>8}{'prompt tokens':>14}{'ms':>8}{'p90':>8}{'launch ms':>11}{'us a token':>12}", flush=True)
    for decodes in (int(part) for part in args.decodes.split(",")):
        alone_ms = 0.0
        for size, steps in _timed(bench, decodes, args.context):
            took_ms = [step.took_ms for step in steps]
            alone_ms = alone_ms or median(took_ms)
            us = 1e3 * (median(took_ms) - alone_ms) / size if size else 0.0
            launch_ms = median(step.launch_ms for step in steps)
            p90_ms = quantiles(took_ms, n=10)[-1]
            print(
                f"{decodes:>8}{size:>14}{median(took_ms):>8.2f}{p90_ms:>8.2f}{launch_ms:>11.2f}{us:>12.1f}", flush=True
            )
            raw += [asdict(step) for step in steps]
    args.output.write_text(json.dumps(raw))


def _timed(bench: Bench, decodes: int, context: int) -> list[tuple[int, list[Step]]]:
    """Steps of each of ``SIZES`` beside so many decodes."""
    core, runner = bench.core(), bench.runner
    assert isinstance(runner, WatchedRunner)
    for number in range(decodes):
        _add(core, f"decode {number}", bench.prompt(context), 10_000)
    while any(request.num_computed_tokens < context for request in core.scheduler.requests.values()):
        core.step()
    found = []
    for size in SIZES:
        runner.steps = []
        # A step takes as many prompt tokens as its decodes leave.
        tokens = decodes + size if size else bench.config.max_num_batched_tokens
        core.scheduler.config = dataclasses.replace(bench.config, max_num_batched_tokens=tokens)
        if size:
            _add(core, f"prompt {size}", bench.prompt(STEPS * size), 1)
        for _ in range(STEPS + 3):
            core.step()
        finish(runner.steps, SHAPES[bench.model])
        found.append((size, [step for step in runner.steps[1:] if step.took_ms and step.load.prefill_tokens == size]))
    core.abort(list(core.scheduler.requests), "measured")
    while core.has_work():
        core.step()
    return found


def _add(core: EngineCore, request_id: str, prompt: list[int], max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.add(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, timeout_s=3600.0))


if __name__ == "__main__":
    main()
