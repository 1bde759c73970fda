"""Greedy fp32 output equals transformers token for token: aggregated and apart, alone and together, any chunks."""

from __future__ import annotations

import pytest

from tests.e2e.client import Answer, complete_all
from tests.e2e.cluster import Cluster, running
from tests.e2e.oracle import Oracle

MAX_TOKENS = 128


def assert_parity(
    oracle: Oracle, prompts: list[list[int]], answers: list[Answer], expected: list[list[int]], name: str
) -> None:
    for i, (prompt, answer, want) in enumerate(zip(prompts, answers, expected, strict=True)):
        oracle.assert_same(prompt, answer.token_ids, want, f"{name} prompt {i}")
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == oracle.eos else "length")


def total(cluster: Cluster, members: str, name: str) -> float:
    chosen = cluster.prefills if members == "prefill" else cluster.decodes
    return sum(member.metrics().get(name, 0.0) for member in chosen)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("apart", [False, True], ids=["aggregated", "apart"])
def test_alone(tmp_path, model_dir, oracle, prompts, expected, apart: bool) -> None:
    with running(tmp_path, str(model_dir), prefill=int(apart), worker_flags=("--dtype", "float32")) as cluster:
        answers = complete_all(cluster.url, prompts, concurrency=1, max_tokens=MAX_TOKENS)
        assert_parity(oracle, prompts, answers, expected, "alone")
        assert total(cluster, "decode", "pdserve_transfers_done_total") == (len(prompts) if apart else 0)
        cluster.assert_no_leak()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("apart", [False, True], ids=["aggregated", "apart"])
def test_together(tmp_path, model_dir, oracle, prompts, expected, apart: bool, chunk_tokens: int) -> None:
    """16 at once; apart, every prompt is handed over, and most of them in several chunks."""
    flags = ("--dtype", "float32", "--max-num-batched-tokens", str(chunk_tokens))
    with running(tmp_path, str(model_dir), prefill=int(apart), worker_flags=flags) as cluster:
        answers = complete_all(cluster.url, prompts, concurrency=16, max_tokens=MAX_TOKENS)
        assert_parity(oracle, prompts, answers, expected, f"together, chunks of {chunk_tokens}")
        prefilling = "prefill" if apart else "decode"
        assert total(cluster, prefilling, "pdserve_prefill_chunks_total") >= sum(
            -(-(len(prompt) - answer.cached_tokens) // chunk_tokens)
            for prompt, answer in zip(prompts, answers, strict=True)
        )
        assert total(cluster, "decode", "pdserve_max_batch_requests") >= min(16, len(prompts), chunk_tokens) - 2
        if apart:
            assert total(cluster, "decode", "pdserve_transfers_done_total") == len(prompts)
            assert total(cluster, "decode", "pdserve_transfer_bytes_total") > 0
        # The same prompts again: their prefixes are cached, and the answers are the same.
        again = complete_all(cluster.url, prompts[:16], concurrency=16, max_tokens=MAX_TOKENS)
        assert_parity(oracle, prompts[:16], again, expected[:16], "cached")
        assert sum(answer.cached_tokens for answer in again) > 0
        cluster.assert_no_leak()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("apart", [False, True], ids=["aggregated", "apart"])
def test_small_pool(tmp_path, model_dir, oracle, prompts, expected, apart: bool) -> None:
    """A pool too small for 16 requests: some are preempted, none changes. Aggregated they are computed again, on the
    decode worker their KV waits in host memory, which its cost model finds cheaper."""
    flags = ("--dtype", "float32", "--block-size", "16")
    small = ("--num-blocks", "60") if apart else ("--num-blocks", "60", "--host-kv-bytes", "0")
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < 300][:48]
    some, want = [prompts[i] for i in fitting], [expected[i] for i in fitting]
    with running(tmp_path, str(model_dir), prefill=int(apart), worker_flags=flags, decode_flags=small) as cluster:
        answers = complete_all(cluster.url, some, concurrency=16, max_tokens=MAX_TOKENS)
        assert_parity(oracle, some, answers, want, "small pool")
        assert total(cluster, "decode", "vllm:num_preemptions_total") > 0
        assert (total(cluster, "decode", "pdserve_kv_restored_blocks_total") > 0) == apart
        if apart:
            assert total(cluster, "decode", "pdserve_transfers_done_total") >= len(some)
        cluster.assert_no_leak()
