"""From the client's arguments to the protobuf requests of the gateway. No I/O."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from pdserve.channel import MAX_MESSAGE_BYTES
from pdserve.errors import InvalidRequestError
from pdserve.v1 import gateway_pb2 as pb

_MESSAGE = "{'role': text, 'content': text}"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

AnyRequest = TypeVar("AnyRequest", pb.TextRequest, pb.ChatRequest, pb.TokenizeRequest, pb.DetokenizeRequest)
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
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
            request.tokens.SetInParent()  # an empty prompt is the server's to refuse
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the prompt is neither text nor token ids: {error}", param="prompt") from error
    return _bounded(request)


def chat_request(messages: Iterable[Message], model: str, options: Options) -> pb.ChatRequest:
    """Raises InvalidRequestError."""
    return _bounded(pb.ChatRequest(model=model, messages=chat_messages(messages), options=_options(options)))


def tokenize_request(text: str | Sequence[Message], model: str, skip_bos: bool) -> pb.TokenizeRequest:
    """Raises InvalidRequestError."""
    request = pb.TokenizeRequest(model=model, skip_bos=skip_bos)
    if not isinstance(text, str):
        request.messages.extend(chat_messages(text))
        return _bounded(request)
    try:
        request.text = text
    except ValueError as error:
        raise InvalidRequestError(f"the text is no Unicode: {error}", param="text") from error
    return _bounded(request)


def detokenize_request(token_ids: Sequence[int], model: str) -> pb.DetokenizeRequest:
    """Raises InvalidRequestError."""
    try:
        return _bounded(pb.DetokenizeRequest(model=model, token_ids=token_ids))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"these are no token ids: {error}", param="token_ids") from error


def request_id_or_new(given: str) -> str:
    """Raises InvalidRequestError for one that cannot be a header's value."""
    if given and not _REQUEST_ID.fullmatch(given):
        raise InvalidRequestError(
            f"request_id {given[:64]!r} is not 1 to 128 printable ASCII characters without spaces", param="request_id"
        )
    return given or uuid.uuid4().hex


def chat_messages(messages: Iterable[Message]) -> list[pb.ChatMessage]:
    """Raises InvalidRequestError."""
    try:
        each = [*messages]
    except TypeError:
        raise InvalidRequestError(
            f"messages are a list of {_MESSAGE}, not {_shown(messages)}", param="messages"
        ) from None
    return [_chat_message(message) for message in each]


def _chat_message(message: Message) -> pb.ChatMessage:
    try:
        named = isinstance(message, Mapping) and {*message} - {"name"} == {"role", "content"}
        if named and message["content"] is not None:  # protobuf would take None for an empty one
            return pb.ChatMessage(**message)
        reason = ""
    except (TypeError, ValueError) as error:
        reason = f" ({error})"
    raise InvalidRequestError(f"a message is {_MESSAGE}, not {_shown(message)}{reason}", param="messages")


def _shown(value: object) -> str:
    """A wrong value in an error, which is no place for a long prompt."""
    return text if len(text := repr(value)) <= 80 else f"{text[:80]}..."


def _bounded(request: AnyRequest) -> AnyRequest:
    """gRPC would say that the server is overloaded."""
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the request has {size >> 20} MiB: a gateway takes no more than {MAX_MESSAGE_BYTES >> 20}",
            code="request_too_large",
        )
    return request


def _options(options: Options) -> pb.GenerationOptions:
    """The seed is always pinned, so that a stream can go on through another gateway."""
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    fields.setdefault("seed", secrets.randbits(63))
    message = pb.GenerationOptions()
    for name, value in fields.items():
        if name not in Options.__annotations__:
            known = ", ".join(Options.__annotations__)
            raise InvalidRequestError(f"there is no option {name!r}: there are {known}", param=name)
        try:
            message.MergeFrom(pb.GenerationOptions(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{name}={_shown(value)} cannot be: {error}", param=name) from error
    return message
