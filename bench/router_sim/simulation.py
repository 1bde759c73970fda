"""The way of each request through a simulated fleet, in simulated time; of decisions the real processor time is taken.

    arrival:      hash, match, choose, guess   (the router's code; this is what is timed)
    prefill:      queued at P; blocks taken when it begins, published when it is done
    hand-off:     D takes blocks; what it has cached is not sent
    or by D:      queued there, at the rate that its ITL budget leaves, when ``shared_prefill`` says so
    decode:       one token after the other; then D's blocks are free, and stay cached

Events reach the index EVENT_DELAY_S after they happened; load reports come twice a second, at other times for each
worker. Several routers share nothing but these.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from bench.router_sim.trace import TraceRequest
from bench.router_sim.view import View
from bench.router_sim.worker import SimWorker, WorkerSpeed
from engine.block_hash import hash_tokens, root_hash
from router.chain_memo import ChainMemo
from router.policies import make_policy
from router.policies.base import Choice, Policy, Pool, PromptInfo
from router.policies.shared_prefill import SharedPrefill
from router.prefix_index import PrefixIndex
from router.prompt import FIRST_UNITS, RoutedPrompt

EVENT_DELAY_S = 0.02
REPORT_INTERVAL_S = 0.5
FINGERPRINT = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    policy: str
    prefills: int
    decodes: int
    routers: int = 1
    speedup: float = 1.0
    """Arrivals come so many times as fast as in the trace."""
    hash_block_tokens: int = 16
    block_tokens: int = 32
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)
    slow_prefills: int = 0
    """So many of the prefill workers take twice as long for everything."""
    learns: bool = True
    """The routers learn how fast each worker is."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    prompt_tokens: int = 0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    no_room: int = 0
    decision_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)
    """Of each prefill worker."""
    decode_requests: list[int] = field(default_factory=list)
    helped: int = 0
    """Prompts that a decode worker computed."""
    decode_prefill_share: float = 0.0
    """Of the time: decode workers had a prompt to compute, so their steps were as long as the budget."""
    index_blocks: int = 0


class SimView(View):
    """Of a simulated worker, and that itself: for the simulation, not for the policies."""

    def __init__(self, worker: SimWorker, pool_tokens: int) -> None:
        super().__init__(worker.worker_id, pool_tokens)
        self.worker = worker


class SimRouter:
    """The real policy and the real index."""

    def __init__(self, setup: Setup, workers: Sequence[SimWorker], clock: Callable[[], float]) -> None:
        self.index = PrefixIndex(clock)
        self._memo = ChainMemo()
        self.policy: Policy = make_policy(setup.policy)
        self._shared_prefill = SharedPrefill(setup.seed)
        self._clock = clock
        self._setup = setup
        self._kind = (FINGERPRINT, setup.hash_block_tokens)
        self.views = {worker.worker_id: SimView(worker, setup.speed.pool_tokens) for worker in workers}
        self._stride = setup.block_tokens // setup.hash_block_tokens
        for worker in workers:
            self.index.meet(worker.worker_id, self._stride)
        views = list(self.views.values())
        self._pool = Pool(views[: setup.prefills], views[setup.prefills :])

    async def place(self, token_ids: list[int], session: str) -> Choice[SimView]:
        unit = self._setup.hash_block_tokens
        if not self.policy.uses_prefixes:
            return await self._choose(PromptInfo(len(token_ids), 0, session))
        prompt = RoutedPrompt(token_ids=token_ids)
        units = prompt.find_cached(self._kind, self.index, self._memo)
        hashes = prompt.hashes(self._kind, FIRST_UNITS)
        cached = {worker_id: found * unit for worker_id, found in units.items()}
        choice = await self._choose(PromptInfo(len(token_ids), 0, session, cached))
        for view in (choice.prefill, choice.decode):
            if view is not None:
                self.index.guess(hashes, units.get(view.worker_id, 0), view.worker_id, self._stride)
        return choice

    async def _choose(self, prompt: PromptInfo) -> Choice[SimView]:
        choice = await self.policy.choose(prompt, [self._pool])
        if self.policy.goes_by_load:
            helpers = self._shared_prefill.sooner(prompt, choice, [self._pool], self._clock())
            if helpers:
                return await self.policy.choose(prompt, helpers)
        return choice


class Simulation:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        names = [f"p{i}" for i in range(setup.prefills)] + [f"d{i}" for i in range(setup.decodes)]
        slow = replace(setup.speed, prefill_tokens_per_s=setup.speed.prefill_tokens_per_s / 2)
        speeds = [slow] * setup.slow_prefills + [setup.speed] * (len(names) - setup.slow_prefills)
        self._workers = [
            SimWorker(name, speed, setup.block_tokens, decodes=name.startswith("d"))
            for name, speed in zip(names, speeds, strict=True)
        ]
        self._routers = [SimRouter(setup, self._workers, lambda: self._now_s) for _ in range(setup.routers)]
        self._rng = random.Random(setup.seed)
        self._left = 0
        self.outcome = Outcome()

    async def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        self._left = len(requests)
        for worker in self._workers:
            self._say(worker)
            self._at(self._rng.random() * REPORT_INTERVAL_S, partial(self._report, worker))
        for request in requests:
            arrival_s = request.arrival_s / self._setup.speedup
            self._go_on_until(arrival_s)
            self._now_s = arrival_s
            await self._arrive(request)
        self._go_on_until(float("inf"))
        outcome = self.outcome
        outcome.computed_tokens = [worker.computed_tokens for worker in self._workers[: self._setup.prefills]]
        outcome.decode_requests = [worker.requests_total for worker in self._workers[self._setup.prefills :]]
        decodes = self._workers[self._setup.prefills :]
        outcome.decode_prefill_share = sum(worker.prefill_busy_s for worker in decodes) / len(decodes) / self._now_s
        outcome.index_blocks = self._routers[0].index.num_blocks
        return outcome

    async def _arrive(self, request: TraceRequest) -> None:
        router = self._rng.choice(self._routers)
        token_ids = request.token_ids()
        started_s = time.thread_time()
        choice = await router.place(token_ids, request.session)
        self.outcome.decision_s.append(time.thread_time() - started_s)
        units = hash_tokens(token_ids, self._setup.hash_block_tokens, root_hash(FINGERPRINT))
        stride = self._setup.block_tokens // self._setup.hash_block_tokens
        flight = Flight(self, request, choice.prefill, choice.decode, units[stride - 1 :: stride])
        flight.begin(self._now_s)

    def _report(self, worker: SimWorker) -> None:
        report = worker.report()
        for router in self._routers:
            router.views[worker.worker_id].load.report(report)
        if self._left:
            self._at(self._now_s + REPORT_INTERVAL_S, partial(self._report, worker))

    def _say(self, worker: SimWorker) -> None:
        batch = worker.take_events()
        if batch is None:
            return

        def arrive() -> None:
            for router in self._routers:
                router.index.apply(worker.worker_id, batch)
                router.index.sweep()

        self._at(self._now_s + EVENT_DELAY_S, arrive)

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), what))

    def _go_on_until(self, end_s: float) -> None:
        while self._agenda and self._agenda[0][0] <= end_s:
            self._now_s, _, what = heapq.heappop(self._agenda)
            what()


class Flight:
    """A request under way."""

    def __init__(
        self,
        simulation: Simulation,
        request: TraceRequest,
        prefill: SimView | None,
        decode: SimView,
        hashes: list[bytes],
    ) -> None:
        self._simulation = simulation
        self._request = request
        self._computes = prefill or decode
        self._decode = decode
        self._is_alone = prefill is None
        self._hashes = hashes
        self._uncached = 0

    def begin(self, now_s: float) -> None:
        simulation, request, computes = self._simulation, self._request, self._computes
        cached, self._table = computes.worker.take_blocks(self._hashes, request.num_tokens)
        self._uncached = request.num_tokens - cached
        outcome = simulation.outcome
        outcome.prompt_tokens += request.num_tokens
        outcome.prefill_cached_tokens += cached
        outcome.no_room += not self._table
        outcome.helped += self._is_alone
        self._finds_rest = computes.load.requests == 0
        self._since_s = now_s
        done_s = computes.worker.prefill(now_s, self._uncached)
        outcome.ttft_s.append(done_s - now_s)
        self._decode.worker.requests += 1
        self._decode.worker.requests_total += 1
        if not self._is_alone:
            computes.worker.requests += 1
            computes.load.add(1, 0, request.num_tokens)
        if not computes.load.own_queued_tokens:
            computes.pace.began(now_s)
        computes.load.add(0, self._uncached, 0)
        self._decode.load.add(1, 0, request.num_tokens)
        simulation._at(done_s, self._prefilled)

    def _prefilled(self) -> None:
        simulation, request, computes, decode = self._simulation, self._request, self._computes, self._decode
        if self._table:
            computes.worker.publish(self._table, self._hashes)
        if simulation._setup.learns and self._finds_rest and computes.load.own_requests == 1 and self._uncached >= 64:
            computes.load.prefill.observe(self._uncached, simulation._now_s - self._since_s)
        computes.worker.queued_tokens -= self._uncached
        computes.pace.computed(self._uncached, simulation._now_s)
        computes.load.add(0, -self._uncached, 0)
        simulation._say(computes.worker)
        if not self._is_alone:
            computes.worker.requests -= 1
            computes.load.add(-1, 0, -request.num_tokens)
            self._hand_over()
        decode_s = request.output_tokens * simulation._setup.speed.decode_s_per_token
        simulation._at(simulation._now_s + decode_s, self._decoded)
        simulation._say(decode.worker)

    def _hand_over(self) -> None:
        simulation, decode = self._simulation, self._decode
        if self._table:
            self._computes.worker.free(self._table)
        cached, self._table = decode.worker.take_blocks(self._hashes, self._request.num_tokens)
        simulation.outcome.decode_cached_tokens += cached
        simulation.outcome.no_room += not self._table
        if self._table:
            decode.worker.publish(self._table, self._hashes)

    def _decoded(self) -> None:
        decode = self._decode
        if self._table:
            decode.worker.free(self._table)
        decode.worker.requests -= 1
        decode.load.add(-1, 0, -self._request.num_tokens)
        self._simulation._left -= 1
