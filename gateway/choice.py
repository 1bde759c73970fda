"""One choice: its tokens as they come, to the text (and logprobs) that may be shown now. No I/O.

    tokens -> detokenizer -> stop strings -> released text
                  |                             |
                  +-> where each token lies ->  logprobs of the tokens whose text is released

Made per choice by ``serving``; what it returns is put into JSON by the endpoint's format.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.detokenizer import IncrementalDetokenizer
from gateway.stop_strings import StopStrings
from gateway.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2 as pb

_FINISH_REASON = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class PlacedToken:
    """A token with its logprobs, and where its text lies in the output's text."""

    token_id: int
    logprobs: pb.TokenLogprobs
    start: int
    end: int


@dataclass(slots=True)
class Delta:
    """What an output brought, as far as it can be shown."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Tokens that arrived with it, the stop token too."""
    logprobs: list[PlacedToken] = field(default_factory=list)
    finish_reason: str | None = None
    """stop | length, with the last one."""


class ChoiceDecoder:
    """State of one choice. ``push`` each output of the router until ``finish_reason`` is set."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop_strings = StopStrings(stop)
        self._min_tokens = min_tokens
        self._waiting: deque[PlacedToken] = deque()
        """Tokens whose text is not released yet, in order."""
        self._unplaced: list[PlacedToken] = []
        """The last of them, whose text is not even decided: their end is unknown."""
        self._num_chars = 0
        self._released_chars = 0
        self.num_tokens = 0
        self.finish_reason: str | None = None

    @property
    def stopped_by_string(self) -> bool:
        """True when a stop string ended the choice, which the worker does not know."""
        return self._stop_strings.matched is not None

    def push(self, output: pb.Output) -> Delta:
        """Take an output without failure. Tokens after the one that completes a stop string are dropped."""
        delta = Delta()
        is_stop = output.finish.reason == pb.FINISH_REASON_STOP
        hidden = output.finish.stop_token_id if is_stop and output.finish.HasField("stop_token_id") else None
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            delta.token_ids.append(token_id)
            if i == last and token_id == hidden:
                break
            piece = self._detokenizer.push(token_id)
            if output.logprobs:
                self._place(token_id, output.logprobs[i], piece)
            self._take(piece, delta)
            if self.stopped_by_string:
                break
        if not self.stopped_by_string and output.HasField("finish"):
            self._flush(delta)
            self.finish_reason = _FINISH_REASON[output.finish.reason]
        if self.stopped_by_string:
            self.finish_reason = "stop"
        self._release_logprobs(delta)
        delta.finish_reason = self.finish_reason
        return delta

    def _place(self, token_id: int, logprobs: pb.TokenLogprobs, piece: str) -> None:
        token = PlacedToken(token_id, logprobs, self._num_chars, self._num_chars)
        self._waiting.append(token)
        self._unplaced.append(token)
        if piece:
            self._settle(len(piece))

    def _settle(self, num_chars: int) -> None:
        """The text of the unplaced tokens is known: it ends here."""
        for token in self._unplaced:
            token.end = self._num_chars + num_chars
        self._unplaced.clear()

    def _take(self, piece: str, delta: Delta) -> None:
        self._num_chars += len(piece)
        released = piece if self.num_tokens <= self._min_tokens else self._stop_strings.push(piece)
        self._released_chars += len(released)
        delta.text += released

    def _flush(self, delta: Delta) -> None:
        piece = self._detokenizer.flush()
        self._settle(len(piece))
        self._take(piece, delta)
        if not self.stopped_by_string:
            rest = self._stop_strings.flush()
            self._released_chars += len(rest)
            delta.text += rest

    def _release_logprobs(self, delta: Delta) -> None:
        """Those whose whole text is out; at a stop string also the one that it cut in two."""
        undecided = len(self._unplaced)
        while len(self._waiting) > undecided:
            token = self._waiting[0]
            is_out = token.end <= self._released_chars
            if self.stopped_by_string:
                is_out = token.start < self._released_chars
            if not is_out:
                break
            delta.logprobs.append(self._waiting.popleft())
