"""POST /v1/completions: texts or token ids to prompts, outputs to text completion objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.chat import LEAST_LOGPROB
from gateway.choice import Delta, PlacedToken
from gateway.errors import invalid
from gateway.exchange import HttpExchange
from gateway.openai import CompletionRequest
from gateway.sampling import check_token_ids, sampling_params, token_budget
from gateway.serving import Call, Choice, Gateway, Prompt
from gateway.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(gateway: Gateway, http_request: Request) -> Response:
    """Raises GatewayError."""
    exchange = HttpExchange(gateway, http_request, "/v1/completions", "cmpl")
    request = await exchange.read(CompletionRequest)
    choices = await completion_choices(exchange.call, request)
    return await exchange.answer(request, choices, CompletionFormat(exchange.call, request))


async def completion_choices(call: Call, request: CompletionRequest) -> list[Choice]:
    """The request checked, its prompts tokenized. Raises GatewayError."""
    gateway = call.gateway
    gateway.check_model(request.model)
    if not request.prompts:
        raise invalid("the list of prompts is empty", "prompt")
    gateway.check_choices(len(request.prompts) * (request.n or 1))
    return call.choices(request, [await _prompt(gateway, request, prompt) for prompt in request.prompts])


async def _prompt(gateway: Gateway, request: CompletionRequest, given: str | list[int]) -> Prompt:
    """One prompt, tokenized and checked."""
    model = gateway.model
    if isinstance(given, str):
        token_ids = await gateway.text.encode(given, request.add_special_tokens, model.max_model_len)
        text = given
    else:
        token_ids = list(check_token_ids(given, model, "prompt"))
        text = await gateway.text.decode(token_ids, request.skip_special_tokens) if request.echo else ""
    max_tokens = token_budget(
        model, len(token_ids), request.max_tokens, DEFAULT_MAX_TOKENS, "prompt", gateway.routers.pool_tokens
    )
    sampling = sampling_params(request, model, max_tokens=max_tokens, logprobs=request.logprobs)
    return Prompt(token_ids, sampling, text)


class CompletionFormat:
    """Text completion objects; a chunk has the same shape."""

    def __init__(self, call: Call, request: CompletionRequest) -> None:
        self._head = {
            "id": call.response_id,
            "object": "text_completion",
            "created": call.created,
            "model": call.gateway.model.name,
        }
        self._tokenizer = call.gateway.model.tokenizer
        self._with_logprobs = request.logprobs is not None
        self._num_top = request.logprobs or 0
        self._with_echo = bool(request.echo)
        self._with_token_ids = request.return_token_ids

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not self._with_echo and not self._with_token_ids:
            return None
        chunk = self._chunk(choice, choice.prompt.text if self._with_echo else "", None, None)
        if self._with_token_ids:
            chunk["choices"][0] |= {"prompt_token_ids": list(choice.prompt.token_ids), "token_ids": []}
        return chunk

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        token_ids = delta.token_ids if self._with_token_ids else None
        if delta.text or delta.logprobs or token_ids or delta.finish_reason:
            chunk = self._chunk(choice, delta.text, self._logprobs(delta.logprobs), delta.finish_reason)
            if token_ids is not None:
                chunk["choices"][0]["token_ids"] = token_ids
            yield chunk

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        for choice in choices:
            text = choice.prompt.text + choice.text if self._with_echo else choice.text
            entry = self._entry(choice, text, self._logprobs(choice.logprobs), choice.finish_reason)
            if self._with_token_ids:
                entry |= {"prompt_token_ids": list(choice.prompt.token_ids), "token_ids": choice.token_ids}
            entries.append(entry)
        return {**self._head, "choices": entries, "usage": usage}

    def _chunk(
        self, choice: Choice, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {**self._head, "choices": [self._entry(choice, text, logprobs, finish_reason)]}

    def _entry(
        self, choice: Choice, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Iterable[PlacedToken]) -> dict[str, Any] | None:
        """The drawn token is among ``top_logprobs``, also when it is not among the most likely."""
        if not self._with_logprobs:
            return None
        tokens = list(tokens)
        tops: list[dict[str, float]] = []
        for token in tokens:
            ids = [*token.logprobs.top_token_ids[: self._num_top], token.token_id]
            values = [*token.logprobs.top_logprobs[: self._num_top], token.logprobs.logprob]
            pairs = zip(ids, values, strict=True)
            tops.append({_token_text(self._tokenizer, i): max(value, LEAST_LOGPROB) for i, value in pairs})
        return {
            "tokens": [_token_text(self._tokenizer, token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprobs.logprob, LEAST_LOGPROB) for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.start for token in tokens],
        }


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; a part of a character as its bytes, which keeps such tokens apart."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
