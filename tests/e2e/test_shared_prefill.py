"""A decode worker with an ITL budget computes prompts while the prefill worker is stuck, or has a queue."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.client import Answer, complete, complete_all
from tests.e2e.cluster import Cluster, running, wait_until
from tests.e2e.oracle import Oracle

TOKENS = 12
STUCK_S = 8.0
"""A wait that no decode worker's own beats, however slow the host is."""


def helped(cluster: Cluster) -> float:
    return cluster["router"].metrics().get("pdserve_local_prefills_total{cause=decode_sooner}", 0.0)


def test_prompts_go_to_the_decode_worker_while_the_prefill_worker_is_stuck(tmp_path, model_dir, oracle: Oracle) -> None:
    texts = [f"Number {n}. " + "The ship left the harbour at dawn and nobody waved. " * 12 for n in range(18)]
    prompts = [oracle.chat_ids(text) for text in texts]
    expected = oracle.generate(prompts, TOKENS)

    def same(answers: list[Answer], first: int) -> None:
        for number, answer in enumerate(answers, first):
            oracle.assert_same(prompts[number], answer.token_ids, expected[number], f"prompt {number}")

    with running(
        tmp_path,
        str(model_dir),
        worker_flags=("--dtype", "float32", "--num-threads", "1"),
        decode_flags=("--itl-budget-ms", "150"),
        router_flags=("--local-prefill-tokens", "32"),
    ) as cluster:
        prefill, decode = cluster["prefill-0"], cluster["decode-0"]
        # One after the other there is no queue: everything is handed off.
        for prompt, tokens in zip(prompts[:3], expected[:3], strict=True):
            oracle.assert_same(prompt, complete(cluster.url, prompt, max_tokens=TOKENS).token_ids, tokens, "alone")
        assert helped(cluster) == 0
        assert decode.metrics()["pdserve_transfers_done_total"] == 3
        assert decode.metrics()["pdserve_shares_prefill"] == 1
        # All at once: each computes a part.
        answers = complete_all(cluster.url, prompts[3:13], concurrency=10, max_tokens=TOKENS)
        same(answers, 3)
        assert 1 <= helped(cluster) < 10
        # The prefill worker's engine stands still, and its service says that all is well.
        before = helped(cluster)
        engine = prefill.engine_pid()
        with ThreadPoolExecutor(1) as pool:
            os.kill(engine, signal.SIGSTOP)
            stuck = pool.submit(complete, cluster.url, prompts[13], max_tokens=TOKENS)
            try:
                wait_until("it waits there", lambda: prefill.metrics()["pdserve_open_requests"] == 1)
                time.sleep(STUCK_S)  # it becomes apparent
                answers = complete_all(cluster.url, prompts[14:], concurrency=1, max_tokens=TOKENS)
                assert not stuck.done()
            finally:
                os.kill(engine, signal.SIGCONT)
            same([stuck.result(timeout=60)], 13)
        same(answers, 14)
        assert helped(cluster) == before + 4
        cluster.assert_no_leak()
