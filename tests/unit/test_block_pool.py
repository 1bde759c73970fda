from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool


def name(value: int) -> bytes:
    return value.to_bytes(16, "little")


def test_a_freed_published_block_is_found_again_and_an_unpublished_one_is_not() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.register(table[0], name(1))
    pool.register(table[1], name(2))
    pool.free(table)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 2, 0)
    assert pool.match_prefix([name(1), name(2), name(3)]) == table[:2]
    assert pool.match_prefix([name(2), name(3)]) == table[1:2]
    assert pool.match_prefix([name(3), name(1)]) == []


def test_empty_blocks_go_first_then_the_tail_of_the_oldest_chain() -> None:
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for value, block_id in enumerate(old + new):
        pool.register(block_id, name(value))
    pool.free(old)
    pool.free(new)
    empty = set(range(5)) - set(old) - set(new)
    assert pool.allocate(5) == [*empty, old[1], old[0], new[1], new[0]]
    assert pool.match_prefix([name(0)]) == []


def test_use_makes_a_cached_block_the_last_to_be_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, name(1))
    pool.register(second, name(2))
    pool.free([first])
    pool.free([second])
    pool.share([first])
    pool.free([first])
    assert pool.allocate(1) == [second]


def test_shared_blocks_stay_until_the_last_reference_is_gone() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.register(table[0], name(1))
    pool.share(table)
    pool.free(table)
    assert (pool.num_used, pool.num_unreferenced(table)) == (1, 0)
    pool.free(table)
    assert (pool.num_used, pool.num_unreferenced(table)) == (0, 1)


def test_a_second_copy_of_a_published_block_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, name(1))
    pool.register(second, name(1))
    assert pool.match_prefix([name(1)]) == [first]
    pool.free([first, second])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.check_invariants()


def test_misuse_is_an_error_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 of 2 available"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([0])
    with pytest.raises(ValueError, match="cannot be published"):
        pool.register(0, name(1))
    assert pool.num_free == 2
    pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """Against a model that keeps sets and searches them: content -> block, and who refers to what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []
        self.content: dict[int, int] = {}
        """Published block -> its name; forgotten when the block is handed out anew."""

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_available:
            with pytest.raises(ValueError, match="blocks wanted"):
                self.pool.allocate(count)
            return
        table = self.pool.allocate(count)
        assert len(set(table)) == count
        assert not set(table) & {block_id for other in self.tables for block_id in other}
        for block_id in table:
            self.content.pop(block_id, None)
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), value=st.integers(0, 4))
    def register(self, data: st.DataObject, value: int) -> None:
        block_id = data.draw(st.sampled_from([block_id for table in self.tables for block_id in table]))
        self.pool.register(block_id, name(value))
        if block_id not in self.content and value not in self.content.values():
            self.content[block_id] = value

    @rule(values=st.lists(st.integers(0, 4), max_size=4))
    def share(self, values: list[int]) -> None:
        expected = []
        for value in values:
            found = [block_id for block_id, content in self.content.items() if content == value]
            if not found:
                break
            expected += found
        matched = self.pool.match_prefix(map(name, values))
        assert matched == expected
        matched = list(dict.fromkeys(matched))
        self.pool.share(matched)
        self.tables.append(matched)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_invariants()
        references = Counter(block_id for table in self.tables for block_id in table)
        assert self.pool.num_used == len(references)
        assert self.pool.num_cached == len(set(self.content) - set(references))
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == 6


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
