"""How a gateway leaves, as a process: ready no more, serving a moment longer, streams to their end, exit status 0."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.model import ServedModel
from pdserve import terminal
from pdserve.channel import open_channel
from pdserve.model_store import prepare_default_model
from pdserve.session_server import ServerSession
from pdserve.v1 import inference_pb2 as pb
from tests.services.gateway_harness import (
    FakeRouter,
    eventually,
    load_test_model,
    running_gateway,
    running_router,
    text_script,
)

BODY = {"model": "small", "prompt": "Hello", "max_tokens": 64}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare_default_model()


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ServedModel:
    return load_test_model(model_dir)


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    url: str
    grpc_address: str

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 60)

    async def health(self) -> tuple[int, str]:
        async with httpx.AsyncClient() as http:
            response = await http.get(f"{self.url}/health")
            return response.status_code, response.text

    async def until_health(self, status: int, word: str = "") -> None:
        async with asyncio.timeout(30):
            while (health := await self.health())[0] != status or word not in health[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def gateway_process(model_dir: Path, router: FakeRouter, *flags: str) -> AsyncIterator[GatewayProcess]:
    argv = [
        "--model",
        str(model_dir),
        "--served-model-name",
        "small",
        "--port",
        "0",
        "--router",
        router.address,
        *flags,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *argv, stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            async for line in process.stderr:
                entry = json.loads(line)
                if entry["event"] == "ready":
                    break
        await eventually(lambda: router.server.sessions)
        gateway = GatewayProcess(process, f"http://127.0.0.1:{entry['port']}", f"127.0.0.1:{entry['grpc_port']}")
        await gateway.until_health(200)
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await process.stderr.read()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # else its pipes are closed by the collector


async def test_the_way_of_a_gateway(model: ServedModel, model_dir: Path) -> None:
    router = FakeRouter(text_script(model, "one two three four", pause_after=2))
    async with (
        running_router(router),
        gateway_process(model_dir, router, "--lame-duck-s", "6") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        open_channel(gateway.grpc_address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        assert "connection" not in (await http.get("/v1/models")).headers
        stream = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await router.wait_requests(1)
        gateway.terminate()
        await gateway.until_health(503, "draining")
        assert (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Whoever has not noticed yet is served, and told that this connection ends here.
        late = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await router.wait_requests(2)
        router.go.set()
        for answer in (await stream, await late):
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == "one two three four"
            assert answer.headers["connection"] == "close"
        assert await gateway.exit_status() == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/live")


async def test_after_the_lame_duck_it_refuses_and_finishes(model: ServedModel, model_dir: Path) -> None:
    router = FakeRouter(text_script(model, "one two three four", pause_after=2))
    async with (
        running_router(router),
        gateway_process(model_dir, router) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        open_channel(gateway.grpc_address) as channel,
    ):
        async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            lines = response.aiter_lines()
            text = json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"]
            gateway.terminate()
            await gateway.until_health(503, "draining")
            assert (await http.get("/live")).status_code == 200
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) > 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_stream("/pdserve.v1.Inference/Generate")(b"").read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            router.go.set()
            async for line in lines:
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert text == "one two three four"
        assert await gateway.exit_status() == 0


@pytest.mark.parametrize("flags", [("--drain-timeout-s", "0.3"), ()])
async def test_what_does_not_end_is_cut_off(model: ServedModel, model_dir: Path, flags: tuple[str, ...]) -> None:
    """At the timeout, or by a second signal."""
    router = FakeRouter(text_script(model, "one two three four", pause_after=2))
    async with (
        running_router(router),
        gateway_process(model_dir, router, *flags) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await router.wait_requests(1)
        gateway.terminate()
        if not flags:
            await gateway.until_health(503, "draining")
            gateway.terminate()
        cut_off = await asking
        assert (cut_off.status_code, cut_off.json()["error"]["code"]) == (503, "draining")
        await router.wait_aborts(1)
        assert await gateway.exit_status() == 0


async def test_a_stream_that_is_cut_off_says_so(model: ServedModel, model_dir: Path) -> None:
    router = FakeRouter(text_script(model, "one two three four", pause_after=2))
    async with (
        running_router(router),
        gateway_process(model_dir, router, "--drain-timeout-s", "0.3") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert "text" in await anext(lines)
        gateway.terminate()
        *_, last = [line async for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        await router.wait_aborts(1)
        assert await gateway.exit_status() == 0


class LeavingRouter(FakeRouter):
    """Hands back what comes, as a router that leaves does, before or after a gateway can have heard of it."""

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        self.requests.append(request)
        session.send([terminal.aborted(request.request_id, "this router is leaving")])
        self.server.draining = True


async def test_what_a_leaving_router_hands_back_goes_to_the_next(model: ServedModel) -> None:
    leaving, stays = LeavingRouter(text_script(model, "")), FakeRouter(text_script(model, "here it is"))
    async with (
        running_router(leaving),
        running_router(stays),
        running_gateway(model, [leaving.address, stays.address], max_resumes=0) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        body = {**BODY, "model": model.name}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "here it is"
        assert (len(leaving.requests), len(stays.requests)) == (1, 1)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (len(leaving.requests), len(stays.requests)) == (1, 2)


async def test_with_every_router_leaving_it_is_not_ready_and_waits_for_one(model: ServedModel) -> None:
    leaving, comes = LeavingRouter(text_script(model, "")), FakeRouter(text_script(model, "here it is"))
    comes.server.draining = True
    async with (
        running_router(leaving),
        running_router(comes),
        running_gateway(model, [leaving.address, comes.address], num_usable=1) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        await eventually(lambda: bool(leaving.server.sessions and comes.server.sessions))
        asking = asyncio.create_task(http.post("/v1/completions", json={**BODY, "model": model.name}))
        await leaving.wait_requests(1)
        while (await http.get("/health")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        comes.server.draining = False
        assert (await asking).json()["choices"][0]["text"] == "here it is"
