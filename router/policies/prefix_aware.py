"""The pair that has the first token soonest: what is cached where, against the work that waits there.

Costs are times, in units of the time to prefill one token, so that unlike things add up:

    prefill worker    uncached tokens + tokens queued before them + its requests
    decode worker     tokens to send (the prefix that it has cached is neither computed nor sent)
                      + its requests (each makes every step longer)
                      + blocks in use, with the expected growth, beyond what the pool holds (those would wait)
    without prefill   both sums of the one worker, with nothing sent

"One token" is that of the average worker: where computing takes longer than on the others, or sending shows more than
the constant says, as learned from what the workers report (``rates``), it counts as much more, within bounds.

A prefix is worth as much as computing it would cost, and no more: a worker that has it and a longer queue than that
loses to an idle one, which then has the prefix too. So a hot prefix spreads over as many workers as its load needs, and
one hot worker changes nothing for the others. In large fleets a lot decides who is looked at beside those that have the
prefix. Equals are drawn by lot.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from router.policies.base import C, Choice, Pool, PromptInfo

MAX_OWNERS = 32
MAX_OTHERS = 32
"""Candidates that are looked at on each side."""
SPEED_STEP = 0.25
"""Smaller differences in speed are noise: equals must stay equals, or the first of them gets all the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """In units of the time that one token's prefill takes."""

    uncached_token: float = 2.0
    """Computing it takes 1, and so long later requests wait: in replays of traces under load, twice is better for the
    mean time to the first token than once, and no worse when idle."""
    send_token: float = 0.05
    """Sending is overlapped with computing; the rest of it shows. Until it is learned."""
    send_token_bounds: tuple[float, float] = (0.005, 4.0)
    speed_bounds: tuple[float, float] = (0.2, 5.0)
    """Of one worker, compared with the average of those it is chosen from."""
    prefill_request: float = 16.0
    """Beside its tokens: even a fully cached request occupies a step and a hand-off."""
    decode_request: float = 256.0
    """What one more running request costs: a little of every step, for all of its output."""
    overflow_token: float = 4.0
    """A token of KV that has no room before others have ended."""
    expected_output_tokens: int = 256
    """What a request grows by, if its limit is higher."""


class PrefixAware:
    uses_prefixes = True
    goes_by_load = True

    def __init__(self, costs: CostModel | None = None, seed: int | None = None) -> None:
        self._costs = costs or CostModel()
        self._random = random.Random(seed)

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        best: tuple[float, Choice[C]] | None = None
        for pool in pools:
            cost = 0.0
            prefill: C | None = None
            decodes = self._look_at(prompt, pool.decodes)
            prefills = self._look_at(prompt, pool.prefills)
            average_s = _average_s_per_token(prefills or decodes)
            if prefills:
                cost, prefill = self._cheapest(prefills, self._prefill_cost, prompt, average_s)
            decode_cost, decode = self._cheapest(
                decodes, self._decode_cost if prefills else self._alone_cost, prompt, average_s
            )
            cost += decode_cost
            if best is None or cost < best[0]:
                best = cost, Choice(prefill, decode)
        assert best is not None, "a policy is asked with at least one pool"
        return best[1]

    def _cheapest(
        self, workers: Sequence[C], cost: Callable[[PromptInfo, C, float], float], prompt: PromptInfo, average_s: float
    ) -> tuple[float, C]:
        """The sums of a pair do not depend on each other, so each side is chosen by itself."""
        costs = [cost(prompt, worker, average_s) for worker in workers]
        least = min(costs)
        equals = [worker for worker, its_cost in zip(workers, costs, strict=True) if its_cost == least]
        return least, equals[0] if len(equals) == 1 else self._random.choice(equals)

    def _look_at(self, prompt: PromptInfo, workers: Sequence[C]) -> Sequence[C]:
        if len(workers) <= MAX_OWNERS + MAX_OTHERS:
            return workers
        cached = prompt.cached_tokens
        owners = [worker for worker in workers if worker.worker_id in cached] if cached else []
        if len(owners) > MAX_OWNERS:
            self._random.shuffle(owners)  # many have the same
            owners = nlargest(MAX_OWNERS, owners, key=lambda worker: cached[worker.worker_id])
        return owners + self._random.sample(workers, MAX_OTHERS)

    def _prefill_cost(self, prompt: PromptInfo, worker: C, average_s: float) -> float:
        uncached = prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0)
        costs, load = self._costs, worker.load
        tokens = costs.uncached_token * uncached + load.queued_tokens + costs.prefill_request * load.requests
        return tokens * self._slowness(worker, average_s)

    def _decode_cost(self, prompt: PromptInfo, worker: C, average_s: float) -> float:
        unsent = prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0)
        return self._send_token(worker, average_s) * unsent + self._occupation_cost(prompt, worker, unsent)

    def _alone_cost(self, prompt: PromptInfo, worker: C, average_s: float) -> float:
        uncached = prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0)
        tokens = self._costs.uncached_token * uncached + worker.load.queued_tokens
        return tokens * self._slowness(worker, average_s) + self._occupation_cost(prompt, worker, uncached)

    def _slowness(self, worker: C, average_s: float) -> float:
        """How many times as long as the average worker it takes for a token."""
        rate = worker.load.prefill
        if not average_s or not rate.is_known:
            return 1.0
        slowness = round(rate.seconds_per_token / average_s / SPEED_STEP) * SPEED_STEP
        slowest, fastest = self._costs.speed_bounds
        return min(max(slowness, 1 / fastest), 1 / slowest)

    def _send_token(self, worker: C, average_s: float) -> float:
        exposed = worker.load.exposed
        if not average_s or not exposed.is_known:
            return self._costs.send_token
        least, most = self._costs.send_token_bounds
        return min(max(exposed.seconds_per_token / average_s, least), most)

    def _occupation_cost(self, prompt: PromptInfo, worker: C, new_tokens: int) -> float:
        costs, load = self._costs, worker.load
        requests, used, pool_tokens = load.requests, load.kv_tokens, load.pool_tokens
        cost = costs.decode_request * requests
        if pool_tokens:
            growth = min(prompt.max_new_tokens or costs.expected_output_tokens, costs.expected_output_tokens)
            # Those that run have half of their growth behind them.
            needed = used + requests * costs.expected_output_tokens / 2 + new_tokens + growth
            cost += costs.overflow_token * max(0.0, needed - pool_tokens)
            cost += costs.decode_request * used / pool_tokens  # among equals, the emptier one
        return cost


def _average_s_per_token(workers: Sequence[C]) -> float:
    """Of those whose speed is known; 0: nobody's is."""
    known = [worker.load.prefill.seconds_per_token for worker in workers if worker.load.prefill.is_known]
    return sum(known) / len(known) if known else 0.0
