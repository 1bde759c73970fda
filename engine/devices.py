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


_GPU_ROLES: dict[str, dict[str, Any]] = {
    # A step is launched as a whole, before the device has computed any of it, and one receiver of several may have half
    # of the staging.
    "prefill": {"staged_steps": 2},
    # A GPU that decodes waits for memory and has computing power to spare. On CPUs all workers of a host share the
    # cores, and what a decode worker computes for the others its own streams pay for (docs/adr/0007).
    "decode": {"itl_budget_ms": 14.0},
}


def resolve_device(asked: str | None) -> str:
    """None and ``auto``: the first CUDA device, or the CPU where torch finds none."""
    if asked is not None and asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def config_for_device(options: Mapping[str, Any], role: str = "") -> EngineConfig:
    """The configuration of those given fields, on the device that they ask for. ``role``: prefill, decode, aggregated.

    Raises:
        ValueError: a field is wrong; the message names the remedy.
    """
    device = resolve_device(options.get("device"))
    defaults: dict[str, Any] = {}
    if device.startswith("cuda"):
        defaults = {**_GPU_SIZES, **_GPU_ROLES.get(role, {})}
    return EngineConfig(**{**defaults, **options, "device": device})
