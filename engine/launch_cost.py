"""Which steps the device may be through with before the host has launched them kernel by kernel.

Owns that estimate, from a model's shape; the GPU runner's forward pass has graphs for such steps. No CUDA.
"""

from __future__ import annotations

from engine.model_config import ModelConfig

_LAYER_S = 1.5e-3
"""Twice what a layer's launches took a slow core of a server (0.73 ms); a fast one's took half of that."""
_FLOPS = 700e12
"""An H200's products of many rows. Slower devices need fewer graphs than they get."""
_ANY_MODEL_TOKENS = 2048
"""Up to here steps run from graphs whatever the model: smaller ones are often mixed with others, or cut short."""


class LaunchCost:
    def __init__(self, config: ModelConfig) -> None:
        heads = 2 * config.num_heads + 2 * config.num_kv_heads
        layer_weights = config.hidden_size * (config.head_dim * heads + 3 * config.intermediate_size)
        self.max_tokens = max(_ANY_MODEL_TOKENS, int(_LAYER_S * _FLOPS / (2 * layer_weights)))
        """Of a step without attention. 2 flops a weight and token."""
        self._pairs_a_token = max(1, layer_weights // (2 * config.num_heads * config.head_dim))
        """Pairs of a query and a key, 4 flops a column each, that cost what a token's products do."""

    def may_exceed(self, tokens: int, pairs: int) -> bool:
        """Whether it may take longer than the device takes for so many tokens and pairs of a query and a key."""
        return tokens <= _ANY_MODEL_TOKENS or tokens + pairs // self._pairs_a_token <= self.max_tokens
