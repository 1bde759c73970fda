"""The simulator on small fleets: what it counts is what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.router_sim.memory import bytes_per_entry
from bench.router_sim.report import row
from bench.router_sim.simulation import Outcome, Setup, Simulation
from bench.router_sim.trace import TraceRequest, ideal_hit_rate, read_mooncake, shared_lru_hit_rate, synthetic
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
