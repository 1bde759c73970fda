"""Finding shared prefixes in block tables and choosing among them, against brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cascade_plan import CascadeCost, PrefixGroup, choose_groups, find_groups

BLOCK = 16


def _cost(**changes: float) -> CascadeCost:
    return CascadeCost(num_heads=32, num_kv_heads=8, head_dim=128, **changes)  # type: ignore[arg-type]


def _flatten(groups: list[PrefixGroup]) -> list[PrefixGroup]:
    return [g for group in groups for g in (group, *_flatten(group.children))]


@st.composite
def _batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tables over few block ids with forced common starts, and lengths."""
    requests = draw(st.integers(1, 7))
    width = 6
    table = np.array(
        draw(
            st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), min_size=requests, max_size=requests)
        )
    )
    # A block id means one content at one place: make ids unique a column, dependent on what came before.
    for column in range(1, width):
        table[:, column] += 3 * table[:, column - 1] + 10
    lengths = np.array(draw(st.lists(st.integers(1, width * BLOCK), min_size=requests, max_size=requests)), np.int32)
    return table.astype(np.int32), lengths


@given(_batches())
@settings(max_examples=200, deadline=None)
def test_groups_are_exactly_the_pairs_common_blocks(batch: tuple[np.ndarray, np.ndarray]) -> None:
    table, lengths = batch
    groups = _flatten(find_groups(table, lengths, BLOCK))
    full = lengths // BLOCK
    for a in range(len(lengths)):
        for b in range(a):
            common = 0
            while common < min(full[a], full[b]) and table[a, common] == table[b, common]:
                common += 1
            covered = [g for g in groups if a in g.members and b in g.members]
            assert sum(g.end_block - g.begin_block for g in covered) == common
            assert all(x.end_block == y.begin_block for x, y in pairwise(covered))


@given(_batches(), st.floats(0, 3), st.floats(0.01, 10))
@settings(max_examples=200, deadline=None)
def test_chosen_ranges_join_up_from_zero_and_never_cost_more(
    batch: tuple[np.ndarray, np.ndarray], launch_us: float, speed: float
) -> None:
    table, lengths = batch
    cost = _cost(
        launch_us=launch_us,
        min_range_us=0.0,
        flat_bytes_per_us=1e4,
        stream_bytes_per_us=1e4,
        shared_flops_per_us=speed * 1e6,
        tile_rows=4,
    )
    ranges = choose_groups(find_groups(table, lengths, BLOCK), BLOCK, cost)
    reached = np.zeros(len(lengths), np.int64)
    saved = 0.0
    for shared in sorted(ranges, key=lambda r: r.begin):
        assert (reached[shared.members] == shared.begin).all()
        reached[shared.members] = shared.end
        first = table[shared.members[0], : shared.end // BLOCK]
        assert (table[shared.members, : shared.end // BLOCK] == first).all()
        tokens = shared.end - shared.begin
        saved += cost.flat_us(len(shared.members), tokens) - cost.shared_us(len(shared.members), tokens)
    assert (reached <= lengths).all()
    assert not ranges or saved > launch_us


def test_the_cost_model_decides() -> None:
    """A long prefix of many requests pays; a short one of few does not."""

    def batch(requests: int, shared: int, own: int) -> tuple[np.ndarray, np.ndarray]:
        private = shared + np.arange(requests * own).reshape(requests, own)
        table = np.concatenate([np.tile(np.arange(shared), (requests, 1)), private], 1).astype(np.int32)
        return table, np.full(requests, (shared + own) * BLOCK, np.int32)

    for requests, shared, own, expected in ((128, 512, 4, 1), (4, 4, 64, 0), (2, 1, 1, 0), (256, 2048, 8, 1)):
        table, lengths = batch(requests, shared, own)
        assert len(choose_groups(find_groups(table, lengths, BLOCK), BLOCK, _cost())) == expected
