"""Which device an engine runs on, and which sizes suit it.

Owns the defaults that differ by device; what was given always wins. Called by the services' ``engine_main``, before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.config import EngineConfig

_GPU_SIZES = {"block_size": 64, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}
"""Attention reads whole blocks by one TMA copy, so large ones pay; a step must be large to fill the device."""


def resolve_device(asked: str | None) -> str:
    """None and ``auto``: the first CUDA device, or the CPU where torch finds none."""
    if asked is not None and asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def config_for_device(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of those given fields, on the device that they ask for.

    Raises:
        ValueError: a field is wrong; the message names the remedy.
    """
    device = resolve_device(options.get("device"))
    sizes = _GPU_SIZES if device.startswith("cuda") else {}
    return EngineConfig(**{**sizes, **options, "device": device})
