"""Which runner serves which device. A new one is a module and a line in ``RUNNERS``; the others are not imported."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.warm_up import warm_up

if TYPE_CHECKING:
    from engine.gpu_runner import GpuRunner
    from engine.model_runner import ModelRunner

RUNNERS = {"cpu": "engine.model_runner:ModelRunner", "cuda": "engine.gpu_runner:GpuRunner"}


def build_runner(config: EngineConfig) -> ModelRunner | GpuRunner:
    """The runner of ``config.device`` with its model loaded, as fast at the first request as later.

    Raises:
        ValueError: no runner for such a device, or none of its kind is here.
    """
    kind = torch.device(config.device).type
    if kind not in RUNNERS:
        raise ValueError(f"device {config.device!r} is not supported: use {' or '.join(RUNNERS)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {config.device!r}: torch finds no CUDA device here; use --device cpu")
    module, _, attribute = RUNNERS[kind].partition(":")
    runner: ModelRunner | GpuRunner = getattr(import_module(module), attribute)(config)
    if kind == "cpu":  # a GPU's runner captures its graphs by itself
        warm_up(runner)
    return runner
