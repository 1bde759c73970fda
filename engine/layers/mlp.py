"""The gated feed-forward layer: merged gate and up projection, SwiGLU, down projection, and the norm after it."""

from __future__ import annotations

import torch

from engine.kernels import Kernels, Normed
from engine.model_config import ModelConfig
from engine.weights import Weights


class GatedMLP:
    """``residual + down(silu(gate(x)) * up(x))``, and its norm by ``next_norm``, which whatever follows begins with."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, kernels: Kernels, next_norm: torch.Tensor
    ) -> None:
        prefix = f"model.layers.{layer}.mlp."
        inner, hidden = config.intermediate_size, config.hidden_size
        halves = ("gate_proj", "up_proj")
        self._gate_up = kernels.gated_linear(
            torch.cat([weights.take(f"{prefix}{name}.weight", (inner, hidden)) for name in halves]),
            torch.cat([weights.take(f"{prefix}{name}.bias", (inner,)) for name in halves]) if config.mlp_bias else None,
        )
        self._down = kernels.linear_add_norm(
            weights.take(f"{prefix}down_proj.weight", (hidden, inner)),
            weights.take(f"{prefix}down_proj.bias", (hidden,)) if config.mlp_bias else None,
            next_norm,
            config.rms_norm_eps,
            # What the last layer leaves is gathered and kept before anything multiplies it.
            plain=layer == config.num_layers - 1,
        )

    def __call__(self, normed: Normed, residual: torch.Tensor) -> tuple[Normed, torch.Tensor]:
        """Both [T, hidden] -> the next norm's output and the residual, likewise; ``residual`` may be overwritten."""
        return self._down(self._gate_up(normed), residual)
