"""Reading config.json: against the configurations of transformers, both rope spellings, refusals by name."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from engine.layers.rope import rope_table
from engine.model_config import RopeConfig, UnsupportedModelError, load_model_config, parse_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_llama() -> None:
    config = parse_model_config(LLAMA)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 8)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.windows == (None,) * 4
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings))
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(theta=1e4, rope_type="linear", factor=4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            RopeConfig(
                theta=5e5,
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=128,
            ),
        ),
    ],
)
def test_both_spellings_of_rope(changes, expected) -> None:
    assert parse_model_config({**LLAMA, **changes}).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn' is not supported; supported: default, linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_model_config({**LLAMA, **changes})


def test_windows() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert parse_model_config(mistral).windows == (4096,) * 4  # what transformers assumes
    assert parse_model_config({**mistral, "sliding_window": None}).windows == (None,) * 4
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}
    assert parse_model_config(qwen).windows == (None,) * 4
    assert parse_model_config({**qwen, "use_sliding_window": True}).windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse_model_config({**qwen, "use_sliding_window": True, "layer_types": kinds}).windows == (
        32,
        None,
        32,
        None,
    )


def test_end_of_sequence_ids_of_the_generation_config_win(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model_config(tmp_path).eos_token_ids == (5, 6)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_defaults_of_transformers(family) -> None:
    """A config saved by transformers with nothing but its own defaults reads as transformers reads it."""
    theirs = getattr(transformers, f"{family}Config")()
    config = parse_model_config({**theirs.to_dict(), "architectures": [f"{family}ForCausalLM"]})
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.windows[0] == (theirs.sliding_window if family == "Mistral" else None)
    assert config.qkv_bias == (family == "Qwen2")
    assert config.qk_norm == (family == "Qwen3")


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}, LLAMA3])
def test_rope_table_is_that_of_transformers(rope) -> None:
    theirs = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=600, rope_parameters={"rope_theta": 5e4, **rope}
    )
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    table = rope_table(parse_model_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope, 64, 600)
    cos, sin = embedding(torch.zeros(1, 1), torch.arange(600)[None])
    torch.testing.assert_close(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), -1), rtol=0, atol=2e-6)
