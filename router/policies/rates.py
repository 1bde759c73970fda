"""How fast a worker computes prompts and takes KV, learned from what it says of each request: for costs, not clocks.

    rate = (tokens + those of the prior) / (seconds + those of the prior)

What is older counts less. Without the prior's weight one odd request would decide. What disturbs a request (others on
the worker that this router does not know of yet) makes it slower, never faster: a slower one counts as SLOWER times the
rate so far at most, a faster one as it is, within FASTER. Until anything is known there is no rate, and the policy has
its own constant.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_TOKENS = 65_536
"""After so many tokens an observation counts half."""
PRIOR_TOKENS = 2_048
"""Weight of the first guess, which is the first observation."""
SLOWER = 1.1
FASTER = 4.0


@dataclass(slots=True)
class Rate:
    """Seconds a token, from pairs of the two."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        return self._tokens > 0

    @property
    def seconds_per_token(self) -> float:
        """0 while nothing is known."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """``tokens`` took ``seconds``. What says nothing (no tokens, no time) is left out."""
        if tokens <= 0 or not 0 <= seconds < float("inf"):
            return
        if not self._tokens:
            self._tokens, self._seconds = float(PRIOR_TOKENS), PRIOR_TOKENS * seconds / tokens
            return
        expected_s = tokens * self.seconds_per_token
        if expected_s:
            seconds = min(max(seconds, expected_s / FASTER), expected_s * SLOWER)
        keep = 0.5 ** (tokens / MEMORY_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
