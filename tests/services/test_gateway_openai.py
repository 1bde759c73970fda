"""The OpenAI API of a gateway, called with the official client; the router behind it says what the test wants.

Every answer and every chunk is checked against the API's schema.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

import pdserve
from gateway.model import ServedModel
from pdserve.model_store import prepare_default_model
from pdserve.v1 import inference_pb2 as pb
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    Script,
    load_test_model,
    running_gateway,
    running_router,
    text_script,
)
from tests.services.openai_schema import assert_valid

TEXT = "Hello 👩‍👩‍👧, naïve 你好 world! The END is near."
HI = [{"role": "user", "content": "hi"}]
PHASES = {
    "tokenize_s",
    "route_s",
    "prefill_queue_s",
    "prefill_s",
    "handoff_wait_s",
    "transfer_s",
    "relay_s",
    "rest_s",
}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_test_model(prepare_default_model())


@pytest_asyncio.fixture
async def router(model: ServedModel) -> AsyncIterator[FakeRouter]:
    async with running_router(FakeRouter(text_script(model, TEXT))) as router:
        yield router


@pytest_asyncio.fixture
async def url(model: ServedModel, router: FakeRouter) -> AsyncIterator[str]:
    async with running_gateway(model, [router.address]) as url:
        yield url


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest_asyncio.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        yield http


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, as raw JSON; asserts how it is framed and that it ends with [DONE]."""
    async with http.stream("POST", path, json={"model": MODEL_NAME, "stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = (await response.aread()).decode()
    assert raw.endswith("\n\n")
    lines = raw.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_chat(client: openai.AsyncOpenAI, router: FakeRouter, model: ServedModel) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=HI)
    assert_valid("CreateChatCompletionResponse", raw.http_response.json())
    answer = raw.parse()
    [choice] = answer.choices
    assert choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    [request] = router.requests
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == len(router.script(request).token_ids)
    assert request.sampling.max_tokens == model.max_model_len - len(request.prompt_token_ids)
    assert request.timeout_s == pytest.approx(600, abs=5)
    prompt = model.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("tokens_per_output", [1, 4])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(
    http: httpx.AsyncClient, router: FakeRouter, model: ServedModel, tokens_per_output: int, include_usage: bool
) -> None:
    router.script = text_script(model, TEXT, tokens_per_output=tokens_per_output, cached_tokens=7)
    body: dict[str, Any] = {"messages": HI}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    chunks = await events(http, "/v1/chat/completions", body)
    for chunk in chunks:
        assert_valid("CreateChatCompletionStreamResponse", chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
        assert last["usage"]["completion_tokens"] == len(router.script(router.requests[0]).token_ids)
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["delta"] == {}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    texts = [choice["delta"].get("content", "") for choice in choices]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)


async def test_stream_with_the_client(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
    completion = await client.completions.create(model=MODEL_NAME, prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in completion]) == TEXT


async def test_sampling_fields_arrive(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    await client.chat.completions.create(
        model=MODEL_NAME,
        messages=HI,
        max_completion_tokens=9,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"42": -100},
        seed=-3,
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [5, 6],
            "ignore_eos": True,
            "cache_salt": "tenant",
            "priority": -4,
        },
    )
    [request] = router.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.25, 0.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.5)
    assert dict(sampling.logit_bias) == {42: -100}
    assert sampling.seed == (1 << 64) - 3
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 0.125, 1.5)
    assert (sampling.min_tokens, list(sampling.stop_token_ids), sampling.ignore_eos) == (2, [5, 6], True)
    assert (request.cache_salt, request.priority) == ("tenant", -4)
    assert not sampling.HasField("logprobs")


async def test_what_belongs_together_is_told_to_the_router(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    """By ``user``, or, before that, by the key that a chat's client groups its prompts with."""
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}]}
    await client.completions.create(model=MODEL_NAME, prompt="x", user="anna")
    await client.chat.completions.create(**chat, user="anna")  # type: ignore[call-overload]
    await client.chat.completions.create(**chat, user="anna", prompt_cache_key="thread-3")  # type: ignore[call-overload]
    await client.chat.completions.create(**chat)  # type: ignore[call-overload]
    assert [request.session for request in router.requests] == ["anna", "anna", "thread-3", ""]


async def test_what_the_client_leaves_out(client: openai.AsyncOpenAI, router: FakeRouter, model: ServedModel) -> None:
    for _ in range(2):
        await client.completions.create(model=MODEL_NAME, prompt="x")
    first, second = router.requests
    assert first.sampling.temperature == pytest.approx(model.defaults.temperature)
    assert first.sampling.top_p == pytest.approx(model.defaults.top_p)
    assert first.sampling.repetition_penalty == pytest.approx(model.defaults.repetition_penalty)
    assert first.sampling.max_tokens == 16
    assert first.sampling.seed != second.sampling.seed, "every request is pinned to a seed of its own"


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts(http: httpx.AsyncClient, router: FakeRouter, stream: bool) -> None:
    """Choice p * n + i is the i-th of prompt p; each prompt's choices form a group and have their own seeds."""

    def script(request: pb.GenerateRequest) -> Script:
        return Script([*request.prompt_token_ids, int(request.request_id.rsplit("/")[-1])])

    router.script = script
    body = {"prompt": [[100], [200], [300]], "n": 2, "seed": 5, "return_token_ids": True}
    if stream:
        chunks = await events(http, "/v1/completions", body)
        token_ids: dict[int, list[int]] = {}
        for chunk in chunks:
            assert_valid("CreateCompletionResponse", _with_finish(chunk))
            [choice] = chunk["choices"]
            token_ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    else:
        answer = (await http.post("/v1/completions", json={"model": MODEL_NAME, **body})).json()
        assert_valid("CreateCompletionResponse", answer)
        token_ids = {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 12
    assert token_ids == {0: [100, 0], 1: [100, 1], 2: [200, 2], 3: [200, 3], 4: [300, 4], 5: [300, 5]}
    by_prompt: dict[int, list[pb.GenerateRequest]] = {}
    for request in router.requests:
        by_prompt.setdefault(request.prompt_token_ids[0], []).append(request)
    groups = [{request.group for request in requests} for requests in by_prompt.values()]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 3
    seeds = {request.request_id.rsplit("/")[-1]: request.sampling.seed for request in router.requests}
    assert seeds["0"] == seeds["2"] == seeds["4"] == 5, "the first choice has the client's seed"
    assert seeds["1"] == seeds["3"] != 5


def _with_finish(chunk: dict[str, Any]) -> dict[str, Any]:
    """The schema of completions knows whole answers only, which have a finish reason."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    return {**chunk, "choices": choices}


async def test_unseeded_prompts_differ(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    await client.completions.create(model=MODEL_NAME, prompt=["x", "x"], n=2)
    assert len({request.sampling.seed for request in router.requests}) == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hello world", ["hello world"]), (["a", "b"], ["a", "b"]), ([9, 10], None), ([[9, 10], [11]], None)],
)
async def test_prompt_forms(
    client: openai.AsyncOpenAI, router: FakeRouter, model: ServedModel, prompt: Any, expected: list[str] | None
) -> None:
    answer = await client.completions.create(model=MODEL_NAME, prompt=prompt, echo=True)
    prompts = [list(request.prompt_token_ids) for request in router.requests]
    texts = [model.tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in prompts]
    if expected is None:
        assert prompts == (prompt if isinstance(prompt[0], list) else [prompt])
    else:
        assert texts == expected
    assert [choice.text for choice in answer.choices] == [text + TEXT for text in texts]


async def test_echo_without_generation(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    answer = await client.completions.create(model=MODEL_NAME, prompt="only this", echo=True, max_tokens=0)
    assert answer.choices[0].text == "only this"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert not router.requests


async def test_echo_stream(http: httpx.AsyncClient) -> None:
    chunks = await events(http, "/v1/completions", {"prompt": "so: ", "echo": True})
    assert chunks[0]["choices"][0]["text"] == "so: "
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "so: " + TEXT


@pytest.mark.parametrize("tokens_per_output", [1, 3])
@pytest.mark.parametrize("stop", ["END", ["naïve", "END"], [" world!", "rld"], "好 w", "👩‍👧"])
async def test_stop_strings(
    client: openai.AsyncOpenAI,
    http: httpx.AsyncClient,
    router: FakeRouter,
    model: ServedModel,
    stop: str | list[str],
    tokens_per_output: int,
) -> None:
    """The text before the stop string, the reason ``stop``, and the router is told to stop."""
    router.script = text_script(model, TEXT * 30, tokens_per_output=tokens_per_output, pause_after=60)
    expected = min((TEXT.partition(s)[0] for s in ([stop] if isinstance(stop, str) else stop)), key=len)
    if stop == [" world!", "rld"]:
        expected = TEXT.partition("rld")[0]  # it ends first
    answer = await client.chat.completions.create(model=MODEL_NAME, messages=HI, stop=stop)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    await router.wait_aborts(1)
    assert router.aborts[0] == (router.requests[0].request_id, "stop")
    chunks = await events(http, "/v1/chat/completions", {"messages": HI, "stop": stop})
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_chat_logprobs(http: httpx.AsyncClient, router: FakeRouter, model: ServedModel) -> None:
    top = [(model.tokenizer.encode(word, False)[0], -1.0 - n) for n, word in enumerate(["The", " a", "!"])]
    top.append((9, float("-inf")))
    router.script = text_script(model, TEXT, top=top)
    body = {"messages": HI, "logprobs": True, "top_logprobs": 4}
    answer = (await http.post("/v1/chat/completions", json={"model": MODEL_NAME, **body})).json()
    assert_valid("CreateChatCompletionResponse", answer)
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == TEXT
    for entry in content:
        assert entry["logprob"] == -0.5
        assert [t["token"] for t in entry["top_logprobs"]][:3] == ["The", " a", "!"]
        assert entry["top_logprobs"][3]["logprob"] == -9999.0
    chunks = await events(http, "/v1/chat/completions", body)
    streamed: list[Any] = []
    for chunk in chunks:
        assert_valid("CreateChatCompletionStreamResponse", chunk)
        [choice] = chunk["choices"]
        entries = (choice["logprobs"] or {}).get("content") or []
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["delta"].get(
            "content", ""
        )
        streamed += entries
    assert streamed == content


async def test_completion_logprobs(http: httpx.AsyncClient, router: FakeRouter, model: ServedModel) -> None:
    top = [(model.tokenizer.encode(word, False)[0], -1.0 - n) for n, word in enumerate(["The", " a"])]
    router.script = text_script(model, TEXT, top=top)
    body = {"model": MODEL_NAME, "prompt": "x", "logprobs": 1, "max_tokens": 50}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert_valid("CreateCompletionResponse", answer)
    logprobs = answer["choices"][0]["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    for token, offset, entry in zip(logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
        assert entry["The"] == -1.0
        assert entry[token] == -0.5
        assert len(entry) <= 2
    assert set(logprobs["token_logprobs"]) == {-0.5}


async def test_cached_tokens_of_choices_that_share_a_prompt(http: httpx.AsyncClient, router: FakeRouter) -> None:
    """One of the siblings computed the prompt; the others found it cached. Billed is what was really cached before."""
    router.script = lambda request: Script([5], cached_tokens=16 if request.request_id.endswith("/0") else 64)
    body = {"model": MODEL_NAME, "prompt": [[7] * 65, [8] * 65], "n": 2}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens"] == 130
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16 + 64


async def test_models(client: openai.AsyncOpenAI, http: httpx.AsyncClient, model: ServedModel) -> None:
    assert_valid("ListModelsResponse", (await http.get("/v1/models")).json())
    assert_valid("Model", (await http.get(f"/v1/models/{MODEL_NAME}")).json())
    assert [entry.id async for entry in client.models.list()] == [MODEL_NAME]
    retrieved = await client.models.retrieve(MODEL_NAME)
    assert retrieved.model_dump()["max_model_len"] == model.max_model_len == 8192
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_tokenize_and_back(http: httpx.AsyncClient, model: ServedModel) -> None:
    answer = (await http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == model.max_model_len
    back = await http.post("/detokenize", json={"model": MODEL_NAME, "tokens": answer["tokens"]})
    assert back.json() == {"prompt": TEXT}
    chat = (await http.post("/tokenize", json={"messages": HI})).json()
    text = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\n")
    assert chat["token_strs"] is None


async def test_request_id_and_where_the_time_went(http: httpx.AsyncClient, router: FakeRouter) -> None:
    headers = {"x-request-id": "mine-1"}
    body = {"model": MODEL_NAME, "messages": HI}
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    record = (await http.get("/debug/requests/mine-1")).json()
    assert record["response_id"] == response.json()["id"]
    assert set(record["phases"]) == PHASES
    assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"])
    assert 0 < record["ttft_s"] <= record["e2e_s"]
    assert record["output_tokens"] == response.json()["usage"]["completion_tokens"]
    assert record["sent_kv_tokens"] == record["prompt_tokens"]
    assert record["outcome"] == "stop"
    assert (await http.get(f"/debug/requests/{record['response_id']}")).json()["request_id"] == "mine-1"
    await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-2"})
    listed = (await http.get("/debug/requests")).json()["requests"]
    assert [each["request_id"] for each in listed] == ["mine-2", "mine-1"]
    shown = set(listed[1]) - {"age_s"}
    assert {name: listed[1][name] for name in shown} == {name: record[name] for name in shown}
    missing = await http.get("/debug/requests/nobody")
    assert missing.status_code == 404
    generated = (await http.get("/live")).headers["x-request-id"]
    assert len(generated) == 32
    unprintable = await http.get("/live", headers={"x-request-id": "a b" + "x" * 200})
    assert len(unprintable.headers["x-request-id"]) == 32


async def test_a_long_prompt_goes_through_a_thread(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    text = "word " * 5000
    await client.completions.create(model=MODEL_NAME, prompt=text)
    assert len(router.requests[0].prompt_token_ids) > 4999


async def test_the_version_that_answers(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": pdserve.__version__}


async def test_metrics(http: httpx.AsyncClient, client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    await client.chat.completions.create(model=MODEL_NAME, messages=HI)
    text = (await http.get("/metrics")).text
    tokens = len(router.script(router.requests[0]).token_ids)
    assert f'vllm:generation_tokens_total{{model_name="{MODEL_NAME}"}} {float(tokens)}' in text
    assert f'vllm:time_to_first_token_seconds_count{{model_name="{MODEL_NAME}"}} 1.0' in text
    assert f'vllm:inter_token_latency_seconds_count{{model_name="{MODEL_NAME}"}} {float(tokens - 1)}' in text
    assert 'pdserve_http_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
    assert "pdserve_open_requests 0.0" in text
