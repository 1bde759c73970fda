"""Which device each worker of ``pdserve up`` gets. Torch-free: ``up`` starts the workers before anything that is slow.

On GPUs workers are dealt out in turn, prefill first, and those that meet on one share its memory in equal parts.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pdserve.up.errors import UpError


def assign_devices(asked: str, num_workers: int, num_gpus: int) -> list[str]:
    """A device for each worker. ``asked``: see ``UpSettings.device``.

    Raises: UpError, when a GPU is asked for that is not there.
    """
    if asked == "cpu" or (asked == "auto" and not num_gpus):
        return ["cpu"] * num_workers
    if not num_gpus:
        raise UpError(f"--device {asked}: there is no NVIDIA GPU, or torch is built without CUDA; use --device cpu")
    if asked in ("auto", "cuda"):
        return [f"cuda:{worker % num_gpus}" for worker in range(num_workers)]
    if int(asked.removeprefix("cuda:")) >= num_gpus:
        raise UpError(f"--device {asked}: the last GPU here is cuda:{num_gpus - 1}")
    return [asked] * num_workers


def memory_parts(devices: Sequence[str], utilization: float) -> list[float]:
    """Of each worker: the part of its device's memory that it may take."""
    sharing = Counter(devices)
    return [round(utilization / sharing[device], 4) for device in devices]


def count_gpus() -> int:
    """How many CUDA devices a worker would see."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib/libtorch_cuda.so").exists():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()])
