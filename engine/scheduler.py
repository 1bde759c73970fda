"""What the next step computes, and what its results mean for each request.

No phases: each step hands out a budget of tokens, and each request's ``num_computed_tokens`` chases its ``num_tokens``.
A decode is a chunk of one token. Blocks for all known tokens are taken at admission, later ones one by one.

    order of a step:  running (decodes, then unfinished prefills) -> preempted -> granted -> waiting, until the budget,
                      the seats (max_num_seqs) or the blocks run out; P's ends sooner, half full, if it completes a
                      prompt. Then requests of P ask for tickets, one step ahead

    waiting          may be admitted                      ticket desk     P: needs its receiver's ticket first
    preempted        gave its blocks up, goes first       granted         P: has it; the receiver keeps room meanwhile
    running          holds blocks, computes               holding         P: prefill done, hand-off open
    waiting_for_kv   D: nothing or reserved blocks        inflight        held back: its prefix is being computed now

Owns these queues (D's: ``Reservations``); what a request holds is in ``BlockTables``, whether it may have more in
``Room``, when it has its last token in ``FinishRules``, and when a step gets too long beside decodes in ``ItlBudget``.
Knows nothing of devices, processes or transfers. Called by ``EngineCore`` only. ``update()`` ignores
items of requests that ended or were preempted since ``schedule()``.

With a step in flight (``launched``, not yet ``update``d) requests are scheduled past it: its tokens count as computed
and the one it draws as known. Blocks it writes are freed only when it is over. ``must_settle`` says when the next
``schedule()`` has to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.batch import SampledBatch, ScheduledBatch, ScheduledItem
from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.deadlines import Deadlines
from engine.finish import FinishRules
from engine.inflight_prefixes import InflightPrefixes
from engine.itl_budget import ItlBudget
from engine.messages import EngineStats, FinishReason, RequestOutput, Timings, TokenLogprobs
from engine.offload import HostMemory, Offload
from engine.preemption import is_catching_up
from engine.request import Request, RequestStatus
from engine.request_queue import RequestQueue
from engine.reservations import Reservations
from engine.room import Room
from engine.ticket_desk import TicketDesk


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        model_fingerprint: str,
        host_memory: HostMemory | None = None,
        padded_rows: Sequence[int] = (),
    ) -> None:
        """``padded_rows``: see ``engine.runner.AsyncRunner``."""
        self.config = config
        self.finish = FinishRules(eos_token_ids, max_model_len)
        self.pool = BlockPool(num_blocks)
        self.inflight = InflightPrefixes()
        self.blocks = BlockTables(config, self.pool, self.inflight, model_fingerprint)
        self.requests: dict[str, Request] = {}
        self.running = RequestQueue()
        self.preempted = RequestQueue()
        self.granted = RequestQueue()
        self.waiting = RequestQueue()
        self.reservations = Reservations(self.blocks, self._queue)
        self.holding: dict[str, Request] = {}
        self.desk = TicketDesk(max(1, int(num_blocks * config.max_peer_pool_fraction)), config.block_size)
        self.counters = EngineStats()
        self.offload = Offload(host_memory, self.counters)
        budget_s = config.itl_budget_ms / 1e3
        self.itl_budget = ItlBudget(budget_s, config.max_num_batched_tokens, padded_rows) if budget_s else None
        self._deadlines = Deadlines(self.requests)
        self._room = Room(config, self.pool, self.blocks, self.inflight, self.running, self.reservations, self.desk)
        self._step = 0
        self._prefill_tokens = config.max_num_batched_tokens
        """That the step may have, beside its decodes."""
        self._stuck = False
        """The last schedule() found nothing that could run, and nothing happened since."""
        self._launched_step = 0

    @property
    def waiting_for_kv(self) -> dict[str, Request]:
        return self.reservations.waiting_for_kv

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Takes over the request. It can run here by itself, and no other has its id."""
        self.requests[request.request_id] = request
        self._deadlines.add(request)
        if request.status is RequestStatus.WAITING_FOR_KV:
            self.waiting_for_kv[request.request_id] = request
        else:
            self._queue([request])

    def end(self, request: Request, reason: FinishReason) -> None:
        """From any state: nothing of the request remains here."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        for queue in (self.waiting, self.granted, self.preempted):
            queue.remove(request)
        self.reservations.forget(request)
        self.holding.pop(request.request_id, None)
        self.inflight.forget(request)
        self.offload.forget(request)
        self._free_blocks(request)
        if request.sends_kv:
            self.desk.forget(request)
        request.finish_reason = reason
        request.transition(RequestStatus.FINISHED)
        del self.requests[request.request_id]
        self._deadlines.forget_ended()
        self._stuck = False

    def expired(self, now_s: float) -> list[Request]:
        """Requests whose deadline passed; each is returned once, the caller ends them."""
        return self._deadlines.expired(now_s)

    def next_deadline_s(self) -> float | None:
        """When ``expired`` or ``schedule`` will have something to do by the clock alone."""
        times_s = (self._deadlines.next_s(), self.desk.next_due_s())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def not_begun(self) -> list[Request]:
        """Requests that hold nothing and computed nothing here: others may have them at no loss."""
        waits = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_KV)
        return [request for request in self.requests.values() if request.status in waits and not request.block_table]

    def has_work(self) -> bool:
        """False when schedule() could not give any request a token nor ask for a ticket."""
        if self.running:
            return True
        return not self._stuck and bool(self.waiting or self.granted or self.preempted or self.desk.queue)

    @property
    def may_find_work(self) -> bool:
        """Something happened since a schedule() that found nothing to run."""
        return not self._stuck

    @property
    def num_queued(self) -> int:
        """Requests that do not run and did not run to their end here."""
        return len(self.requests) - len(self.running) - len(self.holding)

    # --- a step ---

    def schedule(self, now_s: float) -> ScheduledBatch:
        self._step += 1
        if self.desk.take_due(now_s):
            self._stuck = False
        budget = self.config.max_num_batched_tokens
        items: list[ScheduledItem] = []
        prefills = []
        kv_tokens = 0
        for request in list(self.running):
            if self._tokens_left(request) > 1:
                prefills.append(request)
            elif (
                request.status is RequestStatus.RUNNING
                and not self._awaits_last(request)
                and self._grow(request, now_s)
            ):
                budget -= self._put(items, request, 1)
                kv_tokens += request.num_computed_tokens
        queue = prefills or self.preempted or self.granted or self.waiting
        first = next(iter(queue), None)
        self._prefill_tokens = budget = self._within_itl_budget(budget, len(items), kv_tokens, first, now_s)
        for request in prefills:
            if budget and request.status is RequestStatus.RUNNING:
                budget -= self._put(items, request, budget)
        while budget and self._room.has_seat():
            if self.granted and self._ends_with_its_prompts(items, budget):
                break
            request_or_none = self._admit_next(now_s)
            if request_or_none is None:
                break
            budget -= self._put(items, request_or_none, budget)
        # A last chunk of one token counts as a decode.
        items.sort(key=lambda item: item.num_tokens > 1)
        self._stuck = not items
        return ScheduledBatch(items, self._step, self.offload.take_copies())

    def _ends_with_its_prompts(self, items: list[ScheduledItem], budget: int) -> bool:
        """P: a step that is large already ends here. Another prompt would be no faster in it than in the next one, and
        those that are done would wait for it."""
        is_large = 2 * budget <= self.config.max_num_batched_tokens
        return is_large and any(item.needs_sample and item.request.sends_kv for item in items)

    def _within_itl_budget(self, budget: int, decodes: int, kv_tokens: int, first: Request | None, now_s: float) -> int:
        """What of the step's budget prefills may have, ``first`` before the others. Decodes that are to come count."""
        if first is None or self.itl_budget is None or not (decodes or self.reservations.num_seats):
            return budget
        waited_s = now_s - first.waits_since_s
        return min(budget, self.itl_budget.prefill_tokens(decodes, kv_tokens, first.num_computed_tokens, waited_s))

    def launched(self, batch: ScheduledBatch) -> None:
        """The batch is on its way: the next ``schedule()`` may come before its ``update()``."""
        self._launched_step = batch.step
        for item in batch.items:
            item.request.num_computed_tokens = item.start + item.num_tokens
            item.request.num_pending_tokens += item.needs_sample
            item.request.last_step = batch.step

    def must_settle(self) -> bool:
        """Whether the step in flight has to be ``update``d first: a preemption or a token's value may be needed."""
        growing = 0
        for request in self.running:
            if request.num_pending_tokens and request.sampling.uses_history:
                return True
            growing += self.blocks.is_full(request)
        return growing > self.pool.num_available

    def ask_for_tickets(self, now_s: float) -> list[Request]:
        """After schedule(): the requests that ask now, so that their tickets are here for the next step."""
        if not self.desk.queue:
            return []
        # This step's work and the next one's.
        tokens_ahead = sum(r.num_tokens - r.num_computed_tokens for r in self.running)
        return self.desk.ask_all(self._room, self.waiting, 2 * self.config.max_num_batched_tokens - tokens_ahead, now_s)

    def update(self, batch: ScheduledBatch, sampled: SampledBatch, now_s: float) -> list[RequestOutput]:
        """The requests' outputs; those of requests that are HOLDING_KV now are for the sender, not for the client."""
        if batch.step > self._launched_step:  # launched and over at once
            self.launched(batch)
        if self.blocks.settle(batch.step):
            self._stuck = False
        outputs = []
        counters = self.counters
        counters.steps_total += 1
        counters.max_batch_requests = max(counters.max_batch_requests, len(batch.items))
        for item, token_id, logprobs in zip(batch.items, sampled.token_ids, sampled.logprobs, strict=True):
            request = item.request
            if request.status is not RequestStatus.RUNNING:
                continue
            counters.prefill_chunks_total += item.start < request.num_prefill_tokens
            self._queue(self.blocks.publish(request, item.start, item.start + item.num_tokens))
            if token_id is not None:
                request.num_pending_tokens -= 1
                outputs.append(self._take_token(request, token_id, logprobs, now_s))
        return outputs

    # --- hand-off, P ---

    def grant_ticket(self, request: Request, remote_cached_tokens: int, now_s: float) -> None:
        if self.desk.granted(request):
            request.has_ticket = True
            request.num_remote_cached_tokens = remote_cached_tokens
            request.handoff_wait_s = now_s - (request.ticket_asked_s or now_s)
            self._queue([request])

    def defer_ticket(self, request: Request, retry_at_s: float) -> None:
        if self.desk.defer(request, retry_at_s):
            self._stuck = False

    # --- hand-off, D ---

    def reserve(self, request: Request) -> int | None:
        """Take blocks for all tokens known and one more. The cached tokens among them, or None: no room now.

        Also None while a preempted request waits, which goes first, and while another one computes or receives the
        prefix: a little later it is a cache hit. Who took over an earlier attempt's blocks has them already.
        """
        if request.request_id in self.reservations.reserved:
            return request.num_computed_tokens
        found = None if self.preempted else self._room.to_reserve(request, self.waiting, self._prefill_tokens)
        if found is None:
            return None
        self._take_blocks(request, *found)
        self.reservations.reserved[request.request_id] = request
        return request.num_computed_tokens

    def release_reservation(self, request: Request) -> None:
        """Back to waiting for KV, holding nothing."""
        self._free_blocks(request)

    def kv_ready(self, request: Request, first_output: RequestOutput) -> RequestOutput:
        """The KV of all tokens is there: token 0 is taken, and the request runs unless that token ended it."""
        token_id = first_output.token_ids[0]
        finish_reason, stop_token_id = first_output.finish_reason, first_output.stop_token_id
        if finish_reason is None:
            cached_tokens, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens
            self._queue(self.blocks.publish(request, cached_tokens, request.num_tokens))
        request.append_token(token_id)
        self.counters.generation_tokens_total += 1
        if finish_reason is None:
            finish_reason, stop_token_id = self.finish.check(request)
        if finish_reason is not None:
            self.end(request, finish_reason)
        else:
            self.reservations.forget(request)
            request.transition(RequestStatus.RUNNING)
            self.running.push(request)
        return msgspec.structs.replace(
            first_output,
            request_id=request.request_id,
            token_ids=[token_id],
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
        )

    # --- admission ---

    def _queue(self, requests: Iterable[Request]) -> None:
        """Put requests where their state says they wait. Something happened: the next step may find work."""
        self._stuck = False
        for request in requests:
            if request.status is RequestStatus.PREEMPTED:
                self.preempted.push(request)
            elif request.sends_kv:
                (self.granted if request.has_ticket else self.desk.queue).push(request)
            else:
                self.waiting.push(request)

    def _admit_next(self, now_s: float) -> Request | None:
        """The next request in order gets its blocks and runs. None: it and all behind it must wait."""
        while queue := self.preempted or self.granted or self.waiting:
            request = queue.head()
            cached, blocks, is_held = self._room.match(request)
            if is_held:
                queue.remove(request)
                continue
            if blocks > self._room_for(request, queue):
                return None
            queue.remove(request)
            self._take_blocks(request, cached, self.blocks.blocks_for(request.num_tokens))
            if request.host_slots:
                self.offload.restore(request, len(cached))
                start = len(cached) * self.config.block_size
                self._queue(self.blocks.publish(request, start, request.num_computed_tokens))
            if request.sends_kv:
                self.desk.scheduled(request, blocks)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
            request.num_prefill_tokens = request.num_tokens
            request.transition(RequestStatus.RUNNING)
            self.running.push(request)
            return request
        return None

    def _room_for(self, request: Request, queue: RequestQueue) -> int:
        """Blocks that its admission may take."""
        if queue is self.preempted:
            return self._room.of_preempted(request, self._prefill_tokens)
        return self._room.of_waiting() if queue is self.waiting else self._room.of_granted()

    # --- blocks ---

    def _take_blocks(self, request: Request, cached: list[int], num_blocks: int) -> None:
        self.blocks.take(request, cached, num_blocks)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_cache_queries_total += request.num_tokens
            self.counters.prefix_cache_hits_total += request.num_computed_tokens

    def _free_blocks(self, request: Request) -> None:
        self.reservations.reserved.pop(request.request_id, None)
        self._queue(self.blocks.free(request))

    def _grow(self, request: Request, now_s: float) -> bool:
        """Room for one more token. False when ``request`` itself had to give its blocks up."""
        if not self.blocks.is_full(request):
            return True
        while self.pool.num_available == 0:
            victim = next(r for r in reversed(self.running) if not (r.sends_kv or is_catching_up(r)))
            self._preempt(victim)
            victim.waits_since_s = now_s
            if victim is request:
                return False
        self.blocks.grow(request)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.transition(RequestStatus.PREEMPTED)
        request.was_preempted = True
        self.offload.offload(request, self.blocks.blocks_for(request.num_computed_tokens))
        self._free_blocks(request)
        self.preempted.push(request)
        self.counters.preemptions_total += 1

    # --- tokens ---

    @staticmethod
    def _tokens_left(request: Request) -> int:
        return request.num_tokens + request.num_pending_tokens - request.num_computed_tokens

    def _awaits_last(self, request: Request) -> bool:
        """Whether a step in flight draws its last token, whatever that is."""
        pending = request.num_pending_tokens
        return pending > 0 and (request.sends_kv or self.finish.is_last(request, pending))

    def _put(self, items: list[ScheduledItem], request: Request, max_tokens: int) -> int:
        left = self._tokens_left(request)
        num_tokens = min(max_tokens, left)
        items.append(ScheduledItem(request, num_tokens, request.num_computed_tokens, num_tokens == left))
        return num_tokens

    def _take_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None, now_s: float
    ) -> RequestOutput:
        is_first = len(request.output_token_ids) == request.num_output_so_far
        request.append_token(token_id)
        finish_reason, stop_token_id = self.finish.check(request)
        output = RequestOutput(
            request_id=request.request_id,
            token_ids=[token_id],
            logprobs=[] if logprobs is None else [logprobs],
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
        )
        if is_first:
            assert request.first_scheduled_s is not None
            output.timings = Timings(
                prefill_queue_s=request.first_scheduled_s - request.arrival_s - request.handoff_wait_s,
                handoff_wait_s=request.handoff_wait_s,
                prefill_s=now_s - request.first_scheduled_s,
            )
            output.cached_tokens = request.num_cached_tokens
            self.counters.prompt_tokens_total += len(request.prompt_token_ids)
        if request.sends_kv:
            self.running.remove(request)
            request.transition(RequestStatus.HOLDING_KV)
            self.holding[request.request_id] = request
            request.first_output = output
            return output
        self.counters.generation_tokens_total += 1
        if finish_reason is not None:
            self.end(request, finish_reason)
        return output
