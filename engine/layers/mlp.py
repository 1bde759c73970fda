"""The gated feed-forward layer: merged gate and up projection, SwiGLU, down projection."""

from __future__ import annotations

import torch

from engine.kernels import Kernels
from engine.model_config import ModelConfig
from engine.weights import Weights


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, kernels: Kernels) -> None:
        prefix = f"model.layers.{layer}.mlp."
        inner, hidden = config.intermediate_size, config.hidden_size
        halves = ("gate_proj", "up_proj")
        self._gate_up = kernels.gated_linear(
            torch.cat([weights.take(f"{prefix}{name}.weight", (inner, hidden)) for name in halves]),
            torch.cat([weights.take(f"{prefix}{name}.bias", (inner,)) for name in halves]) if config.mlp_bias else None,
        )
        self._down = kernels.linear(
            weights.take(f"{prefix}down_proj.weight", (hidden, inner)),
            weights.take(f"{prefix}down_proj.bias", (hidden,)) if config.mlp_bias else None,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down(self._gate_up(x))
