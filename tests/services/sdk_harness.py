"""What the SDK's tests share: gateways on real gRPC ports in front of fake routers, one of each as fixtures."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from starlette.datastructures import State

import pdserve
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.grpc_service import serve_grpc
from gateway.model import ServedModel
from gateway.serving import Gateway
from pdserve.model_store import prepare_default_model
from tests.services.gateway_harness import FakeRouter, eventually, load_test_model, running_router, text_script

TEXT = "One, two, 你好, three, four, five, six, seven."
HI = [{"role": "user", "content": "hi"}]


@dataclass
class SdkGateway:
    """A gateway's gRPC half."""

    address: str
    gateway: Gateway
    server: grpc.aio.Server

    async def kill(self) -> None:
        """As if the process had died: every stream breaks, the port is closed."""
        await self.server.stop(None)

    def metric(self, name: str, *labels: str) -> float:
        return float(getattr(self.gateway.metrics, name).labels(*labels)._value.get())

    async def has_taken(self, num_outputs: int) -> None:
        """Until it has this many outputs of its only choice: it counts the times between them."""
        between = self.gateway.metrics.inter_token_latency.labels(self.gateway.model.name)
        await eventually(lambda: sum(bucket.get() for bucket in between._buckets) >= num_outputs - 1)


@contextlib.asynccontextmanager
async def sdk_gateway(
    model: ServedModel, routers: Sequence[str], *, port: int = 0, wait_up: bool = True, **settings: object
) -> AsyncIterator[SdkGateway]:
    """The real service in front of ``routers``, whose sessions are up."""
    config = GatewayConfig(model="test", served_model_name=model.name, routers=tuple(routers), **settings)  # type: ignore[arg-type]
    app = create_app(config, model)
    state: State = app.state
    gateway: Gateway = state.gateway
    async with app.router.lifespan_context(app):
        server, bound = await serve_grpc(gateway, "127.0.0.1", port)
        try:
            if wait_up:
                await eventually(lambda: len(gateway.routers.usable) == len(routers))
            yield SdkGateway(f"127.0.0.1:{bound}", gateway, server)
        finally:
            await server.stop(None)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_test_model(prepare_default_model())


@pytest_asyncio.fixture
async def router(model: ServedModel) -> AsyncIterator[FakeRouter]:
    async with running_router(FakeRouter(text_script(model, TEXT, cached_tokens=2))) as router:
        yield router


@pytest_asyncio.fixture
async def served(model: ServedModel, router: FakeRouter) -> AsyncIterator[SdkGateway]:
    async with sdk_gateway(model, [router.address]) as served:
        yield served


@pytest_asyncio.fixture
async def client(served: SdkGateway) -> AsyncIterator[pdserve.AsyncClient]:
    async with pdserve.AsyncClient(served.address, reconnect_s=1.0, deadline_s=20) as client:
        yield client
