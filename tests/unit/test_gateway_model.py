"""What the gateway reads from a model directory, and the sampling parameters that follow from it and from a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.model import ServedModel, load_model
from gateway.openai import CompletionRequest, parse
from gateway.sampling import choice_seed, prompt_seed, sampling_params, token_budget
from pdserve.v1 import inference_pb2 as pb
from tests.unit.tiny_tokenizers import byte_level

CONFIG = {"max_position_embeddings": 512, "vocab_size": 400}


def write_model(directory: Path, **files: Any) -> Path:
    byte_level()._backend.save(str(directory / "tokenizer.json"))
    for name, content in {"config": CONFIG, **files}.items():
        path = directory / (name.replace("_jinja", "") + (".jinja" if name.endswith("_jinja") else ".json"))
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def request(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, {"model": "m", "prompt": "x", **fields})


def params(model: ServedModel, **fields: Any) -> pb.SamplingParams:
    return sampling_params(request(**fields), model, max_tokens=16, logprobs=None)


def test_generation_config_holds_where_the_client_is_silent(tmp_path: Path) -> None:
    defaults = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": None, "repetition_penalty": 1.25}
    model = load_model(write_model(tmp_path, generation_config=defaults), "m")
    silent = params(model)
    assert (silent.temperature, silent.top_p, silent.top_k) == (0.5, 0.75, 20)
    assert (silent.min_p, silent.repetition_penalty) == (0, 1.25)
    said = params(model, temperature=0, top_p=1, top_k=0, repetition_penalty=1)
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty) == (0, 1, 0, 1)


def test_openai_defaults_without_generation_config(tmp_path: Path) -> None:
    silent = params(load_model(write_model(tmp_path), "m"))
    assert (silent.temperature, silent.top_p, silent.top_k, silent.repetition_penalty) == (1, 1, 0, 1)


def test_top_k_and_top_p_at_their_ends(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path), "m")
    assert params(model, top_k=-1).top_k == 0
    nucleus = params(model, top_p=0)
    assert (nucleus.top_k, nucleus.top_p) == (1, 1)


def test_model_length(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert load_model(tmp_path, "m").max_model_len == 512
    assert load_model(tmp_path, "m", 100).max_model_len == 100
    with pytest.raises(ValueError, match="use at most"):
        load_model(tmp_path, "m", 513)
    write_model(tmp_path, config={"vocab_size": 400})
    with pytest.raises(ValueError, match="--max-model-len"):
        load_model(tmp_path, "m")
    write_model(tmp_path, config={"text_config": {"max_position_embeddings": 64}})
    assert load_model(tmp_path, "m").max_model_len == 64


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path, "m")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_model(tmp_path, "m")


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template_jinja": "{{ bos_token }}T"},
        {"chat_template": {"chat_template": "{{ bos_token }}T"}},
        {"tokenizer_config": {"chat_template": "{{ bos_token }}T", "bos_token": {"content": "<b>"}}},
        {
            "tokenizer_config": {
                "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "<b>T"}]
            }
        },
    ],
)
def test_where_the_chat_template_may_lie(tmp_path: Path, files: dict[str, Any]) -> None:
    files.setdefault("tokenizer_config", {"bos_token": "<b>"})
    template = load_model(write_model(tmp_path, **files), "m").chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<b>T"


def test_no_chat_template(tmp_path: Path) -> None:
    assert load_model(write_model(tmp_path), "m").chat_template is None


def test_token_budget(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path), "m")
    assert token_budget(model, 500, None, None, "messages") == 12
    assert token_budget(model, 500, None, 16, "prompt") == 12
    assert token_budget(model, 10, None, 16, "prompt") == 16
    assert token_budget(model, 10, None, None, "messages", pool_tokens=100) == 90
    assert token_budget(model, 10, 200, None, "messages", pool_tokens=100) == 200  # asked for: the worker refuses it
    assert token_budget(model, 500, 12, None, "messages") == 12
    for prompt_tokens, asked in ((500, 13), (512, None), (600, 1)):
        with pytest.raises(GatewayError) as caught:
            token_budget(model, prompt_tokens, asked, None, "messages")
        assert caught.value.code == "context_length_exceeded"


def test_seeds() -> None:
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(7, i) for i in range(100)} | {choice_seed(8, i) for i in range(100)}
    assert len(seeds) == 200
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert choice_seed(7, 1) == choice_seed(7, 1) == 2174948161648732372
    assert prompt_seed(-1) == (1 << 64) - 1
    assert prompt_seed(None) != prompt_seed(None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_text('{"model": ')
    with pytest.raises(ValueError, match=rf"{name} .*fetch the model again"):
        load_model(tmp_path, "m")
