"""POST /tokenize and /detokenize: the model's tokenizer over HTTP, in the shape that vLLM gave these endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.http import JsonResponse, read_body
from gateway.openai import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, parse, read_json
from gateway.sampling import check_token_ids
from gateway.serving import Gateway
from gateway.text import INLINE_BYTES, INLINE_TOKENS

Asked = TypeVar("Asked")


async def tokenize(gateway: Gateway, http_request: Request) -> Response:
    """{prompt} or {messages} -> {count, max_model_len, tokens, token_strs}. Raises GatewayError."""
    request = await _read(gateway, http_request, _tokenize_request)
    gateway.check_model(request.model)
    text, tokenizer = gateway.text, gateway.model.tokenizer
    if isinstance(request, TokenizeChatRequest):
        token_ids = await text.encode_chat(
            [message.for_template() for message in request.messages],
            request.add_special_tokens,
            **request.template_options,
        )
    else:
        token_ids = await text.encode(request.prompt, request.add_special_tokens)
    token_strs: list[str] | None = None
    if request.return_token_strs:
        token_strs = await text.run(
            len(token_ids) <= INLINE_TOKENS, lambda: [tokenizer.token(token_id) for token_id in token_ids]
        )
    return JsonResponse(
        {
            "count": len(token_ids),
            "max_model_len": gateway.model.max_model_len,
            "tokens": token_ids,
            "token_strs": token_strs,
        }
    )


async def detokenize(gateway: Gateway, http_request: Request) -> Response:
    """{tokens} -> {prompt}. Raises GatewayError."""
    request = await _read(gateway, http_request, lambda data: parse(DetokenizeRequest, data))
    gateway.check_model(request.model)
    token_ids = check_token_ids(request.tokens, gateway.model, "tokens")
    return JsonResponse({"prompt": await gateway.text.decode(token_ids, skip_special_tokens=False)})


def _tokenize_request(data: dict[str, Any]) -> TokenizeChatRequest | TokenizeTextRequest:
    return parse(TokenizeChatRequest, data) if "messages" in data else parse(TokenizeTextRequest, data)


async def _read(gateway: Gateway, http_request: Request, as_request: Callable[[dict[str, Any]], Asked]) -> Asked:
    """The request's body; a long one is not read on the event loop. Raises GatewayError."""
    body = await read_body(http_request, gateway.config.max_body_bytes)
    return await gateway.text.run(len(body) <= INLINE_BYTES, lambda: as_request(read_json(body)))
