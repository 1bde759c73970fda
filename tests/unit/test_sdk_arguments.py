"""What a caller of the SDK gets wrong before anything is sent: the error names the argument and what it may be."""

from __future__ import annotations

from typing import Any

import pytest

import pdserve
from pdserve import requests

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "messages",
    [
        "Hi",
        5,
        None,
        ["Hi"],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "Hi", "text": "Hi"}],
    ],
)
def test_messages(messages: Any) -> None:
    with pytest.raises(pdserve.InvalidRequestError, match=r"\{'role': text, 'content': text\}") as caught:
        requests.chat_messages(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": -1},
        {"max_tokens": "3"},
        {"seed": 2**64},
        {"temperature": "warm"},
        {"stop": [1]},
        {"stop_token_ids": [1, -2]},
        {"logit_bias": {-1: 1.0}},
        {"model": "another"},
    ],
)
def test_options(option: Any) -> None:
    (name,) = option
    with pytest.raises(pdserve.InvalidRequestError, match=name) as caught:
        requests.chat_request(HI, "", option)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "endpoint", ["localhost", "http://127.0.0.1:8001", ":8001", "a:99999", "a:0", "a:8001,b:x", ","]
)
def test_endpoints(endpoint: str) -> None:
    for client in (pdserve.Client, pdserve.AsyncClient):
        with pytest.raises(ValueError, match="HOST:PORT"):
            client(endpoint)


def test_the_search_for_a_gateway_has_an_end() -> None:
    for wrong in (
        {"reconnect_s": -1.0},
        {"reconnect_s": float("inf")},
        {"reconnect_s": float("nan")},
        {"max_retries": -1},
    ):
        with pytest.raises(ValueError, match="must not be negative, nor infinite"):
            pdserve.Client(**wrong)  # type: ignore[arg-type]


def test_a_wrong_value_is_not_repeated_at_length() -> None:
    with pytest.raises(pdserve.InvalidRequestError) as caught:
        requests.chat_messages([{"role": "user", "text": "x" * 100_000}])
    assert len(str(caught.value)) < 300


def test_what_is_right_arrives() -> None:
    options: requests.Options = {"max_tokens": 3, "temperature": 0.5, "stop": "a", "logit_bias": {5: 1.0}, "seed": 0}
    request = requests.chat_request([{**HI[0], "name": "me"}], "tiny", options)
    assert [(m.role, m.content, m.name) for m in request.messages] == [("user", "Hi", "me")]
    given = request.options
    assert (given.max_tokens, given.temperature, [*given.stop], dict(given.logit_bias), given.seed) == (
        3,
        0.5,
        ["a"],
        {5: 1.0},
        0,
    )
    assert requests.chat_request(HI, "", {}).options.HasField("seed"), "so that a stream can go on elsewhere"
