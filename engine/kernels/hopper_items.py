# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Work items of the Hopper attention kernel: what they are, and how the producer hands them to both consumers.

Owns the order of the items and the ring between the warps of one program; not what is computed for an item.

    producer:  w -> ``decode_item`` -> ``hand_out`` -> ring of two entries -> ``receive`` :consumers

An entry is ``FIELDS`` numbers. The producer is an item ahead, so decoding (a search in ``cu_ptr``) costs the consumers
no time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ENTRIES = gl.constexpr(2)
FIELDS = gl.constexpr(9)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def decode_item(
    w, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
    K: gl.constexpr, G: gl.constexpr, N: gl.constexpr, BLOCK_B: gl.constexpr, SHARED: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Work item w: (alive, owner of blocks, entry).

    Entry: w, head, first row, end of rows, begin and end of KV, chunk, first token, history.
    """
    head = w % K
    if SHARED:
        item = items_ptr + w // K * 8
        first = gl.load(item)
        limit = first + gl.load(item + 1)
        owner = gl.load(item + 2)
        begin = gl.load(item + 3)
        end = gl.load(item + 4)
        chunk = gl.load(item + 5)
        source = chunk * 0
        history = chunk * 0
        alive = end > begin
    else:
        # Request by request and head by head, so that what is read at a time stays in the L2; of a head its last tile,
        # which attends to most, comes first.
        TOKENS: gl.constexpr = 128 // G
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        tile = w // K
        b = gl.arange(0, BLOCK_B, layout=LAYOUT)
        q_lens = gl.load(cu_ptr + b + 1, mask=b < B, other=0) - gl.load(cu_ptr + b, mask=b < B, other=0)
        tiles_of = gl.where(b < B, (q_lens + TOKENS - 1) // TOKENS, 0)
        upto = gl.associative_scan(tiles_of, 0, _plus)
        owner = gl.sum((upto <= tile).to(gl.int32), 0)
        alive = owner < B
        owner = gl.minimum(owner, B - 1)
        mine = gl.maximum(gl.sum(gl.where(b == owner, tiles_of, 0), 0), 1)
        at = w - gl.sum(gl.where(b == owner, upto - tiles_of, 0), 0) * K
        head = at // mine
        first = (mine - 1 - at % mine) * TOKENS
        source = gl.load(cu_ptr + owner)
        limit = gl.load(cu_ptr + owner + 1) - source
        seq_len = gl.load(seq_lens_ptr + owner)
        history = seq_len - limit
        end = gl.minimum(history + first + TOKENS, seq_len)
        begin = owner * 0
        if WINDOW:
            begin = gl.maximum(history + first - window + 1, 0) // N * N
        chunk = owner * 0
    return alive, owner, (w, head, first, limit, begin, end, chunk, source, history)


@gluon.jit
def hand_out(entry, turn, ring, ring_full, ring_empty):
    """The producer's one warp: this program's turn-th item. An entry past the last item ends the consumers."""
    SLOT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(ring_empty.index(turn % ENTRIES), ((turn // ENTRIES) & 1) ^ 1)
    for i in gl.static_range(FIELDS):
        ring.index(turn % ENTRIES * FIELDS + i).store(gl.full([1], 0, gl.int32, SLOT) + entry[i])
    mbarrier.arrive(ring_full.index(turn % ENTRIES), count=1)


@gluon.jit
def receive(turn, ring, ring_full, ring_empty):
    """A consumer's four warps: the turn-th item of this program."""
    SLOT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(ring_full.index(turn % ENTRIES), (turn // ENTRIES) & 1)
    entry = ()
    for i in gl.static_range(FIELDS):
        field = gl.max(ring.index(turn % ENTRIES * FIELDS + i).load(SLOT), 0)
        entry = entry + (field,)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.arrive(ring_empty.index(turn % ENTRIES), count=1)
    return entry
