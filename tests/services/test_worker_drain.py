"""How real workers leave: what they say, refuse, finish and give back, and with which status they exit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.channel import open_channel
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from registry import WorkerRecord, WorkerRegistry
from tests.e2e.cluster import Member
from tests.holding import Held, is_in_a_handoff
from tests.services.processes import eventually, running_redis
from tests.services.tiny_model import write_tiny_model
from tests.services.worker_cluster import assert_at_rest, prompt_of, read, redis_url, routing, start_worker

LONG = 4000
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(tmp_path: Path, model: Path) -> Iterator[tuple[Member, Member]]:
    """A prefill worker with small chunks, a decode worker that runs two at a time."""
    slow = ("--max-num-batched-tokens", "16", "--drain-timeout-s", "60")
    prefill = start_worker("prefill_service", "drain-p", model, tmp_path, *slow)
    decode = start_worker("decode_service", "drain-d", model, tmp_path, "--max-num-seqs", "2", "--drain-timeout-s", "2")
    try:
        for member in (prefill, decode):
            member.wait_healthy()
        yield prefill, decode
    finally:
        for member in (prefill, decode):
            member.terminate()


def status(member: Member, path: str) -> tuple[int, str]:
    response = httpx.get(f"http://127.0.0.1:{member.health_port}{path}", timeout=20)
    return response.status_code, response.text


async def grpc_health(member: Member) -> int:
    async with open_channel(f"127.0.0.1:{member.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        return int(answer.status)


async def records() -> dict[str, WorkerRecord]:
    registry = WorkerRegistry(redis_url())
    try:
        return {record.worker_id: record for record in await registry.list_workers()}
    finally:
        await registry.close()


def keys_of(worker_id: str) -> set[bytes]:
    with redis.Redis.from_url(redis_url()) as client:
        return {key for key in client.scan_iter() if worker_id.encode() in key}


async def exit_status(member: Member) -> int:
    assert member.process is not None
    return await asyncio.to_thread(member.process.wait, 60)


async def test_a_prefill_worker_completes_its_hand_off_and_hands_back_the_rest(pair: tuple[Member, Member]) -> None:
    prefill, decode = pair
    async with routing(*pair) as router:
        expected = await router.aggregated(prompt_of(LONG), max_tokens=4)
        held, is_under_way = Held([prefill]), is_in_a_handoff(decode)
        try:
            under_way, answer = router.open([*prompt_of(LONG - 1, seed=1), 5], max_tokens=4)
            await asyncio.to_thread(held.run_until, "KV is on its way", is_under_way)
            waiting = [router.open([*prompt_of(LONG, seed=2 + n)], max_tokens=4)[0] for n in range(4)]
            await eventually(lambda: prefill.metrics()["pdserve_open_requests"] == 5, "others wait behind it")
            prefill.signal(signal.SIGTERM)
            await eventually(lambda: status(prefill, "/health")[0] == 503, "it drains")
        finally:
            held.let_go()
        for handle in waiting:
            given_back = await asyncio.wait_for(read(handle), 30)
            assert (given_back.reason, given_back.token_ids) == ("ABORT", [])
        code, text = status(prefill, "/health")
        assert (code, "draining" in text) == (503, True)
        assert status(prefill, "/live")[0] == 200
        assert await grpc_health(prefill) == NOT_SERVING
        assert router.prefill.draining
        async with asyncio.timeout(30):
            while not (await records())["drain-p"].draining:  # noqa: ASYNC110  # in Redis
                await asyncio.sleep(0.05)
        late, _ = router.open(prompt_of(9), max_tokens=4)
        assert (await asyncio.wait_for(read(late), 30)).reason == "ABORT"
        assert (await asyncio.wait_for(read(answer), 60)).reason == "LENGTH"
        assert (await asyncio.wait_for(read(under_way), 30)).reason == "LENGTH"
        assert await exit_status(prefill) == 0
        assert "drain-p" not in await records()
        assert keys_of("drain-p") == {b"{pdserve}:incarnation:drain-p"}  # the fence against an older process stays
        # The decode worker does the same work alone, as before.
        assert (await router.aggregated(prompt_of(LONG), max_tokens=4)).token_ids == expected.token_ids
    assert_at_rest(decode)


async def test_a_decode_worker_gives_back_what_does_not_end_in_time(pair: tuple[Member, Member]) -> None:
    _, decode = pair
    async with routing(*pair) as router:
        request = router.request(prompt_of(20), max_tokens=7000)
        endless = router.decode.open(request)
        first = [output async for output in _take(endless, 3)]
        decode.signal(signal.SIGTERM)
        rest = await asyncio.wait_for(read(endless), 30)
        assert rest.reason == "ABORT"
        so_far = [token for output in first for token in output.token_ids] + rest.token_ids
        assert 3 <= len(so_far) < 7000
        assert await exit_status(decode) == 0
        decode.start()
        decode.wait_healthy()
        await eventually(lambda: router.decode.alive and not router.decode.draining, "the new one is there")
        # Whoever goes on with what was given, and from there, says what one alone says from the beginning.
        number = len(so_far) + 20
        whole = await router.aggregated(prompt_of(20), max_tokens=number)
        resumed = await router.aggregated(prompt_of(20), max_tokens=number, output_so_far=so_far)
        assert whole.token_ids == so_far + resumed.token_ids


async def _take(handle, count: int):  # type: ignore[no-untyped-def]
    for _ in range(count):
        yield await anext(handle)


async def test_a_second_signal_ends_it_at_once(pair: tuple[Member, Member]) -> None:
    prefill, decode = pair
    async with routing(prefill, decode) as router:
        router.prefill.open(router.sides(router.request(prompt_of(LONG)))[0])  # waits for a ticket, for ever
        running = router.decode.open(router.request(prompt_of(20), max_tokens=7000))
        await anext(running)
        reading = asyncio.create_task(read(running))
        decode.signal(signal.SIGTERM)
        await eventually(lambda: status(decode, "/health")[0] == 503, "it drains")
        decode.signal(signal.SIGTERM)
        assert await exit_status(decode) == 0
        answer = await reading
        assert answer.code in ("ERROR_CODE_WORKER_LOST", "ERROR_CODE_ABORTED")


async def test_it_leaves_in_time_with_a_stopped_engine_and_without_redis(model: Path, tmp_path: Path) -> None:
    """Nobody answers it: it exits all the same, and what ran is lost with its session, for its router to resume."""
    with running_redis(tmp_path) as valkey:
        flags = ("--redis", valkey.url, "--drain-timeout-s", "1")
        decode = start_worker("decode_service", "drain-alone", model, tmp_path, *flags)
        try:
            decode.wait_healthy()
            async with routing(decode, decode) as router:
                running = router.decode.open(router.request(prompt_of(20), max_tokens=7000))
                await anext(running)
                reading = asyncio.create_task(read(running))
                os.kill(decode.engine_pid(), signal.SIGSTOP)
                valkey.kill()
                decode.signal(signal.SIGTERM)
                assert (await asyncio.wait_for(reading, 20)).code == "ERROR_CODE_WORKER_LOST"
            assert await exit_status(decode) == 0
        finally:
            decode.terminate()


async def test_a_signal_before_it_is_ready(model: Path, tmp_path: Path) -> None:
    member = start_worker("decode_service", "drain-early", model, tmp_path)
    await eventually(lambda: member.log.exists() and is_alive(member), "its status server is there")
    member.signal(signal.SIGTERM)
    assert await exit_status(member) == 0
    assert "drain-early" not in await records()


def is_alive(member: Member) -> bool:
    try:
        return status(member, "/live")[0] == 200
    except httpx.TransportError:
        return False


async def test_an_operator_drains_it_and_watches(pair: tuple[Member, Member]) -> None:
    _, decode = pair
    async with routing(*pair) as router, open_channel(f"127.0.0.1:{decode.port}") as channel:
        running = router.decode.open(router.request(prompt_of(20), max_tokens=7000))
        await anext(running)
        reading = asyncio.create_task(read(running))
        call = worker_pb2_grpc.WorkerAdminStub(channel).Drain(worker_pb2.DrainRequest(), timeout=30)
        told = [progress async for progress in call]
        assert told[0].open_requests == 1
        assert 0 < told[0].left_s <= 2
        assert [progress.drained for progress in told] == [False] * (len(told) - 1) + [True]
        assert (await reading).reason == "ABORT"
        assert await exit_status(decode) == 0


def drain_command(worker: str, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pdserve.cli", "drain", worker, "--redis", redis_url(), *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


async def test_the_drain_command(pair: tuple[Member, Member]) -> None:
    _, decode = pair
    unknown = await asyncio.to_thread(drain_command, "nobody")
    assert unknown.returncode == 1
    assert "drain-p" in unknown.stderr  # it names those that there are
    away = await asyncio.to_thread(drain_command, "drain-d", "--redis", "unix:///nowhere.sock")
    assert away.returncode == 1
    assert "Redis" in away.stderr
    async with routing(*pair) as router:
        running = router.decode.open(router.request(prompt_of(20), max_tokens=7000))
        await anext(running)
        reading = asyncio.create_task(read(running))
        done = await asyncio.to_thread(drain_command, "drain-d")
        assert done.returncode == 0, done.stderr
        assert "1 request" in done.stdout
        assert "drained" in done.stdout
        assert (await reading).reason == "ABORT"
    assert await exit_status(decode) == 0
    assert "drain-d" not in await records()


async def test_another_models_answer_is_handed_back(pair: tuple[Member, Member]) -> None:
    """Its router still knows the worker as it was before a restart with another model."""
    async with routing(*pair) as router:
        request = router.request(prompt_of(20), max_tokens=8, output_so_far=[4, 5])
        request.model_fingerprint = "of the model before"
        answer = await read(router.decode.open(request))
        assert (answer.reason, answer.token_ids) == ("ABORT", [])


async def test_not_ready_before_it_is_registered(model: Path, tmp_path: Path) -> None:
    member = start_worker("decode_service", "drain-lonely", model, tmp_path, "--redis", f"unix://{tmp_path}/none.sock")
    try:
        await eventually(lambda: '"event": "ready"' in member.log.read_text(), "its engine runs")
        code, text = status(member, "/health")
        assert (code, "Redis" in text) == (503, True)
        assert await grpc_health(member) == NOT_SERVING
        assert status(member, "/live")[0] == 200
    finally:
        assert member.terminate() == 0


async def test_not_ready_before_a_peer_is_reached(model: Path, tmp_path: Path) -> None:
    """A compatible worker that is registered, but where nobody answers, keeps it back; another kind's does not."""
    registry = WorkerRegistry(redis_url())
    first = start_worker("decode_service", "drain-first", model, tmp_path)
    member: Member | None = None
    try:
        first.wait_healthy()  # nobody else was there
        like_it = (await records())["drain-first"]
        first.terminate()
        away = {"role": "prefill", "address": "127.0.0.1:9", "load": like_it.load}
        fields = {name: getattr(like_it, name) for name in like_it.__struct_fields__}
        for worker_id, changed in (
            ("drain-away", {}),
            ("drain-other-wire", {"kv_wire": "0/none"}),
        ):
            await registry.register(WorkerRecord(**{**fields, **away, "worker_id": worker_id, **changed}), 60)
        member = start_worker("decode_service", "drain-second", model, tmp_path)
        await eventually(lambda: '"event": "ready"' in member.log.read_text(), "its engine runs")
        await eventually(lambda: "drain-away at 127.0.0.1:9" in status(member, "/health")[1], "it says whom it misses")
        assert status(member, "/health")[0] == 503
        assert "other-wire" not in status(member, "/health")[1]
        await registry.remove("drain-away", like_it.incarnation)
        await eventually(member.healthy, "only one that it could not pair with is left")
    finally:
        for worker_id in ("drain-away", "drain-other-wire"):
            await registry.remove(worker_id, like_it.incarnation)
        await registry.close()
        for worker in (first, member):
            if worker is not None:
                worker.terminate()


async def test_the_admin_service_is_reflected_and_answers_only_workers(pair: tuple[Member, Member]) -> None:
    prefill, _ = pair
    async with open_channel(f"127.0.0.1:{prefill.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="pdserve.v1.WorkerAdmin"), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Check(health_pb2.HealthCheckRequest(service="pdserve.v1.Nobody"), timeout=5)
