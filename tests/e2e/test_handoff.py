"""What a hand-off must look like from outside: every prompt moves, in pieces, while it is computed, exactly once."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.client import complete, complete_all
from tests.e2e.cluster import running, wait_until

BLOCK_SIZE = 32
"""An engine's default on a CPU."""
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "max_tokens": 40}


@pytest.fixture(scope="module")
def long_prompt(oracle) -> list[int]:
    return oracle.chat_ids(
        "Tell me what happens in this text. " + "The ship left the harbour at dawn and nobody waved. " * 60
    )


def test_segments_leave_while_the_prompt_is_computed(tmp_path, model_dir, long_prompt) -> None:
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "64")
    with running(tmp_path, str(model_dir), worker_flags=flags) as cluster:
        answer = complete(cluster.url, long_prompt, max_tokens=8)
        chunks = "pdserve_prefill_chunks_total"
        assert answer.cached_tokens == 0
        assert len(long_prompt) // 64 > 1
        wait_until("chunks are told", lambda: cluster["prefill-0"].metrics()[chunks] >= len(long_prompt) // 64)
        prefill, decode = cluster["prefill-0"].metrics(), cluster["decode-0"].metrics()
        assert decode["pdserve_transfers_done_total"] == 1
        assert decode["pdserve_transfer_segments_total"] > prefill[chunks]
        # fp32 keys and values of 30 layers, 3 heads of 64: nothing less than the whole prompt went over.
        assert decode["pdserve_transfer_bytes_total"] >= (len(long_prompt) - 1) * 30 * 2 * 3 * 64 * 4
        assert decode["pdserve_segments_before_last_chunk_total"] == 1
        # What D keeps of this prompt need not be sent again, and P need not compute it again.
        sent = decode["pdserve_transfer_bytes_total"]
        again = complete(cluster.url, long_prompt, max_tokens=8)
        assert again.token_ids == answer.token_ids
        assert again.cached_tokens == (len(long_prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, "once, though both have it"
        assert cluster["decode-0"].metrics()["pdserve_transfer_bytes_total"] - sent < sent / 4
        cluster.assert_no_leak()


def test_one_token_and_immediate_stop(tmp_path, model_dir, long_prompt, oracle) -> None:
    """A request that its first token ends: one token, the right reason, nothing left behind on either side."""
    with running(tmp_path, str(model_dir), worker_flags=("--dtype", "float32")) as cluster:
        one = complete(cluster.url, long_prompt, max_tokens=1)
        assert len(one.token_ids) == 1
        assert one.finish_reason == "length"
        stopped = complete(cluster.url, long_prompt, max_tokens=50, stop_token_ids=one.token_ids)
        assert stopped.finish_reason == "stop"
        assert len(stopped.token_ids) <= 1
        cluster.assert_no_leak()


def test_seeded_sampling_draws_the_same_tokens_everywhere(tmp_path_factory, model_dir, prompts) -> None:
    """Alone, in a batch, after preemption, aggregated or apart: (seed, position) decides, nothing else does."""
    chosen = prompts[:8]
    answers: dict[str, list[list[int]]] = {}
    layouts = {
        "aggregated": (0, ()),
        "apart": (1, ()),
        "preempted": (1, ("--num-blocks", "40")),
    }
    for name, (prefill, decode_flags) in layouts.items():
        with running(
            tmp_path_factory.mktemp(name),
            str(model_dir),
            prefill=prefill,
            worker_flags=("--dtype", "float32", "--block-size", "16"),
            decode_flags=decode_flags,
        ) as cluster:
            short = [prompt for prompt in chosen if len(prompt) < 200]
            together = complete_all(cluster.url, short, concurrency=8, seed=11, **SEEDED)
            alone = complete_all(cluster.url, short, concurrency=1, seed=11, **SEEDED)
            assert [a.token_ids for a in alone] == [a.token_ids for a in together]
            answers[name] = [a.token_ids for a in alone]
            other = complete(cluster.url, short[0], seed=12, **SEEDED)
            assert other.token_ids != alone[0].token_ids
            cluster.assert_no_leak()
    assert answers["aggregated"] == answers["apart"] == answers["preempted"]


def test_a_chat_without_max_tokens_fits_a_small_pool(tmp_path, model_dir) -> None:
    """The rest of the context would not fit this pool; nobody asked for that much, so nobody is refused for it."""
    with running(tmp_path, str(model_dir), worker_flags=("--block-size", "16", "--num-blocks", "40")) as cluster:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "test-model", "messages": question, "temperature": 0}
        response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        refused = httpx.post(f"{cluster.url}/v1/chat/completions", json={**body, "max_tokens": 5000}, timeout=60)
        assert refused.status_code == 400
        assert "pool" in refused.json()["error"]["message"]
        cluster.assert_no_leak()
