"""Everybody in turn: of the workers that can take a request, the one that was chosen longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.policies.base import C, Choice, Pool, PromptInfo

MAX_REMEMBERED = 65_536


class RoundRobin:
    """Remembers the order of choices, not a position in a list: workers may come and go without a skipped turn."""

    uses_prefixes = False
    goes_by_load = False

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: OrderedDict[str, int] = OrderedDict()

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        decode, pool = min(
            ((decode, pool) for pool in pools for decode in pool.decodes), key=lambda pair: self._order(pair[0])
        )
        prefill = min(pool.prefills, key=self._order, default=None)
        for chosen in (decode, prefill):
            if chosen is not None:
                self._note(chosen.worker_id)
        return Choice(prefill, decode)

    def _order(self, candidate: C) -> tuple[int, str]:
        return self._last_turn.get(candidate.worker_id, -1), candidate.worker_id

    def _note(self, worker_id: str) -> None:
        self._turn += 1
        self._last_turn[worker_id] = self._turn
        self._last_turn.move_to_end(worker_id)
        if len(self._last_turn) > MAX_REMEMBERED:
            self._last_turn.popitem(last=False)
