"""Models of true shapes with random weights, made on the device: no checkpoint is needed to measure speed.

Owns the two shapes of docs/performance.md and a stand-in for ``WeightReader``. Used by ``bench.gpu_engine``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch

from engine.gpu_runner import WeightSource
from engine.weights import WeightReader

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    },
}


class RandomWeights:
    """Each tensor drawn when it is taken; norms are ones."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, 0.02, generator=self._generator)

    def discard(self, name: str) -> None:
        return


def write_config(name: str, directory: Path) -> str:
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(directory)


def random_weights(directory: Path, dtype: torch.dtype, device: torch.device) -> WeightReader:
    """A ``WeightSource``."""
    return cast(WeightReader, RandomWeights(dtype, device))


SOURCE: WeightSource = random_weights
