"""Whoever dies in the middle of an answer, the client's stream goes on: nothing repeated, missing or changed.

The oracle of greedy answers is transformers; of sampled ones, the same request on the undisturbed cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.e2e.cluster import Cluster, Member, wait_until
from tests.e2e.oracle import Oracle
from tests.e2e.streams import Stream, stream
from tests.holding import Held, is_in_a_handoff

pytestmark = pytest.mark.faults

NUM_TOKENS = 60
BLOCK_SIZE = 32
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "seed": 11, "ignore_eos": True}
NUM_CHOICES = 6
"""Of the streams that a router has when it is hit."""
ATTEMPTS = 5
LOOK_S = 5.0
Result = TypeVar("Result")
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
    return sum(member.metrics().get(metric, 0.0) for member in members if member.exited() is None)


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


class NotInTheMiddle(Exception):
    """The answer was over, or not on one worker, when the fault was to come: this host was slow just then."""


def again_if_late(attempt: Callable[[], Result]) -> Result:
    """What an attempt brings whose fault came in the middle of its answer."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(NotInTheMiddle):
            return attempt()
    raise AssertionError(f"{ATTEMPTS} answers were over before their faults")


def killing_the_decode_worker(cluster: Cluster, choices: int) -> Callable[[], None]:
    """It says no further token while it is looked for: the answer would else be over before the kill on a slow host."""

    def kill() -> None:
        held = Held(cluster.decodes)
        try:
            deadline_s = time.monotonic() + LOOK_S  # metrics come a little after tokens do
            while time.monotonic() < deadline_s:
                running = [member.metrics().get("vllm:num_requests_running", 0.0) for member in cluster.decodes]
                if sorted(running) == [0, choices]:
                    cluster.decodes[running.index(choices)].kill()
                    return
                held.run_a_moment()
        finally:
            held.let_go()
        raise NotInTheMiddle

    return kill


def migrated(cluster: Cluster, prompt: list[int], choices: int = 1, **options: object) -> Stream:
    def attempt() -> Stream:
        before = total(routers(cluster), "pdserve_migrations_total")
        answer = stream(cluster.url, prompt, killing_the_decode_worker(cluster, choices), **options)
        assert total(routers(cluster), "pdserve_migrations_total") == before + choices
        return answer

    return again_if_late(attempt)


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


@contextlib.contextmanager
def handing_off(cluster: Cluster, prompt: list[int]) -> Iterator[tuple[Member, Member, Future[Stream]]]:
    """An answer to come, and its two workers, in the middle of their hand-off: the prefill worker's engine stands still
    to the end of the block."""
    held, handoffs = Held(cluster.prefills), {member.name: is_in_a_handoff(member) for member in cluster.decodes}
    found: list[Member] = []

    def is_under_way() -> bool:
        found[:] = [member for member in cluster.decodes if handoffs[member.name]()]
        return bool(found)

    pool = ThreadPoolExecutor(1)
    try:
        answering = pool.submit(stream, cluster.url, prompt, **GREEDY | {"max_tokens": 12, "ignore_eos": False})
        held.run_until("a hand-off is under way", is_under_way, moment_s=0.1)
        yield busy(cluster.prefills, "pdserve_open_requests"), found[0], answering
    finally:
        held.let_go()
        pool.shutdown(wait=False)


def test_another_prefill_worker_takes_over_and_the_decode_worker_keeps_its_reservation(
    whole: Cluster, oracle: Oracle
) -> None:
    prompt = oracle.chat_ids(LONG_TEXT + "What happened next?")
    before = total(whole.decodes, "pdserve_reservations_taken_over_total")

    with handing_off(whole, prompt) as (prefill, decode, answering):
        prefill.kill()
    answer = answering.result()
    (want,) = oracle.generate([prompt], 12)
    oracle.assert_same(prompt, answer.choices[0].token_ids, want, "another P")
    assert total(whole.decodes, "pdserve_reservations_taken_over_total") == before + 1
    assert decode.metrics()["pdserve_reservations_taken_over_total"] >= 1


def test_the_decode_worker_dies_while_the_prefill_worker_holds_the_kv(whole: Cluster, oracle: Oracle) -> None:
    """The same prefill worker hands its KV to the other decode worker: of the prompt it computes the last token again,
    and no other (the prompt ends one token after a block does)."""
    prompt = oracle.chat_ids("Once more. " + LONG_TEXT)
    prompt = prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE + 1]
    looked_up, found = (f"vllm:prefix_cache_{what}_total" for what in ("queries", "hits"))
    before = {name: total(whole.prefills, name) for name in (looked_up, found)}

    with handing_off(whole, prompt) as (_, decode, answering):
        os.kill(decode.engine_pid(), signal.SIGSTOP)  # it gives no block back: the prefill worker holds its own
    busy(whole.prefills, "pdserve_requests_holding_kv")
    decode.kill()
    answer = answering.result()
    (want,) = oracle.generate([prompt], 12)
    oracle.assert_same(prompt, answer.choices[0].token_ids, want, "another D")

    def grown(name: str) -> float:
        return total(whole.prefills, name) - before[name]

    wait_until("two attempts on prefill workers are counted", lambda: grown(looked_up) == 2 * len(prompt))
    wait_until("all but one token of one are found there", lambda: grown(found) == len(prompt) - 1)


# ---- the router, or the way to it


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_router_goes_on(whole: Cluster, prompt: list[int], number: signal.Signals) -> None:
    """Several streams at once, greedy and sampled."""
    asked = [{**GREEDY, "logprobs": 1}, {**SAMPLED, "max_tokens": NUM_TOKENS, "n": 2}] * 2
    want = [stream(whole.url, prompt, **options) for options in asked[:2]] * 2
    victim = router_in_use(whole, prompt)
    resumes = whole["gateway"].metrics()["pdserve_resumes_total"]

    def hit() -> None:
        """While nobody says anything, and every choice goes over it."""
        held = Held(whole.decodes)
        try:
            is_in_the_middle = victim.metrics()["pdserve_open_requests"] == NUM_CHOICES
            if is_in_the_middle:
                victim.signal(number)
        finally:
            held.let_go()
        if not is_in_the_middle:
            raise NotInTheMiddle

    def attempt() -> list[Stream]:
        ready = threading.Barrier(len(asked))

        def when_all_are() -> None:
            if ready.wait(60) == 0:
                hit()

        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [pool.submit(stream, whole.url, prompt, when_all_are, **options) for options in asked]
            return [future.result() for future in futures]

    try:
        got = again_if_late(attempt)
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
    assert whole["gateway"].metrics()["pdserve_resumes_total"] == resumes + NUM_CHOICES


def router_in_use(cluster: Cluster, prompt: list[int]) -> Member:
    """The one that the gateway uses now."""
    name = "pdserve_router_requests_total"
    before = [member.metrics().get(name, 0.0) for member in routers(cluster)]
    stream(cluster.url, prompt, **GREEDY | {"max_tokens": 2})
    (used,) = (m for m, count in zip(routers(cluster), before, strict=True) if m.metrics().get(name, 0.0) > count)
    return used
