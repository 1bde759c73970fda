"""A GPU engine's start on a device that computes nothing: which kernels it launches, and what they become.

As a program it compiles all of them for one architecture, with an empty cache and without a GPU, and prints what each
took:

    python -m tests.kernels.offline_start [--arch 120] [--model qwen3-0.6b] [--output FILE]
    python -m tests.kernels.offline_start --threads 8      as an engine with that many cores does it
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
from triton import knobs

from bench.random_models import SHAPES
from engine import gpu_runner
from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.devices import config_for_device
from engine.gpu_runner import GpuRunner
from engine.kernels.launch import PATIENCE_S, compile_ahead
from engine.messages import AddRequest
from engine.model_config import ModelConfig
from engine.model_runner import OnLayers
from tests.kernels.offline_gpu import SHARED_BYTES, Launches, offline_gpu, read_cache


class _FakeWeights:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def discard(self, name: str) -> None: ...


def _open_weights(
    config: EngineConfig, directory: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[_FakeWeights, str]:
    return _FakeWeights(dtype, device), "fake"


class _Blind:
    """An engine's runner that launches its steps and draws zeros."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.num_blocks, self.max_model_len = runner.num_blocks, runner.max_model_len
        self.eos_token_ids, self.vocab_size = runner.eos_token_ids, runner.vocab_size
        self.model_fingerprint = runner.model_fingerprint

    def run(self, batch: ScheduledBatch, on_layers: OnLayers | None = None) -> SampledBatch:
        self._runner.launch(batch, on_layers)
        return SampledBatch([0 if item.needs_sample else None for item in batch.items], [None] * len(batch.items))


def serve(runner: GpuRunner, requests: Sequence[AddRequest]) -> None:
    """All at once, to their ends."""
    core = EngineCore(runner.config, _Blind(runner))
    for request in requests:
        core.add(request)
    while core.has_work():
        errors = [output.error_message for output in core.step().outputs if output.error_message]
        assert not errors


@contextmanager
def engine(arch: int, model: str, *, compiles: bool, **options: Any) -> Iterator[tuple[GpuRunner, Launches]]:
    """Started, with a few layers: more launch the same. ``options`` are the engine's, ``shape`` changes the model's."""
    shape = {**SHAPES[model], "num_hidden_layers": 4, **options.pop("shape", {})}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(shape))
        config = config_for_device({"model": name, "device": "cuda", **options})
        with (
            offline_gpu(arch, compiles=compiles) as launches,
            mock.patch.object(gpu_runner, "open_weights", _open_weights),
        ):
            yield GpuRunner(config), launches


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # ptxas
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=SHARED_BYTES)
    parser.add_argument("--model", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1, help="that compile; 0: no compiling ahead")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for compiling ahead")
    parser.add_argument("--small", action="store_true", help="an engine of few requests and tokens a step")
    parser.add_argument("--output", type=Path, help="JSON: what the kernels became, and which were not compiled ahead")
    args = parser.parse_args()
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64} if args.small else {}
    with tempfile.TemporaryDirectory() as cache, ExitStack() as stack:
        stack.enter_context(mock.patch.object(knobs.cache, "dir", cache))
        ahead = partial(compile_ahead, args.threads, args.patience) if args.threads else nullcontext
        stack.enter_context(mock.patch.object(gpu_runner, "compile_ahead", ahead))
        since_s, cpu_s = time.monotonic(), _cpu_s()
        with engine(args.arch, args.model, compiles=True, **options) as (_, launches):
            took_s, used_s = time.monotonic() - since_s, _cpu_s() - cpu_s
        found = read_cache(Path(cache))
    for one in sorted(found, key=lambda one: one.name):
        print(
            f"sm_{args.arch} {one.name:<24}{one.registers:>5} registers{one.stack_bytes:>6} B of stack"
            f"{one.shared_bytes:>8} B shared"
        )
    print(
        f"sm_{args.arch} {args.model}: {len(launches.ahead)} ahead by {args.threads} threads, {len(launches.run)} when "
        f"launched, {took_s:.1f} s, {used_s:.1f} s of CPU"
    )
    if args.output is not None:
        late = sorted(name for name, _ in launches.run)
        args.output.write_text(json.dumps({"kernels": [asdict(one) for one in found], "when_launched": late}))


if __name__ == "__main__":
    main()
