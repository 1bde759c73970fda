"""Which shared prefixes of a batch are attended to once: found in the block tables, chosen by a cost model.

Owns the tree of prefix groups and the choice; ``cascade_attention`` runs what was chosen. Needed again only when a
request joins or leaves the batch: a group stays valid while its members only grow. Nothing else than equal block ids
says that a prefix is shared.

    block tables --find_groups--> tree: (members, blocks begin..end), children begin where the parent ends
    tree --choose_groups(cost)--> SharedRanges: tokens that their members read once; a member's ranges join up from 0

The choice is exact for the model: each node is either a level of its own, or leaves its blocks to the levels below it
(which read them once each), or to the members themselves (flat).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class PrefixGroup:
    """Requests whose block tables agree on blocks begin .. end."""

    members: NDArray[np.int64]
    begin_block: int
    end_block: int
    children: list[PrefixGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SharedRange:
    """One multi-query attention: ``members`` all attend to tokens begin .. end of the first member's blocks."""

    members: NDArray[np.int64]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeCost:
    """The device's speeds, as the kernels here reach them, and the layer's shape. Defaults: one H200, bf16."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_element_bytes: int = 2
    flat_bytes_per_us: float = 6.5e6
    """Of decode attention whose requests share blocks: the cache serves part of it."""
    stream_bytes_per_us: float = 4.1e6
    shared_flops_per_us: float = 4.5e8
    tile_rows: int = 128
    """Rows (requests x query heads of a KV head) of one program: fewer cost the same."""
    launch_us: float = 6.0
    """The added launch with its ramp-up; paid once a layer however many ranges there are."""
    min_range_us: float = 1.0
    """What a range must save to be worth its partials' bookkeeping."""

    @property
    def _token_bytes(self) -> float:
        return 2 * self.num_kv_heads * self.head_dim * self.kv_element_bytes

    def flat_us(self, members: int, tokens: int) -> float:
        """Every member reads the tokens itself."""
        return members * tokens * self._token_bytes / self.flat_bytes_per_us

    def shared_us(self, members: int, tokens: int) -> float:
        """The members read them once, and their partial results (written and read, about two a range) are merged."""
        group = self.num_heads // self.num_kv_heads
        rows = -(-members * group // self.tile_rows) * self.tile_rows
        flops = 4.0 * rows * self.num_kv_heads * self.head_dim * tokens
        partial_bytes = 2 * 2 * members * self.num_heads * self.head_dim * 4
        stream = max(flops / self.shared_flops_per_us, tokens * self._token_bytes / self.stream_bytes_per_us)
        return stream + partial_bytes / self.stream_bytes_per_us + self.min_range_us


def find_groups(block_table: NDArray[np.int32], seq_lens: NDArray[np.int32], block_size: int) -> list[PrefixGroup]:
    """The forest of shared prefixes of the batch; only blocks that are full for every member count."""
    full_blocks = seq_lens.astype(np.int64) // block_size
    return _split(block_table, full_blocks, np.arange(len(seq_lens)), 0)


def _split(
    table: NDArray[np.int32], full_blocks: NDArray[np.int64], members: NDArray[np.int64], column: int
) -> list[PrefixGroup]:
    members = members[full_blocks[members] > column]
    if len(members) < 2:
        return []
    ids = table[members, column]
    order = np.argsort(ids, kind="stable")
    groups = []
    for bucket in np.split(members[order], np.flatnonzero(np.diff(ids[order])) + 1):
        if len(bucket) < 2:
            continue
        limit = int(full_blocks[bucket].min())
        agree = (table[bucket, column:limit] == table[bucket[0], column:limit]).all(0)
        end = limit if agree.all() else column + int(np.argmin(agree))
        groups.append(PrefixGroup(bucket, column, end, _split(table, full_blocks, bucket, end)))
    return groups


def choose_groups(groups: list[PrefixGroup], block_size: int, cost: CascadeCost) -> list[SharedRange]:
    """The ranges that save most against flat attention, or none when all they save does not pay for the launch."""
    saved = 0.0
    ranges: list[SharedRange] = []
    for group in groups:
        gain, chosen = _best(group, group.begin_block, block_size, cost)
        saved += gain
        ranges += chosen
    return ranges if saved > cost.launch_us else []


def _best(group: PrefixGroup, begin: int, block_size: int, cost: CascadeCost) -> tuple[float, list[SharedRange]]:
    """Most microseconds that ``group`` and those below it can save when its ranges must begin at block ``begin``."""
    tokens = (group.end_block - begin) * block_size
    members = len(group.members)
    own_gain = cost.flat_us(members, tokens) - cost.shared_us(members, tokens)
    own = [SharedRange(group.members, begin * block_size, group.end_block * block_size)]
    passed_gain, passed = 0.0, list[SharedRange]()
    for child in group.children:
        gain, chosen = _best(child, group.end_block, block_size, cost)
        own_gain += gain
        own += chosen
        gain, chosen = _best(child, begin, block_size, cost)
        passed_gain += gain
        passed += chosen
    if max(own_gain, passed_gain) <= 0:
        return 0.0, []
    return (own_gain, own) if own_gain >= passed_gain else (passed_gain, passed)
