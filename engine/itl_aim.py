"""How far below an ITL budget a step aims: as far as measured times have lain above what was expected.

Owns what is remembered of that, and how many steps may be too long; no clock, no model of step times.

    aim = 1 / that of the last ratios (measured / expected) which ``allowed`` of them exceed

The budget is for the latency between tokens, and most steps have no prompt tokens: these are far below it. So ``OVER``
of all steps may be too long, and of the mixed ones as many more as they are rarer, up to ``MOST_OVER``. What
took ``STALLED`` times as long as expected says nothing of where to aim: no aim would have mended it.
"""

from __future__ import annotations

from collections import deque

OVER = 0.01
MOST_OVER = 0.05
FIRST_RATIOS = (1.0,) * 30 + (1 / 0.85,) * 2
"""Until others are known: so that the first stall alone does not decide."""
REMEMBERED = 256
STALLED = 2.0
LEAST = 0.6
MOST = 0.95
SHARE_STEPS = 512
"""After so many steps one counts a third in the share of the mixed ones."""


class Aim:
    def __init__(self) -> None:
        self._share = 1.0
        """Of the mixed ones among all steps."""
        self.forget()

    def forget(self) -> None:
        self._ratios = deque(FIRST_RATIOS, maxlen=REMEMBERED)
        self._find()

    @property
    def part(self) -> float:
        """Of the budget."""
        return self._part

    def stepped(self, *, is_mixed: bool) -> None:
        """A step that decodes: with prompt tokens, or without."""
        self._share += (is_mixed - self._share) / SHARE_STEPS

    def observe(self, expected_s: float, took_s: float) -> None:
        """Of a mixed step that was to fit."""
        if took_s < STALLED * expected_s:
            self._ratios.append(took_s / expected_s)
            self._find()

    def _find(self) -> None:
        allowed = min(OVER / max(self._share, OVER), MOST_OVER)
        ordered = sorted(self._ratios)
        exceeded = ordered[-1 - int(allowed * len(ordered))]
        self._part = min(MOST, 1 / exceeded) if exceeded * LEAST < 1 else LEAST
