# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention of many query rows on Hopper: one producer warp streams K and V through TMA, two warpgroups compute.

Owns the matrix-bound attention of sm_90: chunked prefill and the shared ranges of a cascade, written in Gluon because
the overlap must be said explicitly. ``hopper_launch`` launches it, ``hopper_items`` says what an item is;
``prefill_attention`` and ``cascade_attention`` hold portable kernels of the same meaning for everywhere else.

    program:      one an SM; work items (tile of 128 rows, KV head), each to who asks next (``tickets``)
    producer:     item -> ring; block ids -> TMA boxes [S, 64] of K and V -> full barriers    (waits on empty barriers)
    consumer w:   rows 64w .. 64w+63:  S = Q K(j+1)', O += P V(j)  in flight together -> softmax -> next

Specialised warps and both overlaps (between warpgroups, and inside one) follow FlashAttention-3 (Shah et al., 2024).

The loop looks for no maximum. Rows keep the one of their first tile, m, and a tile's weights are exp2(score - m); only
where a sum of them passes ``_LIMIT`` is the tile's product done again, with new maxima, and what was summed up before
rescaled. Weights up to _LIMIT (2^15) fit into either 16-bit type with the relative precision of weights below 1, and
all sums are float32. An assumed maximum with recomputation where it fails is FlashDecoding++'s (Hong et al., 2023),
leaving out rescaling that is not needed FlashAttention-4's.

Layout: KV ``[N, 2, K, S, D]`` contiguous, seen as rows of D; a head of a block is S consecutive rows, one TMA box for
64 columns (128-byte swizzle). Rows of V past the last token are cleared in shared memory, so a block's unused slots
may hold anything.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels.hopper_items import ENTRIES, FIELDS, decode_item, hand_out, receive

# Newer versions of Gluon renamed it.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_MASKED = gl.constexpr(-1.0e30)
_FLOOR = gl.constexpr(-1.0e20)  # see attention_core
_LIMIT = gl.constexpr(32768.0)


@gluon.jit
def _produce(
    desc, table_ptr, stride_table, total, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, tickets_ptr,
    K: gl.constexpr, G: gl.constexpr, S: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    BLOCK_B: gl.constexpr, SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    PER: gl.constexpr = N // S
    BYTES: gl.constexpr = N * D * 2
    done = total * 0
    turn = total * 0
    w = gl.program_id(0)
    while w < total:
        following = gl.atomic_add(tickets_ptr, 1, sem="relaxed") + gl.num_programs(0)
        alive, owner, entry = decode_item(
            w, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr, K, G, N, BLOCK_B, SHARED, WINDOW
        )
        if alive:
            hand_out(entry, turn, ring, ring_full, ring_empty)
            turn += 1
            head, begin, end = entry[1], entry[4], entry[5]
            table = table_ptr + owner.to(gl.int64) * stride_table
            tiles = (end - begin + N - 1) // N
            for j in range(tiles):
                stage = (done + j) % STAGES
                free = (((done + j) // STAGES) & 1) ^ 1
                # All ids first: their loads overlap each other and the wait.
                blocks = ()
                for i in gl.static_range(PER):
                    at = gl.minimum(begin // S + j * PER + i, (end - 1) // S)
                    blocks = blocks + (gl.load(table + at),)  # type: ignore[assignment]  # noqa: RUF005
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_full.index(stage), BYTES)
                for i in gl.static_range(PER):
                    for half in gl.static_range(D // 64):
                        to = k_smem.index(stage).slice(i * S, S).slice(half * 64, 64, 1)
                        row = (blocks[i] * (2 * K) + head) * S
                        _load(desc, [row, half * 64], k_full.index(stage), to)
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_full.index(stage), BYTES)
                for i in gl.static_range(PER):
                    for half in gl.static_range(D // 64):
                        to = v_smem.index(stage).slice(i * S, S).slice(half * 64, 64, 1)
                        row = (blocks[i] * (2 * K) + K + head) * S
                        _load(desc, [row, half * 64], v_full.index(stage), to)
            done += tiles
        w = following
    hand_out((w, w, w, w, w, w, w, w, w), turn, ring, ring_full, ring_empty)
    # The last program to finish leaves the tickets as it found them, for the next launch.
    if gl.atomic_add(tickets_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(tickets_ptr, 0)
        gl.store(tickets_ptr + 1, 0)


@gluon.jit
def _clear_rows(tile, valid, cleared, turn, WG: gl.constexpr, N: gl.constexpr):
    """Zero the rows of a V tile from ``valid`` on: each warpgroup its half, then both wait for the other's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    half = tile.slice(WG * (N // 2), N // 2)
    x = half.load(LAYOUT)
    row = WG * (N // 2) + gl.arange(0, N // 2, layout=gl.SliceLayout(1, LAYOUT))
    half.store(gl.where((row < valid)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    mbarrier.arrive(cleared, count=1)
    mbarrier.wait(cleared, turn & 1)


@gluon.jit
def _load_q(
    q_ptr, members_ptr, entry, total, stride_qt, stride_qh,
    WG: gl.constexpr, G: gl.constexpr, D: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """An item's 64 rows of this warpgroup, into registers; of an entry that is past the last item, zeros."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    w, head, first, limit, _begin, _end, _chunk, source, _history = entry
    r = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    logical = first + r // G
    valid = (logical < limit) & (w < total)
    token = gl.load(members_ptr + logical, mask=valid, other=0) if SHARED else source + logical
    rows = token.to(gl.int64) * stride_qt + (head * G + r % G) * stride_qh
    column = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(q_ptr + rows[:, None] + column[None, :], mask=valid[:, None], other=0.0)


@gluon.jit
def _hide(s, at, position, window, WINDOW: gl.constexpr):
    """Mask the scores of tokens that a row does not attend to."""
    seen = at[None, :] <= position[:, None]
    if WINDOW:
        seen = seen & (at[None, :] > position[:, None] - window)
    return gl.where(seen, s, _MASKED)


@gluon.jit
def _partial_sums(e):
    """Sums of [64, N] over columns that lie 8 apart: all of one sum is one thread's, so nothing is exchanged."""
    return gl.sum(e.reshape([e.shape[0], e.shape[1] // 8, 8]), 1)


@gluon.jit
def _attend(
    q, q_ptr, members_ptr, out_ptr, lse_ptr, entry, total, turn, done, clears, B, scale_log2, window,
    stride_qt, stride_qh, stride_ot, stride_oh, heads,
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, cleared,
    WG: gl.constexpr, G: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """One item, whose rows are q; the next one and its rows."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    _w, head, first, limit, begin, end, chunk, source, history = entry
    tiles = (end - begin + N - 1) // N
    q_smem.store(q)
    fence_async_shared()

    row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    position = gl.zeros_like(row) + (end - 1)
    edge = (end - begin) // N  # the first tile that needs a mask
    filled = end  # where V ends
    if not SHARED:
        position = history + first + row // G
        edge = gl.minimum((history + first + (WG * 64) // G + 1 - begin) // N, edge)
        filled = history + limit
    n = begin + gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))

    zero_s = gl.zeros([64, N], gl.float32, S_LAYOUT)
    o = gl.zeros([64, D], gl.float32, O_LAYOUT)
    here = done % STAGES
    mbarrier.wait(k_full.index(here), (done // STAGES) & 1)
    s = warpgroup_mma(q_smem, k_smem.index(here).permute((1, 0)), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(here), count=1)
    if WINDOW or edge <= 0:
        s = _hide(s, n, position, window, WINDOW)
    m = gl.maximum(gl.max(s, 1) * scale_log2, _FLOOR)
    e = gl.exp2(s * scale_log2 - m[:, None])
    sums = _partial_sums(e)
    p = gl.convert_layout(e.to(dtype), P_LAYOUT)
    for j in range(1, tiles):
        stage = (done + j) % STAGES
        before = (done + j - 1) % STAGES
        mbarrier.wait(k_full.index(stage), ((done + j) // STAGES) & 1)
        s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((done + j - 1) // STAGES) & 1)
        t = warpgroup_mma(p, v_smem.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        if WINDOW or j >= edge:
            s = _hide(s, j * N + n, position, window, WINDOW)
        e = gl.exp2(s * scale_log2 - m[:, None])
        more = _partial_sums(e)
        passed_limit = gl.max((more > _LIMIT).to(gl.int32).reshape([more.numel]), 0)
        # Passed before; here it ends a basic block, so that ptxas cannot move the wait below above the softmax.
        mbarrier.wait(v_full.index(before), ((done + j - 1) // STAGES) & 1)
        o, p, e = warpgroup_mma_wait(0, [t, p, e])
        mbarrier.arrive(v_empty.index(before), count=1)
        if passed_limit > 0:
            s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            if WINDOW or j >= edge:
                s = _hide(s, j * N + n, position, window, WINDOW)
            higher = gl.maximum(m, gl.max(s, 1) * scale_log2)
            alpha = gl.exp2(m - higher)
            m = higher
            e = gl.exp2(s * scale_log2 - m[:, None])
            more = _partial_sums(e)
            sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.arrive(k_empty.index(stage), count=1)
        sums += more
        p = gl.convert_layout(e.to(dtype), P_LAYOUT)  # only now: before, P V still read the last one's registers

    # The next item's rows are on their way while this one ends.
    following = receive(turn + 1, ring, ring_full, ring_empty)
    q = _load_q(q_ptr, members_ptr, following, total, stride_qt, stride_qh, WG, G, D, SHARED)
    last = (done + tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((done + tiles - 1) // STAGES) & 1)
    if begin + tiles * N > filled:
        _clear_rows(v_smem.index(last), end - begin - (tiles - 1) * N, cleared, clears, WG, N)
        clears += 1
    o = warpgroup_mma(p, v_smem.index(last), o, is_async=True)
    o, p = warpgroup_mma_wait(0, [o, p])
    mbarrier.arrive(v_empty.index(last), count=1)

    sum_ = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, S_LAYOUT))
    y = (o * gl.convert_layout(1.0 / sum_, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(out_ptr.dtype.element_ty)
    if SHARED:
        r = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
        logical = first + r // G
        valid = logical < limit
        token = gl.load(members_ptr + logical, mask=valid, other=0)
        index = (chunk.to(gl.int64) * B + token) * heads + head * G + r % G
        lse = gl.convert_layout(m + gl.log2(sum_), gl.SliceLayout(1, O_LAYOUT))
        gl.store(lse_ptr + index, lse, mask=valid)
        d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
        gl.store(out_ptr + (index * D)[:, None] + d[None, :], y, mask=valid[:, None])
    else:
        # By way of shared memory, where Q has been read: a thread's columns lie side by side then, 16 bytes of them.
        q_smem.store(y)
        y = q_smem.load(ROWS)
        r = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
        logical = first + r // G
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
        at = (source + logical).to(gl.int64) * stride_ot + (head * G + r % G) * stride_oh
        gl.store(out_ptr + at[:, None] + d[None, :], y, mask=(logical < limit)[:, None])
    return following, q, tiles, clears


@gluon.jit
def _consume(
    q_ptr, members_ptr, out_ptr, lse_ptr, total, B, scale_log2, window,
    stride_qt, stride_qh, stride_ot, stride_oh, heads,
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, cleared,
    WG: gl.constexpr, G: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    turn = total * 0
    done = total * 0  # tiles
    clears = total * 0
    entry = receive(turn, ring, ring_full, ring_empty)
    q = _load_q(q_ptr, members_ptr, entry, total, stride_qt, stride_qh, WG, G, D, SHARED)
    while entry[0] < total:
        entry, q, tiles, clears = _attend(
            q, q_ptr, members_ptr, out_ptr, lse_ptr, entry, total, turn, done, clears,
            B, scale_log2, window,
            stride_qt, stride_qh, stride_ot, stride_oh, heads,
            q_smem.index(WG), k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty,
            cleared, WG, G, N, STAGES, D, SHARED, WINDOW,
        )  # fmt: skip
        done += tiles
        turn += 1


@gluon.jit(
    do_not_specialize=["B", "max_tiles", "window", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "cu_ptr", "seq_lens_ptr", "tickets_ptr"],
)
def hopper_kernel(
    q_ptr, desc, table_ptr, cu_ptr, seq_lens_ptr, items_ptr, num_items_ptr, members_ptr, tickets_ptr, out_ptr, lse_ptr,
    B, max_tiles, heads, scale_log2, window, stride_qt, stride_qh, stride_table, stride_ot, stride_oh,
    K: gl.constexpr, G: gl.constexpr, S: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    BLOCK_B: gl.constexpr, SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    total = max_tiles * K
    if SHARED:
        total = gl.load(num_items_ptr) * K
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SMEM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, D], SMEM)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, N, D], SMEM)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, N, D], SMEM)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    ring = gl.allocate_shared_memory(gl.int32, [ENTRIES * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_full = gl.allocate_shared_memory(gl.int64, [ENTRIES, 1], BAR)
    ring_empty = gl.allocate_shared_memory(gl.int64, [ENTRIES, 1], BAR)
    for i in gl.static_range(ENTRIES):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=2)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(cleared, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr, members_ptr, out_ptr, lse_ptr, total, B, scale_log2, window,
                    stride_qt, stride_qh, stride_ot, stride_oh, heads, q_smem,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, cleared,
                    FIRST, G, N, STAGES, D, SHARED, WINDOW,
                ),
            ),
            (
                _consume,
                (
                    q_ptr, members_ptr, out_ptr, lse_ptr, total, B, scale_log2, window,
                    stride_qt, stride_qh, stride_ot, stride_oh, heads, q_smem,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, cleared,
                    SECOND, G, N, STAGES, D, SHARED, WINDOW,
                ),
            ),
            (
                _produce,
                (
                    desc, table_ptr, stride_table, total, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, tickets_ptr,
                    K, G, S, N, STAGES, D, BLOCK_B, SHARED, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
