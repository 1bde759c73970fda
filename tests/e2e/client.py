"""Calls through the gateway's HTTP API, as a user makes them; answers carry token ids to compare them exactly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: int
    request_id: str


def complete(url: str, prompt: list[int], **options: Any) -> Answer:
    """One completion, not streamed."""
    body = {"model": "test-model", "prompt": prompt, "temperature": 0, "return_token_ids": True, **options}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    payload = response.json()
    choice = payload["choices"][0]
    usage = payload["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(choice["token_ids"]))
    return Answer(
        choice["token_ids"],
        choice["text"],
        choice["finish_reason"],
        usage["prompt_tokens_details"]["cached_tokens"],
        response.headers["x-request-id"],
    )


def complete_all(url: str, prompts: list[list[int]], concurrency: int, **options: Any) -> list[Answer]:
    """Every prompt, ``concurrency`` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, **options), prompts))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The OpenAI error object of a refused request."""
    error = response.json()["error"]
    assert {"message", "type", "code"} <= error.keys()
    return dict(error)
