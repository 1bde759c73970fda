"""``python -m router`` as it is started in a deployment: ready line, health, metrics, a clean end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.identity import new_identity
from pdserve.session import Session
from pdserve.v1 import inference_pb2 as pb
from tests.services.fake_worker import FakeWorker
from tests.services.processes import RedisProcess, eventually, running_redis
from tests.services.test_router import collect, expected


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    port: int
    metrics_port: int

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=10)

    async def until_health(self, status: int, word: str = "") -> None:
        async with asyncio.timeout(30):
            while True:
                health = await self.get("/health")
                if health.status_code == status and word in health.text:
                    return
                await asyncio.sleep(0.05)

    async def samples(self) -> dict[str, float]:
        text = (await self.get("/metrics")).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisProcess]:
    with running_redis(tmp_path) as server:
        yield server


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[RouterProcess]:
    flags = ("--local-prefill-tokens", "0", *flags)  # short prompts are handed off, too
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            async for line in process.stderr:
                entry = json.loads(line)
                if entry["event"] == "ready":
                    break
        yield RouterProcess(process, entry["port"], entry["metrics_port"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.stderr.read()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # else its pipes are closed by the collector


async def test_ready_serve_count_end(valkey: RedisProcess) -> None:
    async with router_process("--redis", valkey.url) as router:
        assert (await router.get("/live")).status_code == 200
        health = await router.get("/health")
        assert health.status_code == 503
        assert "decode" in health.json()["reason"]
        workers = [FakeWorker("p0", "prefill", valkey.url), FakeWorker("d0", "decode", valkey.url)]
        for worker in workers:
            await worker.start()
        await router.until_health(200)
        session = await Session.connect(f"127.0.0.1:{router.port}", new_identity("gateway", "g0"))
        request = pb.GenerateRequest(
            request_id="q", prompt_token_ids=[5, 6, 7], sampling=pb.SamplingParams(max_tokens=8), timeout_s=30
        )
        assert (await collect(session.open(request))).tokens == expected(8)
        samples = await router.samples()
        assert samples["pdserve_router_requests_total"] == 1
        assert samples["pdserve_dispatches_total"] == 2
        assert samples["pdserve_relayed_tokens_total"] == 8
        assert samples["pdserve_workers"] == 2
        assert samples["pdserve_sessions"] == 1
        assert samples["pdserve_open_requests"] == 0
        assert (await router.get("/nothing")).status_code == 404
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 30) == 0
        await eventually(lambda: not session.alive, "the gateway notices")
        await session.close()
        for worker in workers:
            assert not worker.sessions.sessions
            await worker.stop()


async def test_what_runs_is_finished_before_it_ends(valkey: RedisProcess) -> None:
    async with router_process("--redis", valkey.url) as router:
        worker = FakeWorker("a0", "aggregated", valkey.url)
        worker.behaviour.token_interval_s = 0.06
        await worker.start()
        session = await Session.connect(f"127.0.0.1:{router.port}", new_identity("gateway", "g0"))

        def request(request_id: str) -> pb.GenerateRequest:
            sampling = pb.SamplingParams(max_tokens=50)
            return pb.GenerateRequest(request_id=request_id, prompt_token_ids=[1], sampling=sampling, timeout_s=30)

        running = asyncio.create_task(collect(session.open(request("runs"))))
        await eventually(lambda: worker.opened, "the worker has it")
        router.process.send_signal(signal.SIGTERM)
        await eventually(lambda: session.draining, "the gateway is told")
        late = await collect(session.open(request("late")))
        assert late.finish.reason == pb.FINISH_REASON_ABORT  # the gateway sends it to another router
        assert (await running).tokens == expected(50, [1])
        assert await asyncio.wait_for(router.process.wait(), 30) == 0
        await session.close()
        await worker.stop()


async def test_ready_only_with_the_expected_workers(valkey: RedisProcess) -> None:
    async with router_process("--redis", valkey.url, "--min-prefill-workers", "1") as router:
        decode = FakeWorker("d0", "decode", valkey.url)
        await decode.start()
        await router.until_health(503, "prefill")
        prefill = FakeWorker("p0", "prefill", valkey.url)
        await prefill.start()
        await router.until_health(200)
        await decode.stop()
        await prefill.stop()


async def run_to_end(*flags: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_wrong_starts_are_one_clear_line(valkey: RedisProcess) -> None:
    code, text = await run_to_end("--redis", valkey.url, "--policy", "best")
    assert code == 1
    assert "round_robin" in text
    code, text = await run_to_end("--redis", valkey.url, "--log-level", "loud")
    assert (code, text.count("\n")) == (1, 1)
    assert "warning" in text
    async with router_process("--redis", valkey.url) as router:
        for flag, port in (("--port", router.port), ("--metrics-port", router.metrics_port)):
            code, text = await run_to_end("--redis", valkey.url, flag, str(port))
            assert code == 1
            assert str(port) in text.splitlines()[-1]
            assert "Traceback" not in text


async def test_a_router_without_redis_starts_and_says_so() -> None:
    async with router_process("--redis", "unix:///nonexistent/redis.sock") as router:
        assert (await router.get("/live")).status_code == 200
        assert (await router.get("/health")).status_code == 503
