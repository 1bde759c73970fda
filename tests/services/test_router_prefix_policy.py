"""The default policy on plain data: where a prefix pulls, where load pushes, and how such policies go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pdserve.v1 import inference_pb2 as pb
from router.policies.base import Choice, Policy, Pool, PromptInfo
from router.policies.load import WorkerLoad
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_aware import PrefixAware
from router.policies.session import SessionAffinity


class Sim:
    def __init__(self, worker_id: str, pool_tokens: int = 100_000, **report: int) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad(pool_tokens)
        self.load.report(pb.Load(**{"free_blocks": 100, "total_blocks": 100, **report}))


def sims(prefix: str, count: int, **report: int) -> list[Sim]:
    return [Sim(f"{prefix}{i}", **report) for i in range(count)]


async def choose(
    pool: Pool[Sim], tokens: int = 1000, cached: dict[str, int] | None = None, policy: Policy | None = None
) -> Choice[Sim]:
    return await (policy or PrefixAware(seed=1)).choose(PromptInfo(tokens, 64, "", cached or {}), [pool])


async def route(
    pool: Pool[Sim], prompts: Sequence[tuple[int, str]], policy: Policy
) -> tuple[Counter[str], Counter[str]]:
    """Sends prompts (tokens, prefix) of which all but 50 tokens are the prefix; nobody finishes and nobody reports.
    Whoever got a prefix has it. What the prefill and decode workers got."""
    owned: dict[str, set[str]] = {}
    prefills: Counter[str] = Counter()
    decodes: Counter[str] = Counter()
    for tokens, prefix in prompts:
        cached = dict.fromkeys(owned.get(prefix, ()), tokens - 50)
        choice = await choose(pool, tokens, cached, policy)
        assert choice.prefill is not None
        for worker, computed in (
            (choice.prefill, tokens - cached.get(choice.prefill.worker_id, 0)),
            (choice.decode, 0),
        ):
            worker.load.add(1, computed, tokens)
            owned.setdefault(prefix, set()).add(worker.worker_id)
        prefills[choice.prefill.worker_id] += 1
        decodes[choice.decode.worker_id] += 1
    return prefills, decodes


async def test_the_owner_on_each_side_is_chosen_when_all_are_idle() -> None:
    pool = Pool(sims("p", 4), sims("d", 4))
    choice = await choose(pool, cached={"p2": 900, "d3": 900})
    assert choice.prefill is not None
    assert (choice.prefill.worker_id, choice.decode.worker_id) == ("p2", "d3")


async def test_the_longer_prefix_wins_among_equally_busy_ones() -> None:
    pool = Pool(sims("p", 4), sims("d", 2))
    choice = await choose(pool, cached={"p0": 300, "p1": 600, "p2": 599})
    assert choice.prefill is not None
    assert choice.prefill.worker_id == "p1"


async def test_a_prefix_is_worth_what_computing_it_costs_and_no_more() -> None:
    for queued, expected in ((1000, "owner"), (5000, "idle")):
        pool = Pool([Sim("owner", queued_tokens=queued), Sim("idle")], sims("d", 1))
        choice = await choose(pool, tokens=1000, cached={"owner": 900})
        assert choice.prefill is not None
        assert choice.prefill.worker_id == expected


async def test_a_decode_worker_without_room_is_not_chosen_for_its_prefix() -> None:
    full = Sim("full", 10_000, free_blocks=2, total_blocks=100)
    pool = Pool(sims("p", 1), [full, Sim("empty", 10_000)])
    assert (await choose(pool, tokens=3000, cached={"full": 1000})).decode.worker_id == "empty"


async def test_without_prefill_workers_what_is_uncached_counts_where_it_is_decoded() -> None:
    pool: Pool[Sim] = Pool((), [Sim("owner", running=2), Sim("idle")])
    assert (await choose(pool, tokens=2000, cached={"owner": 1900})).decode.worker_id == "owner"
    assert (await choose(pool, tokens=2000)).decode.worker_id == "idle"


async def test_one_hot_worker_does_not_end_affinity_for_the_others() -> None:
    """A switch to "shortest queue" for all, as soon as one queue is long, would."""
    prefills = [Sim("hot", queued_tokens=500_000, running=200), *sims("p", 7)]
    for i in range(7):
        choice = await choose(Pool(prefills, sims("d", 2)), cached={"hot": 900, f"p{i}": 800})
        assert choice.prefill is not None
        assert choice.prefill.worker_id == f"p{i}"


async def test_a_hot_prefix_spreads_over_as_many_workers_as_it_needs() -> None:
    """200 requests at once, all with one prefix: they do not all wait for its first owner, on neither side."""
    prefills, decodes = await route(Pool(sims("p", 8), sims("d", 8)), [(2050, "hot")] * 200, PrefixAware(seed=1))
    assert len(prefills) >= 6
    assert len(decodes) == 8
    for chosen in (prefills, decodes):
        assert max(chosen.values()) <= 2 * 200 / 8
    assert prefills.most_common(1)[0][1] > 20  # yet the first ones went to the owner


async def test_a_burst_waits_for_its_first_one_until_the_wait_is_longer_than_the_work_it_saves() -> None:
    """While the first one is computed, the second is there as soon if it computes the prefix again: but then that work
    is wasted. Owner's queue: the prefix, and 50 tokens and a step for each before."""
    for prefix_tokens, least, most in ((500, 4, 16), (2000, 16, 64), (8000, 64, 256)):
        prompts = [(prefix_tokens + 50, "new")] * 300
        owned: list[str] = []
        for count in range(1, 301):
            prefills, _ = await route(Pool(sims("p", 4), sims("d", 4)), prompts[:count], PrefixAware(seed=1))
            owned = sorted(prefills)
            if len(owned) > 1:
                break
        assert least <= count <= most, prefix_tokens


async def test_a_cold_crowd_beside_a_hot_prefix_is_spread_evenly() -> None:
    prompts = [(1050, "hot") if i % 2 else (1050, f"cold{i}") for i in range(200)]
    _, decodes = await route(Pool(sims("p", 5), sims("d", 5)), prompts, PrefixAware(seed=3))
    assert max(decodes.values()) <= 1.25 * 200 / 5


async def test_affinity_holds_for_many_prefixes() -> None:
    """40 conversations in turn over 8 workers with time to finish between: each stays where it is."""
    pool, policy = Pool(sims("p", 8), sims("d", 8)), PrefixAware(seed=1)
    places: dict[int, set[tuple[str, str]]] = {}
    owned: dict[int, dict[str, int]] = {}
    for turn in range(5):
        for conversation in range(40):
            tokens = 500 * (turn + 1)
            choice = await choose(pool, tokens, owned.get(conversation), policy)
            assert choice.prefill is not None
            places.setdefault(conversation, set()).add((choice.prefill.worker_id, choice.decode.worker_id))
            owned[conversation] = {choice.prefill.worker_id: tokens - 4, choice.decode.worker_id: tokens - 4}
    assert all(len(pairs) == 1 for pairs in places.values())
    assert len({pair for pairs in places.values() for pair in pairs}) > 8


@pytest.mark.parametrize("policy_type", [PrefixAware, PowerOfTwo])
async def test_routers_with_the_same_old_reports_do_not_run_to_the_same_worker(policy_type: type[PrefixAware]) -> None:
    """Four routers, one burst, no report in between: each sees only what it sent itself."""
    totals: Counter[str] = Counter()
    for router in range(4):
        pool, policy = Pool(sims("p", 10), sims("d", 10)), policy_type(seed=router)
        prefills, decodes = await route(pool, [(500, f"{router}-{i}") for i in range(100)], policy)
        totals += prefills + decodes
    assert max(totals.values()) <= 1.5 * 400 / 10


async def learned(worker: Sim, seconds_per_token: float) -> Sim:
    for _ in range(8):
        worker.load.prefill.observe(1000, 1000 * seconds_per_token)
    return worker


async def test_a_slow_worker_gets_what_it_can_do() -> None:
    """One takes three times as long for a token: of a cold crowd that nobody finishes it gets about a third of the
    others' share; its prefix is still worth going there when the others would compute longer."""
    prefills = [await learned(Sim("slow"), 3e-4), *[await learned(worker, 1e-4) for worker in sims("p", 3)]]
    counts, _ = await route(Pool(prefills, sims("d", 4)), [(1000, f"cold{i}") for i in range(200)], PrefixAware(seed=1))
    assert 0.2 < counts["slow"] / (sum(counts.values()) - counts["slow"]) * 3 < 0.5
    idle = [await learned(Sim("slow"), 3e-4), await learned(Sim("fast"), 1e-4)]
    choice = await choose(Pool(idle, sims("d", 1)), cached={"slow": 900})
    assert choice.prefill is not None
    assert choice.prefill.worker_id == "slow"


async def test_small_differences_in_speed_leave_equals_equal() -> None:
    prefills = [await learned(worker, 1e-4 * (1 + 0.02 * i)) for i, worker in enumerate(sims("p", 5))]
    chosen: Counter[str] = Counter()
    policy = PrefixAware(seed=1)
    for _ in range(200):
        choice = await choose(Pool(prefills, sims("d", 1)), policy=policy)
        assert choice.prefill is not None
        chosen[choice.prefill.worker_id] += 1
    assert min(chosen.values()) > 20


@pytest.mark.parametrize(("exposed_s", "expected"), [(0.0, "idle"), (1e-3, "owner")])
async def test_where_sending_shows_a_prefix_on_the_decode_side_is_worth_more(exposed_s: float, expected: str) -> None:
    prefills = [await learned(worker, 1e-4) for worker in sims("p", 1)]
    decodes = [Sim("owner", running=2), Sim("idle")]
    for worker in decodes:
        worker.load.exposed.observe(1000, 1000 * exposed_s)
    choice = await choose(Pool(prefills, decodes), tokens=2000, cached={"owner": 1900})
    assert choice.decode.worker_id == expected


async def test_no_report_however_odd_decides_alone() -> None:
    """Zeros, infinities and outliers: rates stay near what most say, costs stay within their bounds."""
    worker = await learned(Sim("p0"), 1e-4)
    for tokens, seconds in ((0, 1.0), (-5, 1.0), (1000, float("nan")), (1000, float("inf")), (1000, -1.0)):
        worker.load.prefill.observe(tokens, seconds)
    assert worker.load.prefill.seconds_per_token == pytest.approx(1e-4)
    worker.load.prefill.observe(1000, 3600.0)
    assert worker.load.prefill.seconds_per_token < 2e-4
    glacial = await learned(Sim("glacial"), 1e3)
    choice = await choose(Pool([worker, glacial], sims("d", 1)), cached={"glacial": 990})
    assert choice.prefill is not None
    assert choice.prefill.worker_id == "glacial"  # five times as slow at most, so its prefix is worth the way


async def test_counters_count_and_come_back_to_zero() -> None:
    worker = Sim("p0")
    worker.load.add(1, 500, 600)
    assert (worker.load.requests, worker.load.queued_tokens, worker.load.kv_tokens) == (1, 500, 600)
    worker.load.add(-1, -500, -600)
    assert worker.load.is_at_rest
    assert worker.load.requests == worker.load.queued_tokens == 0


async def test_what_a_report_still_says_of_ended_requests_does_not_count_as_load() -> None:
    worker = Sim("d0")
    worker.load.add(1, 0, 600)
    worker.load.add(-1, 0, -600)
    worker.load.report(pb.Load(running=1, free_blocks=99, total_blocks=100))  # taken before it ended
    assert worker.load.requests == 0
    worker.load.report(pb.Load(running=3, free_blocks=90, total_blocks=100))  # somebody else's
    assert worker.load.requests == 3
    worker.load.add(1, 0, 600)
    assert worker.load.requests == 4


async def test_in_a_large_fleet_the_owner_is_found_among_hundreds() -> None:
    pool = Pool(sims("p", 500), sims("d", 500))
    for i in (0, 250, 499):
        choice = await choose(pool, cached={f"p{i}": 900, f"d{i}": 900})
        assert choice.prefill is not None
        assert (choice.prefill.worker_id, choice.decode.worker_id) == (f"p{i}", f"d{i}")


async def test_sessions_stay_on_their_pair_and_move_only_if_it_is_gone() -> None:
    prefills, decodes = sims("p", 5), sims("d", 5)
    sessions = [f"user-{i}" for i in range(100)]

    async def places(prefills: list[Sim], decodes: list[Sim]) -> dict[str, tuple[str, str]]:
        found = {}
        for session in sessions:
            policy = SessionAffinity()  # any router's
            choice = await policy.choose(PromptInfo(100, session=session), [Pool(prefills, decodes)])
            assert choice.prefill is not None
            found[session] = choice.prefill.worker_id, choice.decode.worker_id
        return found

    before = await places(prefills, decodes)
    assert before == await places(prefills[::-1], decodes[::-1])
    assert len(set(before.values())) > 10
    after = await places(prefills, decodes[1:])
    for session, (prefill, decode) in before.items():
        assert after[session][0] == prefill
        assert (after[session][1] == decode) == (decode != "d0")
