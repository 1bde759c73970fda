"""The SDK against real gateways: what it returns, deadlines, cancellation, failover, and typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import pdserve
from gateway.model import ServedModel
from pdserve.model_store import prepare_default_model
from pdserve.v1 import inference_pb2 as pb
from tests.ports import free_port
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    Script,
    eventually,
    load_test_model,
    running_router,
    text_script,
)
from tests.services.sdk_harness import SdkGateway, sdk_gateway

TEXT = "One, two, 你好, three, four, five, six, seven."
HI = [{"role": "user", "content": "hi"}]


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


def test_importing_the_package_loads_no_grpc() -> None:
    code = "import sys, pdserve, pdserve.errors; assert 'grpc' not in sys.modules; pdserve.Client; sys.modules['grpc']"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_exported_name_is_there() -> None:
    for name in pdserve.__all__:
        assert getattr(pdserve, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = pdserve.nothing  # type: ignore[attr-defined]


async def test_generate(model: ServedModel, router: FakeRouter, client: pdserve.AsyncClient) -> None:
    answer = await client.generate("Count!", max_tokens=64, temperature=0.5, seed=7, request_id="count-1")
    assert answer.text == TEXT
    assert answer.finish_reason == "stop"
    assert list(answer.token_ids)[:-1] == model.tokenizer.encode(TEXT, False)
    prompt = model.tokenizer.encode("Count!", True)
    assert answer.usage == pdserve.Usage(len(prompt), len(answer.token_ids), 2)
    assert answer.request_id == "count-1"
    [request] = router.requests
    assert list(request.prompt_token_ids) == prompt
    assert (request.sampling.max_tokens, request.sampling.seed) == (64, 7)
    assert request.sampling.temperature == 0.5
    assert request.sampling.top_p == pytest.approx(model.defaults.top_p)
    assert 0 < request.timeout_s <= 20


async def test_token_ids_stop_strings_and_choices(
    model: ServedModel, router: FakeRouter, client: pdserve.AsyncClient
) -> None:
    answer = await client.generate([1, 2, 3], n=3, stop="five", ignore_eos=True, logit_bias={5: -1.0}, top_k=3)
    assert [choice.text for choice in answer.choices] == [TEXT.partition("five")[0]] * 3
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage.prompt_tokens == 3
    assert len({request.sampling.seed for request in router.requests}) == 3
    assert len({request.group for request in router.requests}) == 1
    for request in router.requests:
        assert list(request.prompt_token_ids) == [1, 2, 3]
        assert dict(request.sampling.logit_bias) == {5: -1.0}
        assert request.sampling.ignore_eos


async def test_what_belongs_together_is_told_to_the_router(router: FakeRouter, client: pdserve.AsyncClient) -> None:
    await client.generate("one two three", session="conversation-7")
    await client.chat([{"role": "user", "content": "b"}], session="conversation-7")
    await client.generate("four five six")
    assert [request.session for request in router.requests] == ["conversation-7", "conversation-7", ""]


async def test_chat_streams_what_it_returns(model: ServedModel, client: pdserve.AsyncClient) -> None:
    stream = client.stream_chat(HI, max_tokens=64)
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert "�" not in "".join(chunk.text for chunk in chunks)
    assert stream.usage is not None
    whole = await client.chat(HI, max_tokens=64)
    assert whole.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert whole.usage == stream.usage
    assert whole.usage.prompt_tokens == len(await client.tokenize(HI))


async def test_logprobs(model: ServedModel, router: FakeRouter, client: pdserve.AsyncClient) -> None:
    router.script = lambda request: Script([100, 101], top=[(7, -0.25), (8, -2.0)])
    answer = await client.generate("x", logprobs=2)
    assert [entry.token_id for entry in answer.choices[0].logprobs] == [100, 101]
    entry = answer.choices[0].logprobs[0]
    assert entry.token == model.tokenizer.token_bytes(100)
    assert entry.logprob == -0.5
    assert [(top.token_id, top.logprob) for top in entry.top] == [(7, -0.25), (8, -2.0)]


async def test_model_and_tokenizer(model: ServedModel, client: pdserve.AsyncClient) -> None:
    info = await client.model_info()
    assert info == pdserve.ModelInfo(MODEL_NAME, model.max_model_len, model.vocab_size, True)
    token_ids = await client.tokenize(TEXT)
    assert token_ids == model.tokenizer.encode(TEXT, True)
    assert await client.detokenize(token_ids) == TEXT


async def test_load(router: FakeRouter, client: pdserve.AsyncClient, served: SdkGateway) -> None:
    """As the router said with its heartbeats."""
    router.total_blocks = 70
    load = await client.load()
    for _ in range(200):
        if load.total_blocks == 70:
            break
        await asyncio.sleep(0.05)
        load = await client.load()
    assert load == pdserve.Load(0, 0, 0, 0, 70)

    def blocking() -> pdserve.Load:
        with pdserve.Client(served.address, deadline_s=20) as client:
            return client.load()

    assert await asyncio.to_thread(blocking) == load


def in_thread(address: str) -> tuple[pdserve.Generation, str, pdserve.ModelInfo, list[int], str]:
    with pdserve.Client(address, deadline_s=20) as client:
        answer = client.chat(HI, max_tokens=64)
        with client.stream("hi there, count", max_tokens=64) as stream:
            text = "".join(chunk.text for chunk in stream)
        token_ids = client.tokenize(TEXT)
        return answer, text, client.model_info(), token_ids, client.detokenize(token_ids)


async def test_blocking_client(model: ServedModel, served: SdkGateway) -> None:
    answer, text, info, token_ids, back = await asyncio.to_thread(in_thread, served.address)
    assert answer.text == text == TEXT
    assert answer.usage.completion_tokens == len(answer.token_ids)
    assert info.model == MODEL_NAME
    assert (token_ids, back) == (model.tokenizer.encode(TEXT, True), TEXT)


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
