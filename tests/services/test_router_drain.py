"""Workers and routers that leave: what they give back goes on elsewhere, and only where it may."""

from __future__ import annotations

import asyncio
import signal

import pytest

from pdserve.identity import new_identity
from pdserve.session import Session
from pdserve.v1 import inference_pb2 as pb
from router.request_path import MAX_GIVEN_BACK
from tests.services.fake_worker import Behaviour, FakeWorker
from tests.services.processes import RedisProcess, eventually
from tests.services.test_router import PROMPT, Fleet, collect, expected, fleet, valkey
from tests.services.test_router_process import router_process

__all__ = ["fleet", "valkey"]  # fixtures


async def test_what_is_given_back_is_no_failure(fleet: Fleet) -> None:
    """More often than a request may fail, before its first token and in the middle of its answer."""
    leaving = [
        await fleet.add(f"d{n}", "decode", behaviour=Behaviour(gives_back=True, fail_after_tokens=n % 2))
        for n in range(6)
    ]
    asking = asyncio.create_task(fleet.ask(20))
    await eventually(lambda: all(worker.opened for worker in leaving), "all of them have given it back")
    await fleet.add("stays", "decode")
    assert (await asking).tokens == expected(20)


async def test_it_does_not_go_round_for_ever(fleet: Fleet) -> None:
    leaving = [await fleet.add(f"d{n}", "decode", behaviour=Behaviour(gives_back=True)) for n in range(2)]
    answer = await fleet.ask(timeout_s=60)
    assert answer.code == "ERROR_CODE_WORKER_LOST"
    assert sum(len(worker.opened) for worker in leaving) <= MAX_GIVEN_BACK + 3


async def test_a_record_that_says_draining_is_enough(fleet: Fleet) -> None:
    """Before the router has heard of it on the session, or has a session at all."""
    leaving, stays = await fleet.add("d0", "decode"), await fleet.add("d1", "decode")
    leaving.draining = True
    await eventually(lambda: fleet.router.workers.known["d0"].state == "draining", "the router has read it")
    for _ in range(4):
        assert (await fleet.ask()).tokens == expected(8)
    assert (len(leaving.opened), len(stays.opened)) == (0, 4)


@pytest.mark.parametrize("difference", [{"fingerprint": "model-b"}, {"kv_wire": "2/other"}])
async def test_two_versions_side_by_side(fleet: Fleet, difference: dict[str, str]) -> None:
    """Only workers that understand each other are a pair; both pairs get their part."""
    for version, fields in (("old", {}), ("new", difference)):
        await fleet.add(f"p-{version}", "prefill", **fields)
        await fleet.add(f"d-{version}", "decode", **fields)
    for _ in range(8):
        assert (await fleet.ask()).tokens == expected(8)
    for version in ("old", "new"):
        p, d = fleet.workers[f"p-{version}"], fleet.workers[f"d-{version}"]
        assert len(p.opened) == len(d.opened) == 4
        assert {request.handoff.peer.worker_id for request in p.opened} == {d.worker_id}


async def test_an_answer_is_of_one_model(fleet: Fleet) -> None:
    """Once begun, it goes on only where the same model is, at this router and at the next one."""
    leaving = await fleet.add("d-old", "decode", behaviour=Behaviour(gives_back=True, fail_after_tokens=3))
    asking = asyncio.create_task(fleet.ask(20))
    await eventually(lambda: leaving.opened, "the old one has it")
    other = await fleet.add("d-new", "decode", fingerprint="model-b")
    await fleet.add("d-old-2", "decode")
    answer = await asking
    assert answer.tokens == expected(20)
    assert [output.model_fingerprint for output in answer.outputs if output.model_fingerprint] == ["model-a"]
    assert other.opened == []
    await fleet.workers.pop("d-old-2").stop()
    await eventually(lambda: not fleet.router.workers.known["d-old-2"].usable, "it is gone")
    leaving.draining = True
    await eventually(lambda: not fleet.router.workers.known["d-old"].usable, "so is the other old one")
    request = pb.GenerateRequest(
        request_id="from another router",
        prompt_token_ids=PROMPT,
        output_so_far=expected(3),
        sampling=pb.SamplingParams(max_tokens=8),
        timeout_s=1.0,
        model_fingerprint="model-a",
    )
    resumed = await collect(fleet.gateway.open(request))
    assert resumed.tokens == []
    assert other.opened == []
    assert (await fleet.ask()).tokens == expected(8)  # a new one may go there
    assert len(other.opened) == 1


async def test_a_router_hands_back_what_does_not_end_in_time(valkey: RedisProcess) -> None:
    async with router_process("--redis", valkey.url, "--drain-timeout-s", "0.3") as router:
        d = FakeWorker("d0", "decode", valkey.url, behaviour=Behaviour(token_interval_s=0.05))
        await d.start()
        await router.until_health(200)
        session = await Session.connect(f"127.0.0.1:{router.port}", new_identity("gateway", "g0"))
        sampling = pb.SamplingParams(max_tokens=400)
        request = pb.GenerateRequest(request_id="q", prompt_token_ids=PROMPT, sampling=sampling, timeout_s=60)
        asking = asyncio.create_task(collect(session.open(request)))
        await eventually(lambda: d.opened, "the worker has it")
        router.process.send_signal(signal.SIGTERM)
        answer = await asking
        assert answer.finish.reason == pb.FINISH_REASON_ABORT
        assert answer.tokens == expected(len(answer.tokens))
        await eventually(lambda: d.aborted, "the worker is told")
        assert d.aborted == [(d.opened[0].request_id, "drain")]
        assert await asyncio.wait_for(router.process.wait(), 30) == 0
        await session.close()
        await d.stop()


async def test_a_second_signal_does_not_wait(valkey: RedisProcess) -> None:
    async with router_process("--redis", valkey.url, "--drain-timeout-s", "600") as router:
        d = FakeWorker("d0", "decode", valkey.url, behaviour=Behaviour(silent=True))
        await d.start()
        await router.until_health(200)
        session = await Session.connect(f"127.0.0.1:{router.port}", new_identity("gateway", "g0"))
        request = pb.GenerateRequest(
            request_id="q", prompt_token_ids=PROMPT, sampling=pb.SamplingParams(max_tokens=4), timeout_s=900
        )
        asking = asyncio.create_task(collect(session.open(request)))
        await eventually(lambda: d.opened, "the worker has it")
        router.process.send_signal(signal.SIGTERM)
        await router.until_health(503, "draining")
        assert (await router.get("/live")).status_code == 200
        router.process.send_signal(signal.SIGTERM)
        assert (await asking).finish.reason == pb.FINISH_REASON_ABORT
        assert await asyncio.wait_for(router.process.wait(), 30) == 0
        await session.close()
        await d.stop()
