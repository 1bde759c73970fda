"""The pair with the least work ahead: fewest queued tokens on the prefill side, fewest requests on the decode side.

Equals are drawn by lot, so that several routers do not all begin with the same worker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import C, Choice, Pool, PromptInfo


class LeastLoaded:
    uses_prefixes = False
    goes_by_load = True

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        best: tuple[tuple[float, ...], Choice[C]] | None = None
        for pool in pools:
            prefill = min(pool.prefills, key=self._prefill_cost, default=None)
            decode = min(pool.decodes, key=self._decode_cost)
            cost = self._prefill_cost(prefill) if prefill is not None else (0.0, 0.0)
            cost = tuple(p + d for p, d in zip(cost, self._decode_cost(decode), strict=True))
            if best is None or cost < best[0]:
                best = cost, Choice(prefill, decode)
        assert best is not None, "a policy is asked with at least one pool"
        return best[1]

    def _prefill_cost(self, candidate: C) -> tuple[float, ...]:
        """Work ahead as a number near the requests ahead, so that it adds up with the decode side's."""
        return candidate.load.queued_tokens / TOKENS_OF_A_REQUEST, self._random.random()

    def _decode_cost(self, candidate: C) -> tuple[float, ...]:
        load = candidate.load
        used_part = load.kv_tokens / load.pool_tokens if load.pool_tokens else 0.0
        return load.requests + used_part, self._random.random()


TOKENS_OF_A_REQUEST = 512
