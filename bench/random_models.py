"""Models of true shapes and random weights: no checkpoint is needed to measure speed.

Owns the two shapes of docs/performance.md, and what a model directory of theirs holds. Used by the GPU benchmarks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.dummy_weights import DummyWeights

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


def write_model(name: str, directory: Path, *, with_tokenizer: bool = False) -> str:
    """What ``--load-format dummy`` needs: the configuration, and for a gateway a tokenizer with a text for every id."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    if with_tokenizer:
        write_tokenizer(SHAPES[name]["vocab_size"], directory)
    return str(directory)


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    """One with a text for every id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # \u0120 is how a byte-level tokenizer spells a space.
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"\u0120w{index}" for index in range(len(words), vocab_size)]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[0])  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(directory)


def write_checkpoint(name: str, directory: Path, device: torch.device) -> int:
    """The same with files of random weights, a shard a layer, to measure loading; their bytes."""
    write_model(name, directory)
    shape = SHAPES[name]
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q_size, kv_size = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    whole = {"model.embed_tokens": (shape["vocab_size"], hidden), "model.norm": (hidden,)}
    if not shape["tie_word_embeddings"]:
        whole["lm_head"] = (shape["vocab_size"], hidden)
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden), "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    if shape["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shards = [whole]
    shards += [
        {f"model.layers.{i}.{key}": size for key, size in layer.items()} for i in range(shape["num_hidden_layers"])
    ]
    weights = DummyWeights(torch.bfloat16, device)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        tensors = {f"{key}.weight": weights.take(f"{key}.weight", size).cpu() for key, size in shard.items()}
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes
