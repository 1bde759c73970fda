"""Where a request may go: filters the workers, asks the policy, waits briefly when there is nobody.

A request prefers, in this order: a prefill and a decode worker that it has not failed on; a worker that does both; the
same two again for workers that it has failed on. Requests of one group (the n choices of a prompt) go to the same pair
as long as it can take them, so that they share its prefix. Prompts of which a decode worker lacks less than
``local_prefill_tokens`` are left to that worker, as long as it is hardly busier than the others; and any prompt is left
to one that has time for it while the prefill workers have a queue (``policies.shared_prefill``). Queues have a limit:
beyond it requests are refused with a hint.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from pdserve.v1 import inference_pb2 as pb
from router.breaker import Breakers, WorkerKey
from router.chain_memo import ChainMemo
from router.config import RouterConfig
from router.policies.base import Choice, Policy, Pool, PromptInfo
from router.policies.shared_prefill import SharedPrefill
from router.prefix_index import PrefixIndex
from router.prompt import FIRST_UNITS, ModelKind, RoutedPrompt
from router.workers import Worker, Workers

MAX_GROUPS = 4096
GROUP_TTL_S = 60.0
CONNECT_WAIT_S = 1.0
LOOK_AGAIN_S = 0.2
OVERLOADED_RETRY_S = 1.0
LOCAL_LEAD_REQUESTS = 2
"""So many more than the least busy decode worker one may have and still get prompts for what it has cached: without a
limit all that begins alike would go to the one that had it first."""


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
    """Why there is no prefill worker:
    short_prompt | decode_sooner | prefill_full | aggregated | no_prefill_worker | handoffs_failed."""
    is_second_try: bool = False
    """It has failed on one of these workers before."""
    prefill_cached_tokens: int = 0
    """Of the prompt, as far as is known, where it is prefilled."""
    decode_cached_tokens: int = 0
    """And where it is decoded: these need not be sent."""
    is_blind: bool = False
    """Prefixes count for the policy, but it was not known who has which."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers that can be used, as they were at one version of ``Workers``."""

    version: int
    pools: list[Pool[Worker]]
    cause: str
    """Why there are no prefill workers, if so."""
    smallest_pool_tokens: int
    kinds: set[ModelKind]
    has_prefill: bool


def worker_key(worker: Worker) -> WorkerKey:
    return worker.worker_id, worker.identity.incarnation


class Placer:
    """Places requests on workers."""

    def __init__(
        self,
        workers: Workers,
        policy: Policy,
        index: PrefixIndex,
        config: RouterConfig,
        breakers: Breakers,
        is_blind: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_blind``: whether the index lacks workers now."""
        self.breakers = breakers
        self._workers = workers
        self._policy = policy
        self._index = index
        self._memo = ChainMemo()
        self._config = config
        self._is_blind = is_blind
        self._shared_prefill = SharedPrefill()
        self._looks_up_prefixes = policy.uses_prefixes or config.local_prefill_tokens > 0
        self._groups: OrderedDict[str, tuple[float, Placement]] = OrderedDict()
        self._fleet: Fleet | None = None

    async def place(
        self,
        prompt: RoutedPrompt,
        avoid: Collection[WorkerKey],
        patience_s: float | None = None,
        keep: Collection[WorkerKey] = (),
        without_handoff: bool = False,
    ) -> Placement:
        """Choose workers for a request. ``patience_s``: how long a new one may wait until it is computed; None: it has
        been admitted before, and is not refused for a queue now. ``keep``: who has something of it already; taken if
        that is possible. ``without_handoff``: by a worker that does both.

        Raises Unplaceable when it fits nowhere, when all queues are full, or when nobody came in time.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            waited_s = loop.time() - started_s
            if not self._is_prefill_connecting():
                shunned = {*avoid, *self.breakers.ejected()}
                placement = None if without_handoff else self._of_group(prompt, shunned)
                if placement is None:
                    placement = await self._choose(prompt, avoid, shunned, patience_s, keep, without_handoff)
                if placement is not None:
                    self._remember(prompt.group, placement)
                    return placement
            self._refuse_too_large(prompt.num_tokens)
            if waited_s >= self._config.no_worker_wait_s:
                raise Unplaceable(pb.ERROR_CODE_NO_WORKERS, self._why_nobody(), retry_after_s=1.0)
            await self._workers.wait_change(min(LOOK_AGAIN_S, self._config.no_worker_wait_s - waited_s))

    def has_other(self, worker: Worker, avoid: Collection[WorkerKey]) -> bool:
        """Whether there is another worker of the same role that can be used and is not to be avoided."""
        others = self._workers.with_role(worker.record.role)
        return any(other is not worker and other.usable and worker_key(other) not in avoid for other in others)

    async def _choose(
        self,
        prompt: RoutedPrompt,
        avoid: Collection[WorkerKey],
        shunned: Collection[WorkerKey],
        patience_s: float | None,
        keep: Collection[WorkerKey],
        without_handoff: bool,
    ) -> Placement | None:
        """``shunned``: those to avoid, and those that are ejected; better an ejected one than nobody."""
        cached = self._cached_tokens(prompt) if self._looks_up_prefixes else {}
        info = PromptInfo(prompt.num_tokens, prompt.max_new_tokens, prompt.session, cached)
        for left_out in (shunned, avoid, ()):
            pools, cause = self._candidates(prompt, left_out)
            if not pools:
                continue
            is_second_try = bool(avoid) and not left_out
            if without_handoff:
                pools, cause = [Pool((), pool.decodes) for pool in pools], "handoffs_failed"
            elif local := self._with_room(self._local_pools(prompt, pools, cached), patience_s):
                pools, cause = local, "short_prompt"
            roomy = self._with_room(pools, patience_s)
            if not roomy:
                roomy, cause = self._helpers_instead(info, pools, patience_s), "prefill_full"
            if not roomy:
                raise self._overloaded(pools, patience_s)
            choice: Choice[Worker] = await self._policy.choose(info, _keeping(keep, roomy))
            if not keep and (helpers := self._sooner_helpers(info, choice, roomy, patience_s)):
                choice, cause = await self._policy.choose(info, helpers), "decode_sooner"
            prefiller = choice.prefill or choice.decode
            placement = Placement(
                choice.prefill,
                choice.decode,
                cause,
                is_second_try,
                cached.get(prefiller.worker_id, 0),
                cached.get(choice.decode.worker_id, 0),
                self._policy.uses_prefixes and self._is_blind(),
            )
            if self._policy.uses_prefixes:
                self._guess(prompt, placement)
            return placement
        return None

    def _cached_tokens(self, prompt: RoutedPrompt) -> dict[str, int]:
        """Worker -> tokens of the prompt that it has cached; what an older incarnation had does not count."""
        cached = {}
        known = self._workers.known
        for kind in self._usable_fleet().kinds:
            for worker_id, units in prompt.find_cached(kind, self._index, self._memo).items():
                worker = known.get(worker_id)
                if worker is None or worker.session.peer is None:
                    continue
                if self._index.incarnation(worker_id) in (0, worker.session.peer.incarnation):
                    cached[worker_id] = units * kind[1]
        return cached

    def _guess(self, prompt: RoutedPrompt, placement: Placement) -> None:
        """Both workers will soon have all of the prompt; of a long one its beginning will do."""
        unit = placement.decode.record.hash_block_tokens
        hashes = prompt.hashes(placement.decode.kind, FIRST_UNITS)
        decode, prefill = placement.decode, placement.prefill
        self._index.guess(hashes, placement.decode_cached_tokens // unit, decode.worker_id, decode.stride)
        if prefill is not None:
            self._index.guess(hashes, placement.prefill_cached_tokens // unit, prefill.worker_id, prefill.stride)

    def _candidates(self, prompt: RoutedPrompt, avoid: Collection[WorkerKey]) -> tuple[list[Pool[Worker]], str]:
        """Pools of those that can take the request, and why they have no prefill workers, if so."""
        fleet = self._usable_fleet()
        if not avoid and not prompt.model_fingerprint and prompt.num_tokens < fleet.smallest_pool_tokens:
            return fleet.pools, fleet.cause
        fitting = [worker for worker in self._workers.usable() if worker.fits(prompt.num_tokens + 1)]
        able = [worker for worker in fitting if prompt.may_run_on(worker.record.fingerprint)]
        return make_pools(worker for worker in able if worker_key(worker) not in avoid)

    def _usable_fleet(self) -> Fleet:
        """Made anew when a worker has changed, not for every request."""
        if self._fleet is None or self._fleet.version != self._workers.version:
            usable = self._workers.usable()
            self.breakers.keep({worker_key(worker) for worker in usable})
            smallest = min((worker.record.pool_tokens or sys.maxsize for worker in usable), default=0)
            pools, cause = make_pools(usable)
            kinds = {pool.decodes[0].kind for pool in pools}
            has_prefill = any(worker.record.role == "prefill" for worker in usable)
            self._fleet = Fleet(self._workers.version, pools, cause, smallest, kinds, has_prefill)
        return self._fleet

    def _local_pools(
        self, prompt: RoutedPrompt, pools: list[Pool[Worker]], cached: Mapping[str, int]
    ) -> list[Pool[Worker]]:
        """Decode workers that lack so little of the prompt that a hand-off is not worth it, and are not too busy."""
        limit = self._config.local_prefill_tokens
        if not limit or not pools[0].prefills:
            return []
        most_requests = min(worker.load.requests for pool in pools for worker in pool.decodes) + LOCAL_LEAD_REQUESTS

        def is_near(worker: Worker) -> bool:
            num_cached = cached.get(worker.worker_id, 0)
            if prompt.num_tokens - num_cached >= limit or worker.load.requests > most_requests:
                return False
            if not num_cached:
                return True
            # Not what it was only just sent: that may be computed by a prefill worker first, or never come.
            last = num_cached // worker.record.hash_block_tokens - 1
            return self._index.owns(worker.worker_id, prompt.hashes(worker.kind, 0)[last])

        near = [[worker for worker in pool.decodes if is_near(worker)] for pool in pools]
        return [Pool((), decodes) for decodes in near if decodes]

    def _sooner_helpers(
        self, info: PromptInfo, choice: Choice[Worker], pools: list[Pool[Worker]], patience_s: float | None
    ) -> list[Pool[Worker]]:
        """Decode workers that compute the prompt sooner than the chosen pair would, if the policy leaves it to them."""
        if not self._config.local_prefill_tokens or not self._policy.goes_by_load:
            return []
        now_s = asyncio.get_running_loop().time()
        return self._with_room(self._shared_prefill.sooner(info, choice, pools, now_s), patience_s)

    def _helpers_instead(
        self, info: PromptInfo, pools: list[Pool[Worker]], patience_s: float | None
    ) -> list[Pool[Worker]]:
        """When the queues of all prefill workers are full: decode workers that have time. Whatever the policy."""
        if not self._config.local_prefill_tokens:
            return []
        limit_s, now_s = self._limit_s(patience_s or 0.0), asyncio.get_running_loop().time()
        return self._with_room(self._shared_prefill.within(info, pools, limit_s, now_s), patience_s)

    def _with_room(self, pools: list[Pool[Worker]], patience_s: float | None) -> list[Pool[Worker]]:
        """Without workers that prefill and whose queue is full, or longer than ``patience_s``. Empty when all are."""
        if patience_s is None:
            return pools
        limit, limit_s = self._config.max_queued_tokens or sys.maxsize, self._limit_s(patience_s)
        now_s = asyncio.get_running_loop().time()

        def has_room(worker: Worker) -> bool:
            return worker.load.queued_tokens < limit and worker.wait_s(now_s) < limit_s

        roomy = []
        for pool in pools:
            prefills = [worker for worker in pool.prefills if has_room(worker)]
            decodes = pool.decodes if pool.prefills else [worker for worker in pool.decodes if has_room(worker)]
            if decodes and (prefills or not pool.prefills):
                roomy.append(Pool(prefills, decodes))
        return roomy

    def _limit_s(self, patience_s: float) -> float:
        return min(self._config.max_queue_s or patience_s, patience_s)

    def _overloaded(self, pools: list[Pool[Worker]], patience_s: float | None) -> Unplaceable:
        """With a hint when the shortest queue will be short enough again."""
        now_s = asyncio.get_running_loop().time()
        queues = [worker for pool in pools for worker in pool.prefills or pool.decodes]
        wait_s = min(worker.wait_s(now_s) for worker in queues)
        tokens = min(worker.load.queued_tokens for worker in queues)
        message = (
            f"every queue is full: at least {tokens} prompt tokens wait at each worker that prefills, about "
            f"{wait_s:.1f} s of work; try again later, or allow more time"
        )
        retry_after_s = max(OVERLOADED_RETRY_S, wait_s - self._limit_s(patience_s or 0.0))
        return Unplaceable(pb.ERROR_CODE_OVERLOADED, message, retry_after_s=retry_after_s)

    def _is_prefill_connecting(self) -> bool:
        """A prefill worker has just registered and none is there yet: a moment's patience instead of going without."""
        if self._usable_fleet().has_prefill:
            return False
        new_since_s = asyncio.get_running_loop().time() - CONNECT_WAIT_S
        prefills = self._workers.with_role("prefill")
        return any(worker.state == "connecting" and worker.met_s > new_since_s for worker in prefills)

    def _of_group(self, prompt: RoutedPrompt, avoid: Collection[WorkerKey]) -> Placement | None:
        group = prompt.group
        if not group or group not in self._groups:
            return None
        expires_s, placement = self._groups[group]
        if not prompt.may_run_on(placement.decode.record.fingerprint):
            return None
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


def make_pools(workers: Iterable[Worker]) -> tuple[list[Pool[Worker]], str]:
    """Pairs that can hand KV over if there are any, else those that do both; and why there are no prefill workers, if
    so."""
    by_kind: dict[tuple[str, int, str], dict[str, list[Worker]]] = {}
    for worker in workers:
        by_kind.setdefault(worker.record.compatibility, {}).setdefault(worker.record.role, []).append(worker)
    kinds = by_kind.values()
    pairs = [Pool(kind["prefill"], kind["decode"]) for kind in kinds if "prefill" in kind and "decode" in kind]
    if pairs:
        return pairs, ""
    alone = [[*kind.get("decode", ()), *kind.get("aggregated", ())] for kind in kinds]
    cause = "no_prefill_worker" if any("decode" in kind for kind in kinds) else "aggregated"
    return [Pool((), decodes) for decodes in alone if decodes], cause


def _keeping(keep: Collection[WorkerKey], pools: list[Pool[Worker]]) -> list[Pool[Worker]]:
    """Only pairs with those workers, if there are any."""
    kept = []
    for pool in pools if keep else ():
        prefills = [worker for worker in pool.prefills if worker_key(worker) in keep]
        decodes = [worker for worker in pool.decodes if worker_key(worker) in keep]
        if prefills or decodes:
            kept.append(Pool(prefills or pool.prefills, decodes or pool.decodes))
    return kept or pools
