"""The gRPC API's messages, to the request types that the HTTP API reads and back: one set of fields, checks and errors.

No I/O. Called by ``grpc_service``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.chat import LEAST_LOGPROB
from gateway.choice import Delta, PlacedToken
from gateway.errors import GatewayError, invalid
from gateway.model import ServedModel
from gateway.openai import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest, parse
from gateway.sampling import check_token_ids
from gateway.serving import Choice, usage
from gateway.tokenizer import Tokenizer
from pdserve.v1 import gateway_pb2 as pb

_OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def completion_request(request: pb.TextRequest, model: ServedModel) -> CompletionRequest:
    """Raises GatewayError."""
    fields = _fields(request.model, request.options, model)
    match request.WhichOneof("prompt"):
        case "text":
            fields["prompt"] = request.text
        case "tokens":
            fields["prompt"] = list(request.tokens.ids)
        case _:
            raise invalid("the prompt is missing: give `text` or `tokens`", "prompt", "missing_parameter")
    if request.options.HasField("logprobs"):
        fields["logprobs"] = request.options.logprobs
    return parse(CompletionRequest, {**fields, "add_special_tokens": not request.skip_bos})


def chat_request(request: pb.ChatRequest, model: ServedModel) -> ChatCompletionRequest:
    """Raises GatewayError."""
    fields = _fields(request.model, request.options, model) | {
        "messages": _messages(request.messages),
        "continue_final_message": request.continue_final_message,
        "add_generation_prompt": not request.continue_final_message,
    }
    if request.options.HasField("logprobs"):
        fields |= {"logprobs": True, "top_logprobs": request.options.logprobs}
    return parse(ChatCompletionRequest, fields)


def tokenize_chat_request(request: pb.TokenizeRequest) -> TokenizeChatRequest:
    """Raises GatewayError."""
    return parse(TokenizeChatRequest, {"messages": _messages(request.messages)})


def go_on(choices: Sequence[Choice], so_far: Sequence[pb.ChoiceSoFar], options: pb.GenerationOptions) -> None:
    """Let the choices go on after what the client has of them. Raises GatewayError."""
    if not so_far:
        return
    if not options.HasField("seed"):
        raise invalid("to go on after tokens, the seed that drew them is needed", "options.seed")
    if len(so_far) != len(choices):
        raise invalid(f"there are {len(choices)} choices, and `so_far` has {len(so_far)}", "so_far")
    for choice, given in zip(choices, so_far, strict=True):
        if given.finished:
            choice.had_finished = True
        else:
            choice.go_on_after(given.token_ids, given.model_fingerprint)


def check_so_far(so_far: Iterable[pb.ChoiceSoFar], model: ServedModel) -> None:
    """Raises GatewayError."""
    for given in so_far:
        check_token_ids(given.token_ids, model, "so_far")


def response(choice: Choice, delta: Delta, tokenizer: Tokenizer) -> pb.GenerateResponse:
    """The news of one choice."""
    chunk = pb.Chunk(
        index=choice.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[_logprobs(token, tokenizer) for token in delta.logprobs],
        finish_reason=delta.finish_reason or "",
    )
    if not choice.is_model_told:
        chunk.model_fingerprint = choice.generation.model_fingerprint
        choice.is_model_told = True
    return pb.GenerateResponse(chunks=[chunk])


def last_response(choices: Sequence[Choice]) -> pb.GenerateResponse:
    """What is billed."""
    billed = usage(choices)
    return pb.GenerateResponse(
        usage=pb.Usage(
            prompt_tokens=billed["prompt_tokens"],
            completion_tokens=billed["completion_tokens"],
            cached_tokens=billed["prompt_tokens_details"]["cached_tokens"],
        )
    )


def error_detail(error: GatewayError) -> pb.ErrorDetail:
    return pb.ErrorDetail(code=error.code or "", param=error.param or "", retry_after_s=error.retry_after_s or 0.0)


def _fields(model_name: str, options: pb.GenerationOptions, model: ServedModel) -> dict[str, Any]:
    fields: dict[str, Any] = {field.name: value for field, value in options.ListFields() if field.name in _OPTIONAL}
    if options.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in options.logit_bias.items()}
    if options.n:
        fields["n"] = options.n
    return fields | {
        "model": model_name or model.name,
        "stop": list(options.stop),
        "stop_token_ids": list(options.stop_token_ids),
        "min_tokens": options.min_tokens,
        "ignore_eos": options.ignore_eos,
        "skip_special_tokens": not options.keep_special_tokens,
        "cache_salt": options.cache_salt,
        "priority": options.priority,
        "user": options.session or None,
    }


def _messages(messages: Iterable[pb.ChatMessage]) -> list[dict[str, str]]:
    return [
        {"role": message.role, "content": message.content, **({"name": message.name} if message.name else {})}
        for message in messages
    ]


def _logprobs(token: PlacedToken, tokenizer: Tokenizer) -> pb.TextLogprobs:
    return pb.TextLogprobs(
        token_id=token.token_id,
        token=tokenizer.token_bytes(token.token_id),
        logprob=max(token.logprobs.logprob, LEAST_LOGPROB),
        top_token_ids=token.logprobs.top_token_ids,
        top_tokens=[tokenizer.token_bytes(token_id) for token_id in token.logprobs.top_token_ids],
        top_logprobs=[max(value, LEAST_LOGPROB) for value in token.logprobs.top_logprobs],
    )
