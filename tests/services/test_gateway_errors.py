"""What the gateway refuses, and how: always an OpenAI error object that names the field, never silence."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from gateway.model import ServedModel
from pdserve.model_store import prepare_default_model
from pdserve.v1 import inference_pb2 as pb
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    Script,
    eventually,
    load_test_model,
    running_gateway,
    running_router,
    text_script,
)
from tests.services.openai_schema import assert_valid, openapi_schemas

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_test_model(prepare_default_model(), max_model_len=256)


@pytest_asyncio.fixture
async def router(model: ServedModel) -> AsyncIterator[FakeRouter]:
    async with running_router(FakeRouter(text_script(model, "fine."))) as router:
        yield router


@pytest_asyncio.fixture
async def http(model: ServedModel, router: FakeRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_gateway(model, [router.address], max_choices=8, max_body_bytes=50_000) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        yield http


def assert_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert_valid("ErrorResponse", body)
    error: dict[str, Any] = body["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert "x-request-id" in response.headers
    return error


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "x"}
    return {"model": MODEL_NAME, **prompt, **fields}


async def test_wrong_values(http: httpx.AsyncClient, router: FakeRouter) -> None:
    """Each is answered 400 with the name of the field, on both endpoints."""
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (path, fields, next(iter(fields)))
        for path in (CHAT, COMPLETIONS)
        for fields in (
            {"temperature": -0.1},
            {"temperature": 2.1},
            {"temperature": "hot"},
            {"top_p": 1.5},
            {"n": 0},
            {"n": 1.5},
            {"max_tokens": -1},
            {"max_tokens": "many"},
            {"stop": ["a", "b", "c", "d", "e"]},
            {"stop": [""]},
            {"stop": 3},
            {"presence_penalty": 3},
            {"frequency_penalty": -2.5},
            {"logit_bias": {"5": 101}},
            {"logit_bias": {"five": 1}},
            {"logit_bias": {"9" * 5000: 1}},
            {"logit_bias": {"1000000": 1}},
            {"seed": 1 << 70},
            {"stream": "yes"},
            {"stream_options": {"include_usage": True}},
            {"top_k": -2},
            {"min_p": 2},
            {"repetition_penalty": 0},
            {"min_tokens": 200, "max_tokens": 10},
            {"stop_token_ids": [1_000_000]},
            {"cache_salt": 5},
            {"unheard_of": 1},
        )
    ]
    wrong += [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages"),
        (CHAT, {"u" * 40_000: 1}, "u" * 1000 + "... (40000 characters)"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"n": 9}, "n"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1_000_000]}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 3, "n": 3}, "n"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1, "echo": True}, "logprobs"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
    ]
    for path, fields, param in wrong:
        error = assert_error(await http.post(path, json=body_of(path, **fields)), 400)
        assert error["param"].split(".")[0].split("[")[0] == param.split(".")[0].split("[")[0], (fields, error)
        if "." in param:
            assert error["param"] == param
        assert len(error["message"]) < 1100, "what the client sent is not sent back whole"
        assert "dictionary" not in error["message"], "Python's words"
        assert error["type"] == "invalid_request_error"
    assert not router.requests, "none of them reached a router"


UNSERVED_CHAT: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "auto"},
    {"functions": [{"name": "f"}]},
    {"function_call": "auto"},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "alloy", "format": "wav"}},
    {"prediction": {"type": "content", "content": "x"}},
    {"web_search_options": {}},
    {"reasoning_effort": "high"},
    {"verbosity": "low"},
    {"store": True},
    {"service_tier": "priority"},
    {"moderation": {"model": "x"}},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"ttl": "30m"}},
]


@pytest.mark.parametrize("fields", UNSERVED_CHAT, ids=lambda fields: next(iter(fields)))
async def test_unserved_fields_are_refused_by_name(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    error = assert_error(await http.post(CHAT, json=body_of(CHAT, **fields)), 400, code="unsupported_parameter")
    assert error["param"] == next(iter(fields))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "function", "name": "f", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
    ],
    ids=["tool", "function", "tool_calls", "image", "audio"],
)
async def test_unserved_messages_are_refused(http: httpx.AsyncClient, message: dict[str, Any]) -> None:
    assert_error(await http.post(CHAT, json=body_of(CHAT, messages=[message])), 400, code="unsupported_parameter")


async def test_neutral_values_are_accepted(http: httpx.AsyncClient) -> None:
    """Values that mean the default, and fields without effect: clients send them."""
    chat = {
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "k",
        "temperature": None,
        "max_tokens": None,
        "stop": None,
        "logit_bias": None,
        "stream": False,
        "n": None,
        "audio": None,
        "verbosity": None,
    }
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    response = await http.post(CHAT, json=body_of(CHAT, messages=messages, **chat))
    assert response.status_code == 200, response.text
    completion = {"best_of": 1, "suffix": None, "echo": False, "user": "me", "logprobs": None}
    assert (await http.post(COMPLETIONS, json=body_of(COMPLETIONS, **completion))).status_code == 200


@pytest.mark.parametrize(
    ("path", "schema"), [(CHAT, "CreateChatCompletionRequest"), (COMPLETIONS, "CreateCompletionRequest")]
)
async def test_every_field_of_the_api_is_known(http: httpx.AsyncClient, path: str, schema: str) -> None:
    """Whatever field OpenAI documents is served or refused by name; none of them is unknown here."""
    schemas = openapi_schemas()
    if schemas is None:
        pytest.skip("needs the OpenAPI file: set PDSERVE_DATA")
    names = set(_properties(schemas, schemas[schema]))
    assert {"model", "temperature", "stop"} <= names
    for name in sorted(names):
        fields = body_of(path) | {name: [{}]}
        error = assert_error(await http.post(path, json=fields), 400)
        assert error["code"] != "unknown_parameter", name
        assert error["param"].split(".")[0].split("[")[0] == name, error


def _properties(schemas: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    names = list(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        target = schemas[part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part
        names += _properties(schemas, target)
    return names


async def test_unknown_model(http: httpx.AsyncClient) -> None:
    for path in (CHAT, COMPLETIONS):
        assert_error(await http.post(path, json=body_of(path) | {"model": "other"}), 404, "model", "model_not_found")
    assert_error(await http.post("/tokenize", json={"prompt": "x", "model": "other"}), 404, code="model_not_found")
    missing = body_of(CHAT)
    del missing["model"]
    assert_error(await http.post(CHAT, json=missing), 400, "model", "missing_parameter")


async def test_context_length(http: httpx.AsyncClient, router: FakeRouter) -> None:
    error = assert_error(
        await http.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=[5] * 200, max_tokens=57)),
        400, "prompt", "context_length_exceeded",
    )  # fmt: skip
    assert all(number in error["message"] for number in ("256", "257", "200", "57"))
    fits = await http.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=[5] * 200, max_tokens=56))
    assert fits.status_code == 200
    chat = body_of(CHAT, messages=[{"role": "user", "content": "word " * 300}])
    assert_error(await http.post(CHAT, json=chat), 400, "messages", "context_length_exceeded")
    assert (await http.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=[5] * 250))).status_code == 200
    assert router.requests[-1].sampling.max_tokens == 6, "the default gives way to the context"


async def test_what_can_never_fit_is_not_tokenized(
    http: httpx.AsyncClient, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text may take seconds, in which other prompts would wait for the thread."""
    longest = model.tokenizer.max_chars_per_token
    assert longest is not None
    tokenized: list[int] = []
    encode = type(model.tokenizer).encode

    def spy(self: Any, text: str, add_special_tokens: bool) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(model.tokenizer), "encode", spy)
    text = "x" * 257 * longest
    for path, fields in ((CHAT, {"messages": [{"role": "user", "content": text}]}), (COMPLETIONS, {"prompt": text})):
        error = assert_error(await http.post(path, json=body_of(path, **fields)), 400, code="context_length_exceeded")
        assert "at least 257" in error["message"] or "at least 258" in error["message"]
        assert not tokenized
    response = await http.post("/tokenize", json={"prompt": text})
    assert response.status_code == 200, "who only counts may count more than the model takes"
    assert response.json()["count"] >= 257


async def test_bad_bodies_and_paths(http: httpx.AsyncClient) -> None:
    assert_error(await http.post(CHAT, content=b"{"), 400, code="invalid_json")
    assert_error(await http.post(CHAT, content=b"[]"), 400, code="invalid_json")
    assert_error(await http.post(CHAT, content=b'{"temperature": NaN}'), 400, code="invalid_json")
    assert_error(await http.post(CHAT, json=body_of(CHAT, user="x" * 60_000)), 413, code="request_too_large")
    compressed = await http.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
    assert_error(compressed, 415, code="unsupported_encoding")
    nowhere = assert_error(await http.get("/nowhere"), 404, code="not_found")
    for path in nowhere["message"].partition("There are ")[2].split(", "):
        assert (await http.get(path)).status_code in (200, 405), path
    assert_error(await http.get(CHAT), 405, code="method_not_allowed")
    assert (await http.head("/live")).status_code == (await http.head("/health")).status_code == 200
    for value in ("0", "-1", "soon", "inf", "nan", "1e9"):
        response = await http.post(CHAT, json=body_of(CHAT), headers={"x-request-timeout-s": value})
        assert_error(response, 400, "x-request-timeout-s")


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
