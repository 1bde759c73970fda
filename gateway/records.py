"""Where each recent request's time went: one record per HTTP request that generates, kept in a bounded LRU.

    received .. tokenize .. dispatched ................................... first output ..... ended
                              | relay + route + [worker: queue, hand-off wait, prefill, transfer] |
Every phase is a duration on one process's clock; what no process accounts for is ``rest``, computed and shown.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from pdserve.v1 import inference_pb2 as pb

PHASES = (
    "tokenize_s",
    "route_s",
    "prefill_queue_s",
    "prefill_s",
    "handoff_wait_s",
    "transfer_s",
    "relay_s",
    "rest_s",
)


@dataclass(slots=True)
class RequestRecord:
    """Filled while the request runs. Times are ``time.monotonic()`` of this process."""

    request_id: str
    endpoint: str
    response_id: str = ""
    received_s: float = field(default_factory=time.monotonic)
    tokenize_s: float = 0.0
    """Parsing, templating and tokenizing."""
    dispatched_s: float | None = None
    first_output_s: float | None = None
    ended_s: float | None = None
    outcome: str = "running"
    """stop | length | an error's code | client (gone)."""
    worker_phases: pb.Phases | None = None
    transfer: pb.Transfer | None = None
    """How the KV came, after a hand-off."""
    route: pb.Route | None = None
    """Which workers were tried, by the router that answered last."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sent_kv_tokens: int = 0
    output_tokens: int = 0
    num_choices: int = 0
    resumes: int = 0
    traceparent: str = ""
    """Of the request's span; empty: nobody traces it."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_output_s is None else self.first_output_s - self.received_s

    def phases(self) -> dict[str, float]:
        """They add up to ``ttft_s``. Empty before the first output."""
        if self.first_output_s is None or self.dispatched_s is None or self.worker_phases is None:
            return {}
        worker, ttft_s = self.worker_phases, self.first_output_s - self.received_s
        phases = {
            "tokenize_s": self.tokenize_s,
            "route_s": worker.route_s,
            "prefill_queue_s": worker.prefill_queue_s,
            "prefill_s": worker.prefill_s,
            "handoff_wait_s": worker.handoff_wait_s,
            "transfer_s": worker.transfer_s,
            # Every hop: gateway to router and back, router to worker and back, between the two workers.
            "relay_s": max(self.first_output_s - self.dispatched_s - worker.route_s - worker.worker_s, 0.0)
            + worker.handoff_relay_s,
        }
        total_s = sum(phases.values())
        if total_s > ttft_s:  # measured on several clocks and across resumes, parts may overlap: they still add up
            phases = {name: duration_s * ttft_s / total_s for name, duration_s in phases.items()}
            total_s = ttft_s
        return phases | {"rest_s": ttft_s - total_s}

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.received_s

    def summary(self) -> dict[str, Any]:
        """As the list /debug/requests shows it."""
        return {
            "request_id": self.request_id,
            "response_id": self.response_id,
            "endpoint": self.endpoint,
            "outcome": self.outcome,
            "age_s": time.monotonic() - self.received_s,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "resumes": self.resumes,
        }

    def view(self) -> dict[str, Any]:
        """As /debug/requests/{id} shows it."""
        return self.summary() | {
            "phases": self.phases(),
            "sent_kv_tokens": self.sent_kv_tokens,
            "choices": self.num_choices,
            "trace_id": self.traceparent.split("-")[1] if self.traceparent else "",
            "transfer": None if self.transfer is None else _transfer_view(self.transfer),
            "router": "" if self.route is None else self.route.router,
            "attempts": [] if self.route is None else [_attempt_view(attempt) for attempt in self.route.attempts],
        }


def _transfer_view(transfer: pb.Transfer) -> dict[str, Any]:
    return {
        "lane": transfer.lane,
        "seconds": transfer.seconds,
        "bytes": transfer.bytes,
        "cached_tokens": transfer.cached_tokens,
    }


def _attempt_view(attempt: pb.Route.Attempt) -> dict[str, Any]:
    return {
        "prefill_worker": attempt.prefill_worker,
        "decode_worker": attempt.decode_worker,
        "start_s": attempt.start_s,
        "duration_s": attempt.duration_s,
        "failure": attempt.failure,
    }


class RecentRequests:
    """The last ``limit`` records by request id; a repeated id replaces the older record."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        while len(self._records) > self._limit:
            self._records.popitem(last=False)

    def get(self, request_or_response_id: str) -> RequestRecord | None:
        """By its x-request-id, or by the ``id`` of its answer, which is what most clients show."""
        if (found := self._records.get(request_or_response_id)) is not None:
            return found
        return next((each for each in self._records.values() if each.response_id == request_or_response_id), None)

    def newest_first(self) -> list[RequestRecord]:
        return list(reversed(self._records.values()))
