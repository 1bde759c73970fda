"""The SDK against a real gateway: how a request ends that does not end well. Deadlines, cancellation, typed errors."""

from __future__ import annotations

import asyncio

import pytest

import pdserve
from gateway.model import ServedModel
from pdserve.v1 import inference_pb2 as pb
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    Script,
    eventually,
    text_script,
)
from tests.services.sdk_harness import HI, TEXT, SdkGateway, client, model, router, sdk_gateway, served

__all__ = ["client", "model", "router", "served"]  # fixtures


async def test_deadline(
    model: ServedModel, router: FakeRouter, served: SdkGateway, client: pdserve.AsyncClient
) -> None:
    """The request ends in its time, and the workers hear that it was the deadline."""
    router.script = text_script(model, TEXT, pause_after=2)
    with pytest.raises(pdserve.DeadlineExceededError) as caught:
        await client.chat(HI, deadline_s=1.0)
    assert "deadline_s" in str(caught.value)
    await router.wait_aborts(1)
    assert [reason for _, reason in router.aborts] == ["deadline"]

    def blocking() -> None:
        with pdserve.Client(served.address) as other:
            other.chat(HI, deadline_s=1.0)

    with pytest.raises(pdserve.DeadlineExceededError):
        await asyncio.to_thread(blocking)
    await router.wait_aborts(2)


@pytest.mark.parametrize("pause_after", [0, 3])
async def test_cancel(
    model: ServedModel, router: FakeRouter, served: SdkGateway, client: pdserve.AsyncClient, pause_after: int
) -> None:
    """By ``cancel``, by leaving the block, and by cancelling the task: the worker sees an abort each time."""
    router.script = text_script(model, TEXT, pause_after=pause_after)
    stream = client.stream_chat(HI, n=2)
    reading = asyncio.create_task(stream.result())
    await router.wait_requests(2)
    stream.cancel()
    with pytest.raises(pdserve.RequestCancelledError):
        await reading
    await router.wait_aborts(2)

    reading = asyncio.create_task(client.chat(HI))
    await router.wait_requests(3)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await router.wait_aborts(3)

    async with client.stream_chat(HI) as left:
        if pause_after:
            assert (await anext(left)).token_ids
        else:
            first = asyncio.ensure_future(anext(left))
            await router.wait_requests(4)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    await router.wait_aborts(4)
    assert {reason for _, reason in router.aborts} == {"client"}
    await eventually(lambda: served.metric("grpc_requests", "Chat", "CANCELLED") == 3)
    assert served.gateway.metrics.open_requests._value.get() == 0


async def test_blocking_cancel(model: ServedModel, router: FakeRouter, served: SdkGateway) -> None:
    router.script = text_script(model, TEXT, pause_after=3)
    with pdserve.Client(served.address) as client:
        stream = client.stream_chat(HI)
        reading = asyncio.create_task(asyncio.to_thread(stream.result))
        await router.wait_requests(1)
        await asyncio.sleep(0.05)
        stream.cancel()
        with pytest.raises(pdserve.RequestCancelledError):
            await reading
        await router.wait_aborts(1)

        with client.stream_chat(HI):
            await router.wait_requests(2)
        await router.wait_aborts(2)

        reading = asyncio.create_task(asyncio.to_thread(client.chat, HI))
        await router.wait_requests(3)
        client.close()
        with pytest.raises(pdserve.RequestCancelledError):
            await reading
        await router.wait_aborts(3)
        with pytest.raises(pdserve.RequestCancelledError):
            client.chat(HI)


async def test_closing_the_client_ends_its_streams(
    model: ServedModel, router: FakeRouter, client: pdserve.AsyncClient
) -> None:
    router.script = text_script(model, TEXT, pause_after=3)
    reading = asyncio.create_task(client.chat(HI))
    await router.wait_requests(1)
    await client.close()
    with pytest.raises(pdserve.RequestCancelledError):
        await reading
    await router.wait_aborts(1)


FAILURES = [
    (pb.ERROR_CODE_OVERLOADED, pdserve.OverloadedError, "overloaded"),
    (pb.ERROR_CODE_NO_WORKERS, pdserve.UnavailableError, "no_workers"),
    (pb.ERROR_CODE_WORKER_LOST, pdserve.UnavailableError, "worker_lost"),
    (pb.ERROR_CODE_PROMPT_TOO_LARGE, pdserve.ContextLengthError, "prompt_too_large"),
    (pb.ERROR_CODE_INVALID_REQUEST, pdserve.InvalidRequestError, "invalid_value"),
    (pb.ERROR_CODE_INTERNAL, pdserve.InternalError, "internal_error"),
    (pb.ERROR_CODE_SLOW_CONSUMER, pdserve.SlowConsumerError, "slow_consumer"),
]


@pytest.mark.parametrize(("failure", "kind", "code"), FAILURES)
async def test_failures_are_typed(
    router: FakeRouter, served: SdkGateway, failure: pb.ErrorCode.ValueType, kind: type[pdserve.PdserveError], code: str
) -> None:
    finish = pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=pb.Failure(code=failure, message="why", retry_after_s=3))
    router.script = lambda request: Script([], finish)
    async with pdserve.AsyncClient(served.address, max_retries=0) as client:
        with pytest.raises(kind) as caught:
            await client.chat(HI, request_id="named")
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert caught.value.request_id == "named"
    if caught.value.retryable:
        assert caught.value.retry_after_s == 3


async def test_wrong_requests_are_typed(model: ServedModel, client: pdserve.AsyncClient) -> None:
    with pytest.raises(pdserve.ContextLengthError) as caught:
        await client.generate([5] * model.max_model_len)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(pdserve.InvalidRequestError) as wrong:
        await client.chat(HI, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(pdserve.InvalidRequestError, match="vocabulary"):
        await client.generate([model.vocab_size])
    with pytest.raises(pdserve.InvalidRequestError, match="empty"):
        await client.generate([])
    with pytest.raises(pdserve.InvalidRequestError):
        await client.chat([{"role": "wizard", "content": "x"}])
    with pytest.raises(pdserve.InvalidRequestError):
        await client.chat([{"role": "user", "text": "x"}])
    with pytest.raises(pdserve.InvalidRequestError):
        await client.generate("x", max_tokens=-1)
    with pytest.raises(pdserve.InvalidRequestError):
        await client.generate("x", maximum=1)  # type: ignore[call-arg]
    with pytest.raises(pdserve.InvalidRequestError, match="token ids"):
        await client.generate(5)  # type: ignore[arg-type]
    for deadline_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="deadline_s"):
            await client.generate("x", deadline_s=deadline_s)
    for content in ({}, {"content": None}):
        with pytest.raises(pdserve.InvalidRequestError, match="content"):
            await client.chat([{"role": "user", **content}])  # type: ignore[list-item]
    for surrogate in (client.generate("\ud800"), client.tokenize("\ud800"), client.detokenize([-1])):
        with pytest.raises(pdserve.InvalidRequestError):
            await surrogate
    for request_id in ("two words", "é", "a" * 129, "line\n"):
        with pytest.raises(pdserve.InvalidRequestError, match="request_id"):
            await client.generate("x", request_id=request_id)
    with pytest.raises(pdserve.InvalidRequestError, match="70 MiB") as large:
        await client.generate("x" * (70 << 20))
    assert not large.value.retryable, "it is not the server that is too busy"
    for endpoint in ("http://127.0.0.1:8001", "localhost"):
        with pytest.raises(ValueError, match="grpc-port"):
            pdserve.AsyncClient(endpoint)


async def test_another_model_is_refused(served: SdkGateway) -> None:
    async with pdserve.AsyncClient(served.address, model="another") as client:
        with pytest.raises(pdserve.ModelNotFoundError, match=MODEL_NAME):
            await client.chat(HI)
    async with pdserve.AsyncClient(served.address, model="m" * 100_000) as client:
        with pytest.raises(pdserve.ModelNotFoundError, match="characters"):
            await client.chat(HI)


async def test_overload_is_refused_and_retried(model: ServedModel, router: FakeRouter) -> None:
    """One request at a time: the second is refused with a typed error, or, with retries, waits for its turn."""
    router.script = text_script(model, TEXT, pause_after=2)
    async with (
        sdk_gateway(model, [router.address], max_requests=1) as served,
        pdserve.AsyncClient(served.address, max_retries=0) as client,
        pdserve.AsyncClient(served.address, max_retries=3) as patient,
    ):
        first = asyncio.create_task(client.chat(HI))
        await router.wait_requests(1)
        with pytest.raises(pdserve.OverloadedError) as caught:
            await client.chat(HI)
        assert caught.value.retry_after_s > 0
        second = asyncio.create_task(patient.chat(HI))
        await asyncio.sleep(0.1)
        router.go.set()
        assert (await first).text == (await second).text == TEXT


async def test_a_client_that_does_not_read(model: ServedModel, router: FakeRouter) -> None:
    """Its stream is ended as slow_consumer; another one's goes on."""
    # Much text for little work: gRPC takes some megabytes before it makes the gateway wait.
    longest = max(range(model.vocab_size), key=lambda token_id: len(model.tokenizer.token_bytes(token_id)))

    def script(request: pb.GenerateRequest) -> Script:
        if request.cache_salt == "stalled":
            # It stops before its end: an answer that is complete cannot be aborted any more.
            return Script([longest] * 200_000, tokens_per_output=50, pause_after=199_950)
        return text_script(model, TEXT)(request)

    router.script = script
    settings = {"max_stream_buffer_bytes": 50_000, "stall_timeout_s": 0.3}
    async with (
        sdk_gateway(model, [router.address], **settings) as served,
        pdserve.AsyncClient(served.address) as stalled,
        pdserve.AsyncClient(served.address) as client,
    ):
        stream = stalled.stream("x", cache_salt="stalled")
        await anext(stream)
        assert (await client.chat(HI)).text == TEXT
        await router.wait_aborts(1)
        assert [reason for _, reason in router.aborts] == ["slow_consumer"]
        with pytest.raises(pdserve.SlowConsumerError):
            await stream.result()
