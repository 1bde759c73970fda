# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention of many query rows on Hopper: one producer warp streams K and V through TMA, two warpgroups compute.

Owns the matrix-bound attention of sm_90: chunked prefill and the shared ranges of a cascade, written in Gluon because
the overlap must be said explicitly. ``hopper_launch`` launches it; ``prefill_attention`` and ``cascade_attention`` hold
portable kernels of the same meaning for everywhere else. Follows FlashAttention-3 (Shah et
al., 2024): warp specialisation, and inside a warpgroup the scores of tile j + 1 are in flight with P V of tile j.

    program:      one an SM; work items (tile of 128 rows, KV head), heaviest first, each to who asks next (``tickets``)
    producer:     item -> ring; block ids -> TMA boxes [S, 64] of K and V -> full barriers    (waits on empty barriers)
    consumer w:   rows 64w .. 64w+63:  S = Q K(j+1)', O += P V(j)  in flight together -> softmax -> next

The producer is an item ahead: its first K and V arrive while the last item ends.

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

# Newer versions of Gluon renamed it.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_MASKED = gl.constexpr(-1.0e30)
_FLOOR = gl.constexpr(-1.0e20)  # see attention_core


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _item(
    w, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
    K: gl.constexpr, G: gl.constexpr, N: gl.constexpr, BLOCK_B: gl.constexpr, SHARED: gl.constexpr,
    WINDOW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Work item w: (alive, head, first row, end of rows, owner of blocks, begin, end, chunk, first token, history)."""
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
        # Later tiles attend to more and come first.
        TOKENS: gl.constexpr = 128 // G
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        tile = max_tiles - 1 - w // K
        b = gl.arange(0, BLOCK_B, layout=LAYOUT)
        q_lens = gl.load(cu_ptr + b + 1, mask=b < B, other=0) - gl.load(cu_ptr + b, mask=b < B, other=0)
        tiles_of = gl.where(b < B, (q_lens + TOKENS - 1) // TOKENS, 0)
        upto = gl.associative_scan(tiles_of, 0, _plus)
        owner = gl.sum((upto <= tile).to(gl.int32), 0)
        alive = owner < B
        owner = gl.minimum(owner, B - 1)
        first = (tile - gl.sum(gl.where(b == owner, upto - tiles_of, 0), 0)) * TOKENS
        source = gl.load(cu_ptr + owner)
        limit = gl.load(cu_ptr + owner + 1) - source
        seq_len = gl.load(seq_lens_ptr + owner)
        history = seq_len - limit
        end = gl.minimum(history + first + TOKENS, seq_len)
        begin = owner * 0
        if WINDOW:
            begin = gl.maximum(history + first - window + 1, 0) // N * N
        chunk = owner * 0
    return alive, head, first, limit, owner, begin, end, chunk, source, history


@gluon.jit
def _hand_out(w, turn, ring, ring_full, ring_empty, WARPS: gl.constexpr):
    """Item w, this program's turn-th, to both consumers; one past the last item ends them."""
    SLOT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(ring_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    ring.index(turn % 2).store(gl.full([1], 0, gl.int32, SLOT) + w)
    mbarrier.arrive(ring_full.index(turn % 2), count=1)


@gluon.jit
def _receive(turn, ring, ring_full, ring_empty, WARPS: gl.constexpr):
    SLOT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(ring_full.index(turn % 2), (turn // 2) & 1)
    w = gl.max(ring.index(turn % 2).load(SLOT), 0)
    mbarrier.arrive(ring_empty.index(turn % 2), count=1)
    return w


@gluon.jit
def _produce(
    desc, table_ptr, stride_table, total, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty, tickets_ptr,
    K: gl.constexpr, G: gl.constexpr, S: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    BLOCK_B: gl.constexpr, SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    PER: gl.constexpr = N // S
    BYTES: gl.constexpr = N * D * 2
    WARPS: gl.constexpr = 1
    done = total * 0
    turn = total * 0
    w = gl.program_id(0)
    while w < total:
        _hand_out(w, turn, ring, ring_full, ring_empty, WARPS)
        following = gl.atomic_add(tickets_ptr, 1, sem="relaxed") + gl.num_programs(0)
        alive, head, _first, _limit, owner, begin, end, _chunk, _source, _history = _item(
            w, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr, K, G, N, BLOCK_B, SHARED, WINDOW, WARPS
        )
        if alive:
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
        turn += 1
    _hand_out(w, turn, ring, ring_full, ring_empty, WARPS)
    # The last program to finish leaves the tickets as it found them, for the next launch.
    if gl.atomic_add(tickets_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(tickets_ptr, 0)
        gl.store(tickets_ptr + 1, 0)


@gluon.jit
def _clear_rows(tile, valid, N: gl.constexpr):
    """Zero the rows of a V tile from ``valid`` on; both warpgroups may do it, they write the same bytes."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = tile.load(LAYOUT)
    row = gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    zero = gl.zeros_like(x)
    tile.store(gl.where((row < valid)[:, None], x, zero))
    fence_async_shared()


@gluon.jit
def _attend(
    q_ptr, members_ptr, out_ptr, lse_ptr, head, first, limit, source, history, begin, end, tiles, done, chunk_row,
    scale_log2, window,
    stride_qt, stride_qh, stride_ot, stride_oh, heads,
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    WG: gl.constexpr, G: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    # Q of this warpgroup: 64 rows to shared memory.
    r = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    logical = first + r // G
    valid = logical < limit
    token = gl.load(members_ptr + logical, mask=valid, other=0) if SHARED else source + logical
    rows = token.to(gl.int64) * stride_qt + (head * G + r % G) * stride_qh
    column = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
    q_smem.store(gl.load(q_ptr + rows[:, None] + column[None, :], mask=valid[:, None], other=0.0))
    fence_async_shared()

    row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    position = gl.zeros_like(row) + (end - 1)
    edge = (end - begin) // N  # the first tile that needs a mask
    if not SHARED:
        position = history + first + row // G
        edge = gl.minimum((history + first + (WG * 64) // G + 1 - begin) // N, edge)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))

    zero_s = gl.zeros([64, N], gl.float32, S_LAYOUT)
    o = gl.zeros([64, D], gl.float32, O_LAYOUT)
    here = done % STAGES
    mbarrier.wait(k_full.index(here), (done // STAGES) & 1)
    s = warpgroup_mma(q_smem, k_smem.index(here).permute((1, 0)), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(here), count=1)
    if WINDOW or edge <= 0:
        seen = (begin + n)[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & ((begin + n)[None, :] > position[:, None] - window)
        s = gl.where(seen, s, _MASKED)
    m = gl.maximum(gl.max(s, 1) * scale_log2, _FLOOR)
    e = gl.exp2(s * scale_log2 - m[:, None])
    total = gl.sum(e, 1)
    p = gl.convert_layout(e.to(dtype), P_LAYOUT)
    for j in range(1, tiles):
        stage = (done + j) % STAGES
        before = (done + j - 1) % STAGES
        mbarrier.wait(k_full.index(stage), ((done + j) // STAGES) & 1)
        s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((done + j - 1) // STAGES) & 1)
        t = warpgroup_mma(p, v_smem.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if WINDOW or j >= edge:
            at = begin + j * N + n
            seen = at[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            s = gl.where(seen, s, _MASKED)
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        e = gl.exp2(s * scale_log2 - m_new[:, None])
        alpha = gl.exp2(m - m_new)
        total = total * alpha + gl.sum(e, 1)
        m = m_new
        alpha_o = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p_next = gl.convert_layout(e.to(dtype), P_LAYOUT)
        # Passed before; here it ends a basic block, so that ptxas cannot move the wait below above the softmax.
        mbarrier.wait(v_full.index(before), ((done + j - 1) // STAGES) & 1)
        o, p, p_next = warpgroup_mma_wait(0, [t, p, p_next])
        mbarrier.arrive(v_empty.index(before), count=1)
        o = o * alpha_o
        p = p_next
    last = (done + tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((done + tiles - 1) // STAGES) & 1)
    rest = end - begin - (tiles - 1) * N
    if rest < N:
        _clear_rows(v_smem.index(last), rest, N)
    o = warpgroup_mma(p, v_smem.index(last), o, is_async=True)
    o, p = warpgroup_mma_wait(0, [o, p])
    mbarrier.arrive(v_empty.index(last), count=1)

    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    r = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    logical = first + r // G
    valid = logical < limit
    d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    if SHARED:
        token = gl.load(members_ptr + logical, mask=valid, other=0)
        index = (chunk_row + token) * heads + head * G + r % G
        lse = gl.convert_layout(m + gl.log2(total), gl.SliceLayout(1, O_LAYOUT))
        gl.store(lse_ptr + index, lse, mask=valid)
        target = out_ptr + (index * D)[:, None] + d[None, :]
    else:
        token = source + logical
        target = out_ptr + (token.to(gl.int64) * stride_ot + (head * G + r % G) * stride_oh)[:, None] + d[None, :]
    gl.store(target, (o * inverse).to(out_ptr.dtype.element_ty), mask=valid[:, None])


@gluon.jit
def _consume(
    q_ptr, members_ptr, out_ptr, lse_ptr, scale_log2, stride_qt, stride_qh, stride_ot, stride_oh, heads,
    total, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty,
    WG: gl.constexpr, K: gl.constexpr, G: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    BLOCK_B: gl.constexpr, SHARED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = 4
    done = total * 0
    turn = total * 0 + 1
    w = _receive(turn - 1, ring, ring_full, ring_empty, WARPS)
    while w < total:
        alive, head, first, limit, _owner, begin, end, chunk, source, history = _item(
            w, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr, K, G, N, BLOCK_B, SHARED, WINDOW, WARPS
        )
        if alive:
            tiles = (end - begin + N - 1) // N
            _attend(
                q_ptr, members_ptr, out_ptr, lse_ptr, head, first, limit, source, history, begin, end, tiles, done,
                chunk.to(gl.int64) * B, scale_log2, window, stride_qt, stride_qh, stride_ot, stride_oh, heads,
                q_smem.index(WG), k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                WG, G, N, STAGES, D, SHARED, WINDOW,
            )  # fmt: skip
            done += tiles
        w = _receive(turn, ring, ring_full, ring_empty, WARPS)
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
    ring = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ring_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(2):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=2)
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
                    q_ptr, members_ptr, out_ptr, lse_ptr, scale_log2, stride_qt, stride_qh, stride_ot, stride_oh, heads,
                    total, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
                    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty,
                    FIRST, K, G, N, STAGES, D, BLOCK_B, SHARED, WINDOW,
                ),
            ),
            (
                _consume,
                (
                    q_ptr, members_ptr, out_ptr, lse_ptr, scale_log2, stride_qt, stride_qh, stride_ot, stride_oh, heads,
                    total, B, max_tiles, window, cu_ptr, seq_lens_ptr, items_ptr,
                    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, ring, ring_full, ring_empty,
                    SECOND, K, G, N, STAGES, D, BLOCK_B, SHARED, WINDOW,
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
