"""POST /v1/chat/completions: messages to a prompt, outputs to chat completion objects and chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.choice import Delta, PlacedToken
from gateway.exchange import HttpExchange
from gateway.openai import ChatCompletionRequest
from gateway.sampling import sampling_params, token_budget
from gateway.serving import Call, Choice, Gateway, Prompt
from gateway.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What the API says for a probability of zero; JSON has no infinity."""


async def chat_completions(gateway: Gateway, http_request: Request) -> Response:
    """Raises GatewayError."""
    exchange = HttpExchange(gateway, http_request, "/v1/chat/completions", "chatcmpl")
    request = await exchange.read(ChatCompletionRequest)
    choices = await chat_choices(exchange.call, request)
    return await exchange.answer(request, choices, ChatFormat(exchange.call, request))


async def chat_choices(call: Call, request: ChatCompletionRequest) -> list[Choice]:
    """The request checked, its messages made a prompt. Raises GatewayError."""
    gateway = call.gateway
    gateway.check_model(request.model)
    gateway.check_choices(request.n or 1)
    messages = [message.for_template() for message in request.messages]
    token_ids = await gateway.text.encode_chat(
        messages, max_tokens=gateway.model.max_model_len, **request.template_options
    )
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    max_tokens = token_budget(gateway.model, len(token_ids), asked, None, "messages", gateway.routers.pool_tokens)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = sampling_params(request, gateway.model, max_tokens=max_tokens, logprobs=logprobs)
    return call.choices(request, [Prompt(token_ids, sampling)])


class ChatFormat:
    """Chat completion objects and chunks."""

    def __init__(self, call: Call, request: ChatCompletionRequest) -> None:
        self._head = {"id": call.response_id, "created": call.created, "model": call.gateway.model.name}
        self._tokenizer = call.gateway.model.tokenizer
        self._with_logprobs = bool(request.logprobs)
        self._num_top = request.top_logprobs or 0
        self._with_token_ids = request.return_token_ids

    def opening(self, choice: Choice) -> dict[str, Any]:
        chunk = self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, None, None)
        if self._with_token_ids:
            chunk["prompt_token_ids"] = list(choice.prompt.token_ids)
        return chunk

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        token_ids = delta.token_ids if self._with_token_ids else None
        if delta.text or delta.logprobs or token_ids:
            logprobs = self._logprobs(delta.logprobs)
            chunk = self._chunk(choice, {"content": delta.text}, logprobs, None)
            if token_ids is not None:
                chunk["choices"][0]["token_ids"] = token_ids
            yield chunk
        if delta.finish_reason is not None:
            yield self._chunk(choice, {}, None, delta.finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        answer = {**self._head, "object": "chat.completion", "choices": entries, "usage": usage}
        for choice in choices:
            entry = {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.logprobs) if self._with_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            if self._with_token_ids:
                entry["token_ids"] = choice.token_ids
                answer["prompt_token_ids"] = list(choice.prompt.token_ids)
            entries.append(entry)
        return answer

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        entry = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [entry]}

    def _logprobs(self, tokens: Iterable[PlacedToken]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **_token(self._tokenizer, token.token_id, token.logprobs.logprob),
                "top_logprobs": [
                    _token(self._tokenizer, top_id, logprob)
                    for top_id, logprob in zip(
                        token.logprobs.top_token_ids[: self._num_top], token.logprobs.top_logprobs, strict=False
                    )
                ],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }
