"""256 requests at once open one stream, over one socket, between each pair of processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.model import ServedModel
from pdserve.model_store import prepare_default_model
from pdserve.session_server import ServerSession
from pdserve.v1 import inference_pb2 as pb
from router.app import Router
from router.config import RouterConfig
from tests.services.fake_worker import FakeWorker, token_at
from tests.services.gateway_harness import MODEL_NAME, load_test_model, running_gateway
from tests.services.processes import eventually, running_redis

REQUESTS = 256
TOKENS = 4


@dataclass
class GatedWorker(FakeWorker):
    """Answers nobody before the gate is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_sessions: int = 0
    """Streams that ever carried a request."""

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        super().open(session, request)
        self.num_sessions = len({id(opened_on) for opened_on, _ in self.tasks})

    async def _answer(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        await self.gate.wait()
        await super()._answer(session, request)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_test_model(prepare_default_model())


def sockets_to(port: int) -> int:
    """Established connections to a port of this process, seen from the side that listens."""
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and bool(connection.laddr) and connection.laddr.port == port
        for connection in psutil.Process().net_connections("tcp")
    )


async def test_256_requests_share_one_stream_each(tmp_path: Path, model: ServedModel) -> None:
    gate = asyncio.Event()
    with running_redis(tmp_path) as redis:
        prefill = GatedWorker("p0", "prefill", redis.url, gate=gate)
        decode = GatedWorker("d0", "decode", redis.url, gate=gate)
        await prefill.start()
        await decode.start()
        router = Router(
            RouterConfig(redis_url=redis.url, poll_interval_s=0.05, policy="round_robin", local_prefill_tokens=0)
        )
        await router.start()
        try:
            await eventually(lambda: router.workers.known.keys() == {"p0", "d0"}, "both workers are known")
            await eventually(lambda: all(w.usable for w in router.workers.known.values()), "both workers are met")
            address = f"127.0.0.1:{router.port}"
            limits = httpx.Limits(max_connections=REQUESTS)
            async with (
                running_gateway(model, [address]) as url,
                httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client,
            ):
                await eventually(lambda: router._sessions.sessions, "the gateway's session")
                asked = [asyncio.create_task(ask(client, 100 + i)) for i in range(REQUESTS)]
                await eventually(lambda: len(decode.tasks) == len(prefill.tasks) == REQUESTS, "all are on both workers")
                assert [len(side.sessions) for side in (router._sessions, prefill.sessions, decode.sessions)] == [1] * 3
                assert [worker.num_sessions for worker in (prefill, decode)] == [1, 1]
                assert [worker.session.connects_total for worker in router.workers.known.values()] == [1, 1]
                assert [sockets_to(port) for port in (router.port, prefill.port, decode.port)] == [1] * 3
                gate.set()
                answers = await asyncio.gather(*asked)
            assert answers == [[token_at([100 + i], position) for position in range(TOKENS)] for i in range(REQUESTS)]
        finally:
            await router.stop()
            await prefill.stop()
            await decode.stop()


async def ask(client: httpx.AsyncClient, token_id: int) -> list[int]:
    body = {"model": MODEL_NAME, "prompt": [token_id], "max_tokens": TOKENS, "return_token_ids": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])
