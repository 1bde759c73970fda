"""The shape of a model, read from a Hugging Face ``config.json`` by our own parser.

Owns what a decoder of the Llama family needs to know about itself; not its weights. Read by the model runner once.
Both spellings of rope settings are understood: ``rope_theta`` + ``rope_scaling`` (transformers 4) and
``rope_parameters`` (transformers 5). What is not supported is refused by name: a silently ignored key is a wrong model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3")

# What transformers assumes when a key is absent, per architecture; every other absent key is an error.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 128},
}
ARCHITECTURES = tuple(_DEFAULTS)


class UnsupportedModelError(ValueError):
    """The model asks for something that this engine does not do; the message lists what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; the last three fields are used by ``llama3`` only, ``factor`` not by ``default``."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: a query sees itself and the ``window - 1`` tokens before it; None: all before it."""
    dtype: str
    eos_token_ids: tuple[int, ...]


def load_model_config(directory: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for the end-of-sequence ids).

    Raises:
        UnsupportedModelError: the model needs something that is not implemented.
        FileNotFoundError: there is no ``config.json``.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a Hugging Face model directory or a hub name (org/name)")
    generation_path = directory / "generation_config.json"
    generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
    return parse_model_config(json.loads(path.read_text()), generation)


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Translate the parsed JSON; see :func:`load_model_config`."""
    named = raw.get("architectures") or ["(none named)"]
    architecture = next((name for name in named if name in _DEFAULTS), None)
    if architecture is None:
        raise UnsupportedModelError(
            f"architecture {', '.join(named)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    config = {**_DEFAULTS[architecture], **raw}
    _refuse_unsupported(config)

    num_layers = int(_required(config, "num_hidden_layers"))
    num_heads = int(_required(config, "num_attention_heads"))
    hidden_size = int(_required(config, "hidden_size"))
    attention_bias = bool(config.get("attention_bias", False))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(_required(config, "vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(_required(config, "intermediate_size")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(config),
        max_position_embeddings=int(_required(config, "max_position_embeddings")),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or (attention_bias and architecture != "MistralForCausalLM"),
        o_bias=attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_parse_windows(config, architecture, num_layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UnsupportedModelError(f"config.json has no {key!r}: it is not the configuration of a whole decoder")
    return config[key]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        raise UnsupportedModelError(
            f"quantized weights ({method}) are not supported; supported: float32, bfloat16 and float16 safetensors"
        )


def _parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError("rope settings per layer type are not supported; supported: one for all layers")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if rope_type == "default":
        return RopeConfig(theta=float(theta))
    if rope_type == "linear":
        return RopeConfig(theta=float(theta), rope_type="linear", factor=float(_required(scaling, "factor")))
    return RopeConfig(
        theta=float(theta),
        rope_type="llama3",
        factor=float(_required(scaling, "factor")),
        low_freq_factor=float(_required(scaling, "low_freq_factor")),
        high_freq_factor=float(_required(scaling, "high_freq_factor")),
        original_max_position_embeddings=int(_required(scaling, "original_max_position_embeddings")),
    )


def _parse_windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = int(config.get("max_window_layers", 28))
        layer_types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = sorted(set(layer_types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer type {', '.join(unknown)} is not supported; supported: full_attention, sliding_attention"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
