"""From the pool's changes to numbered events, and from there to what a worker publishes."""

from __future__ import annotations

import random

from engine.block_pool import BlockPool
from engine.kv_events import MAX_HASHES
from engine.messages import BlocksCleared, BlocksRemoved, BlocksStored, KVEvents


def name(value: int) -> bytes:
    return value.to_bytes(16, "little")


def fill(pool: BlockPool, *values: int) -> list[int]:
    table = pool.allocate(len(values))
    for index, value in enumerate(values):
        pool.register(table[index], name(value), name(values[index - 1]) if index else b"root")
    return table


def replay(taken: list[KVEvents | None]) -> set[bytes]:
    """What a listener believes; the numbers must have no gaps."""
    blocks: set[bytes] = set()
    next_seq = 1
    for message in taken:
        if message is None:
            continue
        assert message.first_seq == next_seq
        next_seq += len(message.events)
        for event in message.events:
            match event:
                case BlocksStored(block_hashes=hashes):
                    blocks |= set(hashes)
                case BlocksRemoved(block_hashes=hashes):
                    blocks -= set(hashes)
                case BlocksCleared():
                    blocks = set()
    return blocks


def test_the_first_event_says_that_nothing_is_here() -> None:
    pool = BlockPool(2)
    assert pool.events.take() == KVEvents(1, [BlocksCleared()])
    assert pool.events.take() is None


def test_a_chain_is_one_event_and_another_chain_another() -> None:
    pool = BlockPool(6)
    pool.events.take()
    fill(pool, 1, 2, 3)
    fill(pool, 7, 8)
    assert pool.events.take() == KVEvents(
        2, [BlocksStored(b"root", [name(1), name(2), name(3)]), BlocksStored(b"root", [name(7), name(8)])]
    )


def test_what_is_evicted_is_told_and_what_was_published_before_is_not_told_again() -> None:
    pool = BlockPool(3)
    pool.free(fill(pool, 1, 2))
    pool.events.take()
    twin = pool.allocate(1)
    pool.register(twin[0], name(1))
    assert pool.events.take() is None
    pool.free(twin)
    pool.allocate(3)
    assert pool.events.take() == KVEvents(3, [BlocksRemoved([name(2), name(1)])])


def test_a_snapshot_begins_with_cleared_and_goes_on_counting() -> None:
    pool = BlockPool(4)
    fill(pool, 1, 2)
    first = pool.events.take()
    fill(pool, 3)
    pool.announce_all()
    snapshot = pool.events.take()
    assert snapshot is not None
    assert snapshot.events[0] == BlocksCleared()
    assert replay([first, snapshot]) == replay([KVEvents(1, snapshot.events)]) == {name(1), name(2), name(3)}


def test_events_are_bounded_in_size() -> None:
    count = 2 * MAX_HASHES + 5
    pool = BlockPool(count)
    fill(pool, *range(count))
    pool.announce_all()
    for message in (pool.events.take(),):
        assert message is not None
        sizes = [len(event.block_hashes) for event in message.events if isinstance(event, BlocksStored)]
        assert sizes == [MAX_HASHES, MAX_HASHES, 5]


def test_events_add_up_to_the_prefix_cache() -> None:
    rng = random.Random(7)
    pool = BlockPool(20)
    taken = []
    for step in range(500):
        values = [rng.randrange(4) * 100 + depth for depth in range(rng.randrange(1, 8))]
        cached = pool.match_prefix(name(value) for value in values)
        pool.share(cached)
        table = cached + pool.allocate(len(values) - len(cached))
        for index in range(len(cached), len(values)):
            pool.register(table[index], name(values[index]))
        pool.free(table)
        if step % 97 == 0:
            pool.announce_all()
        if step % 3 == 0:
            taken.append(pool.events.take())
    taken.append(pool.events.take())
    assert replay(taken) == set(pool._block_of_hash)
