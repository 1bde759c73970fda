# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Programmatic dependent launch: a kernel is set up on the device while the one before it still runs.

A kernel that takes part calls ``await_inputs(PDL)`` before it reads what an earlier kernel wrote, and is launched
with ``**pdl(device)``. There it waits for the whole of the kernel before it, then lets the next one be set up.
Hopper and later; elsewhere (and interpreted) nothing changes. CUDA programming guide, "programmatic dependent launch".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def await_inputs(PDL: tl.constexpr, EARLY: tl.constexpr = False):
    """EARLY: the next kernel is set up while this one still waits; pays where that one has weights to fetch ahead."""
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()


def pdl(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch."""
    if device.type == "cuda" and _supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _supported(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
