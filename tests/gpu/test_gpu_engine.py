"""The engine on a CUDA device against the engine on the CPU: graphs, steps launched ahead, sampling, cascade."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.batch import ScheduledBatch, ScheduledItem
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.host_kv import HostKV
from engine.kernels import load_kernels
from engine.messages import AddRequest, RequestOutput, SamplingParams
from engine.model_runner import ModelRunner
from engine.request import Request, RequestStatus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, HIDDEN, INNER, DIM = 1000, 256, 512, 64


def write_model(
    directory: Path,
    dtype: torch.dtype,
    max_positions: int = 2048,
    layers: int = 3,
    heads: int = 8,
    kv_heads: int = 2,
    normed_heads: bool = True,
) -> str:
    generator = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 * 1.5).to(dtype)

    tensors = {
        "model.embed_tokens.weight": (torch.randn(VOCAB, HIDDEN, generator=generator)).to(dtype),
        "model.norm.weight": torch.ones(HIDDEN, dtype=dtype),
        "lm_head.weight": weight(VOCAB, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=dtype)
        for name in ("q_norm", "k_norm") if normed_heads else ():
            tensors[f"{prefix}self_attn.{name}.weight"] = torch.ones(DIM, dtype=dtype)
        tensors[f"{prefix}self_attn.q_proj.weight"] = weight(heads * DIM, HIDDEN)
        tensors[f"{prefix}self_attn.k_proj.weight"] = weight(kv_heads * DIM, HIDDEN)
        tensors[f"{prefix}self_attn.v_proj.weight"] = weight(kv_heads * DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = weight(HIDDEN, heads * DIM)
        tensors[f"{prefix}mlp.gate_proj.weight"] = weight(INNER, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = weight(INNER, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = weight(HIDDEN, INNER)
    save_file(tensors, str(directory / "model.safetensors"))
    config = {
        "architectures": ["Qwen3ForCausalLM" if normed_heads else "LlamaForCausalLM"],
        "model_type": "qwen3" if normed_heads else "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16" if dtype == torch.bfloat16 else "float32",
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("fp32"), torch.float32)


@pytest.fixture(scope="module")
def half_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("bf16"), torch.bfloat16)


def make_core(model: str, device: str, **options: object) -> EngineCore:
    settings: dict[str, object] = {
        "model": model, "device": device, "block_size": 16, "max_model_len": 512, "max_num_seqs": 12,
        "max_num_batched_tokens": 128, "num_blocks": 400, "layer_group_size": 2, **options,
    }  # fmt: skip
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    if device == "cpu":
        return EngineCore(config, ModelRunner(config, load_kernels("torch")))
    from engine.gpu_runner import GpuRunner

    return EngineCore(config, GpuRunner(config))


def prompt(index: int, length: int) -> list[int]:
    return [(index * 7919 + i * i * 31 + i * 17) % (VOCAB - 2) + 2 for i in range(length)]


def request(index: int, tokens: list[int], max_tokens: int, **sampling: object) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return AddRequest(request_id=f"r{index}", prompt_token_ids=tokens, sampling=params, timeout_s=1000.0)


def outputs_of(core: EngineCore, messages: list[AddRequest], every: int = 2) -> dict[str, list[RequestOutput]]:
    """Add a message every ``every`` steps (0: all at once), run to the end."""
    got: dict[str, list[RequestOutput]] = {message.request_id: [] for message in messages}
    waiting, steps = list(messages), 0
    while waiting or core.has_work():
        due = len(waiting) if not every else int(steps % every == 0)
        for message in waiting[:due]:
            core.add(message)
        waiting = waiting[due:]
        for output in core.step().outputs:
            assert output.error_message == ""
            got[output.request_id].append(output)
        steps += 1
    return got


def tokens_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {name: [t for output in found for t in output.token_ids] for name, found in outputs.items()}


def mixed_messages() -> list[AddRequest]:
    lengths = [1, 5, 16, 17, 63, 100, 130, 300, 31, 2, 200, 64, 40, 90, 7, 150]
    messages = [request(i, prompt(i % 13, n), 10 + 3 * (i % 7)) for i, n in enumerate(lengths)]
    shared = prompt(50, 96)
    messages += [request(20 + i, shared + prompt(60 + i, 5 + i), 20) for i in range(6)]
    return messages


def test_greedy_float32_equals_the_cpu(model: str) -> None:
    expected = tokens_of(outputs_of(make_core(model, "cpu"), mixed_messages()))
    assert tokens_of(outputs_of(make_core(model, "cuda"), mixed_messages())) == expected


def test_preempted_requests_resume_as_on_the_cpu(model: str) -> None:
    messages = [request(i, prompt(i, 10 + i), 60) for i in range(10)]
    expected = tokens_of(outputs_of(make_core(model, "cpu"), messages))
    core = make_core(model, "cuda", num_blocks=20)
    assert tokens_of(outputs_of(core, messages)) == expected
    assert core.stats().preemptions_total > 0


def test_preempted_requests_come_back_from_host_memory(model: str) -> None:
    messages = [request(i, prompt(i, 10 + i), 60) for i in range(10)]
    expected = tokens_of(outputs_of(make_core(model, "cpu"), messages))
    runner = make_core(model, "cuda", num_blocks=20).runner
    host_memory = HostKV(runner.kv_cache, 64 << 20)
    host_memory.bytes_per_s = math.inf  # else computing these few tokens again may be as cheap as their copies
    core = EngineCore(runner.config, runner, host_memory=host_memory)
    assert tokens_of(outputs_of(core, messages)) == expected
    assert core.stats().restored_blocks_total > 0


def test_one_step_at_a_time_gives_the_same(model: str) -> None:
    ahead = tokens_of(outputs_of(make_core(model, "cuda"), mixed_messages()))
    assert tokens_of(outputs_of(make_core(model, "cuda", async_scheduling=False), mixed_messages())) == ahead


@pytest.mark.parametrize("most", [4096, 4100])
def test_steps_of_thousands_of_tokens_equal_the_cpu(model: str, most: int) -> None:
    """From graphs of up to 4096 tokens; larger ones' last layer attends for the rows only that are drawn from."""
    lengths = [40, 9, 1700, 1800, 1300, 33, 2000, 1100]
    messages = [request(i, prompt(i, n), 12) for i, n in enumerate(lengths)]
    options = {"max_num_batched_tokens": most, "max_model_len": 2040, "num_blocks": 1000}
    expected = tokens_of(outputs_of(make_core(model, "cpu", **options), messages, every=0))
    assert tokens_of(outputs_of(make_core(model, "cuda", **options), messages, every=0)) == expected


def test_sampling_equals_the_cpu(model: str) -> None:
    def messages() -> list[AddRequest]:
        asked: list[dict[str, object]] = [
            {"temperature": 0.8, "seed": 1},
            {"temperature": 1.0, "seed": 2, "top_k": 20},
            {"temperature": 1.2, "seed": 3, "top_p": 0.9},
            {"temperature": 0.7, "seed": 4, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
            {"repetition_penalty": 1.3},
            {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"logit_bias": {17: 3.0, 400: -8.0}, "logprobs": 3},
            {"min_tokens": 8, "stop_token_ids": [3, 4]},
            {},
            {"temperature": 1.0, "seed": 9, "logprobs": 0},
        ]
        return [request(i, prompt(i, 20 + i), 25, **params) for i, params in enumerate(asked)]

    expected = outputs_of(make_core(model, "cpu"), messages())
    got = outputs_of(make_core(model, "cuda"), messages())
    for name, tokens in tokens_of(expected).items():
        assert tokens_of(got)[name] == tokens, name
    for name in ("r6", "r9"):
        for mine, theirs in zip(got[name], expected[name], strict=True):
            assert len(mine.logprobs) == len(theirs.logprobs)
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert a.top_token_ids == b.top_token_ids
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
                assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-3)


def test_bfloat16_is_within_its_rounding(half_model: str) -> None:
    messages = [request(i, prompt(i, 20 + 37 * i), 1, logprobs=20) for i in range(8)]
    expected = outputs_of(make_core(half_model, "cpu", dtype="float32"), messages)
    got = outputs_of(make_core(half_model, "cuda", dtype="bfloat16", block_size=64), messages)
    for name, (output,) in got.items():
        mine = dict(zip(output.logprobs[0].top_token_ids, output.logprobs[0].top_logprobs, strict=True))
        truth = expected[name][0].logprobs[0]
        theirs = dict(zip(truth.top_token_ids, truth.top_logprobs, strict=True))
        common = mine.keys() & theirs.keys()
        assert len(common) >= 15
        assert max(abs(mine[t] - theirs[t]) for t in common) < 0.15


@pytest.mark.parametrize("normed_heads", [True, False])
def test_bfloat16_decoding_is_within_its_rounding(tmp_path: Path, normed_heads: bool) -> None:
    """Each token's log probabilities, given those drawn before it: from graphs of few rows, and of more."""
    model = write_model(tmp_path, torch.bfloat16, normed_heads=normed_heads)
    for count in (3, 40):
        messages = [request(i, prompt(i, 20 + 3 * i), 4, logprobs=20) for i in range(count)]
        core = make_core(model, "cuda", dtype="bfloat16", block_size=64, max_num_seqs=count)
        got = outputs_of(core, messages, every=1)
        again, mine = [], {}
        for i in range(0, count, max(1, count // 5)):
            tokens = tokens_of(got)[f"r{i}"]
            for k, drawn in enumerate(x for output in got[f"r{i}"] for x in output.logprobs):
                again.append(request(1000 * k + i, prompt(i, 20 + 3 * i) + tokens[:k], 1, logprobs=20))
                mine[again[-1].request_id] = drawn
        for name, (output,) in outputs_of(make_core(model, "cpu", dtype="float32"), again).items():
            truth = output.logprobs[0]
            theirs = dict(zip(truth.top_token_ids, truth.top_logprobs, strict=True))
            ours = dict(zip(mine[name].top_token_ids, mine[name].top_logprobs, strict=True))
            common = ours.keys() & theirs.keys()
            assert len(common) >= 15
            assert max(abs(ours[t] - theirs[t]) for t in common) < 0.15


def test_a_shared_prefix_is_attended_to_once_and_changes_little(half_model: str) -> None:
    shared = prompt(1, 448)
    messages = [request(i, shared + prompt(10 + i, 3), 16, logprobs=1) for i in range(12)]
    core = make_core(half_model, "cuda", dtype="bfloat16", block_size=64, max_num_batched_tokens=512)
    got = outputs_of(core, messages, every=1)
    alone = {}
    for message in messages:
        alone |= outputs_of(core, [message])
    same = sum(tokens_of(got)[name] == tokens for name, tokens in tokens_of(alone).items())
    assert same >= 9  # a tie may fall to the other side in bfloat16
    assert core.stats().prefix_cache_hits_total > 0


@pytest.mark.parametrize(
    ("kind", "lengths"), [("decode", [1]), ("prompts", [40]), ("pieces", [1, 40]), ("eager", [130])]
)
def test_layers_are_announced_when_their_kv_is_written(model: str, kind: str, lengths: list[int]) -> None:
    """What is launched in the callback finds the KV of the layers that were announced, and the step is the same."""
    core = make_core(model, "cuda", max_num_batched_tokens=130)
    runner = core.runner
    items = []
    for index, length in enumerate(lengths):
        asked = Request(f"{index}", prompt(3 + index, length), [], SamplingParams(max_tokens=4), 0.0, 1.0)
        asked.transition(RequestStatus.RUNNING)
        asked.block_table = list(range(3 + 20 * index, 14 + 20 * index))
        items.append(ScheduledItem(asked, length, 0, True))
    batch = ScheduledBatch(items, 1)
    assert runner._forward.shape_of(batch).kind == kind
    layers = runner.kv_cache.layers
    groups: list[tuple[int, int]] = []
    seen: list[torch.Tensor] = []

    def on_layers(start: int, end: int) -> None:
        groups.append((start, end))
        seen.extend(layer.clone() for layer in layers[start:end])

    for layer in layers:
        layer.zero_()
    told = runner.run(batch, on_layers)
    assert groups == [(0, 2), (2, 3)]
    for layer, then in zip(layers, seen, strict=True):
        assert layer.any()
        assert torch.equal(layer, then)
    assert runner.run(batch).token_ids == told.token_ids


def test_the_pool_fills_the_allowed_memory(tmp_path: Path) -> None:
    # With so many bytes a token that the memory ends before all requests have their longest.
    model = write_model(tmp_path, torch.float32, max_positions=8192, kv_heads=8)
    gc.collect()
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    part = 8e9 / total
    core = make_core(model, "cuda", num_blocks=None, gpu_memory_utilization=part, max_model_len=8192, max_num_seqs=128)
    assert 1000 < core.runner.num_blocks < 128 * 8192 // 16
    taken = before - torch.cuda.mem_get_info()[0]
    assert part / 2 < taken / total < part
