"""The less loaded of two workers drawn by lot, on each side (Mitzenmacher 2001): as good as looking at all of them, and
routers that all read the same old reports do not all run to the same worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import C, Choice, Pool, PromptInfo
from router.policies.least_loaded import LeastLoaded


class PowerOfTwo:
    uses_prefixes = False
    goes_by_load = True

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._less_loaded = LeastLoaded(seed)

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        drawn = [Pool(self._draw(pool.prefills), self._draw(pool.decodes)) for pool in pools]
        return await self._less_loaded.choose(prompt, drawn)

    def _draw(self, workers: Sequence[C]) -> Sequence[C]:
        return workers if len(workers) <= 2 else self._random.sample(workers, 2)
