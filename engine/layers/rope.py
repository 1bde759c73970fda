"""The table of rotary position embeddings: computed once per model, read by the ``rope_kv_write`` kernel.

RoPE: Su et al. 2021, RoFormer, section 3.2.2, in the half-rotated form of GPT-NeoX that Hugging Face checkpoints use.
"""

from __future__ import annotations

import math

import torch

from engine.model_config import RopeConfig


def rope_table(config: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """[num_positions, head_dim] float32: the cosines of the head_dim / 2 frequencies, then the sines."""
    frequencies = _inverse_frequencies(config, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    frequencies = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        # Slow frequencies are stretched by the factor, fast ones kept, those between interpolated (Llama 3.1's code).
        rotations = config.original_max_position_embeddings / (2 * math.pi / frequencies)
        span = config.high_freq_factor - config.low_freq_factor
        keep = ((rotations - config.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - keep) * frequencies / config.factor + keep * frequencies
    return frequencies
