"""One request's way through the router, top to bottom: validate, place, dispatch, relay, try again, end.

The gateway gets the decode worker's tokens and exactly one terminal output. A failed attempt, streamed or not, is one
mechanism: the tokens so far go along to the next pair of workers, which goes on at that position. While a hand-off is
under way, only the worker that failed is replaced: the other one has what the next attempt needs, the decode worker its
reservation, the prefill worker what it has computed.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable

import structlog

from pdserve import terminal
from pdserve.v1 import inference_pb2 as pb
from router.attempt import Attempt
from router.breaker import WorkerKey
from router.config import RouterConfig
from router.placement import Placement, Placer, Unplaceable
from router.prompt import RoutedPrompt
from router.trail import Trail
from router.workers import Worker
from telemetry.metrics import RouterMetrics

HANDOFF_TRIES = 2
"""After so many failed ones it may be the network between the workers: the decode worker computes the prompt itself."""
MAX_GIVEN_BACK = 16
"""So often a worker that leaves may give a request back; after that it counts as a failure."""
SECOND_TRY_WAIT_S = 0.1  # doubled with each: the same worker may need a moment to come back

log = structlog.get_logger()


class AttemptFailed(Exception):
    """A worker ended the attempt, and not the request."""

    def __init__(self, worker: Worker, failure: pb.Failure, is_given_back: bool) -> None:
        """``is_given_back``: nothing failed, the worker leaves."""
        super().__init__(failure.message)
        self.worker = worker
        self.failure = failure
        self.is_given_back = is_given_back


class RequestPath:
    """Runs one request. ``emit`` takes each output for the gateway; it is called with exactly one terminal output,
    unless the task that runs it is cancelled (the gateway wants no answer)."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        emit: Callable[[pb.Output], None],
        placer: Placer,
        config: RouterConfig,
        metrics: RouterMetrics,
        trail: Trail,
    ) -> None:
        self.abort_reason = "client"
        """What the workers are told if the task is cancelled."""
        self._request = request
        self._request_id = request.request_id
        self._emit = emit
        self._placer = placer
        self._config = config
        self._metrics = metrics
        self._trail = trail
        self._received_s = asyncio.get_running_loop().time()
        # Unique in the fleet: a gateway that fails over to another router sends the same request id again.
        self._transfer_id = f"{request.request_id}~{secrets.token_hex(4)}"
        self._output_so_far = list(request.output_so_far)
        self._has_emitted = False
        self._given_back = 0
        self._handoffs_failed = 0
        self._keep: set[WorkerKey] = set()
        """Of the attempt before: who goes on with the next one, if that is possible."""
        self._route_s = 0.0

    async def run(self) -> None:
        """The whole path."""
        error: str | None = None
        try:
            error = await self._run()
        finally:
            self._trail.end(self.abort_reason if error is None else error)

    async def _run(self) -> str:
        """The code of the failure that the request ended with, or nothing."""
        invalid = _why_invalid(self._request)
        if invalid:
            return self._end(terminal.failed(self._request_id, pb.ERROR_CODE_INVALID_REQUEST, invalid))
        timeout_s = min(self._request.timeout_s, self._config.max_timeout_s)
        self._deadline_s = self._received_s + timeout_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                last = await self._generate()
        except TimeoutError:
            last = terminal.timed_out(self._request_id, f"not finished within {timeout_s:g} s")
        except Unplaceable as why:
            retryable = why.code in (pb.ERROR_CODE_NO_WORKERS, pb.ERROR_CODE_OVERLOADED)
            last = terminal.failed(
                self._request_id, why.code, why.message, retryable=retryable, retry_after_s=why.retry_after_s
            )
        return self._end(last)

    async def _generate(self) -> pb.Output:
        """Attempts until one ends the request; returns the terminal output."""
        avoid: set[WorkerKey] = set()
        number = 0
        while True:
            number += 1
            attempt = await self._dispatch(number, avoid)
            abort_reason: str | None = self.abort_reason
            error = self.abort_reason
            begun_s = asyncio.get_running_loop().time()
            suspects: list[WorkerKey] = []
            code = pb.ERROR_CODE_UNSPECIFIED
            try:
                last = await self._relay(attempt)
                abort_reason = "deadline" if last.finish.reason == pb.FINISH_REASON_TIMEOUT else None
                error = abort_reason or ""
                return last
            except AttemptFailed as failed:
                code, suspects = failed.failure.code, _suspects(failed, attempt, self._keep)
                abort_reason, error = "retry", pb.ErrorCode.Name(code)
                self._handoffs_failed += code == pb.ERROR_CODE_HANDOFF_FAILED and attempt.prefill is not None
                avoid.update(suspects)
                self._keep = set() if attempt.has_tokens else set(attempt.keys.values()).difference(suspects)
                if not self._may_retry(failed, attempt, avoid):
                    abort_reason = "failed"
                    return pb.Output(
                        request_id=self._request_id,
                        finish=pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=failed.failure),
                    )
                if len(self._output_so_far) >= self._request.sampling.max_tokens:  # only the last word was lost
                    return pb.Output(request_id=self._request_id, finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
            except asyncio.CancelledError:
                deadline_passed = asyncio.get_running_loop().time() >= self._deadline_s
                error = abort_reason = "deadline" if deadline_passed else self.abort_reason
                raise
            finally:
                attempt.end(abort_reason)
                self._placer.breakers.ended(attempt.keys.values(), suspects, code, begun_s, attempt.has_tokens)
                self._trail.attempt_ended(error)

    async def _dispatch(self, number: int, avoid: set[WorkerKey]) -> Attempt:
        """Choose workers and send them the request, with what is left of its time and what it has so far."""
        request = self._request
        prompt = RoutedPrompt.of(request, self._output_so_far)
        is_new = number == 1 and not self._output_so_far
        patience_s = self._deadline_s - asyncio.get_running_loop().time() if is_new else None
        alone = self._handoffs_failed >= HANDOFF_TRIES
        placement = await self._placer.place(prompt, avoid, patience_s, self._keep, alone)
        if placement.is_second_try:
            await asyncio.sleep(SECOND_TRY_WAIT_S * 2 ** (number - 2 - self._given_back))
            placement = await self._placer.place(prompt, avoid, keep=self._keep, without_handoff=alone)
        now_s = asyncio.get_running_loop().time()
        request.ClearField("handoff")
        request.output_so_far[:] = self._output_so_far
        request.timeout_s = max(0.001, self._deadline_s - now_s)
        request.traceparent = self._trail.attempt_begins(placement, now_s)
        attempt = Attempt(placement, request, self._transfer_id, number)
        self._placer.breakers.sent(attempt.keys.values())
        if not self._has_emitted:
            self._route_s = now_s - self._received_s
            self._metrics.route_seconds.observe(self._route_s)
        self._count(placement, prompt)
        return attempt

    def _count(self, placement: Placement, prompt: RoutedPrompt) -> None:
        metrics = self._metrics
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                metrics.dispatches.labels(worker.worker_id, worker.record.role).inc()
        if placement.prefill is None:
            metrics.local_prefills.labels(placement.cause).inc()
        metrics.routed_tokens.inc(prompt.num_tokens)
        metrics.routed_cached_tokens.labels("prefill").inc(placement.prefill_cached_tokens)
        metrics.routed_cached_tokens.labels("decode").inc(placement.decode_cached_tokens)
        if placement.is_blind:
            metrics.blind_decisions.inc()

    async def _relay(self, attempt: Attempt) -> pb.Output:
        """Give the decode worker's tokens to the gateway; returns its terminal output. Raises AttemptFailed."""
        while True:
            worker, output = await attempt.next_output()
            failure = _failure_of(worker, output)
            is_given_back = output.finish.reason == pb.FINISH_REASON_ABORT
            if worker is not attempt.decode:
                if failure is not None and not attempt.has_tokens:  # else the decode worker has all it needs
                    raise AttemptFailed(worker, failure, is_given_back)
                continue
            output.request_id = self._request_id
            if failure is not None:
                output.ClearField("finish")
            if output.token_ids:
                self._output_so_far.extend(output.token_ids)
                self._metrics.tokens.inc(len(output.token_ids))
                self._set_phases(output, attempt)
            if output.HasField("finish"):
                return output
            if output.token_ids:
                self._emit(output)
            if failure is not None:
                raise AttemptFailed(worker, failure, is_given_back)

    def _set_phases(self, output: pb.Output, attempt: Attempt) -> None:
        """Add the router's part to the first output with tokens; a later attempt's first output is not the first."""
        if self._has_emitted:
            output.ClearField("phases")
            output.ClearField("cached_tokens")
            output.ClearField("sent_kv_tokens")
            output.ClearField("transfer")
            return
        self._has_emitted = True
        output.phases.route_s = self._route_s
        output.phases.router_s = asyncio.get_running_loop().time() - self._received_s
        output.route.CopyFrom(self._trail.route)
        # From here on, the rest of the answer must be this model's, wherever it goes on.
        output.model_fingerprint = self._request.model_fingerprint = attempt.model_fingerprint

    def _may_retry(self, failed: AttemptFailed, attempt: Attempt, avoid: set[WorkerKey]) -> bool:
        """Whether another attempt, that avoids those, is worth it."""
        failure, worker = failed.failure, failed.worker
        if failed.is_given_back and self._given_back < MAX_GIVEN_BACK:
            self._given_back += 1
        is_last = attempt.number - self._given_back >= self._config.max_attempts
        # Work that a full worker refuses is not pushed onto workers of the other kind: the client is told to wait.
        is_full = failure.code == pb.ERROR_CODE_OVERLOADED and not self._placer.has_other(worker, avoid)
        code = pb.ErrorCode.Name(failure.code)
        may_retry = failure.retryable and not is_last and not is_full
        log.warning(
            "attempt failed",
            request_id=self._request_id,
            attempt=attempt.number,
            worker=worker.worker_id,
            code=code,
            message=failure.message,
            output_tokens=len(self._output_so_far),
            retry=may_retry,
        )
        if may_retry:
            self._metrics.retries.labels(code).inc()
            if self._has_emitted:
                self._metrics.migrations.inc()
        return may_retry

    def _end(self, last: pb.Output) -> str:
        route = self._trail.route
        if len(route.attempts) > 1 or not self._has_emitted:
            last.route.CopyFrom(route)
        self._metrics.requests_finished.labels(pb.FinishReason.Name(last.finish.reason)).inc()
        code = pb.ErrorCode.Name(last.finish.failure.code) if last.finish.HasField("failure") else ""
        if code:
            self._metrics.failures.labels(code).inc()
        self._emit(last)
        return code


def _why_invalid(request: pb.GenerateRequest) -> str:
    """One line that names the remedy, or an empty string."""
    if not request.prompt_token_ids:
        return "prompt_token_ids is empty: give at least one token"
    if not math.isfinite(request.timeout_s) or request.timeout_s <= 0:
        return f"timeout_s={request.timeout_s} is not a deadline: give seconds, more than 0"
    if request.sampling.max_tokens < 1:
        return "sampling.max_tokens must be at least 1"
    return ""


def _suspects(failed: AttemptFailed, attempt: Attempt, kept: set[WorkerKey]) -> list[WorkerKey]:
    """Who may be the reason. A worker that blames the other one is believed once: not when it was ``kept`` for that."""
    mine, others = attempt.keys[failed.worker.worker_id], list(attempt.keys.values())
    if failed.failure.code != pb.ERROR_CODE_HANDOFF_FAILED:
        return [mine]
    if failed.failure.peer_lost and mine not in kept:
        others.remove(mine)
    return others


def _failure_of(worker: Worker, output: pb.Output) -> pb.Failure | None:
    """Ends that are not the request's: an error, or an abort that nobody here asked for (the worker is leaving)."""
    reason = output.finish.reason
    if reason == pb.FINISH_REASON_ERROR:
        return output.finish.failure
    if reason == pb.FINISH_REASON_ABORT:
        message = f"{worker.worker_id} gave the request back: {output.finish.failure.message}"
        return pb.Failure(code=pb.ERROR_CODE_WORKER_LOST, message=message, retryable=True)
    return None
