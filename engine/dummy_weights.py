"""Random weights in the shapes that a model asks for: to measure speed without a checkpoint.

``--load-format dummy`` needs a directory with a config.json (and a tokenizer, for the gateway) and nothing else. The
same device type draws the same weights, so that workers apart agree.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash

from engine.config import EngineConfig
from engine.model_config import ModelConfig
from engine.weights import WeightReader, Weights, model_fingerprint

_STD = 0.02


class DummyWeights:
    """See ``engine.weights.Weights``. Norms are ones, the rest is normal."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _STD, generator=self._generator)

    def discard(self, name: str) -> None: ...


def open_weights(
    config: EngineConfig, directory: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Weights, str]:
    """What ``config.load_format`` says, and the fingerprint: equal for engines that may share KV."""
    if config.load_format == "dummy":
        return DummyWeights(dtype, device), "dummy-" + xxhash.xxh3_128(f"{model!r} {device.type}".encode()).hexdigest()
    return WeightReader(directory, dtype, device), model_fingerprint(directory, model)
