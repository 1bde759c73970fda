# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""``silu(x Wg') * (x Wu')`` of many rows in one kernel on Hopper: the gated product without its intermediate.

Owns the matrix-bound gated product of sm_90 and its launch, written in Gluon; few rows and other devices take a product
and a pass over it (``triton_gpu``). W is ``[gate; up]``, [2 I, K]: a tile of BN outputs multiplies rows n.. of both
halves, laid one below the other in shared memory, so that one wgmma of 2 BN columns makes gate and up of the same
outputs in the same thread.

    program:      one an SM, tiles of [128, BN] in turn, GROUP rows of tiles at a time (what they read stays in the L2)
    producer:     TMA boxes of x [128, 64], gate [BN, 64], up [BN, 64] -> full barriers     (waits on empty barriers)
    consumer w:   rows 64w .. 64w+63:  begins the next tile's product, and under it gates and stores the last tile's
                  (kept as two rounded halves in registers) -> TMA store

Rows past the last one are read as zeros and not written, both by TMA. x may have any row stride TMA takes (a multiple
of 16 bytes).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.launch import launch

BM = 128
BN = 64  # measured on H200s: as fast as 128 or faster, as the programs' last turn is fuller
BK = 64  # columns of a TMA box: the 128 bytes of its swizzle
STAGES = 6
GROUP = 16

# Newer versions of Gluon renamed these.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: down GROUP rows of tiles, then right."""
    first = tile // (GROUP * tiles_n) * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def _produce(
    x_desc, w_desc, a_smem, b_smem, full, empty, tiles_m, tiles_n, width, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (BM + 2 * BN) * BK * 2
    done = tiles_m * 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        for k in range(steps):
            stage = (done + k) % STAGES
            mbarrier.wait(empty.index(stage), (((done + k) // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            b = b_smem.index(stage)
            _load(x_desc, [m * BM, k * BK], full.index(stage), a_smem.index(stage))
            _load(w_desc, [n * BN, k * BK], full.index(stage), b.slice(0, BN))
            _load(w_desc, [width + n * BN, k * BK], full.index(stage), b.slice(BN, BN))
        done += steps


@gluon.jit
def _silu(x):
    """x * sigmoid(x) by the device's exp2 and reciprocal: a few units of float32's last place."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 e, e;
        mul.f32 $0, $1, e;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _halves(acc, column, bias_ptr, width, BN: gl.constexpr, BIAS: gl.constexpr):
    """Gate and up of an accumulator [64, gate | up]: other names for its registers."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    gate, up = acc.reshape([64, 2, BN]).permute((0, 2, 1)).split()
    gate = gl.convert_layout(gate, HALF, assert_trivial=True)
    up = gl.convert_layout(up, HALF, assert_trivial=True)
    if BIAS:
        n = column + gl.arange(0, BN, layout=gl.SliceLayout(0, HALF))
        gate += gl.load(bias_ptr + n).to(gl.float32)[None, :]
        up += gl.load(bias_ptr + width + n).to(gl.float32)[None, :]
    return gate, up


@gluon.jit
def _put(gate, up, y_desc, y_smem, row, column):
    y = _silu(gate.to(gl.float32)) * up.to(gl.float32)
    # One thread stores: the others learn from the barrier that the last store has read its tile.
    tma.store_wait(0)
    _barrier()
    y_smem.store(y.to(y_smem.dtype))
    fence_async_shared()
    _store(y_desc, [row, column], y_smem)


@gluon.jit
def _multiply(a_smem, b_smem, full, step, acc, WG: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    a = a_smem.index(stage).slice(WG * 64, 64)
    return warpgroup_mma(a, b_smem.index(stage).permute((1, 0)), acc, use_acc=not FIRST, is_async=True)


@gluon.jit
def _consume(
    y_desc, bias_ptr, a_smem, b_smem, y_smem, full, empty, tiles_m, tiles_n, width, steps,
    WG: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BN, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    dtype: gl.constexpr = y_smem.dtype
    YES: gl.constexpr = True
    NO: gl.constexpr = False
    # Before the first tile there is none to store: its place is past the last row.
    row = tiles_m * BM
    column = tiles_m * 0
    gate = gl.zeros([64, BN], dtype, HALF)
    up = gl.zeros([64, BN], dtype, HALF)
    done = tiles_m * 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = gl.zeros([64, 2 * BN], gl.float32, ACC)
        token = _multiply(a_smem, b_smem, full, done, acc, WG, STAGES, YES)
        # Passed before; here it ends a basic block, so that ptxas cannot move the gating above the product.
        mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
        _put(gate, up, y_desc, y_smem.index(WG), row, column)
        acc = warpgroup_mma_wait(0, [token])
        mbarrier.arrive(empty.index(done % STAGES), count=1)
        token = _multiply(a_smem, b_smem, full, done + 1, acc, WG, STAGES, NO)
        acc = warpgroup_mma_wait(1, [token])  # waits for nothing: this step goes on
        for step in range(done + 2, done + steps):
            token = _multiply(a_smem, b_smem, full, step, acc, WG, STAGES, NO)
            acc = warpgroup_mma_wait(1, [token])
            mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        done += steps
        mbarrier.arrive(empty.index((done - 1) % STAGES), count=1)
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        row = m * BM + WG * 64
        column = n * BN
        g, u = _halves(acc, column, bias_ptr, width, BN, BIAS)
        gate = g.to(dtype)
        up = u.to(dtype)
    _put(gate, up, y_desc, y_smem.index(WG), row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "width", "steps"])
def swiglu_kernel(
    x_desc, w_desc, y_desc, bias_ptr, tiles_m, tiles_n, width, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    SMEM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], SMEM)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * BN, BK], SMEM)
    y_smem = gl.allocate_shared_memory(dtype, [2, 64, BN], SMEM)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    y_desc, bias_ptr, a_smem, b_smem, y_smem, full, empty, tiles_m, tiles_n, width, steps,
                    FIRST, BM, BN, STAGES, GROUP, BIAS,
                ),
            ),
            (
                _consume,
                (
                    y_desc, bias_ptr, a_smem, b_smem, y_smem, full, empty, tiles_m, tiles_n, width, steps,
                    SECOND, BM, BN, STAGES, GROUP, BIAS,
                ),
            ),
            (
                _produce,
                (
                    x_desc, w_desc, a_smem, b_smem, full, empty, tiles_m, tiles_n, width, steps,
                    BM, BN, BK, STAGES, GROUP,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Measured, too: below, and where the last turn leaves many programs idle, the library's product and a pass are as fast.
_MIN_ROWS = 513
_MIN_FILL = 0.9


class HopperSwiGLU:
    """A weight ``[gate; up]`` [2 I, K] and its gated product."""

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Hopper, 16-bit, whole tiles."""
        outputs, inputs = weight.shape
        return (
            weight.device.type == "cuda"
            and torch.cuda.get_device_capability(weight.device) == (9, 0)
            and weight.dtype in (torch.bfloat16, torch.float16)
            and weight.is_contiguous()
            and outputs % (2 * BN) == 0
            and inputs % BK == 0
            and inputs >= 2 * BK
        )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._width = weight.shape[0] // 2
        self._layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        self._descriptor = TensorDescriptor.from_tensor(weight, [BN, BK], self._layout)
        # One an SM: shared memory and registers fit no second one.
        self._programs = torch.cuda.get_device_properties(weight.device).multi_processor_count

    def pays(self, rows: int) -> bool:
        """Whether it is faster than the library's product and the pass over it."""
        tiles = triton.cdiv(rows, BM) * (self._width // BN)
        turns = triton.cdiv(tiles, self._programs)
        return rows >= _MIN_ROWS and tiles >= _MIN_FILL * turns * self._programs

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] -> [T, I]."""
        rows, inputs = x.shape
        y = torch.empty(rows, self._width, dtype=x.dtype, device=x.device) if out is None else out
        tiles_m, tiles_n = triton.cdiv(rows, BM), self._width // BN
        launch(swiglu_kernel, (min(tiles_m * tiles_n, self._programs),),
            TensorDescriptor.from_tensor(x, [BM, BK], self._layout),
            self._descriptor,
            TensorDescriptor.from_tensor(y, [64, BN], self._layout),
            self._weight if self._bias is None else self._bias,
            tiles_m, tiles_n, self._width, inputs // BK,
            BM=BM, BN=BN, BK=BK, STAGES=STAGES, GROUP=GROUP, BIAS=self._bias is not None, num_warps=4,
        )  # fmt: skip
        return y
