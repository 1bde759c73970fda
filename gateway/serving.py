"""One request that generates, over HTTP or gRPC: from its choices to their end.

Owns the request's deadline, its record and its metrics, runs all choices at once, and ends them all when one fails, the
deadline passes or the client goes. How it came and how it is answered is ``exchange`` (HTTP) and ``grpc_service``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway.admission import Admission
from gateway.choice import ChoiceDecoder, Delta, PlacedToken
from gateway.config import GatewayConfig
from gateway.errors import GatewayError, deadline_exceeded, draining, invalid
from gateway.model import ServedModel
from gateway.openai import SamplingFields
from gateway.records import RecentRequests, RequestRecord
from gateway.routers import Generation, RouterPool
from gateway.sampling import choice_seed, prompt_seed
from gateway.text import TextWorker
from pdserve.v1 import inference_pb2 as pb
from telemetry.metrics import GatewayMetrics
from telemetry.tracing import OFF, Span, Tracer, valid_traceparent

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Gateway:
    """What every request uses."""

    config: GatewayConfig
    model: ServedModel
    text: TextWorker
    routers: RouterPool
    metrics: GatewayMetrics
    recent: RecentRequests
    admission: Admission
    tracer: Tracer = OFF

    @property
    def not_ready_reason(self) -> str | None:
        """Why no request should come here now; None when one may."""
        return "draining" if self.admission.draining else self.routers.not_ready_reason

    def check_model(self, name: str | None) -> None:
        """Raises GatewayError for a model that is not served here."""
        if name is not None and name != self.model.name:
            raise GatewayError(
                404,
                f"The model {name!r} does not exist: this server has {self.model.name!r}.",
                code="model_not_found",
                param="model",
            )

    def check_choices(self, num_choices: int) -> None:
        """Raises GatewayError for more choices than one request may have."""
        if num_choices > self.config.max_choices:
            raise invalid(
                f"prompts x n is {num_choices}: at most {self.config.max_choices} choices in one request", "n"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, ready to be sent."""

    token_ids: Sequence[int]
    sampling: pb.SamplingParams
    text: str = ""
    """Only where it is to be echoed."""


@dataclass(slots=True)
class Choice:
    """One output of one prompt, and what came of it."""

    index: int
    prompt: Prompt
    decoder: ChoiceDecoder
    generation: Generation
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PlacedToken] = field(default_factory=list)
    cached_tokens: int | None = None
    last_output_s: float | None = None
    is_model_told: bool = False
    """The client of a gRPC stream knows which model answers."""
    had_finished: bool = False
    """Before the stream that this one goes on from was lost."""

    @property
    def finish_reason(self) -> str | None:
        return self.decoder.finish_reason

    async def keep(self, delta: Delta) -> None:
        """For an answer that is sent whole."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def go_on_after(self, token_ids: Sequence[int], model_fingerprint: str) -> None:
        """The client has these tokens, and the text that they decided."""
        self.decoder.push(pb.Output(token_ids=token_ids))
        self.generation.go_on_after(token_ids, model_fingerprint)


OnDelta = Callable[[Choice, Delta], Awaitable[None]]


class Call:
    """One request. Made by an endpoint, which makes the prompts, then the choices, and runs them."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        endpoint: str,
        id_prefix: str,
        request_id: str,
        timeout_s: float,
        traceparent: str | None = None,
    ) -> None:
        """``traceparent``: the client's W3C trace context, if it sent one."""
        self.gateway = gateway
        self.response_id = f"{id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._timeout_s = timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._record = RequestRecord(request_id, endpoint, self.response_id)
        self._traceparent = valid_traceparent(traceparent)
        self._span: Span | None = None

    def choices(self, request: SamplingFields, prompts: Sequence[Prompt]) -> list[Choice]:
        """n choices for each prompt, in the API's order. The choices of one prompt share a group, so that they run on
        the same workers and share the prompt's KV."""
        n = request.n or 1
        choices: list[Choice] = []
        for p, prompt in enumerate(prompts):
            seed = prompt_seed(request.seed)
            for i in range(n):
                prompt.sampling.seed = choice_seed(seed, i)
                choices.append(self._choice(p * n + i, f"{self.response_id}/{p}" if n > 1 else "", request, prompt))
        return choices

    def prepared(self, choices: Sequence[Choice]) -> None:
        """The prompts are made: note how long that took, and show the request from now on."""
        record = self._record
        record.tokenize_s = time.monotonic() - record.received_s
        record.prompt_tokens = sum(len(prompt.token_ids) for prompt in _prompts(choices))
        record.num_choices = len(choices)
        self.gateway.recent.add(record)
        self._span = span = self.gateway.tracer.begin(
            "request",
            self._traceparent,
            record.received_s,
            request_id=record.request_id,
            endpoint=record.endpoint,
            model=self.gateway.model.name,
            prompt_tokens=record.prompt_tokens,
        )
        span.child("tokenize", record.received_s, record.received_s + record.tokenize_s)
        record.traceparent = span.traceparent
        for choice in choices:
            choice.generation.traceparent = span.traceparent

    async def run(self, choices: Sequence[Choice], on_delta: OnDelta) -> None:
        """All choices to their end, recorded however they end. Raises GatewayError; cancelled, it aborts them."""
        with self._recorded(choices):
            await self._run_all(choices, on_delta)

    async def _run_all(self, choices: Sequence[Choice], on_delta: OnDelta) -> None:
        """All choices to their end. The first failure, the deadline, a drain's end or a cancel ends them all.

        Raises GatewayError.
        """
        self._record.dispatched_s = time.monotonic()
        tasks = [asyncio.create_task(self._run(choice, on_delta)) for choice in choices]
        all_of_them = asyncio.gather(*tasks)
        cut_off = asyncio.create_task(self.gateway.admission.cut_off.wait())
        waiting: list[asyncio.Future[Any]] = [all_of_them, cut_off]
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not all_of_them.done():
                raise draining()
            all_of_them.result()
        except TimeoutError:
            raise deadline_exceeded(self._timeout_s) from None
        finally:
            for task in (*tasks, cut_off):
                task.cancel()
            await asyncio.gather(*tasks, *waiting, return_exceptions=True)

    async def _run(self, choice: Choice, on_delta: OnDelta) -> None:
        async def on_output(output: pb.Output) -> bool:
            self._observe(choice, output)
            delta = choice.decoder.push(output)
            await on_delta(choice, delta)
            return delta.finish_reason is None

        if not choice.had_finished:
            await choice.generation.run(self.gateway.routers, on_output)

    def _choice(self, index: int, group: str, request: SamplingFields, prompt: Prompt) -> Choice:
        config, metrics = self.gateway.config, self.gateway.metrics
        template = pb.GenerateRequest(
            request_id=f"{self.response_id}/{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=prompt.sampling,
            cache_salt=request.cache_salt or "",
            priority=request.priority,
            group=group,
            session=request.session,
        )
        generation = Generation(
            template,
            deadline_s=self._deadline_s,
            timeout_s=self._timeout_s,
            max_resumes=config.max_resumes,
            on_abort=lambda reason: metrics.aborts.labels(reason).inc(),
        )
        decoder = ChoiceDecoder(
            self.gateway.model.tokenizer,
            prompt.token_ids,
            stop=request.stop_strings,
            min_tokens=request.min_tokens,
            skip_special_tokens=request.skip_special_tokens,
        )
        return Choice(index, prompt, decoder, generation)

    def _observe(self, choice: Choice, output: pb.Output) -> None:
        """Times and counts of one output."""
        if output.HasField("route"):
            self._record.route = output.route
        if not output.token_ids:
            return
        now_s, record = time.monotonic(), self._record
        metrics, name = self.gateway.metrics, self.gateway.model.name
        if record.first_output_s is None:
            record.first_output_s = now_s
            record.worker_phases = output.phases
            record.sent_kv_tokens = output.sent_kv_tokens
            if output.HasField("transfer"):
                record.transfer = output.transfer
            self._observe_first(output)
        if choice.cached_tokens is None:
            choice.cached_tokens = output.cached_tokens
        if choice.last_output_s is not None:
            metrics.inter_token_latency.labels(name).observe(now_s - choice.last_output_s)
        choice.last_output_s = now_s

    def _observe_first(self, output: pb.Output) -> None:
        """The request's first output, whichever choice it is of: each phase once, so that their sums are TTFT's."""
        record, metrics, name = self._record, self.gateway.metrics, self.gateway.model.name
        assert record.ttft_s is not None
        metrics.time_to_first_token.labels(name).observe(record.ttft_s)
        metrics.observe_phases(name, {phase.removesuffix("_s"): value for phase, value in record.phases().items()})
        if output.HasField("transfer"):
            metrics.prefix_hit_tokens.labels(name, "prefill").inc(output.cached_tokens)
            metrics.prefix_hit_tokens.labels(name, "decode").inc(output.transfer.cached_tokens)
        else:
            metrics.prefix_hit_tokens.labels(name, "decode").inc(output.cached_tokens)

    @contextmanager
    def _recorded(self, choices: Sequence[Choice]) -> Iterator[None]:
        """Close the record, and count, however the request ends."""
        outcome = "client"
        try:
            yield
            outcome = "stop" if any(choice.finish_reason == "stop" for choice in choices) else "length"
        except GatewayError as error:
            outcome = error.code or "error"
            self.gateway.metrics.failures.labels(outcome).inc()
            raise
        except Exception:
            outcome = "internal_error"
            self.gateway.metrics.failures.labels(outcome).inc()
            raise
        finally:
            self._close_record(choices, outcome)

    def _close_record(self, choices: Sequence[Choice], outcome: str) -> None:
        record, metrics, name = self._record, self.gateway.metrics, self.gateway.model.name
        record.ended_s = time.monotonic()
        e2e_s = record.ended_s - record.received_s
        record.outcome = outcome
        record.output_tokens = sum(choice.decoder.num_tokens for choice in choices)
        record.cached_tokens = cached_tokens(choices)
        record.resumes = sum(choice.generation.resumes for choice in choices)
        metrics.requests_finished.labels(name, outcome).inc()
        metrics.resumes.inc(record.resumes)
        metrics.prompt_tokens.labels(name).inc(record.prompt_tokens)
        metrics.generation_tokens.labels(name).inc(record.output_tokens)
        metrics.cached_tokens.labels(name).inc(record.cached_tokens)
        if self._span is not None:
            error = "" if outcome in ("stop", "length") else outcome
            self._span.end(error, output_tokens=record.output_tokens, cached_tokens=record.cached_tokens)
        if outcome not in ("stop", "length"):
            ttft_s = None if record.ttft_s is None else round(record.ttft_s, 3)
            log.info(
                "request ended",
                request_id=record.request_id,
                outcome=outcome,
                ttft_s=ttft_s,
                e2e_s=round(e2e_s, 3),
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.output_tokens,
            )
            return
        metrics.e2e_latency.labels(name).observe(e2e_s)
        metrics.request_prompt_tokens.labels(name).observe(record.prompt_tokens)
        metrics.request_generation_tokens.labels(name).observe(record.output_tokens)
        if record.ttft_s is not None and len(choices) == 1 and record.output_tokens > 1:
            per_token_s = (e2e_s - record.ttft_s) / (record.output_tokens - 1)
            metrics.time_per_output_token.labels(name).observe(per_token_s)


def cached_tokens(choices: Sequence[Choice]) -> int:
    """Prompt tokens that nobody had to compute for this request: choices of one prompt share it, so their least."""
    least: dict[int, int] = {}
    for choice in choices:
        key = id(choice.prompt)
        cached = choice.cached_tokens or 0
        least[key] = min(least.get(key, cached), cached)
    return sum(least.values())


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """What is billed: each prompt once, and every token generated."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in _prompts(choices))
    completion_tokens = sum(choice.decoder.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(choices)},
    }


def _prompts(choices: Sequence[Choice]) -> list[Prompt]:
    return list({id(choice.prompt): choice.prompt for choice in choices}.values())
