"""What one streamed request has brought so far, and how it goes on after a lost connection. No I/O.

The gateway keeps nothing of a lost stream. The client sends the same request with the tokens it has and the pinned
seed, and gets the rest: no token twice, none missing. Logprobs that were held back are lost with a stream, so a
request that asked for them cannot go on once it has tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.results import Choice, Chunk, Generation, TokenLogprob, Usage
from pdserve.v1 import gateway_pb2 as pb

Request = pb.TextRequest | pb.ChatRequest


@dataclass(slots=True)
class _ChoiceSoFar:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    model_fingerprint: str = ""


class Progress:
    """State of one request."""

    def __init__(self, request: Request, request_id: str) -> None:
        self.request_id = request_id
        self.usage: Usage | None = None
        """With the last message; until then the answer is not whole."""
        self._request = request
        self._choices = [_ChoiceSoFar() for _ in range(max(request.options.n, 1))]

    def next_request(self) -> Request:
        """The request, with what is there already."""
        if not any(choice.token_ids for choice in self._choices):
            return self._request
        request = copy.deepcopy(self._request)
        for choice in self._choices:
            request.so_far.add(
                token_ids=choice.token_ids,
                finished=choice.finish_reason is not None,
                model_fingerprint=choice.model_fingerprint,
            )
        return request

    def check_can_go_on(self, error: PdserveError) -> None:
        """Raises ``error`` when the rest could not be had without a gap."""
        if self._request.options.HasField("logprobs") and any(choice.token_ids for choice in self._choices):
            raise error

    def take(self, response: pb.GenerateResponse) -> list[Chunk]:
        """Note and translate a message."""
        if response.HasField("usage"):
            usage = response.usage
            self.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return [self._take_chunk(chunk) for chunk in response.chunks]

    def result(self) -> Generation:
        """The whole answer, when ``usage`` has come."""
        assert self.usage is not None
        choices = (
            Choice(
                index,
                "".join(choice.text),
                tuple(choice.token_ids),
                choice.finish_reason or "",
                tuple(choice.logprobs),
            )
            for index, choice in enumerate(self._choices)
        )
        return Generation(self.request_id, tuple(choices), self.usage)

    def _take_chunk(self, message: pb.Chunk) -> Chunk:
        chunk = Chunk(
            message.index,
            message.text,
            tuple(message.token_ids),
            tuple(map(_logprob, message.logprobs)),
            message.finish_reason or None,
        )
        choice = self._choices[chunk.index]
        choice.text.append(chunk.text)
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(chunk.logprobs)
        choice.finish_reason = chunk.finish_reason
        choice.model_fingerprint = message.model_fingerprint or choice.model_fingerprint
        return chunk


def _logprob(message: pb.TextLogprobs) -> TokenLogprob:
    top = (
        TokenLogprob(token_id, token, logprob)
        for token_id, token, logprob in zip(
            message.top_token_ids, message.top_tokens, message.top_logprobs, strict=True
        )
    )
    return TokenLogprob(message.token_id, message.token, message.logprob, tuple(top))
