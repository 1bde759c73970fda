"""Token ids to text, one token at a time, so that the pieces together are the text of all tokens.

A token may end in the middle of a character. The decoder shows that as U+FFFD at the end of the text; what such a token
brought is held back until a later one completes it. Some decoders also drop a space at the very start of a text, so
decoding begins with the last tokens of the prompt.

    ids   ... p p p | a b c | d e        window = ids[start:], decoded at each token
              ^start          ^new       emitted = characters of the window already given out
At each clean end (nothing held back) the window moves up to the tokens since the last clean end, so that its length,
and with it the cost of a token, stays constant.

Known limit: decoders with byte fallback decode a whole run of byte tokens anew; when a run turns invalid after a valid
beginning, the whole decode shows that beginning as U+FFFD too, the pieces do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 5
_REPLACEMENT = "�"
_MAX_HELD_TOKENS = 64
"""A character has four bytes at most; only invalid bytes, token after token, reach this, and are then given out."""


class IncrementalDetokenizer:
    """Text of one output. ``push`` each token, ``flush`` once at the end."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-PROMPT_TAIL_TOKENS:])
        self._clean = len(self._window)
        """Tokens of the window up to the last clean end."""
        self._emitted = len(self._decode(self._window))

    def push(self, token_id: int) -> str:
        """The text that this token decides, possibly empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._clean < _MAX_HELD_TOKENS:
            return ""
        piece = text[self._emitted :]
        del self._window[: self._clean]
        self._clean = len(self._window)
        self._emitted = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """What is still held back."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)
