"""From the client's arguments to the protobuf requests of the gateway. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from pdserve.errors import InvalidRequestError
from pdserve.v1 import gateway_pb2 as pb

Prompt = str | Sequence[int]
Message = Mapping[str, str]
"""{"role": ..., "content": ...}, optionally "name"."""


class Options(TypedDict, total=False):
    """How to generate. What is left out is the model's default."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    logprobs: int
    """n: logprobs of the drawn token and of the n most likely ones."""
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    keep_special_tokens: bool
    n: int
    cache_salt: str
    """Cached prefixes are shared with requests of the same salt only."""
    priority: int
    """Smaller runs earlier."""
    session: str
    """Requests of one session belong together: routers may keep them on one pair of workers."""


def text_request(prompt: Prompt, model: str, options: Options) -> pb.TextRequest:
    """Raises InvalidRequestError."""
    request = pb.TextRequest(model=model, options=_options(options))
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        request.tokens.ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the prompt is neither text nor token ids: {error}", param="prompt") from error
    request.tokens.SetInParent()  # an empty prompt is the server's to refuse
    return request


def chat_request(messages: Iterable[Message], model: str, options: Options) -> pb.ChatRequest:
    """Raises InvalidRequestError."""
    return pb.ChatRequest(model=model, messages=chat_messages(messages), options=_options(options))


def chat_messages(messages: Iterable[Message]) -> list[pb.ChatMessage]:
    """Raises InvalidRequestError."""
    try:
        return [pb.ChatMessage(**message) for message in messages]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"a message is not {{'role': text, 'content': text}}: {error}", param="messages"
        ) from error


def _options(options: Options) -> pb.GenerationOptions:
    """The seed is always pinned, so that a stream can go on through another gateway."""
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    fields.setdefault("seed", secrets.randbits(63))
    try:
        return pb.GenerationOptions(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"wrong option: {error}") from error
