"""A random Llama in a Hugging Face directory, small enough that a step takes a millisecond."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 300, 64, 128, 6, 4, 2, 16
MAX_MODEL_LEN = 8192


def write_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Weights are large, so that tokens differ and ties do not happen."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
