"""The prefix index on plain data: what batches do to it in any order, what it answers, what guesses are worth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from registry.kv_events import Batch, Cleared, Event, Removed, Stored, join
from router.prefix_index import GUESS_TTL_S, Outcome, PrefixIndex


def name(value: int) -> bytes:
    return value.to_bytes(16, "little")


CHAIN = [name(value) for value in range(1, 9)]


def stored(*hashes: bytes) -> Stored:
    return Stored(join(hashes))


def removed(*hashes: bytes) -> Removed:
    return Removed(join(hashes))


def first(*events: Event, incarnation: int = 1) -> Batch:
    return Batch(incarnation, 1, [Cleared(), *events])


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def index_of(**chains: list[bytes]) -> PrefixIndex:
    index = PrefixIndex(Clock())
    for worker_id, hashes in chains.items():
        index.meet(worker_id, 1)
        index.apply(worker_id, first(stored(*hashes)) if hashes else first())
    return index


def test_each_worker_has_the_longest_beginning_that_it_owns() -> None:
    index = index_of(a=CHAIN[:5], b=CHAIN[:2], c=CHAIN[1:], d=[])
    assert index.match(CHAIN) == {"a": 5, "b": 2}
    assert index.match(CHAIN[:3]) == {"a": 3, "b": 2}
    assert index.match([]) == {}


def test_a_hole_ends_the_prefix() -> None:
    index = index_of(a=CHAIN)
    index.apply("a", Batch(1, 3, [removed(CHAIN[3])]))
    assert index.match(CHAIN) == {"a": 3}


def test_workers_with_other_block_sizes_share_the_unit() -> None:
    index = PrefixIndex(Clock())
    for worker_id, stride in (("small", 1), ("double", 2), ("large", 4)):
        index.meet(worker_id, stride)
        index.apply(worker_id, first(stored(*CHAIN[stride - 1 :: stride])))
    assert index.match(CHAIN) == {"small": 8, "double": 8, "large": 8}
    assert index.match(CHAIN[:7]) == {"small": 7, "double": 6, "large": 4}
    assert index.match(CHAIN[:1]) == {"small": 1}
    index.guess([name(100 + i) for i in range(8)], 0, "large", 4)
    assert index.match([name(100 + i) for i in range(8)]) == {"large": 8}


def test_a_repeated_or_late_batch_changes_nothing() -> None:
    index = index_of(a=CHAIN[:1])
    later = Batch(1, 3, [stored(CHAIN[1]), removed(CHAIN[0])])
    assert index.apply("a", later) is Outcome.APPLIED
    before = index.blocks_of("a")
    assert index.apply("a", later) is Outcome.KNOWN
    assert index.apply("a", first(stored(CHAIN[0]))) is Outcome.KNOWN
    assert index.blocks_of("a") == before == {CHAIN[1]}
    assert index.position("a") == (1, 4)


def test_of_an_overlapping_batch_only_the_new_part_counts() -> None:
    index = index_of(a=CHAIN[:1])
    index.apply("a", Batch(1, 3, [stored(CHAIN[1])]))
    assert index.apply("a", Batch(1, 2, [stored(CHAIN[0]), removed(CHAIN[1]), stored(CHAIN[2])])) is Outcome.APPLIED
    assert index.blocks_of("a") == set(CHAIN[:3])


def test_a_gap_is_told_and_a_batch_that_begins_anew_closes_it() -> None:
    index = index_of(a=CHAIN[:2])
    assert index.apply("a", Batch(1, 9, [stored(CHAIN[4])])) is Outcome.GAP
    assert index.blocks_of("a") == set(CHAIN[:2])
    assert index.apply("a", Batch(1, 20, [Cleared(), stored(CHAIN[5])])) is Outcome.APPLIED
    assert index.blocks_of("a") == {CHAIN[5]}


def test_all_blocks_cleared_in_the_middle_of_a_batch() -> None:
    index = index_of(a=CHAIN[:2], b=CHAIN[:1])
    index.apply("a", Batch(1, 3, [stored(CHAIN[2]), Cleared(), stored(CHAIN[7])]))
    assert index.blocks_of("a") == {CHAIN[7]}
    assert index.match(CHAIN) == {"b": 1}


def test_a_block_that_is_missing_does_not_stop_the_rest_of_a_delete_batch() -> None:
    index = index_of(a=CHAIN)
    index.apply("a", Batch(1, 3, [removed(CHAIN[7], name(99), CHAIN[6]), removed(name(98), CHAIN[5])]))
    assert index.blocks_of("a") == set(CHAIN[:5])


def test_a_restarted_engine_that_counts_from_one_again_owns_nothing_of_before() -> None:
    index = index_of(a=CHAIN)
    index.apply("a", Batch(1, 3, [stored(name(50 + i)) for i in range(100)]))
    assert index.apply("a", Batch(2, 1, [Cleared(), stored(CHAIN[0])])) is Outcome.APPLIED
    assert index.blocks_of("a") == {CHAIN[0]}
    assert index.incarnation("a") == 2
    assert index.apply("a", Batch(1, 103, [stored(CHAIN[1])])) is Outcome.STALE
    assert index.match(CHAIN) == {"a": 1}


def test_a_new_incarnation_whose_beginning_was_lost_still_ends_the_old_one() -> None:
    index = index_of(a=CHAIN)
    assert index.apply("a", Batch(2, 5, [stored(CHAIN[0])])) is Outcome.GAP
    assert index.match(CHAIN) == {}
    assert index.apply("a", Batch(2, 6, [stored(CHAIN[0])])) is Outcome.GAP


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    index = index_of(a=CHAIN, b=CHAIN[:3])
    index.forget("a")
    assert index.match(CHAIN) == {"b": 3}
    while index.sweep(2):
        index.check_invariants()
    assert index.num_blocks == index.num_entries == 3
    index.forget("b")
    index.forget("b")
    index.sweep()
    assert index.num_blocks == 0
    index.check_invariants()


def test_a_slot_is_not_given_away_before_it_is_swept_and_guesses_about_it_are_over() -> None:
    clock = Clock()
    index = PrefixIndex(clock)
    index.meet("a", 1)
    index.apply("a", first(stored(*CHAIN)))
    index.guess(CHAIN, 0, "a", 1)
    index.forget("a")
    index.meet("b", 1)
    assert index.match(CHAIN) == {}
    index.sweep()
    index.meet("c", 1)
    assert index.match(CHAIN) == {}
    clock.now_s += 2 * GUESS_TTL_S
    index.meet("d", 1)
    assert index.match(CHAIN) == {}
    index.check_invariants()


def test_a_guess_counts_like_ownership_and_is_forgotten_by_itself() -> None:
    clock = Clock()
    index = PrefixIndex(clock)
    index.meet("a", 1)
    index.meet("b", 1)
    index.apply("a", first(stored(*CHAIN[:2])))
    index.match(CHAIN)
    index.guess(CHAIN[:6], 2, "a", 1)
    assert index.match(CHAIN) == {"a": 6}
    clock.now_s += 0.9 * GUESS_TTL_S
    index.guess(CHAIN, 0, "b", 1)
    assert index.match(CHAIN) == {"a": 6, "b": 8}
    clock.now_s += GUESS_TTL_S
    assert index.match(CHAIN)["b"] == 8
    clock.now_s += 2 * GUESS_TTL_S
    assert index.match(CHAIN) == {"a": 2}


def test_guesses_outlive_the_first_words_of_a_worker_and_not_a_new_incarnation() -> None:
    index = PrefixIndex(Clock())
    index.guess(CHAIN, 0, "a", 1)  # nobody has introduced it
    assert index.match(CHAIN) == {"a": 8}
    assert not index.meet("a", 1)
    index.begin("a", 1, 0)  # an empty snapshot
    assert index.match(CHAIN) == {"a": 8}
    index.apply("a", first(stored(*CHAIN[:2])))
    assert index.match(CHAIN) == {"a": 8}
    index.begin("a", 1, 2)
    index.add("a", CHAIN[:2])
    assert index.match(CHAIN) == {"a": 2}  # what it had is replaced; a guess is not worth the search for it
    index.guess(CHAIN, 0, "a", 1)
    index.apply("a", first(incarnation=2))
    assert index.match(CHAIN) == {}
    index.check_invariants()


def test_a_thousand_owners_of_one_prefix() -> None:
    index = index_of(**{f"w{i}": CHAIN[: 1 + i % 8] for i in range(1000)})
    everybody = {f"w{i}": 1 + i % 8 for i in range(1000)}
    assert index.match(CHAIN) == everybody
    assert index.num_blocks == 8
    named = index.match(CHAIN[:1])  # all have the same: some are named, others the next time
    assert 32 <= len(named) <= 128
    assert named.items() <= dict.fromkeys(everybody, 1).items()
    assert named != index.match(CHAIN[:1])
    for i in range(0, 1000, 2):
        index.forget(f"w{i}")
    index.sweep(10_000)
    index.check_invariants()
    assert len(index.match(CHAIN)) == 500


events = st.lists(
    st.one_of(
        st.lists(st.sampled_from(CHAIN), min_size=1, max_size=3).map(lambda hashes: stored(*hashes)),
        st.lists(st.sampled_from(CHAIN), min_size=1, max_size=3).map(lambda hashes: removed(*hashes)),
        st.just(Cleared()),
    ),
    min_size=1,
    max_size=12,
)


@given(events, st.data())
def test_in_whatever_cuts_and_repeats_a_stream_comes_it_ends_the_same(
    history: list[Event], data: st.DataObject
) -> None:
    expected: set[bytes] = set()
    for event in history:
        match event:
            case Stored(hashes=hashes):
                expected |= {hashes[i : i + 16] for i in range(0, len(hashes), 16)}
            case Removed(hashes=hashes):
                expected -= {hashes[i : i + 16] for i in range(0, len(hashes), 16)}
            case Cleared():
                expected = set()
    index = index_of(a=[])
    seq, end = 2, 2 + len(history)
    while index.position("a")[1] < end - 1:
        start = data.draw(st.integers(2, index.position("a")[1] + 1))
        stop = data.draw(st.integers(start + 1, end)) if start < end else end
        index.apply("a", Batch(1, start, history[start - 2 : stop - 2]))
        seq += 1
        if seq > 60:
            index.apply("a", Batch(1, 2, history))
    assert index.blocks_of("a") == expected
    index.sweep()
    index.check_invariants()
