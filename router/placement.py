"""Where a request may go: filters the workers, asks the policy, waits briefly when there is nobody.

A request prefers, in this order: a prefill and a decode worker that it has not failed on; a worker that does both; the
same two again for workers that it has failed on. Requests of one group (the n choices of a prompt) go to the same pair
as long as it can take them, so that they share its prefix.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace

from pdserve.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.policies.base import Choice, Policy, Pool, PromptInfo
from router.workers import Worker, Workers

MAX_GROUPS = 4096
GROUP_TTL_S = 60.0
CONNECT_WAIT_S = 1.0
LOOK_AGAIN_S = 0.2

WorkerKey = tuple[str, int]
"""Worker id and incarnation: a restarted worker has failed nobody yet."""


class Unplaceable(Exception):
    """No worker can take the request."""

    def __init__(self, code: pb.ErrorCode.ValueType, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: Worker | None
    decode: Worker
    cause: str = ""
    """Why there is no prefill worker: short_prompt | aggregated | no_prefill_worker."""
    is_second_try: bool = False
    """It has failed on one of these workers before."""


def worker_key(worker: Worker) -> WorkerKey:
    return worker.worker_id, worker.identity.incarnation


class Placer:
    """Places requests on workers."""

    def __init__(self, workers: Workers, policy: Policy, config: RouterConfig) -> None:
        self._workers = workers
        self._policy = policy
        self._config = config
        self._groups: OrderedDict[str, tuple[float, Placement]] = OrderedDict()

    async def place(self, num_tokens: int, group: str, avoid: Collection[WorkerKey]) -> Placement:
        """Choose workers for a request of ``num_tokens`` (prompt and output so far).

        Raises Unplaceable when it fits nowhere, or when nobody came in time.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            waited_s = loop.time() - started_s
            if not self._is_prefill_connecting():
                placement = self._of_group(group, avoid) or await self._choose(num_tokens, avoid)
                if placement is not None:
                    self._remember(group, placement)
                    return placement
            self._refuse_too_large(num_tokens)
            if waited_s >= self._config.no_worker_wait_s:
                raise Unplaceable(pb.ERROR_CODE_NO_WORKERS, self._why_nobody(), retry_after_s=1.0)
            await self._workers.wait_change(min(LOOK_AGAIN_S, self._config.no_worker_wait_s - waited_s))

    def has_other(self, worker: Worker, avoid: Collection[WorkerKey]) -> bool:
        """Whether there is another worker of the same role that can be used and is not to be avoided."""
        others = self._workers.with_role(worker.record.role)
        return any(other is not worker and other.usable and worker_key(other) not in avoid for other in others)

    async def _choose(self, num_tokens: int, avoid: Collection[WorkerKey]) -> Placement | None:
        fitting = [worker for worker in self._workers.known.values() if worker.usable and worker.fits(num_tokens + 1)]
        fresh = [worker for worker in fitting if worker_key(worker) not in avoid]
        for workers, is_second_try in ((fresh, False), (fitting, True)):
            pools, cause = self._pools(workers, num_tokens)
            if pools:
                choice: Choice[Worker] = await self._policy.choose(PromptInfo(num_tokens), pools)
                return Placement(choice.prefill, choice.decode, cause, is_second_try)
        return None

    def _pools(self, workers: list[Worker], num_tokens: int) -> tuple[list[Pool[Worker]], str]:
        """Pools that can be used, and why they have no prefill workers, if so."""
        by_kind: dict[tuple[str, int], dict[str, list[Worker]]] = {}
        for worker in workers:
            kind = by_kind.setdefault((worker.record.fingerprint, worker.record.hash_block_tokens), {})
            kind.setdefault(worker.record.role, []).append(worker)
        kinds = by_kind.values()
        pairs = [Pool(kind["prefill"], kind["decode"]) for kind in kinds if "prefill" in kind and "decode" in kind]
        if pairs and num_tokens < self._config.local_prefill_tokens:
            return [Pool((), pool.decodes) for pool in pairs], "short_prompt"
        if pairs:
            return pairs, ""
        alone = [[*kind.get("decode", ()), *kind.get("aggregated", ())] for kind in kinds]
        cause = "no_prefill_worker" if any("decode" in kind for kind in kinds) else "aggregated"
        return [Pool((), decodes) for decodes in alone if decodes], cause

    def _is_prefill_connecting(self) -> bool:
        """A prefill worker has just registered and none is there yet: a moment's patience instead of going without."""
        prefills = self._workers.with_role("prefill")
        new_since_s = asyncio.get_running_loop().time() - CONNECT_WAIT_S
        is_coming = any(worker.state == "connecting" and worker.met_s > new_since_s for worker in prefills)
        return is_coming and not any(worker.usable for worker in prefills)

    def _of_group(self, group: str, avoid: Collection[WorkerKey]) -> Placement | None:
        if not group or group not in self._groups:
            return None
        expires_s, placement = self._groups[group]
        chosen = [worker for worker in (placement.prefill, placement.decode) if worker is not None]
        if asyncio.get_running_loop().time() < expires_s and all(
            self._workers.known.get(worker.worker_id) is worker and worker.usable and worker_key(worker) not in avoid
            for worker in chosen
        ):
            return replace(placement, is_second_try=False)
        del self._groups[group]
        return None

    def _remember(self, group: str, placement: Placement) -> None:
        if not group:
            return
        self._groups[group] = (asyncio.get_running_loop().time() + GROUP_TTL_S, placement)
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def _refuse_too_large(self, num_tokens: int) -> None:
        decodes = self._workers.with_role("decode", "aggregated")
        if decodes and not any(worker.fits(num_tokens + 1) for worker in decodes):
            largest_tokens = max(worker.record.pool_tokens for worker in decodes)
            message = (
                f"{num_tokens} prompt tokens do not fit any worker's pool of KV (the largest holds {largest_tokens})"
            )
            raise Unplaceable(pb.ERROR_CODE_PROMPT_TOO_LARGE, message)

    def _why_nobody(self) -> str:
        states = sorted(f"{worker.worker_id} is {worker.state}" for worker in self._workers.known.values())
        return "no worker can take the request: " + (", ".join(states[:8]) or "none has registered")
