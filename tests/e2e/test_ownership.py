"""Prefix ownership over real processes: the owner gets the request, a new router knows it at once, a flush heals."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from tests.e2e.client import Answer, complete
from tests.e2e.cluster import Cluster, Member, running, wait_until

BLOCK = 16
WORKER_FLAGS = ("--dtype", "float32", "--block-size", str(BLOCK), "--num-threads", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir) -> Iterator[Cluster]:
    flags = ("--poll-interval-s", "0.1", "--min-prefill-workers", "2", "--min-decode-workers", "2")
    directory = tmp_path_factory.mktemp("own")
    with running(
        directory, str(model_dir), prefill=2, decode=2, worker_flags=WORKER_FLAGS, router_flags=flags
    ) as cluster:
        yield cluster


def hits(member: Member) -> float:
    return member.metrics()["vllm:prefix_cache_hits_total"]


def prompt_about(oracle, subject: str) -> list[int]:
    return oracle.chat_ids(f"Tell me about {subject}. " + f"The {subject} left the harbour at dawn. " * 25)


def indexed_blocks(cluster: Cluster) -> float:
    """Counted for each of their owners."""
    return cluster["router"].metrics()["pdserve_prefix_index_entries"]


def settled(cluster: Cluster) -> None:
    """What was computed is in the index, and guesses about recent requests are forgotten."""
    wait_until("blocks are in the index", lambda: indexed_blocks(cluster) > 0)
    time.sleep(4.5)


def ask_repeatedly(cluster: Cluster, prompt: list[int], times: int = 4) -> tuple[list[Answer], list[str], list[str]]:
    """The answers, and which prefill and decode workers had a part in them."""
    before = {member.name: dispatches(cluster, member.name) for member in cluster.workers}
    answers = [complete(cluster.url, prompt, max_tokens=4) for _ in range(times)]
    took = [name for name, count in before.items() if dispatches(cluster, name) > count]
    return answers, [n for n in took if n.startswith("prefill")], [n for n in took if n.startswith("decode")]


def dispatches(cluster: Cluster, name: str) -> float:
    role = name.partition("-")[0]
    return cluster["router"].metrics().get(f"pdserve_dispatches_total{{role={role},worker={name}}}", 0.0)


def test_the_owner_of_a_prefix_gets_its_requests(cluster, oracle) -> None:
    prompt = prompt_about(oracle, "lighthouse")
    first = complete(cluster.url, prompt, max_tokens=4)
    assert first.cached_tokens == 0
    settled(cluster)
    answers, prefills, decodes = ask_repeatedly(cluster, prompt)
    expected = (len(prompt) - 1) // BLOCK * BLOCK
    assert [answer.cached_tokens for answer in answers] == [expected] * 4
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(first.token_ids)}
    assert len(prefills) == len(decodes) == 1
    for owner in (prefills[0], decodes[0]):
        role = owner.partition("-")[0]
        (idle,) = (m for m in cluster.workers if m.name.startswith(role) and m.name != owner)
        wait_until("the hits are counted", lambda owner=owner: hits(cluster[owner]) >= 4 * expected)
        assert hits(idle) == 0


def test_a_conversation_stays_with_its_decode_worker_and_is_not_sent_again(cluster, oracle) -> None:
    """The second turn's prompt is the first turn and its answer: the one that answered has it all."""
    turn = prompt_about(oracle, "conversation")
    answer = complete(cluster.url, turn, max_tokens=40, ignore_eos=True)
    settled(cluster)
    owner = max(cluster.decodes, key=lambda member: member.metrics()["vllm:generation_tokens_total"])
    sent = {member.name: member.metrics()["pdserve_transfer_bytes_total"] for member in cluster.decodes}
    generated = {member.name: member.metrics()["vllm:generation_tokens_total"] for member in cluster.decodes}
    second = [*turn, *answer.token_ids, *oracle.chat_ids("And then?")]
    complete(cluster.url, second, max_tokens=4)
    moved = {m.name: m.metrics()["pdserve_transfer_bytes_total"] - sent[m.name] for m in cluster.decodes}
    grown = {m.name for m in cluster.decodes if m.metrics()["vllm:generation_tokens_total"] > generated[m.name]}
    assert len(grown) == 1
    (decoder,) = grown
    bytes_per_token = 30 * 2 * 3 * 64 * 4
    cached = (len(turn) + len(answer.token_ids) - 1) // BLOCK * BLOCK
    assert moved[decoder] <= (len(second) - cached + BLOCK) * bytes_per_token, owner.name
    assert sum(moved.values()) == moved[decoder]


def test_a_restarted_router_knows_the_owners_at_once(cluster, oracle) -> None:
    prompt = prompt_about(oracle, "restart")
    complete(cluster.url, prompt, max_tokens=4)
    settled(cluster)
    blocks = indexed_blocks(cluster)
    router = cluster["router"]
    router.terminate()
    router.start()
    router.wait_healthy()
    assert indexed_blocks(cluster) == blocks
    wait_until("the gateway is back", cluster["gateway"].healthy)
    answers, prefills, decodes = ask_repeatedly(cluster, prompt)
    assert all(answer.cached_tokens > 0 for answer in answers)
    assert len(prefills) == len(decodes) == 1
    assert router.metrics()["pdserve_blind_decisions_total"] == 0


def test_a_flushed_redis_is_filled_again(cluster, oracle) -> None:
    prompt = prompt_about(oracle, "flush")
    complete(cluster.url, prompt, max_tokens=4)
    settled(cluster)
    blocks = indexed_blocks(cluster)

    def owned() -> int:
        with redis.Redis.from_url(cluster.redis_url) as client:
            return sum(client.hlen(key) - 2 for key in client.keys("{pdserve}:kv:*:blocks"))

    before = owned()
    with redis.Redis.from_url(cluster.redis_url) as client:
        client.flushall()
    answers, *_ = ask_repeatedly(cluster, prompt, times=1)
    assert answers[0].cached_tokens > 0  # the router has not forgotten
    wait_until("all is published again", lambda: owned() >= before)
    wait_until("the index is as it was", lambda: indexed_blocks(cluster) == blocks)
    router = cluster["router"]
    router.terminate()
    router.start()
    router.wait_healthy()
    assert indexed_blocks(cluster) == blocks
    cluster.assert_no_leak()


def test_a_restarted_worker_owns_nothing(cluster, oracle) -> None:
    prompt = prompt_about(oracle, "engine")
    complete(cluster.url, prompt, max_tokens=4)
    settled(cluster)
    _, _, decodes = ask_repeatedly(cluster, prompt, times=1)
    victim = cluster[decodes[0]]
    before = indexed_blocks(cluster)
    victim.kill()
    victim.start()
    victim.wait_healthy()
    wait_until("its blocks are forgotten", lambda: indexed_blocks(cluster) < before)
    assert complete(cluster.url, prompt, max_tokens=4).cached_tokens > 0  # on the prefill worker
