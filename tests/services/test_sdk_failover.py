"""The SDK while gateways and routers come and go: an answer goes on, or ends with an error that says why."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

import pdserve
from gateway.model import ServedModel
from pdserve.v1 import inference_pb2 as pb
from tests.ports import free_port
from tests.services.gateway_harness import (
    FakeRouter,
    Script,
    eventually,
    running_router,
    text_script,
)
from tests.services.sdk_harness import HI, TEXT, SdkGateway, client, model, router, sdk_gateway, served

__all__ = ["client", "model", "router", "served"]  # fixtures


async def test_nobody_answers() -> None:
    async with pdserve.AsyncClient(f"127.0.0.1:{free_port()}", reconnect_s=0.2) as client:
        with pytest.raises(pdserve.ConnectionFailedError, match="is it started"):
            await client.chat(HI)
        with pytest.raises(pdserve.ConnectionFailedError):
            await client.model_info()

    def blocking() -> None:
        with pdserve.Client(f"127.0.0.1:{free_port()}", reconnect_s=0.2) as other:
            other.chat(HI)

    with pytest.raises(pdserve.ConnectionFailedError):
        await asyncio.to_thread(blocking)


async def test_it_waits_for_a_gateway_that_comes(model: ServedModel, router: FakeRouter) -> None:
    port = free_port()
    async with pdserve.AsyncClient(f"127.0.0.1:{port}", reconnect_s=10) as client:
        asking = asyncio.create_task(client.chat(HI))
        await asyncio.sleep(0.3)
        async with sdk_gateway(model, [router.address], port=port):
            assert (await asking).text == TEXT


def read(stream: pdserve.Stream, has: Counter[int]) -> pdserve.Generation:
    """To its end; ``has`` counts what it has of each choice."""
    for chunk in stream:
        has[chunk.index] += len(chunk.token_ids)
    return stream.result()


async def read_async(stream: pdserve.AsyncStream, has: Counter[int]) -> pdserve.Generation:
    async for chunk in stream:
        has[chunk.index] += len(chunk.token_ids)
    return await stream.result()


@pytest.mark.parametrize("pause_after", [0, 6])
@pytest.mark.parametrize("blocking", [False, True])
async def test_another_gateway_takes_over(model: ServedModel, pause_after: int, blocking: bool) -> None:
    """Before the first token or after some: one unbroken answer, though the gateway that had the stream is gone."""
    async with contextlib.AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(running_router(FakeRouter(text_script(model, TEXT)))) for _ in range(2)
        ]
        gateways = [await stack.enter_async_context(sdk_gateway(model, [router.address])) for router in routers]
        for router in routers:
            router.script = text_script(model, TEXT, pause_after=pause_after)
        endpoints = ",".join(gateway.address for gateway in gateways)
        has: Counter[int] = Counter()  # tokens of each choice
        if blocking:
            sync_client = stack.enter_context(pdserve.Client(endpoints))
            asking = asyncio.create_task(asyncio.to_thread(read, sync_client.stream_chat(HI, n=2, stop=["seven"]), has))
        else:
            client = await stack.enter_async_context(pdserve.AsyncClient(endpoints))
            asking = asyncio.create_task(read_async(client.stream_chat(HI, n=2, stop=["seven"]), has))
        await eventually(lambda: any(len(router.requests) == 2 for router in routers))
        await eventually(lambda: [has[0], has[1]] == [pause_after] * 2)
        [used] = [index for index, router in enumerate(routers) if router.requests]
        for router in routers:
            router.script = text_script(model, TEXT)
        await gateways[used].kill()
        answer = await asking
        assert [choice.text for choice in answer.choices] == [TEXT.partition("seven")[0]] * 2
        whole = len(model.tokenizer.encode(TEXT.partition("seven")[0] + "seven", False))
        assert answer.usage.completion_tokens == 2 * whole
        assert [len(choice.token_ids) for choice in answer.choices] == [whole, whole]
        before, after = routers[used].requests, routers[1 - used].requests
        assert [len(request.output_so_far) for request in after] == [pause_after] * 2
        assert {request.model_fingerprint for request in after} == {"model-a" if pause_after else ""}
        assert {r.sampling.seed for r in before} == {r.sampling.seed for r in after}


async def test_a_finished_choice_is_not_asked_again(model: ServedModel) -> None:
    """Of two choices one had ended when the gateway died."""
    async with contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(running_router(FakeRouter(text_script(model, TEXT)))) for _ in "ab"
        ]

        def script(request: pb.GenerateRequest) -> Script:
            pause = 4 if request.request_id.endswith("/1") else None
            return text_script(model, TEXT, pause_after=pause)(request)

        first.script = second.script = script
        gateways = [await stack.enter_async_context(sdk_gateway(model, [router.address])) for router in (first, second)]
        client = await stack.enter_async_context(pdserve.AsyncClient([gateway.address for gateway in gateways]))
        stream = client.stream_chat(HI, n=2)
        finished = asyncio.Event()

        async def read() -> pdserve.Generation:
            async for chunk in stream:
                if chunk.finish_reason:
                    finished.set()
            return await stream.result()

        reading = asyncio.create_task(read())
        await finished.wait()
        await asyncio.sleep(0.05)
        used = 0 if first.requests else 1
        first.script = second.script = text_script(model, TEXT)
        await gateways[used].kill()
        answer = await reading
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        assert len((first, second)[1 - used].requests) == 1


async def test_with_logprobs_a_broken_stream_is_an_error(model: ServedModel, router: FakeRouter) -> None:
    """What was held back of them is lost: no gap is hidden."""
    router.script = text_script(model, TEXT, pause_after=3)
    async with sdk_gateway(model, [router.address]) as served, pdserve.AsyncClient(served.address) as client:
        stream = client.stream_chat(HI, logprobs=1)
        assert (await anext(stream)).token_ids
        await served.kill()
        with pytest.raises(pdserve.ConnectionFailedError):
            await stream.result()


async def test_a_router_dies_behind_the_gateway(
    model: ServedModel, router: FakeRouter, served: SdkGateway, client: pdserve.AsyncClient
) -> None:
    """The gateway resumes by itself; the SDK does not even notice."""
    router.script = text_script(model, TEXT, pause_after=4)
    asking = asyncio.create_task(client.chat(HI))
    await router.wait_requests(1)
    await served.has_taken(4)
    router.script = text_script(model, TEXT)
    router.lose_sessions()
    assert (await asking).text == TEXT
    assert [len(request.output_so_far) for request in router.requests] == [0, 4]
