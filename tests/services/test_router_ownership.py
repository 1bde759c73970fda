"""A router with its index over a real Valkey: fake workers say what they own, requests go there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine.block_hash import hash_tokens, root_hash
from pdserve.identity import new_identity
from pdserve.session import Session
from pdserve.v1 import inference_pb2 as pb
from registry.kv_events import Batch, Cleared, Removed, Stored, join
from registry.ownership import Ownership
from router.app import Router
from router.config import RouterConfig
from tests.services.fake_worker import Behaviour, FakeWorker
from tests.services.processes import RedisProcess, eventually, running_redis
from tests.services.test_router import Fleet, collect, expected, running_fleet

UNIT = 16
PROMPT = list(range(100, 100 + 20 * UNIT))


def hashes(prompt: list[int], fingerprint: str = "model-a") -> list[bytes]:
    return hash_tokens(prompt, UNIT, root_hash(fingerprint))


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisProcess]:
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture
async def ownership(valkey: RedisProcess) -> AsyncIterator[Ownership]:
    ownership = Ownership(valkey.url)
    yield ownership
    await ownership.close()


async def say_owned(ownership: Ownership, worker: FakeWorker, prompt: list[int], first_seq: int = 1) -> None:
    batch = Batch(worker.identity.incarnation, first_seq, [Cleared(), Stored(join(hashes(prompt)))])
    await ownership.publish(worker.worker_id, batch)


async def until_indexed(router: Router, worker: FakeWorker, count: int) -> None:
    await eventually(lambda: len(router.index.blocks_of(worker.worker_id)) == count, "the index has it")


async def four_workers(fleet: Fleet) -> list[FakeWorker]:
    return [
        await fleet.add(f"{role[0]}{i}", role, pool_tokens=100_000) for role in ("prefill", "decode") for i in range(2)
    ]


async def test_requests_go_where_their_prefix_is(valkey: RedisProcess, ownership: Ownership) -> None:
    async with running_fleet(valkey, policy="prefix_aware") as fleet:
        p0, p1, d0, d1 = await four_workers(fleet)
        for owner in (p1, d0):
            await say_owned(ownership, owner, PROMPT)
            await until_indexed(fleet.router, owner, 20)
        for _ in range(6):
            await fleet.ask(2, prompt=PROMPT)
        assert (len(p1.opened), len(d0.opened)) == (6, 6)
        assert not p0.opened
        assert not d1.opened
        gone = Batch(p1.identity.incarnation, 3, [Removed(join(hashes(PROMPT)))])
        await ownership.publish("p1", gone)
        await until_indexed(fleet.router, p1, 0)


async def test_another_model_or_tenant_has_other_names(valkey: RedisProcess, ownership: Ownership) -> None:
    async with running_fleet(valkey, policy="prefix_aware") as fleet:
        a = await fleet.add("a", "decode", fingerprint="model-b")
        await say_owned(ownership, a, PROMPT)  # names of model-a
        await until_indexed(fleet.router, a, 20)
        assert fleet.router.index.match(hashes(PROMPT, "model-b")) == {}


@pytest.mark.parametrize("count", [3, 12])
async def test_a_burst_with_one_new_prefix_stays_together(valkey: RedisProcess, count: int) -> None:
    """Nobody has published anything yet, and the workers were met just now: the first choice is a guess for those that
    come with it, and it outlives the router's first look at what the workers own."""
    async with running_fleet(valkey, policy="prefix_aware") as fleet:
        workers = await four_workers(fleet)
        for worker in workers:
            worker.behaviour = Behaviour(first_token_s=0.5)
        await asyncio.gather(*(fleet.ask(1, prompt=[*PROMPT, i]) for i in range(count)))
        assert sorted(len(worker.opened) for worker in workers[:2]) == [0, count]


async def test_a_new_incarnation_of_a_worker_owns_nothing(valkey: RedisProcess, ownership: Ownership) -> None:
    async with running_fleet(valkey, policy="prefix_aware") as fleet:
        p0, p1, *_ = await four_workers(fleet)
        await say_owned(ownership, p1, PROMPT)
        await until_indexed(fleet.router, p1, 20)
        await p1.stop()
        again = await fleet.add("p1", "prefill", pool_tokens=100_000)  # Redis still has the old one's blocks
        for i in range(8):
            await fleet.ask(1, prompt=[*PROMPT[:32], 7, i, *range(32)])
        assert p0.opened
        await say_owned(ownership, again, PROMPT[:160])
        await until_indexed(fleet.router, again, 10)


async def test_a_restarted_router_is_ready_only_when_it_knows_the_owners(
    valkey: RedisProcess, ownership: Ownership
) -> None:
    async with running_fleet(valkey, policy="prefix_aware") as fleet:
        workers = await four_workers(fleet)
        for owner in (workers[1], workers[2]):
            await say_owned(ownership, owner, PROMPT)
        config = RouterConfig(
            redis_url=valkey.url,
            poll_interval_s=0.05,
            min_prefill_workers=2,
            min_decode_workers=2,
            local_prefill_tokens=0,
        )
        router = Router(config)
        await router.start()
        try:
            await eventually(lambda: router._service.not_ready() is None, "the second router is ready")
            assert len(router.index.blocks_of("p1")) == len(router.index.blocks_of("d0")) == 20
            session = await Session.connect(f"127.0.0.1:{router.port}", new_identity("gateway", "g9"))
            request = pb.GenerateRequest(
                request_id="x", prompt_token_ids=PROMPT, sampling=pb.SamplingParams(max_tokens=3), timeout_s=30
            )
            assert (await collect(session.open(request))).tokens == expected(3, PROMPT)
            assert workers[1].opened
            assert workers[2].opened
            assert router._metrics_registry.get_sample_value("pdserve_blind_decisions_total") == 0
            await session.close()
        finally:
            await router.stop()


async def test_with_redis_gone_what_is_known_goes_on_and_later_it_catches_up(
    valkey: RedisProcess, ownership: Ownership
) -> None:
    async with running_fleet(valkey, policy="prefix_aware") as fleet:
        _, p1, d0, _ = await four_workers(fleet)
        for owner in (p1, d0):
            await say_owned(ownership, owner, PROMPT)
            await until_indexed(fleet.router, owner, 20)
        valkey.kill()
        await eventually(lambda: not fleet.router.feed.is_available, "the router notices")
        await fleet.ask(2, prompt=PROMPT)
        assert (len(p1.opened), len(d0.opened)) == (1, 1)
        assert fleet.router._service.not_ready() is None
        valkey.start()
        await eventually(lambda: fleet.router.feed.is_available, "the router notices")
        await say_owned(ownership, p1, PROMPT[:64], first_seq=9)
        await until_indexed(fleet.router, p1, 4)


async def test_a_prompt_that_a_decode_worker_has_cached_skips_the_prefill_workers(
    valkey: RedisProcess, ownership: Ownership
) -> None:
    async with running_fleet(valkey, policy="prefix_aware", local_prefill_tokens=64) as fleet:
        p0, p1, _, d1 = await four_workers(fleet)
        await fleet.ask(1, prompt=PROMPT)
        assert len(p0.opened) + len(p1.opened) == 1
        fresh = list(range(5000, 5000 + 20 * UNIT))
        await say_owned(ownership, d1, fresh)
        await until_indexed(fleet.router, d1, 20)
        await fleet.ask(1, prompt=[*fresh, 1, 2, 3])
        assert len(p0.opened) + len(p1.opened) == 1
        assert len(d1.opened) >= 1
        assert not d1.opened[-1].HasField("handoff")


async def test_a_decode_worker_with_a_popular_prefix_is_not_left_alone_with_it(
    valkey: RedisProcess, ownership: Ownership
) -> None:
    """What one decode worker has cached goes there without a hand-off only while it is hardly busier than the other."""
    async with running_fleet(valkey, policy="prefix_aware", local_prefill_tokens=64) as fleet:
        p0, p1, d0, d1 = await four_workers(fleet)
        for worker in (d0, d1):
            worker.behaviour = Behaviour(first_token_s=0.5)
        await say_owned(ownership, d1, PROMPT)
        await until_indexed(fleet.router, d1, len(PROMPT) // UNIT)
        await asyncio.gather(*(fleet.ask(1, prompt=[*PROMPT, i]) for i in range(12)))
        local = [request for request in d1.opened if not request.HasField("handoff")]
        assert local
        assert d0.opened, "the other decode worker takes its share"
        assert p0.opened or p1.opened


async def test_full_queues_refuse_with_a_hint(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, policy="prefix_aware", max_queued_tokens=300) as fleet:
        for worker in await four_workers(fleet):
            worker.behaviour = Behaviour(first_token_s=1.5)
        held = [asyncio.create_task(fleet.ask(1, prompt=[i] * 300)) for i in range(1, 3)]  # one queue each
        await eventually(lambda: sum(len(w.opened) for w in fleet.workers.values()) == 4, "the queues are full")
        refused = await fleet.ask(1, prompt=[9] * 300)
        assert refused.code == "ERROR_CODE_OVERLOADED"
        assert refused.finish.failure.retryable
        assert refused.finish.failure.retry_after_s > 0
        for answer in await asyncio.gather(*held):
            assert answer.finish.reason == pb.FINISH_REASON_LENGTH
        assert (await fleet.ask(1, prompt=[9] * 300)).finish.reason == pb.FINISH_REASON_LENGTH
