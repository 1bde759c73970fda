"""How many prompt tokens a step may take beside decodes, so that it stays within a budget of time.

Owns what is learned of the time that steps take; no clock, no queue, no request. The scheduler asks before each step
that decodes and tells how long steps took; a step or two late will do.

    seconds of a step = fixed + each decode + each token of KV that decodes read
                        + each prompt token + each pair of a prompt token and one before it (attention)
                        + what any prompt tokens cost, however few (a GPU's steps of decodes only are launched at once)

All six are 0 or more, and found by least squares over the steps so far, of which older ones count less. Steps with and
without prompt tokens are remembered apart, so that a long time of decodes only does not wash out what the others cost.
Without the last one a step of few tokens would look as if each of them were dear, and be followed by such steps only.

- Progress: MIN_TOKENS in any case, even where the decodes alone are over the budget, so nothing starves.
- Age: the longer the first prompt has waited, the more of the step's time it gets, whatever the budget: MOST_SHARE of
  it from AGEING_S on, and twice MIN_TOKENS, or the next row size, in every second step in any case (where prompts never
  pause, two sizes are what tells their cost from the decodes'). So nothing crawls, and at worst a step is half as long
  again as its decodes.
- Bounds: it begins with MIN_TOKENS and never takes more than twice what it took of late: what was not measured, it does
  not extrapolate. So it needs a few steps from nothing to the budget.
- Outliers: a stall counts as SLOWER times what was expected, at most, once TRAINED_STEPS are known. What is much faster
  than expected counts little, too, unless it happens AGAIN times in a row: then what was remembered was wrong.
- It aims below the budget, since times scatter (``itl_aim``).
- Padding: rows that are computed in any case cost what tokens do, so steps are remembered with them; and a device that
  computes certain numbers of rows gets so many: a few tokens that would need a larger one wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from engine.itl_aim import Aim

MIN_TOKENS = 32
MOST_SHARE = 1 / 3
"""Of a step's time. What it costs: decodes alone have the other two thirds."""
AGEING_S = 1.0
"""Until the share, which grows evenly from nothing, is that."""
SLOWER = 1.5
FASTER = 4.0
AGAIN = 3
TRAINED_STEPS = 8
TRIED_STEPS = 16
"""With decodes and prompt tokens: then it is said how fast they are."""
STALE_STEPS = 1024
"""Without any: then that is not known any more."""
CALM_STEPS = 64
"""Without any: then the aim is the first one again. While it is low a decode worker offers little, so it would get
nothing by which to find a better one."""
MEMORY_STEPS = 64
"""After so many steps of its kind one counts a third."""
FADE = 0.98
"""What was tried long ago, and only less since, counts less with each step."""
_KV_UNIT = 1024.0
_PAIR_UNIT = 1024.0 * 1024.0
_COLUMNS = 6
_MIXED = 5
"""The column of what any prompt tokens cost."""
_DECODE_ORDER = (2, 1, 0)
_MIXED_ORDER = (3, 4, _MIXED, 2, 1, 0, 3, 4, _MIXED, 2, 1, 0)
"""In which the columns are solved. What is not told apart yet, prompt tokens cost: carefully."""


class StepLoad(NamedTuple):
    """What a step computed."""

    decodes: int
    kv_tokens: int
    """That the decodes read."""
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """Of each of them and those before it in its prompt."""

    @property
    def mean_context(self) -> float:
        """Tokens before the first of the prompt tokens, where they are of one prompt."""
        return max(0.0, self.prefill_pairs / self.prefill_tokens - self.prefill_tokens / 2)


def _row(load: StepLoad) -> tuple[float, ...]:
    decodes, kv_tokens, prefill_tokens, pairs = load
    is_mixed = float(decodes > 0 and prefill_tokens > 0)
    return 1.0, float(decodes), kv_tokens / _KV_UNIT, float(prefill_tokens), pairs / _PAIR_UNIT, is_mixed


class StepTimes:
    """The least squares: one row of sums for each kind of step, solved a little after each (coordinate descent)."""

    def __init__(self) -> None:
        self._weights = [0.0] * _COLUMNS
        self._sums = [_Sums(), _Sums()]
        """Of steps without prompt tokens, and with some."""
        self._fast = [0, 0]
        """Steps in a row that were much faster than expected, of either kind."""

    def seconds(self, load: StepLoad) -> float:
        return sum(weight * value for weight, value in zip(self._weights, _row(load), strict=True))

    def prefill_tokens(self, seconds: float, context: int) -> float:
        """That take so long beside decodes, after ``context`` tokens of their prompt."""
        seconds -= self._weights[_MIXED]
        pair_s = self._weights[4] / _PAIR_UNIT
        token_s = self._weights[3] + pair_s * context
        if seconds <= 0 or not (pair_s or token_s):
            return 0.0 if seconds <= 0 else math.inf
        # token_s * n + pair_s * n^2 / 2 = seconds
        return 2 * seconds / (token_s + math.sqrt(token_s**2 + 2 * pair_s * seconds))

    def observe(self, load: StepLoad, seconds: float) -> None:
        kind = load.prefill_tokens > 0
        expected_s = self.seconds(load)
        self._fast[kind] = self._fast[kind] + 1 if seconds < expected_s / FASTER else 0
        if self._fast[kind] == AGAIN:
            self._sums = [_Sums(), _Sums()]
        sums = self._sums[kind]
        if sums.steps >= TRAINED_STEPS:
            seconds = min(max(seconds, expected_s / FASTER), expected_s * SLOWER)
        sums.add(_row(load), seconds)
        weights, (without, beside) = self._weights, self._sums
        for i in _MIXED_ORDER if kind else _DECODE_ORDER:
            if i == _MIXED and not without.steps:
                continue  # it is not to be told apart from what the decodes cost
            square = without.squares[i][i] + beside.squares[i][i]
            if square > 0:
                pull = without.pull(i, weights) + beside.pull(i, weights)
                weights[i] = max(0.0, weights[i] + pull / square)


class _Sums:
    """Of one kind of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.squares = [[0.0] * _COLUMNS for _ in range(_COLUMNS)]
        self.products = [0.0] * _COLUMNS

    def add(self, row: Sequence[float], seconds: float) -> None:
        self.steps += 1
        keep = 1 - 1 / MEMORY_STEPS
        for i, value in enumerate(row):
            self.products[i] = self.products[i] * keep + value * seconds
            squares = self.squares[i]
            for j, other in enumerate(row):
                squares[j] = squares[j] * keep + value * other

    def pull(self, i: int, weights: Sequence[float]) -> float:
        squares = self.squares[i]
        return self.products[i] - sum(square * weight for square, weight in zip(squares, weights, strict=True))


class ItlBudget:
    def __init__(self, budget_s: float, max_tokens: int, padded_rows: Sequence[int] = ()) -> None:
        """``max_tokens``: of a step in any case. ``padded_rows``: of mixed steps; see ``engine.runner.AsyncRunner``."""
        self._budget_s = budget_s
        self._padded_rows = padded_rows
        self._max_tokens = max_tokens
        self._times = StepTimes()
        self._aim = Aim()
        self._tried = MIN_TOKENS / 2
        self.mixed_steps_total = 0
        """With decodes and prompt tokens."""
        self.over_budget_total = 0
        """Those of them that took longer than the budget."""
        self._last = StepLoad(0, 0)
        self._known_steps = 0
        """Mixed ones, from which the rate is known."""
        self._quiet_steps = 0
        """Since the last of them."""
        self._context = 0.0
        """Of prompt tokens of late, as a mean."""

    def prefill_tokens(self, decodes: int, kv_tokens: int, context: int = 0, waited_s: float = 0.0) -> int:
        """Most prompt tokens of a step beside so many decodes, which read so many tokens of KV. ``context``: so much of
        the first prompt is computed; ``waited_s``: so long it has waited by now."""
        age = min(1.0, waited_s / AGEING_S)
        tokens = max(self._within(decodes, kv_tokens, context), self._by_age(decodes, kv_tokens, context, age))
        least = self._least(decodes, age)
        if tokens > 2 * self._tried:  # it is only growing
            return min(self._max_tokens, max(least, int(2 * self._tried)))
        return self._without_padding(decodes, min(self._max_tokens, max(least, int(tokens))), least)

    def step_took(self, computed: StepLoad, seconds: float) -> None:
        """A step without decodes has no budget, and says nothing of those that have."""
        self._last = load = self._with_padding(computed)
        decodes, kv_tokens, prefill_tokens, _ = load
        if not decodes or seconds <= 0:
            return
        self._quiet_steps += 1
        self._aim.stepped(is_mixed=prefill_tokens > 0)
        if self._quiet_steps == STALE_STEPS:
            self._known_steps = 0
        if self._quiet_steps == CALM_STEPS:
            self._aim.forget()
        if prefill_tokens:
            self._known_steps += 1
            self._quiet_steps = 0
            context = computed.mean_context
            self._context += (context - self._context) / MEMORY_STEPS
            self.mixed_steps_total += 1
            self.over_budget_total += seconds > self._budget_s
            expected_s = self._times.seconds(load)
            was_to_fit = prefill_tokens > MIN_TOKENS and expected_s <= self._budget_s
            if was_to_fit and 2 * prefill_tokens > self.prefill_tokens(decodes, kv_tokens, int(context)):
                self._aim.observe(expected_s, seconds)
            self._tried = max(self._tried * FADE, float(prefill_tokens), MIN_TOKENS / 2)
        self._times.observe(load, seconds)

    @property
    def aim_s(self) -> float:
        """So long a mixed step is to take."""
        return self._aim.part * self._budget_s

    @property
    def has_room(self) -> bool:
        """What decodes now leaves time for more."""
        return self._times.seconds(self._last._replace(prefill_tokens=0, prefill_pairs=0)) < self.aim_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that it computes beside what decodes now; 0: that was not tried enough, or too long ago. What
        looks slow must be tried again, or nobody would ever see that it is not."""
        if self._known_steps < TRIED_STEPS:
            return 0.0
        within = self._within(self._last.decodes, self._last.kv_tokens, int(self._context))
        if within > 2 * self._tried:
            return 0.0
        tokens = self._without_padding(self._last.decodes, int(max(within, MIN_TOKENS)))
        return tokens / max(self._seconds_with(tokens), 1e-9)

    def _seconds_with(self, prefill_tokens: int) -> float:
        """Of a step like the last one, with so many prompt tokens."""
        pairs = int(prefill_tokens * (self._context + prefill_tokens / 2))
        load = self._last._replace(prefill_tokens=prefill_tokens, prefill_pairs=pairs)
        return self._times.seconds(self._with_padding(load))

    def _within(self, decodes: int, kv_tokens: int, context: int) -> float:
        """By what is known; as many as there can be, while that is nothing."""
        left_s = self.aim_s - self._times.seconds(StepLoad(decodes, kv_tokens))
        return min(self._times.prefill_tokens(left_s, context), self._max_tokens)

    def _with_padding(self, load: StepLoad) -> StepLoad:
        """As a step of prompt tokens that are as many as the rows that are computed."""
        sizes, rows = self._padded_rows, load.decodes + load.prefill_tokens
        if not load.prefill_tokens or not sizes or rows > sizes[-1]:
            return load
        return load._replace(prefill_tokens=sizes[bisect_left(sizes, rows)] - load.decodes)

    def _least(self, decodes: int, age: float) -> int:
        """Whatever the budget. More after a step that computed no more rows than MIN_TOKENS need, by age."""
        smallest = self._with_padding(StepLoad(decodes, 0, MIN_TOKENS)).prefill_tokens
        if self._last.prefill_tokens > smallest:
            return MIN_TOKENS
        more = int(MIN_TOKENS * (1 + age))
        # Twice in a row the same number of rows would tell nothing.
        return max(more, smallest + 1) if age == 1 and self._last.prefill_tokens else more

    def _without_padding(self, decodes: int, tokens: int, least: int = MIN_TOKENS) -> int:
        """Fewer, where the last ones would have a row size of their own, most of which would be padding."""
        sizes = self._padded_rows
        larger = bisect_right(sizes, decodes + tokens)
        if not 0 < larger < len(sizes):
            return tokens
        fitting = sizes[larger - 1] - decodes
        return fitting if fitting >= max(least, tokens / 2) else tokens

    def _by_age(self, decodes: int, kv_tokens: int, context: int, age: float) -> float:
        """That take the share of the step which the first prompt has by waiting. ``age``: 0 to 1."""
        share = MOST_SHARE * age
        seconds = self._times.seconds(StepLoad(decodes, kv_tokens)) * share / (1 - share)
        return min(self._times.prefill_tokens(seconds, context), self._max_tokens)
