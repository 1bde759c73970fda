"""What an engine says of itself: the scheduler's counters, and gauges of now."""

from __future__ import annotations

import msgspec

from engine.messages import EngineStats
from engine.request import RequestStatus
from engine.scheduler import Scheduler


def read_stats(scheduler: Scheduler) -> EngineStats:
    """O(requests): for heartbeats, not for every step."""
    not_computed = (
        request.num_tokens - request.num_computed_tokens - request.num_host_tokens
        for request in scheduler.requests.values()
        if request.status not in (RequestStatus.WAITING_FOR_KV, RequestStatus.HOLDING_KV)
    )
    budget, pool = scheduler.itl_budget, scheduler.pool
    return msgspec.structs.replace(
        scheduler.counters,
        running=len(scheduler.running),
        waiting=scheduler.num_queued - len(scheduler.waiting_for_kv),
        waiting_for_kv=len(scheduler.waiting_for_kv),
        holding_kv=len(scheduler.holding),
        # One token ahead is a decode, not a queue.
        queued_tokens=sum(tokens for tokens in not_computed if tokens > 1),
        shares_prefill=budget is not None and budget.has_room and not scheduler.preempted,
        prefill_tokens_per_s=0.0 if budget is None else budget.tokens_per_s,
        itl_aim_s=0.0 if budget is None else budget.aim_s,
        mixed_steps_total=0 if budget is None else budget.mixed_steps_total,
        mixed_steps_over_budget_total=0 if budget is None else budget.over_budget_total,
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        host_blocks=scheduler.offload.num_used,
        total_host_blocks=scheduler.offload.num_slots,
        reservations_taken_over_total=scheduler.reservations.taken_over_total,
    )
