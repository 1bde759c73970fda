"""The simulator on small fleets: what it counts is what it says it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.router_sim.memory import bytes_per_entry
from bench.router_sim.report import row
from bench.router_sim.simulation import Outcome, Setup, Simulation
from bench.router_sim.trace import TraceRequest, ideal_hit_rate, read_mooncake, shared_lru_hit_rate, synthetic
from bench.router_sim.worker import WorkerSpeed
from router.policies import POLICIES


async def run(policy: str, requests: list[TraceRequest], **settings: int) -> Outcome:
    setup = Setup(
        policy=policy, **{"prefills": 2, "decodes": 2, "hash_block_tokens": 512, "block_tokens": 512, **settings}
    )
    return await Simulation(setup).run(requests)


def repeats(count: int, gap_s: float) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 2048, 10, (1, 2, 3, 4)) for i in range(count)]


def test_the_ideal_is_what_was_seen_before() -> None:
    assert ideal_hit_rate(repeats(4, 1)) == 0.75
    assert ideal_hit_rate([TraceRequest(0, 1000, 1, (1, 2)), TraceRequest(1, 1000, 1, (1, 3))]) == 512 / 2000
    assert shared_lru_hit_rate(repeats(4, 1), 4096) == 0.75
    assert shared_lru_hit_rate(repeats(4, 1), 1024) == pytest.approx(0.75 / 2)


async def test_one_prompt_again_and_again_is_computed_once_where_its_prefix_counts() -> None:
    outcome = await run("prefix_aware", repeats(20, 2))
    assert outcome.prompt_tokens == 20 * 2048
    assert outcome.prefill_cached_tokens == 19 * 1536  # the last block is computed for the last token
    assert sorted(outcome.computed_tokens) == [0, 2048 + 19 * 512]
    assert sorted(outcome.decode_requests) == [0, 20]


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_every_policy_serves_everything_and_gives_all_blocks_back(policy: str) -> None:
    requests = synthetic(300, rate=20)
    simulation = Simulation(
        Setup(policy=policy, prefills=4, decodes=4, routers=2, hash_block_tokens=128, block_tokens=256)
    )
    outcome = await simulation.run(requests)
    assert len(outcome.ttft_s) == len(outcome.decision_s) == sum(outcome.decode_requests) == 300
    for worker in simulation._workers:
        worker._pool.check_invariants()
        assert worker._pool.num_used == worker.requests == worker.queued_tokens == 0
    for router in simulation._routers:
        assert all(view.load.own_requests == 0 for view in router.views.values())
        for worker in simulation._workers:
            assert router.index.blocks_of(worker.worker_id) == set(worker._pool._block_of_hash)
    assert json.dumps(row("made-up", 1.0, 1.0, simulation._setup, outcome))


async def test_prefix_aware_hits_more_than_least_loaded() -> None:
    requests = synthetic(400)
    aware, loaded = [await run(policy, requests, prefills=8, decodes=8) for policy in ("prefix_aware", "least_loaded")]
    assert aware.prefill_cached_tokens > 1.1 * loaded.prefill_cached_tokens
    assert aware.decode_cached_tokens > 1.1 * loaded.decode_cached_tokens


def test_a_trace_is_read_as_published(tmp_path: Path) -> None:
    entry = {"timestamp": 2500, "input_length": 700, "output_length": 9, "hash_ids": [5, 6]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(entry) + "\n")
    (request,) = read_mooncake(tmp_path / "trace.jsonl")
    assert request == TraceRequest(2.5, 700, 9, [5, 6])
    assert request.token_ids() == [5] * 512 + [6] * 188


def test_memory_is_that_of_entries() -> None:
    assert 50 < bytes_per_entry(4, 2048, 1) < 400


async def test_decode_workers_help_when_prompts_queue_and_only_then() -> None:
    speed = WorkerSpeed(shared_tokens_per_s=8_000)
    crowded = [TraceRequest(i * 0.1, 2048, 10, tuple(range(10 * i, 10 * i + 4))) for i in range(200)]
    setup = Setup(policy="prefix_aware", prefills=1, decodes=1, hash_block_tokens=512, block_tokens=512, speed=speed)
    alone = await Simulation(replace(setup, speed=WorkerSpeed())).run(crowded)
    helped = await Simulation(setup).run(crowded)
    assert alone.helped == 0
    # 20,480 tokens a second come; 16,000 one computes, and the other a part of 8,000.
    assert 0.2 < helped.helped / 200 < 0.4
    assert 0.4 < helped.decode_prefill_share < 0.9
    assert sum(helped.ttft_s) < 0.5 * sum(alone.ttft_s)
    sparse = [replace(request, arrival_s=5 * request.arrival_s) for request in crowded]
    assert (await Simulation(setup).run(sparse)).helped == 0
    in_turn = await Simulation(replace(setup, policy="round_robin")).run(crowded)
    assert in_turn.helped == 0
