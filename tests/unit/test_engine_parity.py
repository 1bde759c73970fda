"""A real model under the real scheduler: tokens depend neither on chunks, batch, prefix hits nor preemption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.host_kv import HostKV
from engine.messages import AddRequest, EngineStats
from engine.model_runner import ModelRunner
from tests.services.tiny_model import VOCAB, write_tiny_model
from tests.unit.fake_runner import make_message
from tests.unit.leaks import assert_no_leak

NUM_TOKENS = 40
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Sixteen, half of them with one prefix."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    prefix = draw(70)
    return [(prefix if index % 2 else []) + draw(3 + 5 * index) for index in range(16)]


@pytest.fixture(scope="module")
def greedy(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The oracle: transformers, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@dataclass
class Setup:
    max_num_batched_tokens: int = 512
    num_blocks: int = 400
    max_num_seqs: int = 16
    enable_prefix_caching: bool = True
    host_kv_bytes: int = 0
    """For preempted requests, always rather than computing again."""


def run(directory: Path, setup: Setup, added: list[AddRequest]) -> tuple[list[list[int]], EngineStats]:
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        block_size=16,
        num_threads=1,
        max_model_len=1024,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        num_blocks=setup.num_blocks,
        max_num_seqs=setup.max_num_seqs,
        enable_prefix_caching=setup.enable_prefix_caching,
    )
    runner = ModelRunner(config)
    host_kv = None
    if setup.host_kv_bytes:
        host_kv = HostKV(runner.kv_cache, setup.host_kv_bytes)
        host_kv.bytes_per_s = float("inf")
    core = EngineCore(config, runner, host_memory=host_kv)
    tokens: dict[str, list[int]] = {message.request_id: [] for message in added}
    for message in added:
        core.add(message)
    while core.has_work():
        for output in core.step().outputs:
            assert output.error_code is None, output.error_message
            tokens[output.request_id] += output.token_ids
    assert_no_leak(core)
    return list(tokens.values()), core.stats()


SETUPS = {
    "roomy": Setup(),
    "chunks of 16": Setup(max_num_batched_tokens=16),
    "chunks of 64": Setup(max_num_batched_tokens=64),
    "one at a time": Setup(max_num_seqs=1),
    "no prefix cache": Setup(enable_prefix_caching=False),
    "small pool": Setup(num_blocks=34, max_num_batched_tokens=64),
    "small pool, no prefix cache": Setup(num_blocks=40, enable_prefix_caching=False),
    "small pool, host memory": Setup(num_blocks=34, max_num_batched_tokens=64, host_kv_bytes=1 << 24),
    "small pool, host memory, no prefix cache": Setup(
        num_blocks=40, enable_prefix_caching=False, host_kv_bytes=1 << 24
    ),
}


@pytest.mark.parametrize("name", SETUPS)
def test_greedy_output_is_that_of_transformers(
    name: str, directory: Path, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    setup = SETUPS[name]
    added = [make_message(f"r{i}", prompt, NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts)]
    outputs, stats = run(directory, setup, added)
    assert outputs == greedy
    # Each setup did what it is here for.
    assert (stats.preemptions_total > 0) == name.startswith("small pool")
    assert (stats.restored_blocks_total > 0) == bool(setup.host_kv_bytes)
    assert (stats.prefix_cache_hits_total > 0) == setup.enable_prefix_caching
    if name == "roomy":
        assert stats.max_batch_requests == 16
    if setup.max_num_batched_tokens < 512:
        assert stats.prefill_chunks_total > 16


def test_seeded_sampling_draws_the_same_tokens_in_every_setup(directory: Path, prompts: list[list[int]]) -> None:
    added = [
        make_message(f"r{i}", prompt, NUM_TOKENS, ignore_eos=True, seed=1000 + i, **SAMPLED)
        for i, prompt in enumerate(prompts)
    ]
    reference, _ = run(directory, SETUPS["one at a time"], added)
    assert len({tuple(output) for output in reference}) == len(reference)
    for name in ("roomy", "chunks of 16", "small pool", "small pool, host memory"):
        assert run(directory, SETUPS[name], added)[0] == reference, name


def test_a_resumed_request_goes_on_with_the_same_tokens(directory: Path, prompts: list[list[int]]) -> None:
    whole, _ = run(directory, Setup(), [make_message("w", prompts[3], NUM_TOKENS, ignore_eos=True, seed=5, **SAMPLED)])
    added = [
        make_message(f"r{cut}", prompts[3], NUM_TOKENS, output=whole[0][:cut], ignore_eos=True, seed=5, **SAMPLED)
        for cut in (1, 7, NUM_TOKENS - 1)
    ]
    rest, _ = run(directory, Setup(), added)
    assert rest == [whole[0][cut:] for cut in (1, 7, NUM_TOKENS - 1)]
