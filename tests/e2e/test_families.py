"""Tiny random models of each family through a real cluster, apart: greedy output equals that of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.e2e.client import complete_all
from tests.e2e.cluster import running
from tests.unit.test_models_parity import assert_equal_or_tied, save_tiny_model

FAMILIES = ["llama3-rope", "mistral-window", "qwen2", "qwen3"]


def prompts() -> list[list[int]]:
    """Longer than a chunk of the cluster below, and of several blocks."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (5, 40, 90, 150)]


@pytest.fixture
def model_in(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[transformers.PreTrainedModel, Path]:
    """A tiny model's directory, with a tokenizer: the gateway wants one, although these prompts are token ids."""
    directory = tmp_path / "model"
    model = save_tiny_model(request.param, directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(directory)
    return model, directory


@pytest.mark.parametrize("model_in", FAMILIES, indirect=True)
def test_family_apart(tmp_path: Path, model_in: tuple[transformers.PreTrainedModel, Path]) -> None:
    model, directory = model_in
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "32", "--block-size", "16", "--num-blocks", "64")
    with running(tmp_path, str(directory), worker_flags=flags) as cluster:
        answers = complete_all(cluster.url, prompts(), concurrency=4, max_tokens=24, ignore_eos=True)
        for prompt, answer in zip(prompts(), answers, strict=True):
            assert len(answer.token_ids) == 24
            assert_equal_or_tied(model, prompt, answer.token_ids)
        assert cluster["decode-0"].metrics()["pdserve_transfers_done_total"] == len(answers)
        cluster.assert_no_leak()
