"""The SDK against a real gateway: what it returns."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import pdserve
from gateway.model import ServedModel
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    Script,
)
from tests.services.sdk_harness import HI, TEXT, SdkGateway, client, model, router, served

__all__ = ["client", "model", "router", "served"]  # fixtures


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
    assert 0 < request.timeout_s <= 20.1  # gRPC says a deadline of so many seconds in tenths, rounded up


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
