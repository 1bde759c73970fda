"""The whole service with its workers on a GPU: greedy fp32 output equals transformers' on the CPU, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.model_store import ModelUnavailableError, prepare_default_model
from tests.e2e.client import complete_all
from tests.e2e.cluster import running
from tests.e2e.conftest import OWN_PROMPTS
from tests.e2e.oracle import Oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAX_TOKENS = 48
LONG = "Once upon a time a lighthouse keeper counted the waves, one by one, and wrote each number down. " * 60


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    try:
        return Oracle(prepare_default_model())
    except ModelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[list[int]]:
    """Short ones and one of several chunks, of a real model's own chat format."""
    return [oracle.chat_ids(text) for text in (*OWN_PROMPTS, LONG)]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    return oracle.generate(prompts, MAX_TOKENS, batch=4)


@pytest.mark.parametrize("apart", [False, True], ids=["aggregated", "apart"])
def test_greedy_float32_through_the_gateway(
    tmp_path: Path, oracle: Oracle, prompts: list[list[int]], expected: list[list[int]], apart: bool
) -> None:
    """Apart: both workers on the one GPU, and every prompt's KV handed over."""
    flags = ("--device", "cuda:0", "--dtype", "float32", "--gpu-memory-utilization", "0.3")
    flags += ("--max-num-batched-tokens", "512")
    with running(tmp_path, oracle.tokenizer.name_or_path, prefill=int(apart), worker_flags=flags) as cluster:
        for concurrency in (1, len(prompts)):
            answers = complete_all(cluster.url, prompts, concurrency, max_tokens=MAX_TOKENS)
            for i, (prompt, answer, want) in enumerate(zip(prompts, answers, expected, strict=True)):
                oracle.assert_same(prompt, answer.token_ids, want, f"{concurrency} at once, prompt {i}")
        done = cluster["decode-0"].metrics().get("pdserve_transfers_done_total", 0.0)
        assert done == (2 * len(prompts) if apart else 0)
        cluster.assert_no_leak()
    assert not oracle.ties, oracle.ties
