"""The check that ends every scheduler and core test: whatever happened, nothing is left behind."""

from __future__ import annotations

from engine.core import EngineCore


def check_books(core: EngineCore) -> None:
    """What must hold between any two calls."""
    scheduler = core.scheduler
    scheduler.pool.check_invariants()
    references = [0] * scheduler.pool.num_blocks
    for request in scheduler.requests.values():
        assert len(set(request.block_table)) == len(request.block_table)
        assert request.block_table or request.num_computed_tokens == 0
        for block_id in request.block_table:
            references[block_id] += 1
    for block_table in scheduler.reservations.kept_tables:
        for block_id in block_table:
            references[block_id] += 1
    for _, block_ids in scheduler.blocks._freed_later:
        for block_id in block_ids:
            references[block_id] += 1
    assert references == scheduler.pool._ref_counts, "the pool and the block tables disagree"
    slots = [slot for request in scheduler.requests.values() for slot in request.host_slots]
    assert sorted(slots + scheduler.offload._free) == list(range(scheduler.offload.num_slots)), "a host slot is lost"
    stats = core.stats()
    used = stats.total_blocks - stats.free_blocks - stats.cached_blocks
    assert used == sum(count > 0 for count in references)
    assert stats.running + stats.waiting + stats.waiting_for_kv + stats.holding_kv == len(scheduler.requests)


def assert_no_leak(core: EngineCore) -> None:
    """No request, no queue entry, no reference; every block is free or cached."""
    check_books(core)
    scheduler = core.scheduler
    assert not core.step().outputs, "an output came after the end"
    assert not core.has_work()
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.preempted
    assert not scheduler.granted
    assert not scheduler.waiting
    assert not scheduler.waiting_for_kv
    assert not scheduler.reservations.reserved
    assert not scheduler.reservations.kept
    assert not scheduler.holding
    assert scheduler.inflight.is_empty()
    assert scheduler.desk.is_empty()
    assert scheduler.pool.num_used == 0
    assert scheduler.offload.num_used == 0
    assert scheduler.pool.num_free + scheduler.pool.num_cached == scheduler.pool.num_blocks
