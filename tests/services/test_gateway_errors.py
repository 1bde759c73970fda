"""What the gateway says of requests that fail behind it, are late or too many: always an OpenAI error object."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from gateway.model import ServedModel
from pdserve.v1 import inference_pb2 as pb
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    Script,
    eventually,
    running_gateway,
)
from tests.services.openai_schema import assert_valid
from tests.services.small_gateway import CHAT, COMPLETIONS, HI, assert_error, body_of, http, model, router

__all__ = ["http", "model", "router"]  # fixtures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error_code", "status", "code"),
    [
        (pb.ERROR_CODE_OVERLOADED, 429, "overloaded"),
        (pb.ERROR_CODE_NO_WORKERS, 503, "no_workers"),
        (pb.ERROR_CODE_PROMPT_TOO_LARGE, 400, "prompt_too_large"),
        (pb.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, 400, "context_length_exceeded"),
        (pb.ERROR_CODE_WORKER_LOST, 503, "worker_lost"),
        (pb.ERROR_CODE_INTERNAL, 500, "internal_error"),
    ],
)
async def test_failures_before_the_first_token(
    http: httpx.AsyncClient, router: FakeRouter, error_code: pb.ErrorCode, status: int, code: str, stream: bool
) -> None:
    """An HTTP status, streamed or not; not retried here, as the router has done that."""
    failure = pb.Failure(code=error_code, message="because", retryable=True, retry_after_s=2.5)
    router.script = lambda request: Script([], pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=failure))
    response = await http.post(CHAT, json=body_of(CHAT, stream=stream))
    error = assert_error(response, status, code=code)
    assert error["message"] == "because"
    assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)
    assert len(router.requests) == 1
    assert f'pdserve_failures_total{{code="{code}"}} 1.0' in (await http.get("/metrics")).text


async def test_client_raises_its_typed_errors(http: httpx.AsyncClient, router: FakeRouter) -> None:
    failure = pb.Failure(code=pb.ERROR_CODE_OVERLOADED, message="full")
    router.script = lambda request: Script([], pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=failure))
    base_url = f"{http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=True)
        router.script = lambda request: Script(
            [5, 6], pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=pb.Failure(code=pb.ERROR_CODE_INTERNAL))
        )
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=True):
                pass


async def test_error_inside_a_stream(http: httpx.AsyncClient, router: FakeRouter) -> None:
    """One error event, then the end, without [DONE]."""
    failure = pb.Failure(code=pb.ERROR_CODE_INTERNAL, message="broke")
    finish = pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=failure)

    def script(request: pb.GenerateRequest) -> Script:
        return Script([5, 6], finish) if request.request_id.endswith("/1") else Script([5] * 9, pause_after=4)

    router.script = script
    response = await http.post(CHAT, json=body_of(CHAT, stream=True, n=2))
    assert response.status_code == 200
    lines = response.text.removesuffix("\n\n").split("\n\n")
    last = json.loads(lines[-1].removeprefix("data: "))
    assert_valid("ErrorResponse", last)
    assert last["error"] == {"message": "broke", "type": "server_error", "param": None, "code": "internal_error"}
    await router.wait_aborts(1)
    assert router.aborts[0][0].endswith("/0"), "the other choice is ended too"


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(http: httpx.AsyncClient, router: FakeRouter, stream: bool) -> None:
    """The gateway's own clock ends a request that nobody answers."""
    router.script = lambda request: Script([5] * 9, pause_after=0)
    response = await http.post(CHAT, json=body_of(CHAT, stream=stream), headers={"x-request-timeout-s": "0.3"})
    assert_error(response, 504, code="deadline_exceeded")
    assert 0 < router.requests[0].timeout_s <= 0.3
    await router.wait_aborts(1)
    assert router.aborts[0][1] == "deadline"


async def test_deadline_inside_a_stream(http: httpx.AsyncClient, router: FakeRouter) -> None:
    router.script = lambda request: Script([5] * 9, pause_after=3)
    response = await http.post(CHAT, json=body_of(CHAT, stream=True), headers={"x-request-timeout-s": "0.5"})
    assert response.status_code == 200
    assert '"code":"deadline_exceeded"' in response.text


async def test_deadline_seen_by_the_worker(http: httpx.AsyncClient, router: FakeRouter) -> None:
    router.script = lambda request: Script([5], pb.Finish(reason=pb.FINISH_REASON_TIMEOUT))
    assert_error(await http.post(CHAT, json=body_of(CHAT)), 504, code="deadline_exceeded")


async def test_too_many_requests(model: ServedModel, router: FakeRouter) -> None:
    """One at a time here; the second is told to come back, and may when the first has gone."""
    router.script = lambda request: Script([5] * 9, pause_after=2)
    async with (
        running_gateway(model, [router.address], max_requests=1) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        async with http.stream("POST", CHAT, json=body_of(CHAT, stream=True)) as first:
            assert first.status_code == 200
            refused = await http.post(COMPLETIONS, json=body_of(COMPLETIONS))
            assert_error(refused, 429, code="overloaded")
            assert refused.headers["retry-after"] == "1"
            assert (await http.get("/v1/models")).status_code == 200, "what does not generate is not limited"
        await router.wait_aborts(1)
        router.go.set()
        for _ in range(100):
            again = await http.post(COMPLETIONS, json=body_of(COMPLETIONS))
            if again.status_code == 200:
                return
            await tick()
        raise AssertionError("still refused")


async def test_no_router(model: ServedModel) -> None:
    async with (
        running_gateway(model, ["127.0.0.1:9"], num_usable=0, router_wait_s=0.2) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        assert (await http.get("/live")).status_code == 200
        health = await http.get("/health")
        assert health.status_code == 503
        assert "no router answers" in health.json()["reason"]
        response = await http.post(CHAT, json=body_of(CHAT, stream=True))
        assert_error(response, 503, code="router_unavailable")
        assert response.headers["retry-after"] == "1"


async def test_health_follows_the_router(model: ServedModel, router: FakeRouter) -> None:
    router.total_blocks = 0
    async with running_gateway(model, [router.address]) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:

        async def becomes(text: str) -> None:
            for _ in range(300):
                if text in (last := (await http.get("/health")).text):
                    return
                await tick()
            raise AssertionError(f"never {text!r}, last {last!r}")

        await becomes("no workers")
        router.total_blocks = 5
        await becomes("ready")


async def tick() -> None:
    """A moment for the others."""
    ticks = iter([False, True])
    await eventually(lambda: next(ticks))
