"""Streamed completions as a client sees them, and something done to the cluster in the middle of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 90.0


@dataclass
class Streamed:
    """One choice of a stream."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


@dataclass
class Stream:
    choices: list[Streamed]
    usage: dict[str, Any] | None = None


def stream(
    url: str, prompt: list[int], fault: Callable[[], None] | None = None, after_tokens: int = 15, **options: Any
) -> Stream:
    """Read a stream to its end. ``fault`` happens once, when each choice has ``after_tokens`` tokens."""
    answer = Stream([Streamed() for _ in range(options.get("n", 1))])
    body = {"model": "test-model", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"return_token_ids": True, **options}
    headers = {"x-request-timeout-s": str(TIMEOUT_S)}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S + 10) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            _take(answer, chunk)
            if fault is not None and all(len(choice.token_ids) >= after_tokens for choice in answer.choices):
                fault()
                fault = None
    assert fault is None, "it was over before the fault"
    return answer


def _take(answer: Stream, chunk: dict[str, Any]) -> None:
    if chunk.get("usage"):
        assert answer.usage is None, "usage comes once"
        answer.usage = chunk["usage"]
    for piece in chunk["choices"]:
        choice = answer.choices[piece["index"]]
        assert not choice.finish_reasons, "something came after the end"
        choice.text += piece["text"]
        choice.token_ids += piece.get("token_ids") or []
        if piece.get("logprobs"):
            choice.logprobs += piece["logprobs"]["token_logprobs"]
            choice.top_logprobs += piece["logprobs"]["top_logprobs"]
        if piece["finish_reason"]:
            choice.finish_reasons.append(piece["finish_reason"])
