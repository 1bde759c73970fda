"""Stop strings: text that may turn out to be the beginning of one is held back until it is decided.

Knows characters only; called by ``choice`` for each piece of text. The result does not depend on how the text was cut
into pieces: the stop string that ends first wins, and of those that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output. After ``matched`` is set nothing more is released."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._longest = max((len(text) for text in self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now, possibly empty."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The output ended otherwise: what was held back is ordinary text."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
