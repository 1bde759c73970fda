"""grpc.health.v1 and reflection, as every server of ours has them through ``pdserve.channel.serve``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.address import join_address
from pdserve.channel import open_channel, serve
from pdserve.v1 import gateway_pb2_grpc, inference_pb2_grpc, worker_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
OURS = ["pdserve.v1.Generation", "pdserve.v1.Inference", "pdserve.v1.KVHandoff"]


class Service:
    """A server whose readiness the test decides."""

    ready = False
    port = 0


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    servicers = [
        inference_pb2_grpc.GenerationServicer(),
        gateway_pb2_grpc.InferenceServicer(),
        worker_pb2_grpc.KVHandoffServicer(),
    ]
    server, service.port = await serve(servicers, "127.0.0.1", 0, is_ready=lambda: service.ready)
    yield service
    await server.stop(None)


@pytest_asyncio.fixture
async def channel(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{service.port}") as channel:
        yield channel


async def test_check_asks_the_service(service: Service, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ["", *OURS]:
        service.ready = False
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == NOT_SERVING
        service.ready = True
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_changes(service: Service, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(10):
        assert (await watch.read()).status == NOT_SERVING
        service.ready = True
        assert (await watch.read()).status == SERVING
        service.ready = False
        assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    listed = await stub.List(health_pb2.HealthListRequest())
    assert set(listed.statuses) == {"", *OURS}
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_an_ipv6_address_works_like_any_other() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    server, port = await serve([inference_pb2_grpc.GenerationServicer()], "::1", 0)
    try:
        async with open_channel(join_address("::1", port)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == SERVING
    finally:
        await server.stop(None)
    assert [join_address(host, 1) for host in ("a", "10.0.0.7", "fd00::1", "[::1]")] == [
        "a:1",
        "10.0.0.7:1",
        "[fd00::1]:1",
        "[::1]:1",
    ]


async def test_reflection_lists_what_is_served(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    names = [entry.name for entry in answer.list_services_response.service]
    assert sorted(names) == sorted([*OURS, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"])
    symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="pdserve.v1.Inference")
    answer = await stub.ServerReflectionInfo(iter([symbol])).read()
    assert answer.file_descriptor_response.file_descriptor_proto
