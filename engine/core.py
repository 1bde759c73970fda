"""The engine without its process: one step after the other, and the calls of a hand-off between steps.

Owns the scheduler and the order of things in a step. Everything here runs in one thread, which alone touches the
scheduler, the block pool and the KV memory; no call blocks longer than a step. Driven by ``EngineProcess`` (or a test);
the hand-off (``engine.handoff``) is attached from outside.

    step():  end expired requests -> schedule -> ask for tickets -> run -> update -> news

A runner that can ``launch`` has one step in flight: step n+1 is scheduled and launched while n runs, then n's results
are read. The one token that n draws for a request is not known then; the runner feeds it to n+1 by itself, and what
n+1 computes for a request that this token ended is thrown away.

    step():  end expired requests -> schedule n+1 -> launch n+1 -> result of n -> update n -> news

While the result of n is waited for, ``while_waiting`` lets requests and hand-offs come and go. What can run by then,
when nothing could before, is launched as n+1 at once, and what could run after that asks for its ticket.

Nothing is refused by an exception or by silence: each request added ends with exactly one ``RequestOutput`` that has a
``finish_reason``, in the outputs of some ``step()``. Calls that name an ended request do nothing (it may have ended
while the caller's message was on its way); only ``reserve_kv``, ``write_kv`` and ``kv_ready``, whose caller would go on
with blocks that are not its own, raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.admission import EngineLimits, Refusal, find_refusal
from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.gauges import read_stats
from engine.handoff import HandoffReceiver, HandoffSender
from engine.messages import (
    AddRequest,
    EngineStats,
    ErrorCode,
    FinishReason,
    ReceiveKV,
    RequestOutput,
    SendKV,
    StepOutputs,
)
from engine.offload import BlockCopy, HostMemory
from engine.request import Request, RequestStatus
from engine.runner import AsyncRunner, PendingStep, Runner
from engine.scheduler import Scheduler

DRAINING = "this worker is draining: use another one"
HANGS_S = 30.0
"""No step takes so long. What is said while one is waited for looks like life, so the service would not see it."""


class EngineCore:
    """``sender`` and ``receiver`` may be set after construction (they call the core), but before the first ``add``."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        sender: HandoffSender | None = None,
        receiver: HandoffReceiver | None = None,
        host_memory: HostMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.runner = runner
        self.sender = sender
        self.receiver = receiver
        self.scheduler = Scheduler(
            config,
            runner.num_blocks,
            runner.max_model_len,
            runner.eos_token_ids,
            runner.model_fingerprint,
            host_memory,
            padded_rows=runner.padded_rows if isinstance(runner, AsyncRunner) else (),
        )
        self.limits = EngineLimits(runner.num_blocks, config.block_size, runner.max_model_len, runner.vocab_size)
        self.draining = False
        self.while_waiting: Callable[[], bool] | None = None
        """Called over and over while a launched step is waited for: a nap, then it takes in what has come, as between
        steps. Whether a message was among it. None: nothing is taken in before the step is over."""
        self._launch = runner.launch if config.async_scheduling and isinstance(runner, AsyncRunner) else None
        self._in_flight: tuple[ScheduledBatch, PendingStep, float] | None = None
        """The batch, its results to come, and when it was launched."""
        self._host_memory = host_memory
        self._clock = clock
        self._last_result_s = 0.0
        self._arrivals = 0
        self._news: list[RequestOutput] = []
        """Outputs that did not come from a batch; they go out with the next step."""

    # --- requests ---

    def add(self, message: AddRequest) -> None:
        """A new request, or a terminal output for it in the next step."""
        existing = self.scheduler.requests.get(message.request_id)
        if existing is not None:
            # One terminal output is all that this id can get, so neither request may go on.
            text = "two requests came with this id: use an id once"
            self._end_open(existing, FinishReason.ERROR, error_code=ErrorCode.INVALID_REQUEST, error_message=text)
            return
        if self.draining:
            self._news.append(
                RequestOutput(request_id=message.request_id, finish_reason=FinishReason.ABORT, error_message=DRAINING)
            )
            return
        refusal = find_refusal(message, self.limits) or self._refuse_now(message)
        if refusal is not None:
            self._news.append(
                RequestOutput(
                    request_id=message.request_id,
                    finish_reason=FinishReason.ERROR,
                    error_code=refusal.code,
                    error_message=refusal.message,
                    retryable=refusal.retryable,
                )
            )
            return
        if len(message.output_token_ids) >= message.sampling.max_tokens:
            self._news.append(RequestOutput(request_id=message.request_id, finish_reason=FinishReason.LENGTH))
            return
        request = self._make_request(message)
        self.scheduler.add(request)
        if request.status is RequestStatus.WAITING_FOR_KV:
            assert self.receiver is not None
            self.receiver.want_kv(request)

    def abort(self, request_ids: Iterable[str], reason: str, is_retry: bool = False) -> None:
        """``is_retry``: another attempt comes, maybe to here."""
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                if is_retry and self.receiver is not None and request_id in self.scheduler.waiting_for_kv:
                    self.receiver.attempt_ends(request)
                self._end_open(request, FinishReason.ABORT, error_message=f"aborted: {reason}")

    def drain(self) -> None:
        """Finish what has begun; hand back (as aborted) what has not, and what comes."""
        self.draining = True
        for request in self.scheduler.not_begun():
            self._end_open(request, FinishReason.ABORT, error_message=DRAINING)

    # --- steps ---

    def step(self) -> StepOutputs:
        """One step, or what there is of it: with nothing to run, only the news."""
        now_s = self._clock()
        scheduler = self.scheduler
        for request in scheduler.expired(now_s):
            self._end_open(request, FinishReason.TIMEOUT, error_message="the request's deadline passed")
        if self._in_flight is not None and scheduler.must_settle():
            self._read(*self._in_flight)
            self._in_flight = None
            now_s = self._clock()  # else who came meanwhile would be scheduled before it came
        before, self._in_flight = self._in_flight, None
        if self._launch is None:
            batch = self._schedule(now_s)
            if batch.items:
                started_s = self._clock()
                self._take(batch, self.runner.run(batch, self._stream_kv(batch)), started_s)
            return self.take_news()
        self._launch_next(now_s)
        if before is not None:
            self._read(*before)
        return self.take_news()

    def _schedule(self, now_s: float) -> ScheduledBatch:
        batch = self.scheduler.schedule(now_s)
        self._carry_out(batch.copies)
        self._ask_for_tickets(now_s)
        return batch

    def _ask_for_tickets(self, now_s: float) -> None:
        for request in self.scheduler.ask_for_tickets(now_s):
            assert self.sender is not None
            self.sender.want_ticket(request)

    def _launch_next(self, now_s: float) -> None:
        assert self._launch is not None
        batch = self._schedule(now_s)
        if batch.items:
            self.scheduler.launched(batch)
            started_s = self._clock()
            self._in_flight = (batch, self._launch(batch, self._stream_kv(batch)), started_s)

    def _carry_out(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            assert self._host_memory is not None
            if copy.is_out:
                self._host_memory.copy_out(copy.block_ids, copy.slots)
            else:
                self._host_memory.copy_in(copy.slots, copy.block_ids)

    def _read(self, batch: ScheduledBatch, pending: PendingStep, launched_s: float) -> None:
        scheduler = self.scheduler
        hangs_s = self._clock() + HANGS_S
        while self.while_waiting is not None:
            now_s = self._clock()  # before it is asked: this process may have been stopped, and the device gone on
            if pending.is_done():
                break
            if now_s > hangs_s:
                raise TimeoutError(
                    f"the device has not finished a step in {HANGS_S:.0f} s: restart the engine, and if that does not "
                    "help, look after the device (nvidia-smi, dmesg)"
                )
            message_came = self.while_waiting()
            if self._in_flight is None and scheduler.may_find_work and not scheduler.must_settle():
                self._launch_next(self._clock())
            elif message_came:
                self._ask_for_tickets(self._clock())
        self._take(batch, pending.result(), launched_s)

    def _take(self, batch: ScheduledBatch, sampled: SampledBatch, launched_s: float) -> None:
        now_s = self._clock()
        # One launched ahead began when the one before it was over.
        took_s = now_s - max(launched_s, self._last_result_s)
        if (costs := self.scheduler.offload.costs) is not None:
            costs.step_took(batch.num_tokens, took_s)
        if self.scheduler.itl_budget is not None:
            self.scheduler.itl_budget.step_took(batch.load(), took_s)
        self._last_result_s = now_s
        for output in self.scheduler.update(batch, sampled, now_s):
            request = self.scheduler.holding.get(output.request_id)
            if request is None:
                self._news.append(output)
            else:
                assert self.sender is not None
                self.sender.prefill_ended(request, output)

    def take_news(self) -> StepOutputs:
        """What there is to say already, without a step: a first token that came with its KV does not wait for one."""
        outputs, self._news = self._news, []
        return StepOutputs(outputs=outputs, kv_events=self.scheduler.pool.events.take())

    def announce_kv(self) -> None:
        """The next news say of every block in the prefix cache that it is there."""
        self.scheduler.pool.announce_all()

    def has_work(self) -> bool:
        """False when ``step()`` would have nothing to do before the next message or ``next_deadline_s()``."""
        return bool(self._news) or self._in_flight is not None or self.scheduler.has_work()

    def next_deadline_s(self) -> float | None:
        """time.monotonic of the next thing that only the clock brings about."""
        return self.scheduler.next_deadline_s()

    def stats(self) -> EngineStats:
        return read_stats(self.scheduler)

    # --- hand-off, sender side ---

    def grant_ticket(self, request_id: str, remote_cached_tokens: int) -> None:
        """The receiver reserved room and has that many tokens already: the request may run, and is never preempted."""
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self.scheduler.grant_ticket(request, remote_cached_tokens, self._clock())

    def defer_ticket(self, request_id: str, retry_after_s: float) -> None:
        """The receiver is busy: ``want_ticket`` comes again, not before that time."""
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self.scheduler.defer_ticket(request, self._clock() + retry_after_s)

    def release_kv(self, request_id: str, error: tuple[ErrorCode, str, bool] | None, peer_lost: bool = False) -> None:
        """The hand-off ended: free the blocks and answer for the request, without its token (D emits that)."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return
        first = request.first_output
        if error is None and first is None:
            error = (ErrorCode.HANDOFF_FAILED, "the hand-off ended before the prefill did", True)
        if error is not None:
            self._fail(request, *error, peer_lost=peer_lost)
            return
        assert first is not None
        self._end(
            request,
            first.finish_reason or FinishReason.LENGTH,
            stop_token_id=first.stop_token_id,
            timings=first.timings,
            cached_tokens=first.cached_tokens,
        )

    # --- hand-off, receiver side ---

    def reserve_kv(self, request_id: str) -> int | None:
        """Reserve blocks for the prompt and one token; the cached ones among them are pinned.

        The number of cached tokens, or None: no room now, or the prefix is just being computed or received; try again.
        A request holds one reservation: release it before the next. Raises KeyError when the request is not waiting.
        """
        return self.scheduler.reserve(self._waiting_for_kv(request_id, reserved=False))

    def write_kv(
        self,
        request_id: str,
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        payload: Any,
        dtype: Any,
    ) -> Any:
        """Copy a segment into the request's own, unpublished blocks: ``KVMemory.unpack``.

        Raises KeyError when the request has no reservation, ValueError when the range is not its own to write.
        """
        request = self._waiting_for_kv(request_id, reserved=True)
        if not request.num_computed_tokens <= token_start < token_end <= request.num_tokens:
            raise ValueError(
                f"request {request_id}: tokens {token_start} to {token_end} are outside of its unpublished blocks "
                f"({request.num_computed_tokens} to {request.num_tokens})"
            )
        return self.runner.kv_cache.unpack(
            request.block_table, token_start, token_end, layer_start, layer_end, payload, dtype
        )

    def kv_ready(self, request_id: str, first_output: RequestOutput) -> None:
        """All KV of the prompt is written and verified: publish it, emit token 0 and go on from there.

        With a ``finish_reason`` in ``first_output`` token 0 was the last one: no KV is needed, and none is published.
        Raises KeyError when the request is not waiting or (unless token 0 was the last) has no reservation.
        """
        request = self._waiting_for_kv(request_id, reserved=first_output.finish_reason is None)
        self._news.append(self.scheduler.kv_ready(request, first_output))

    def release_reservation(self, request_id: str) -> None:
        """Free the blocks; the request waits for another attempt, until its deadline."""
        request = self.scheduler.waiting_for_kv.get(request_id)
        if request is not None:
            self.scheduler.release_reservation(request)

    def keep_reservation(self, request_id: str) -> bool:
        """Part the request, which the caller is about to end, from its blocks: they wait for the next attempt.

        The caller calls ``drop_reservation`` if that does not come. False when it has no blocks.
        """
        request = self.scheduler.waiting_for_kv.get(request_id)
        return request is not None and self.scheduler.reservations.keep(request)

    def take_over_reservation(self, request_id: str) -> bool:
        """Give the request the blocks of its transfer's attempt before; ``reserve_kv`` then finds them. False when they
        do not fit it: they are free then."""
        return self.scheduler.reservations.take_over(self._waiting_for_kv(request_id, reserved=False))

    def drop_reservation(self, transfer_id: str) -> None:
        self.scheduler.reservations.drop(transfer_id)

    # --- both sides ---

    def fail_request(
        self, request_id: str, code: ErrorCode, message: str, retryable: bool, peer_lost: bool = False
    ) -> None:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self._fail(request, code, message, retryable, peer_lost)

    def _refuse_now(self, message: AddRequest) -> Refusal | None:
        limit = self.config.max_waiting_requests
        if self.scheduler.num_queued >= limit:
            return Refusal(
                ErrorCode.OVERLOADED, f"{limit} requests are waiting here already: retry later", retryable=True
            )
        if isinstance(message.handoff, SendKV) and self.sender is None:
            return Refusal(ErrorCode.INVALID_REQUEST, "this worker does not send KV: use a prefill worker")
        if isinstance(message.handoff, ReceiveKV) and self.receiver is None:
            return Refusal(ErrorCode.INVALID_REQUEST, "this worker does not receive KV: use a decode worker")
        return None

    def _make_request(self, message: AddRequest) -> Request:
        now_s = self._clock()
        self._arrivals += 1
        receives = isinstance(message.handoff, ReceiveKV)
        return Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            output_token_ids=list(message.output_token_ids),
            sampling=message.sampling,
            arrival_s=now_s,
            deadline_s=now_s + message.timeout_s,
            arrival_index=self._arrivals,
            priority=message.priority,
            cache_salt=message.cache_salt,
            handoff=message.handoff,
            status=RequestStatus.WAITING_FOR_KV if receives else RequestStatus.WAITING,
        )

    def _waiting_for_kv(self, request_id: str, reserved: bool) -> Request:
        request = self.scheduler.waiting_for_kv.get(request_id)
        if request is None or (reserved and not request.block_table):
            raise KeyError(f"request {request_id} is not waiting for KV" + (" with a reservation" if reserved else ""))
        return request

    def _stream_kv(self, batch: ScheduledBatch) -> Callable[[int, int], None] | None:
        """Tell the sender of each layer group's KV as it is computed; of the locally cached part, now."""
        sender = self.sender
        if sender is None:
            return None
        ranges: list[tuple[Request, int, int]] = []
        for item in batch.items:
            request = item.request
            if not request.sends_kv:
                continue
            remote = request.num_remote_cached_tokens
            if item.start == request.num_cached_tokens and remote < item.start:
                sender.kv_computed(request, remote, item.start, 0, self.runner.kv_cache.num_layers)
            start, end = max(item.start, remote), item.start + item.num_tokens
            if start < end:
                ranges.append((request, start, end))
        if not ranges:
            return None

        def on_layers(layer_start: int, layer_end: int) -> None:
            for request, start, end in ranges:
                sender.kv_computed(request, start, end, layer_start, layer_end)

        return on_layers

    def _fail(
        self, request: Request, code: ErrorCode, message: str, retryable: bool = False, peer_lost: bool = False
    ) -> None:
        details = {"error_code": code, "error_message": message, "retryable": retryable, "peer_lost": peer_lost}
        self._end(request, FinishReason.ERROR, **details)

    def _end(self, request: Request, reason: FinishReason, **details: Any) -> None:
        self.scheduler.end(request, reason)
        self._news.append(RequestOutput(request_id=request.request_id, finish_reason=reason, **details))

    def _end_open(self, request: Request, reason: FinishReason, **details: Any) -> None:
        """End a request whose hand-off, if it is open, does not know of it yet."""
        receiving = request.request_id in self.scheduler.waiting_for_kv
        self._end(request, reason, **details)
        if receiving and self.receiver is not None:
            self.receiver.request_ended(request)
        elif request.sends_kv and self.sender is not None:
            self.sender.request_ended(request)
