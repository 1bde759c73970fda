"""The pair that has the first token soonest: what is cached where, against the work that waits there.

Costs are times, in units of the time to prefill one token, so that unlike things add up:

    prefill worker    uncached tokens + tokens queued before them + its requests
    decode worker     tokens to send (the prefix that it has cached is neither computed nor sent)
                      + its requests (each makes every step longer)
                      + blocks in use, with the expected growth, beyond what the pool holds (those would wait)
    without prefill   both sums of the one worker, with nothing sent

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """In units of the time that one token's prefill takes."""

    uncached_token: float = 2.0
    """Computing it takes 1, and so long later requests wait: in replays of traces under load, twice is better for the
    mean time to the first token than once, and no worse when idle."""
    send_token: float = 0.05
    """Sending is overlapped with computing; the rest of it shows."""
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

    def __init__(self, costs: CostModel | None = None, seed: int | None = None) -> None:
        self._costs = costs or CostModel()
        self._random = random.Random(seed)

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        best: tuple[float, Choice[C]] | None = None
        for pool in pools:
            cost = 0.0
            prefill: C | None = None
            if pool.prefills:
                cost, prefill = self._cheapest(prompt, pool.prefills, self._prefill_cost)
                decode_cost, decode = self._cheapest(prompt, pool.decodes, self._decode_cost)
            else:
                decode_cost, decode = self._cheapest(prompt, pool.decodes, self._alone_cost)
            cost += decode_cost
            if best is None or cost < best[0]:
                best = cost, Choice(prefill, decode)
        assert best is not None, "a policy is asked with at least one pool"
        return best[1]

    def _cheapest(
        self, prompt: PromptInfo, workers: Sequence[C], cost: Callable[[PromptInfo, C], float]
    ) -> tuple[float, C]:
        """The sums of a pair do not depend on each other, so each side is chosen by itself."""
        looked_at = self._look_at(prompt, workers)
        costs = [cost(prompt, worker) for worker in looked_at]
        least = min(costs)
        equals = [worker for worker, its_cost in zip(looked_at, costs, strict=True) if its_cost == least]
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

    def _prefill_cost(self, prompt: PromptInfo, worker: C) -> float:
        uncached = prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0)
        costs, load = self._costs, worker.load
        return costs.uncached_token * uncached + load.queued_tokens + costs.prefill_request * load.requests

    def _decode_cost(self, prompt: PromptInfo, worker: C) -> float:
        unsent = prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0)
        return self._costs.send_token * unsent + self._occupation_cost(prompt, worker, unsent)

    def _alone_cost(self, prompt: PromptInfo, worker: C) -> float:
        uncached = prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0)
        return (
            self._costs.uncached_token * uncached
            + worker.load.queued_tokens
            + self._occupation_cost(prompt, worker, uncached)
        )

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
