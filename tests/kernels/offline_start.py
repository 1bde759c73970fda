"""A GPU engine's start on a device that computes nothing: which kernels it launches, and what they become.

As a program it compiles all of them for one architecture, with an empty cache and without a GPU, and prints what each
took:

    python -m tests.kernels.offline_start [--arch 120] [--model qwen3-0.6b] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
from triton import knobs

from bench.random_models import SHAPES
from engine import gpu_runner
from engine.config import EngineConfig
from engine.devices import config_for_device
from engine.gpu_runner import GpuRunner
from engine.model_config import ModelConfig
from tests.kernels.offline_gpu import SHARED_BYTES, Compiled, Launch, offline_gpu


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


def start(arch: int, model: str, **options: Any) -> list[Launch]:
    """What the start launches, with two layers: the others launch what these do."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps({**SHAPES[model], "num_hidden_layers": 2}))
        config = config_for_device({"model": name, "device": "cuda", **options})
        with offline_gpu(arch) as launches, mock.patch.object(gpu_runner, "open_weights", _open_weights):
            GpuRunner(config)
    return list(launches.values())


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # ptxas
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=SHARED_BYTES)
    parser.add_argument("--model", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    found: list[Compiled] = []
    with tempfile.TemporaryDirectory() as cache, mock.patch.object(knobs.cache, "dir", cache):
        since_s = _cpu_s()
        for one in start(args.arch, args.model):
            before_s = _cpu_s()
            built = one.compile()
            found.append(built)
            print(
                f"sm_{args.arch} {built.name:<24}{_cpu_s() - before_s:>6.2f} s{built.registers:>5} registers"
                f"{built.stack_bytes:>6} B of stack{built.shared_bytes:>8} B shared"
            )
        print(f"sm_{args.arch} {args.model}: {_cpu_s() - since_s:.1f} s of CPU")
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main()
