"""Clients that leave or stall, and routers that die: what was running is ended with a reason, or goes on unbroken."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.model import ServedModel
from pdserve.model_store import prepare_default_model
from pdserve.session import DEFAULT_BUFFERED_OUTPUTS
from pdserve.v1 import inference_pb2 as pb
from tests.ports import free_port
from tests.services.gateway_harness import (
    MODEL_NAME,
    WAIT_S,
    FakeRouter,
    Script,
    load_test_model,
    running_gateway,
    running_router,
    text_script,
)

TEXT = "One, two, 你好, three, four, five, six, seven."
BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_test_model(prepare_default_model())


@pytest_asyncio.fixture
async def routers(model: ServedModel) -> AsyncIterator[list[FakeRouter]]:
    async with AsyncExitStack() as stack:
        made = [FakeRouter(text_script(model, TEXT)) for _ in range(2)]
        yield [await stack.enter_async_context(running_router(router)) for router in made]


async def metrics(http: httpx.AsyncClient) -> str:
    return (await http.get("/metrics")).text


async def has_taken(http: httpx.AsyncClient, num_outputs: int, choices: int = 1) -> None:
    """Until the gateway has this many outputs of each choice: it counts the times between those of one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = re.search(
                r"^vllm:inter_token_latency_seconds_count\{.*\} (\S+)$", await metrics(http), re.MULTILINE
            )
            if (float(found[1]) if found else 0.0) >= choices * (num_outputs - 1):
                return
            await asyncio.sleep(0.01)


async def open_stream(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection, so that the test decides when it reads and how it ends."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 14)
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    writer.write(head.encode() + b"\r\n\r\n" + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 3])
async def test_client_leaves(model: ServedModel, routers: list[FakeRouter], stream: bool, pause_after: int) -> None:
    """While queued or in the middle, streamed or not: all choices are aborted at once."""
    [router, _] = routers
    router.script = text_script(model, TEXT, pause_after=pause_after)
    async with running_gateway(model, [router.address]) as url:
        _, writer = await open_stream(url, {**BODY, "stream": stream, "n": 3})
        await router.wait_requests(3)
        writer.close()
        await router.wait_aborts(3)
        assert {reason for _, reason in router.aborts} == {"client"}
        async with httpx.AsyncClient(base_url=url) as http:
            text = await metrics(http)
            assert 'pdserve_aborts_total{reason="client"} 3.0' in text
            assert "pdserve_open_requests 0.0" in await metrics(http)


@pytest.mark.parametrize(("num_outputs", "tokens_each"), [(3000, 100), (600, 1000)])
async def test_stalled_client_slows_nobody(
    model: ServedModel, routers: list[FakeRouter], num_outputs: int, tokens_each: int
) -> None:
    """A client that does not read is ended as slow_consumer: by its full buffer when outputs come fast (the session's),
    by the time it took nothing when they come slowly. Another one's stream goes on meanwhile."""
    [router, _] = routers
    num_tokens = num_outputs * tokens_each

    def script(request: pb.GenerateRequest) -> Script:
        if request.cache_salt == "stalled":
            return Script([5] * (num_tokens + tokens_each), tokens_per_output=tokens_each, pause_after=num_tokens)
        return text_script(model, TEXT)(request)

    router.script = script
    async with running_gateway(model, [router.address], max_stream_buffer_bytes=50_000, stall_timeout_s=0.5) as url:
        body = {**BODY, "stream": True, "return_token_ids": True, "cache_salt": "stalled"}
        reader, writer = await open_stream(url, body)
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            answer = await http.post(CHAT, json=BODY)
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
            await router.wait_aborts(1)
            assert router.aborts == [(router.requests[0].request_id, "slow_consumer")]
            rest = await asyncio.wait_for(reader.read(-1), WAIT_S)
            assert b"[DONE]" not in rest, "what it gets late is no complete answer"
            assert b"\r\n0\r\n" not in rest, "and does not look like one"
            text = await metrics(http)
            assert 'pdserve_failures_total{code="slow_consumer"} 1.0' in text
            assert 'pdserve_aborts_total{reason="slow_consumer"} 1.0' in text
        writer.close()


async def test_a_burst_is_no_slow_consumer(model: ServedModel, routers: list[FakeRouter]) -> None:
    """As many outputs at once as a session keeps, each with much to write, to one who reads: all of it arrives."""
    [router, _] = routers
    top, count = [(token_id, -1.0) for token_id in range(100, 120)], DEFAULT_BUFFERED_OUTPUTS
    router.script = lambda request: Script([5] * count, top=top)
    async with (
        running_gateway(model, [router.address], max_stream_buffer_bytes=200_000) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        body = {**BODY, "stream": True, "max_tokens": count, "logprobs": True, "top_logprobs": 20}
        response = await http.post(CHAT, json=body)
        assert len(response.content) > 5 * 200_000
        assert answered(response, stream=True) == {0: model.tokenizer.decode([5] * count, True)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 6])
async def test_another_router_takes_over(
    model: ServedModel, routers: list[FakeRouter], stream: bool, pause_after: int
) -> None:
    """Before the first token or after some: the client sees one unbroken answer."""
    first, second = routers
    first.script = text_script(model, TEXT, pause_after=pause_after, cached_tokens=3)
    async with (
        running_gateway(model, [first.address, second.address]) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        body = {**BODY, "logprobs": True, "n": 2, "stop": ["seven"]}
        task = asyncio.create_task(http.post(CHAT, json={**body, "stream": stream}))
        await first.wait_requests(2)
        await has_taken(http, pause_after, choices=2)
        first.lose_sessions()
        response = await task
        assert response.status_code == 200
        assert answered(response, stream) == {0: TEXT.partition("seven")[0], 1: TEXT.partition("seven")[0]}
        originals = {request.request_id: request for request in first.requests}
        for request in second.requests:
            original = originals[request.request_id.partition("+")[0]]
            assert len(request.output_so_far) == pause_after
            assert request.sampling == original.sampling
            assert request.group == original.group
            assert request.prompt_token_ids == original.prompt_token_ids
        if not stream:
            usage = response.json()["usage"]
            tokens = len(model.tokenizer.encode(TEXT.partition("seven")[0] + "seven", False))
            assert usage["completion_tokens"] == 2 * tokens
            assert usage["prompt_tokens_details"]["cached_tokens"] == (3 if pause_after else 0)
        assert "pdserve_resumes_total 2.0" in await metrics(http)


async def is_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def answered(response: httpx.Response, stream: bool) -> dict[int, str]:
    """Text of each choice."""
    if not stream:
        return {choice["index"]: choice["message"]["content"] for choice in response.json()["choices"]}
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert lines[-1] == "data: [DONE]", lines[-1]
    texts: dict[int, str] = {}
    for line in lines[:-1]:
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


async def test_the_same_router_comes_back(model: ServedModel) -> None:
    port = free_port()
    before = FakeRouter(text_script(model, TEXT, pause_after=4))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(running_gateway(model, [f"127.0.0.1:{port}"], num_usable=0))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        async with running_router(before, port):
            await is_ready(http)
            task = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
            await before.wait_requests(1)
            await has_taken(http, 4)
        after = await stack.enter_async_context(running_router(FakeRouter(text_script(model, TEXT)), port))
        response = await task
        assert answered(response, stream=True) == {0: TEXT}
        [request] = after.requests
        assert list(request.output_so_far) == model.tokenizer.encode(TEXT, False)[:4]


async def test_a_router_that_stays_away(model: ServedModel) -> None:
    """A typed error within the waiting time: as HTTP status before the first token, as an event after it."""
    for pause_after in (0, 4):
        router = FakeRouter(text_script(model, TEXT, pause_after=pause_after))
        async with AsyncExitStack() as stack:
            serving = await stack.enter_async_context(AsyncExitStack())
            await serving.enter_async_context(running_router(router))
            url = await stack.enter_async_context(running_gateway(model, [router.address], router_wait_s=0.3))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            task = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
            await router.wait_requests(1)
            await has_taken(http, pause_after)
            await serving.aclose()
            response = await task
            if pause_after == 0:
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "router_unavailable"
            else:
                assert response.status_code == 200
                assert '"code":"router_unavailable"' in response.text
                assert "[DONE]" not in response.text


async def test_resumes_are_bounded(model: ServedModel, routers: list[FakeRouter]) -> None:
    """A session that is lost again and again does not keep a request for ever."""
    [router, _] = routers
    router.script = text_script(model, TEXT, pause_after=0)
    async with (
        running_gateway(model, [router.address], max_resumes=2) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        task = asyncio.create_task(http.post(CHAT, json=BODY))
        for attempt in range(3):
            await router.wait_requests(attempt + 1)
            router.lose_sessions()
        response = await task
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_lost"
        assert len(router.requests) == 3


async def test_worker_lost_in_the_middle(model: ServedModel, routers: list[FakeRouter]) -> None:
    """The router stays, its worker is gone after some tokens: the choice is taken up again with them."""
    [router, _] = routers
    whole = text_script(model, TEXT)
    lost = pb.Finish(
        reason=pb.FINISH_REASON_ERROR,
        failure=pb.Failure(code=pb.ERROR_CODE_WORKER_LOST, message="decode-0 is gone", retryable=True),
    )

    def script(request: pb.GenerateRequest) -> Script:
        at = len(request.output_so_far)
        return whole(request) if at else Script(whole(request).token_ids[:5], lost)

    router.script = script
    async with running_gateway(model, [router.address]) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        response = await http.post(CHAT, json={**BODY, "stream": True})
        # the failing output's own tokens are not shown, they are drawn again
        assert answered(response, stream=True) == {0: TEXT}
        assert len(router.requests) == 2
        assert router.requests[1].request_id == router.requests[0].request_id + "+1"


async def test_only_the_finish_was_lost(model: ServedModel, routers: list[FakeRouter]) -> None:
    """All of max_tokens had arrived: nothing is asked again."""
    [router, _] = routers
    lost = pb.Failure(code=pb.ERROR_CODE_WORKER_LOST, retryable=True)

    router.script = lambda request: Script(
        [5, 6, 7, 8], pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=lost), pause_after=3
    )
    async with running_gateway(model, [router.address]) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        task = asyncio.create_task(http.post(CHAT, json={**BODY, "max_tokens": 3}))
        await router.wait_requests(1)
        await has_taken(http, 3)
        router.lose_sessions()
        response = await task
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["usage"]["completion_tokens"] == 3
        assert len(router.requests) == 1


async def test_a_router_that_knows_no_workers_is_passed_over(model: ServedModel, routers: list[FakeRouter]) -> None:
    """One that has just started, or whose Redis is gone."""
    empty, full = routers
    empty.total_blocks = 0
    async with running_gateway(model, [empty.address, full.address]) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
    assert full.requests
    assert not empty.requests
