"""Routing policies on plain data: fair, joint, and not fooled by stale reports or by workers that come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.policies import POLICIES, make_policy
from router.policies.base import Pool, PromptInfo
from router.policies.least_loaded import LeastLoaded
from router.policies.load import WorkerLoad
from router.policies.round_robin import RoundRobin


class Sim:
    def __init__(self, worker_id: str, report: pb.Load | None = None, own_requests: int = 0) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad(pool_tokens=1000)
        self.load.report(report or pb.Load())
        self.load.add(own_requests, 0, 0)

    def take(self, tokens: int) -> None:
        self.load.add(1, tokens, tokens)


def sims(prefix: str, count: int) -> list[Sim]:
    return [Sim(f"{prefix}{i}") for i in range(count)]


PROMPT = PromptInfo(100)


@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_every_policy_spreads_a_burst_evenly(name: str) -> None:
    """All choices are made before any worker reports again."""
    policy = make_policy(name)
    pool = Pool(sims("p", 4), sims("d", 3))
    chosen: Counter[str] = Counter()
    for _ in range(120):  # without a session of the client's
        choice = await policy.choose(PROMPT, [pool])
        assert choice.prefill is not None
        for worker in (choice.prefill, choice.decode):
            worker.take(PROMPT.num_tokens)
            chosen[worker.worker_id] += 1
    even = Counter({"p0": 30, "p1": 30, "p2": 30, "p3": 30, "d0": 40, "d1": 40, "d2": 40})
    tolerance = 4 if name == "power_of_two" else 0  # it does not look at all of them
    assert all(abs(chosen[worker_id] - count) <= tolerance for worker_id, count in even.items()), chosen


@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_every_policy_pairs_inside_a_pool_and_can_do_without_prefill(name: str) -> None:
    policy = make_policy(name)
    pools = [Pool(sims("a-p", 2), sims("a-d", 2)), Pool(sims("b-p", 2), sims("b-d", 2))]
    for _ in range(20):
        choice = await policy.choose(PROMPT, pools)
        assert choice.prefill is not None
        assert choice.prefill.worker_id[0] == choice.decode.worker_id[0]
    alone = await policy.choose(PROMPT, [Pool((), sims("d", 2))])
    assert alone.prefill is None


async def test_round_robin_keeps_its_turn_when_workers_come_and_go() -> None:
    policy = RoundRobin()
    workers = sims("d", 3)

    async def turn(decodes: list[Sim]) -> str:
        return (await policy.choose(PROMPT, [Pool((), decodes)])).decode.worker_id

    assert [await turn(workers) for _ in range(4)] == ["d0", "d1", "d2", "d0"]
    assert [await turn([workers[0], workers[2]]) for _ in range(2)] == ["d2", "d0"]
    assert [await turn([*workers, Sim("d3")]) for _ in range(4)] == ["d3", "d1", "d2", "d0"]


async def test_least_loaded_takes_the_idle_pair_by_report_and_by_own_count() -> None:
    busy_p, idle_p = Sim("p0", pb.Load(queued_tokens=5000)), Sim("p1")
    busy_d, idle_d = Sim("d0", pb.Load(running=5)), Sim("d1", own_requests=1)
    choice = await LeastLoaded().choose(PROMPT, [Pool([busy_p, idle_p], [busy_d, idle_d])])
    assert (choice.prefill, choice.decode) == (idle_p, idle_d)


async def test_least_loaded_prefers_free_memory_among_equals() -> None:
    full = Sim("d0", pb.Load(running=2, free_blocks=1, total_blocks=100))
    empty = Sim("d1", pb.Load(running=2, free_blocks=90, total_blocks=100))
    for _ in range(10):
        assert (await LeastLoaded().choose(PROMPT, [Pool((), [full, empty])])).decode is empty


async def test_least_loaded_weighs_both_sides_of_a_pair() -> None:
    """The pool whose sum is least, not the one with the idlest decode worker."""
    a = Pool([Sim("a-p", pb.Load(queued_tokens=50_000))], [Sim("a-d")])
    b = Pool([Sim("b-p")], [Sim("b-d", pb.Load(running=2))])
    choice = await LeastLoaded().choose(PROMPT, [a, b])
    assert choice.decode.worker_id == "b-d"


@pytest.mark.parametrize(
    ("setting", "word"),
    [({"policy": "best"}, "round_robin"), ({"max_attempts": 0}, "max_attempts"), ({"no_worker_wait_s": 0}, "wait")],
)
def test_a_wrong_setting_is_an_error_that_names_it(setting: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RouterConfig(redis_url="redis://", **setting)  # type: ignore[arg-type]
