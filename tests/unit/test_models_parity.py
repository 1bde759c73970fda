"""Greedy output of tiny random models of every family equals that of transformers, token for token, in float32.

A first divergence counts as a tie only where the oracle's own top-2 margin is under 1e-4.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.kernels import load_kernels
from engine.model_runner import ModelRunner
from tests.unit.engine_driver import Driver, make_request

BACKENDS = ("native", "torch")
NUM_TOKENS = 24
PROMPT_LENS = (1, 7, 33, 64)
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-48": ("Llama", {"head_dim": 48}),
    "llama-mha-head-dim-20": ("Llama", {"head_dim": 20, "num_key_value_heads": 4}),
    "llama-mqa-128": ("Llama", {"head_dim": 128, "num_key_value_heads": 1}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 20, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
}


def save_tiny_model(name: str, directory: Path, **save_options: object) -> transformers.PreTrainedModel:
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases start at zero and norms at one: make them matter.
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, **save_options)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def oracle_output(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


def assert_equal_or_tied(model: transformers.PreTrainedModel, prompt: list[int], ours: list[int]) -> None:
    theirs = oracle_output(model, prompt)
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.no_grad():
        top = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1].topk(2).values
    assert top[0] - top[1] < 1e-4, f"differs at token {at}: {ours[at]} for {theirs[at]}, margin {top[0] - top[1]}"


def runner_for(directory: Path, backend: str = "torch", **config: object) -> ModelRunner:
    settings = {"model": str(directory), "num_blocks": 64, "block_size": 16, **config}
    return ModelRunner(EngineConfig(**settings), load_kernels(backend))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[transformers.PreTrainedModel, Path]]:
    made = {}
    for name in MODELS:
        directory = tmp_path_factory.mktemp(name)
        made[name] = (save_tiny_model(name, directory), directory)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers(tiny_models, name: str, backend: str) -> None:
    model, directory = tiny_models[name]
    runner = runner_for(directory, backend)
    requests = [make_request(prompt) for prompt in prompts()]
    for request, ours in zip(requests, Driver(runner).generate(requests, NUM_TOKENS), strict=True):
        assert_equal_or_tied(model, request.prompt_token_ids, ours)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (5, 16), (16, 32), (17, 48), (64, 128)])
@pytest.mark.parametrize("name", ["llama-tied", "mistral-window"])
def test_chunks_and_block_sizes_change_nothing(tiny_models, name, chunk, block_size, backend) -> None:
    model, directory = tiny_models[name]
    runner = runner_for(directory, backend, block_size=block_size, num_blocks=64)
    requests = [make_request(prompt) for prompt in prompts()]
    for request, ours in zip(requests, Driver(runner, chunk).generate(requests, NUM_TOKENS), strict=True):
        assert_equal_or_tied(model, request.prompt_token_ids, ours)


def test_joining_a_running_batch_changes_nothing(tiny_models) -> None:
    model, directory = tiny_models["llama"]
    driver = Driver(runner_for(directory), chunk=8)
    requests = [make_request(prompt) for prompt in prompts()]
    for joined in range(1, len(requests)):
        for _ in range(2):
            driver.step(requests[:joined])
    for request, ours in zip(requests, driver.generate(requests, NUM_TOKENS), strict=True):
        assert_equal_or_tied(model, request.prompt_token_ids, ours[:NUM_TOKENS])


def test_a_resumed_request_continues_as_if_never_interrupted(tiny_models) -> None:
    _, directory = tiny_models["qwen3"]
    driver = Driver(runner_for(directory))
    whole = make_request(prompts()[2])
    driver.generate([whole], NUM_TOKENS)
    resumed = make_request(whole.prompt_token_ids, whole.output_token_ids[:9])
    driver.generate([resumed], NUM_TOKENS)
    assert resumed.output_token_ids == whole.output_token_ids


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = save_tiny_model("qwen2", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    requests = [make_request(prompt) for prompt in prompts()]
    for request, ours in zip(requests, Driver(runner_for(tmp_path)).generate(requests, NUM_TOKENS), strict=True):
        assert_equal_or_tied(model, request.prompt_token_ids, ours)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(tiny_models, name: str, backend: str) -> None:
    """Teacher-forced logits over a prompt, one token a step: the yardstick is the error of transformers in bfloat16."""
    model, directory = tiny_models[name]
    prompt = prompts()[-1]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        exact = model(ids).logits[0].log_softmax(-1)
        usual = (copy.deepcopy(model).bfloat16()(ids).logits[0].float().log_softmax(-1) - exact).abs()
    driver = Driver(runner_for(directory, backend, dtype="bfloat16"))
    rows: list[torch.Tensor] = []
    blocks: list[int] = []
    for end in range(1, len(prompt) + 1):
        request = make_request(prompt[:end], logprobs=320)
        request.block_table, request.num_computed_tokens = blocks, end - 1
        (logprobs,) = driver.step([request]).logprobs
        blocks = request.block_table
        rows.append(
            torch.empty(320).scatter_(0, torch.tensor(logprobs.top_token_ids), torch.tensor(logprobs.top_logprobs))
        )
    error = (torch.stack(rows) - exact).abs()
    assert error.mean() < 1.25 * usual.mean()
    assert error.max() < 2 * usual.max()
