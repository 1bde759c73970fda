"""POST /tokenize and /detokenize: the model's tokenizer over HTTP, in the shape that vLLM gave these endpoints."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.http import JsonResponse, read_body
from gateway.openai import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, parse, read_json
from gateway.sampling import check_token_ids
from gateway.serving import Gateway


async def tokenize(gateway: Gateway, http_request: Request) -> Response:
    """{prompt} or {messages} -> {count, max_model_len, tokens, token_strs}. Raises GatewayError."""
    data = read_json(await read_body(http_request, gateway.config.max_body_bytes))
    request: TokenizeChatRequest | TokenizeTextRequest
    if "messages" in data:
        request = parse(TokenizeChatRequest, data)
        gateway.check_model(request.model)
        token_ids = await gateway.text.encode_chat(
            [message.for_template() for message in request.messages],
            request.add_special_tokens,
            **request.template_options,
        )
    else:
        request = parse(TokenizeTextRequest, data)
        gateway.check_model(request.model)
        [token_ids] = await gateway.text.encode([request.prompt], request.add_special_tokens)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": gateway.model.max_model_len,
        "tokens": token_ids,
    }
    tokenizer = gateway.model.tokenizer
    answer["token_strs"] = [tokenizer.token(i) for i in token_ids] if request.return_token_strs else None
    return JsonResponse(answer)


async def detokenize(gateway: Gateway, http_request: Request) -> Response:
    """{tokens} -> {prompt}. Raises GatewayError."""
    request = parse(DetokenizeRequest, read_json(await read_body(http_request, gateway.config.max_body_bytes)))
    gateway.check_model(request.model)
    token_ids = check_token_ids(request.tokens, gateway.model, "tokens")
    return JsonResponse({"prompt": await gateway.text.decode(token_ids, skip_special_tokens=False)})
