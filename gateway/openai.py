"""What clients may send: the OpenAI request fields, strictly read.

Every field of the OpenAI API is either a field here, or listed in a ``NEUTRAL`` table with the values that change
nothing; any other value of those is refused by name, and so is a field that neither OpenAI nor we know. Nothing is
silently ignored. Ranges are checked here; what depends on the model (ids, lengths) is checked in ``sampling``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from gateway.errors import GatewayError, invalid, unsupported

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
INT64 = 1 << 63
_MODEL_NAME = re.compile(r"dictionary or instance of \w+|dictionary")
"""Python's words, in pydantic's messages, for what is an object in JSON."""

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Neutral = Mapping[str, tuple[object, ...]]
"""Known fields that are not served -> the values that mean nothing and are accepted."""


class StrictModel(BaseModel):
    """No coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    NEUTRAL: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not (unserved := cls.NEUTRAL.keys() & data.keys()):
            return data
        for name in sorted(unserved):
            if data[name] not in cls.NEUTRAL[name]:
                meaning = " or ".join(orjson.dumps(value).decode() for value in cls.NEUTRAL[name])
                raise unsupported(name, f"leave it out, or send {meaning}")
        return {name: value for name, value in data.items() if name not in unserved}


class StreamOptions(StrictModel):
    NEUTRAL: ClassVar[Neutral] = {"include_obfuscation": (None, False)}

    include_usage: bool = False


class SamplingFields(StrictModel):
    """What both completion endpoints share."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=2 * INT64)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    """Requests of one user belong together, for routers that go by it (``--policy session``)."""
    # Extensions that engines have in common.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    """Also give the token ids of the prompt and of each choice."""
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    """Smaller runs earlier."""

    @property
    def session(self) -> str:
        """What the client says belongs together; may be empty."""
        return self.user or ""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options may only be given with stream=true", "stream_options")
        return self


class ContentPart(StrictModel):
    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise unsupported(f"messages[].content[].type={kind}", "this model takes text only")
        return data

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise invalid(f"a content part of type {self.type!r} needs {self.type!r}", "messages")
        return self

    @property
    def content(self) -> str:
        return (self.text if self.type == "text" else self.refusal) or ""


class ChatMessage(StrictModel):
    NEUTRAL: ClassVar[Neutral] = {
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
        "tool_calls": (None, []),
        "tool_call_id": (None,),
    }

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None

    @field_validator("role")
    @classmethod
    def _no_tools(cls, role: str) -> str:
        if role in ("tool", "function"):
            raise unsupported(f"messages[].role={role}", "tool calls are not served yet")
        return role

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.refusal):
            raise invalid(f"a {self.role} message needs content", "messages")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text as one string, and the system role, which all models know."""
        content = self.content if self.content is not None else self.refusal or ""
        if not isinstance(content, str):
            content = "\n".join(part.content for part in content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatTemplateFields(StrictModel):
    """How messages become a prompt; extensions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message excludes add_generation_prompt: set add_generation_prompt=false",
                "continue_final_message",
            )
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "template_kwargs": self.chat_template_kwargs,
        }


class ChatCompletionRequest(SamplingFields, ChatTemplateFields):
    NEUTRAL: ClassVar[Neutral] = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None, "in_memory"),
        "reasoning_effort": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "tool_choice": (None, "none"),
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_cache_key: str | None = None
    """Goes before ``user`` as a name for what belongs together."""
    # Accepted, without effect on the answer.
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ: give only one", "max_completion_tokens")
        return self


class CompletionRequest(SamplingFields):
    NEUTRAL: ClassVar[Neutral] = {"suffix": (None, "")}

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True
    """Of the tokenizer (BOS, for example), to text prompts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.best_of not in (None, 1, self.n or 1):
            raise unsupported("best_of", "every choice is returned, so it must be 1 or n")
        if self.echo and self.logprobs is not None:
            raise unsupported("logprobs", "there are no logprobs of the prompt, so not together with echo")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt: all texts or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TokenizeTextRequest(StrictModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatTemplateFields):
    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: list[TokenId]


Schema = TypeVar("Schema", bound=StrictModel)


def read_json(body: bytes) -> dict[str, Any]:
    """Raises GatewayError."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return data


def parse(schema: type[Schema], data: dict[str, Any]) -> Schema:
    """The request, or a GatewayError that names the first wrong field."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _explain(data, error.errors(include_url=False, include_context=False, include_input=False)) from error


def _explain(data: dict[str, Any], errors: Sequence[Mapping[str, Any]]) -> GatewayError:
    """One error for the first wrong field. A field with several allowed types has an error for each of them."""
    param = _param(data, errors[0]["loc"])
    if errors[0]["type"] == "extra_forbidden":
        return invalid(f"Unknown field {param!r}: it is not part of this API.", param, "unknown_parameter")
    if errors[0]["type"] == "missing":
        return invalid(f"{param!r} is required.", param, "missing_parameter")
    field = errors[0]["loc"][0] if errors[0]["loc"] else None
    same = [error for error in errors if error["loc"][:1] == (field,)]
    in_range = [error for error in same if not error["type"].endswith("_type")]
    if in_range:  # the type was right, the value was not
        same, param = in_range[:1], _param(data, in_range[0]["loc"])
    reasons = list(dict.fromkeys(_MODEL_NAME.sub("object", error["msg"]) for error in same))
    return invalid(f"Invalid {param!r}: {'; or: '.join(reasons[:3])}.", param)


def _param(data: Any, location: tuple[int | str, ...]) -> str:
    """The path in the request, without the names of type alternatives that pydantic puts into it."""
    path = ""
    for part in location:
        if isinstance(part, str) and isinstance(data, dict):
            path, data = f"{path}.{part}" if path else part, data.get(part)
        elif isinstance(part, int) and isinstance(data, list) and part < len(data):
            path, data = f"{path}[{part}]", data[part]
        else:
            break
    return path
