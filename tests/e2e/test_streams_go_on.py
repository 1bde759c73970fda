"""Whoever dies in the middle of an answer, the client's stream goes on: nothing repeated, missing or changed.

The oracle of greedy answers is transformers; of sampled ones, the same request on the undisturbed cluster.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.e2e.cluster import Cluster, Member, wait_until
from tests.e2e.oracle import Oracle
from tests.e2e.streams import Stream, stream

pytestmark = pytest.mark.faults

NUM_TOKENS = 60
BLOCK_SIZE = 32
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "seed": 11, "ignore_eos": True}
LONG_TEXT = "The ship left the harbour at dawn and nobody waved. " * 110


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    """Two of each but the gateway."""
    cluster = Cluster(tmp_path_factory.mktemp("streams"), str(model_dir))
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--num-threads", "1")
    try:
        cluster.add_redis()
        for n in range(2):
            cluster.add_router(f"router-{n}", "--min-prefill-workers", "1", "--min-decode-workers", "1")
            cluster.add_worker(f"prefill-{n}", *flags)
            cluster.add_worker(f"decode-{n}", *flags)
        cluster.add_gateway()
        cluster.wait_healthy()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def whole(cluster: Cluster) -> Iterator[Cluster]:
    """All parts run, before and after; and whatever happened, nothing is left behind."""
    yield cluster
    for member in cluster.members.values():
        assert member.process is not None
        if member.process.poll() is not None:
            member.start()
    cluster.wait_healthy()
    wait_until("the routers know everybody", lambda: all(knows_all(cluster[f"router-{n}"]) for n in range(2)))
    cluster.assert_no_leak()


def knows_all(router: Member) -> bool:
    metrics = router.metrics()
    return all(metrics.get(f"pdserve_workers{{role={role},state=usable}}") == 2 for role in ("prefill", "decode"))


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> list[int]:
    return oracle.chat_ids("Tell me about the sea, at length.")


def total(members: list[Member], metric: str) -> float:
    return sum(member.metrics().get(metric, 0.0) for member in members if member.healthy())


def routers(cluster: Cluster) -> list[Member]:
    return [cluster["router-0"], cluster["router-1"]]


def busy(members: list[Member], metric: str = "vllm:num_requests_running") -> Member:
    """The only one of these workers that has something."""
    found: list[Member] = []

    def look() -> bool:
        found[:] = [member for member in members if member.metrics().get(metric, 0.0) > 0]
        return len(found) == 1

    wait_until(f"one of {[member.name for member in members]} has {metric}", look)
    return found[0]


def killing_the_decode_worker(cluster: Cluster) -> Callable[[], None]:
    """It says no further token while it is looked for: the answer would else be over before the kill on a slow host."""
    engines = [member.engine_pid() for member in cluster.decodes]

    def signal_all(number: signal.Signals) -> None:
        for pid in engines:
            os.kill(pid, number)

    def kill() -> None:
        victims: list[Member] = []
        while len(victims) != 1:  # metrics come a little after tokens do
            signal_all(signal.SIGCONT)
            time.sleep(0.01)
            signal_all(signal.SIGSTOP)
            victims = [member for member in cluster.decodes if member.metrics().get("vllm:num_requests_running", 0.0)]
        engines.remove(victims[0].engine_pid())
        victims[0].kill()
        signal_all(signal.SIGCONT)

    return kill


def migrated(cluster: Cluster, prompt: list[int], choices: int = 1, **options: object) -> Stream:
    before = total(routers(cluster), "pdserve_migrations_total")
    answer = stream(cluster.url, prompt, killing_the_decode_worker(cluster), **options)
    assert total(routers(cluster), "pdserve_migrations_total") == before + choices
    return answer


# ---- the decode worker dies in the middle of an answer


def test_greedy_with_logprobs_and_usage(whole: Cluster, prompt: list[int], oracle: Oracle) -> None:
    answer = migrated(whole, prompt, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        want = oracle.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        logits = oracle.model(want).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    tokens = want[0, len(prompt) :].tolist()
    oracle.assert_same(prompt, choice.token_ids, tokens, "migrated")
    assert choice.token_ids == tokens, "a tie: take another prompt for this test"
    assert choice.text == oracle.tokenizer.decode(tokens, skip_special_tokens=True)
    assert choice.finish_reasons == ["length"]
    expected = [float(logits[position, token]) for position, token in enumerate(tokens)]
    assert choice.logprobs == pytest.approx(expected, abs=2e-3)
    assert [len(top) for top in choice.top_logprobs] == [2] * NUM_TOKENS
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == len(prompt)
    assert answer.usage["completion_tokens"] == NUM_TOKENS
    assert answer.usage["total_tokens"] == len(prompt) + NUM_TOKENS


def test_sampled_with_logprobs(whole: Cluster, prompt: list[int]) -> None:
    options = {**SAMPLED, "max_tokens": NUM_TOKENS, "logprobs": 1}
    want = stream(whole.url, prompt, **options).choices[0]
    got = migrated(whole, prompt, **options).choices[0]
    assert (got.token_ids, got.text, got.finish_reasons) == (want.token_ids, want.text, want.finish_reasons)
    assert got.logprobs == pytest.approx(want.logprobs, abs=2e-3)


def test_several_choices(whole: Cluster, prompt: list[int]) -> None:
    """``n``: each goes on by itself, and usage counts all of them once."""
    options = {**SAMPLED, "max_tokens": NUM_TOKENS, "n": 3}
    want = stream(whole.url, prompt, **options)
    got = migrated(whole, prompt, 3, **options)
    assert [choice.token_ids for choice in got.choices] == [choice.token_ids for choice in want.choices]
    assert len({tuple(choice.token_ids) for choice in got.choices}) == 3
    assert got.usage is not None
    assert got.usage["completion_tokens"] == 3 * NUM_TOKENS
    assert got.usage["prompt_tokens"] == len(prompt)


def test_a_stop_string_across_the_break(whole: Cluster, prompt: list[int], oracle: Oracle) -> None:
    """It begins in what the dead worker said and ends in what the next one says; and it is not shown."""
    (tokens,) = oracle.generate([prompt], NUM_TOKENS)
    assert len(tokens) >= 40, "take a prompt with a longer answer"
    text = oracle.tokenizer.decode(tokens, skip_special_tokens=True)
    stop = oracle.tokenizer.decode(tokens[10:35]).strip()
    assert text.count(stop) == 1
    (choice,) = migrated(whole, prompt, **GREEDY | {"ignore_eos": False}, stop=[stop], after_tokens=15).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reasons == ["stop"]


# ---- the hand-off is not over


def test_another_prefill_worker_takes_over_and_the_decode_worker_keeps_its_reservation(
    whole: Cluster, oracle: Oracle
) -> None:
    prompt = oracle.chat_ids(LONG_TEXT + "What happened next?")
    before = total(whole.decodes, "pdserve_reservations_taken_over_total")

    def kill_the_prefill_worker() -> None:
        decode = busy(whole.decodes, "pdserve_leases")
        busy(whole.prefills).kill()
        taken.append(decode)

    taken: list[Member] = []
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_the_prefill_worker)
        answer = stream(whole.url, prompt, **GREEDY | {"max_tokens": 12, "ignore_eos": False})
        killing.result()
    (want,) = oracle.generate([prompt], 12)
    oracle.assert_same(prompt, answer.choices[0].token_ids, want, "another P")
    assert total(whole.decodes, "pdserve_reservations_taken_over_total") == before + 1
    assert taken[0].metrics()["pdserve_reservations_taken_over_total"] >= 1


def test_the_decode_worker_dies_while_the_prefill_worker_holds_the_kv(whole: Cluster, oracle: Oracle) -> None:
    """The same prefill worker hands its KV to the other decode worker: of the prompt it computes the last token again,
    and no other (the prompt ends one token after a block does)."""
    prompt = oracle.chat_ids("Once more. " + LONG_TEXT)
    prompt = prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE + 1]
    looked_up, found = (f"vllm:prefix_cache_{what}_total" for what in ("queries", "hits"))
    before = {name: total(whole.prefills, name) for name in (looked_up, found)}

    def kill_the_decode_worker() -> None:
        decode = busy(whole.decodes, "pdserve_leases")
        os.kill(decode.engine_pid(), signal.SIGSTOP)  # it gives no block back: the prefill worker holds its own
        busy(whole.prefills, "pdserve_requests_holding_kv")
        decode.kill()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_the_decode_worker)
        answer = stream(whole.url, prompt, **GREEDY | {"max_tokens": 12, "ignore_eos": False})
        killing.result()
    (want,) = oracle.generate([prompt], 12)
    oracle.assert_same(prompt, answer.choices[0].token_ids, want, "another D")
    attempts = total(whole.prefills, looked_up) - before[looked_up]
    assert attempts == 2 * len(prompt), "two attempts on prefill workers"
    assert total(whole.prefills, found) - before[found] == len(prompt) - 1


# ---- the router, or the way to it


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_router_goes_on(whole: Cluster, prompt: list[int], number: signal.Signals) -> None:
    """Several streams at once, greedy and sampled."""
    asked = [{**GREEDY, "logprobs": 1}, {**SAMPLED, "max_tokens": NUM_TOKENS, "n": 2}] * 2
    want = [stream(whole.url, prompt, **options) for options in asked[:2]] * 2
    victim = busy_router(whole, prompt)
    ready = threading.Barrier(len(asked), action=lambda: victim.signal(number))
    before = whole["gateway"].metrics()["pdserve_resumes_total"]
    try:
        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [
                pool.submit(stream, whole.url, prompt, lambda: ready.wait(60) and None, **options) for options in asked
            ]
            got = [future.result() for future in futures]
    finally:
        if number == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            assert victim.process is not None
            victim.process.wait(10)
    for one, other in zip(got, want, strict=True):
        assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in other.choices]
        assert [choice.text for choice in one.choices] == [choice.text for choice in other.choices]
        assert one.choices[0].logprobs == pytest.approx(other.choices[0].logprobs, abs=2e-3)
        assert one.usage is not None
        assert other.usage is not None
        assert one.usage["completion_tokens"] == other.usage["completion_tokens"]
    assert whole["gateway"].metrics()["pdserve_resumes_total"] == before + 6


def busy_router(cluster: Cluster, prompt: list[int]) -> Member:
    """The one that the gateway uses now."""
    found: list[Member] = []
    options = GREEDY | {"max_tokens": 40}
    stream(cluster.url, prompt, lambda: found.append(busy(routers(cluster), "pdserve_open_requests")), 5, **options)
    return found[0]
