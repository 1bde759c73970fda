"""A session's requests go to one pair, as long as it is there: the worker whose hash with the session is largest
(rendezvous hashing), so all routers agree without talking, and a worker that comes or goes moves only its own share.

What belongs together is what the client says; requests without a session go to the least loaded pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from router.policies.base import C, Choice, Pool, PromptInfo
from router.policies.least_loaded import LeastLoaded


class SessionAffinity:
    uses_prefixes = False
    goes_by_load = False

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        if not prompt.session:
            return await self._least_loaded.choose(prompt, pools)
        key = prompt.session.encode()

        def weight(worker: C) -> bytes:
            return blake2b(worker.worker_id.encode(), key=blake2b(key).digest(), digest_size=8).digest()

        pool = max(pools, key=lambda pool: max(weight(worker) for worker in pool.decodes))
        return Choice(max(pool.prefills, key=weight, default=None), max(pool.decodes, key=weight))
