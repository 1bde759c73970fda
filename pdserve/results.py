"""What the client gives back: plain frozen values, without protobuf or grpc."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its logprob. ``token`` is bytes: a token may be a part of a character."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position, when they were asked for."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """News of one choice. ``text`` may lag behind ``token_ids``: half a character, the beginning of a stop string."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    """stop | length, on the choice's last chunk."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What is billed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, that nobody had to compute."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer; ``text``, ``token_ids`` and ``finish_reason`` are the first choice's."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a gateway serves."""

    model: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the workers are that answer through a gateway."""

    running: int
    waiting: int
    queued_tokens: int
    """Of prompts, not yet computed."""
    free_blocks: int
    """Of KV, that can be taken now."""
    total_blocks: int
    """0: nobody can answer."""
