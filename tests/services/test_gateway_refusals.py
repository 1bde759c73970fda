"""What the gateway refuses before any router hears of it: an OpenAI error object that names the field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.model import ServedModel
from tests.services.gateway_harness import (
    FakeRouter,
)
from tests.services.openai_schema import openapi_schemas
from tests.services.small_gateway import CHAT, COMPLETIONS, assert_error, body_of, http, model, router

__all__ = ["http", "model", "router"]  # fixtures


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
