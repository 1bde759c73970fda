# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""``y = x @ w.T`` for a few rows of x (M <= 64): the product that decode waits for, bound by reading w once.

A weight tile of 64 rows is the left operand of the matrix unit and the padded x the right one (``y.T = w @ x.T``), so
that 16 columns cost no more than they must: wgmma takes it straight from shared memory. Where that makes fewer programs
than there are SMs, tiles of 32 rows are the right operand of mma. w [N, K] is row-major and streamed through
``num_stages`` tiles; a program waiting for its inputs fetches its first weights into the cache. Splits of K write
float32 partials; the last one to arrive sums them in fixed order, so the result does not depend on timing.

    program (n, s): rows n*BLOCK_N.. of w, columns s*K/SPLIT..;   partial[s, n] --last of SPLIT--> epilogue of tile n

What stands between two products of a layer is done in the epilogues, without a launch of its own:

    gated       the tile is BLOCK_N/2 rows of the gate and the same rows of the up matrix:  y = silu(gate) * up
    add_norm    residual += x @ w.T, in place. The norm that follows needs the whole row, which no program has: each
                leaves residual * norm_weight and its columns' sum of squares (``DeferredNorm``), and the product that
                reads those scales its sums by 1 / rms in its own epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import await_inputs, pdl
from engine.kernels.launch import launch

MAX_ROWS = 64


@triton.jit
def prefetch_weights(w_ptr, offsets, first, PER_SPLIT: tl.constexpr, LINES_AHEAD: tl.constexpr):
    """Weights are nobody's output: fetch the first ones into the cache while the kernel before still runs."""
    ahead = first + tl.minimum(tl.arange(0, LINES_AHEAD) * 64, PER_SPLIT - 1)
    lines = w_ptr + offsets[:, None] + ahead[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_squares(squares_ptr, m, SQUARES: tl.constexpr, ROW_STRIDE: tl.constexpr):
    """[parts, BLOCK_M]. Not summed before the product: its first tiles must not wait for this."""
    s = tl.arange(0, triton.next_power_of_2(SQUARES))
    return tl.load(squares_ptr + s[:, None] * ROW_STRIDE + m[None, :], mask=s[:, None] < SQUARES, other=0.0)


@triton.jit
def norm_scale(squares, eps, K: tl.constexpr):
    """[BLOCK_M]: what a ``DeferredNorm`` still lacks."""
    return tl.math.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def multiply(
    x_ptr, w_ptr, w_desc, offsets, pair, row, m, M, stride_x, first,
    PER_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    PAIRED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] of rows of w at ``offsets``. The descriptor finds them at ``row`` on, of pair and pair + 1."""
    kk = tl.arange(0, BLOCK_K)
    # Tiles of 32 rows are too small for wgmma; the other unit wants x, which has 16 rows at least, on the left.
    acc = tl.zeros([BLOCK_M, BLOCK_N] if BLOCK_N < 64 else [BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(first, first + PER_SPLIT, BLOCK_K, num_stages=STAGES):
        if TMA:
            w = w_desc.load([pair, row, k]).reshape(BLOCK_N, BLOCK_K) if PAIRED else w_desc.load([row, k])
        else:
            w = tl.load(w_ptr + offsets[:, None] + (k + kk)[None, :])
        x = tl.load(x_ptr + m[:, None] * stride_x + (k + kk)[None, :], mask=m[:, None] < M, other=0.0)
        if BLOCK_N < 64:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return tl.trans(acc) if BLOCK_N < 64 else acc


@triton.jit
def both_of_pair(acc, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """The first and the second COLUMNS rows of acc."""
    return acc.reshape(2, COLUMNS, BLOCK_M).permute(1, 2, 0).split()


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr, squares_ptr, w_ptr, w_desc, bias_ptr, y_ptr, norm_weight_ptr, scaled_ptr, out_squares_ptr, partial_ptr,
    counter_ptr, M, N, eps, stride_x, stride_w, stride_y,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD_NORM: tl.constexpr, SQUARES: tl.constexpr,
    ROW_STRIDE: tl.constexpr, STAGES: tl.constexpr, LINES_AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SQUARES: how many sums of squares x's norm is made of; 0: x is as it should be. GATED: w has 2 * N rows."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    PER_SPLIT: tl.constexpr = K // SPLIT
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of y
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.arange(0, BLOCK_M)
    cell_n = tl.arange(0, BLOCK_N)
    row = tl.minimum(tile * COLUMNS + cell_n % COLUMNS, N - 1) + cell_n // COLUMNS * N
    offsets = row.to(tl.int64) * stride_w
    first = split * PER_SPLIT
    if PDL:
        prefetch_weights(w_ptr, offsets, first, PER_SPLIT, LINES_AHEAD)
    await_inputs(PDL, EARLY=True)
    if SQUARES:
        squares = load_squares(squares_ptr, m, SQUARES, ROW_STRIDE)
    mask = (m[:, None] < M) & (n[None, :] < N)
    at = y_ptr + m[:, None] * stride_y + n[None, :]
    if ADD_NORM:
        residual = tl.load(at, mask=mask, other=0.0)
        norm_weight = tl.load(norm_weight_ptr + n, mask=n < N, other=0.0)
    acc = multiply(
        x_ptr, w_ptr, w_desc, offsets, 0, tile * COLUMNS, m, M, stride_x, first,
        PER_SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, TMA, GATED, STAGES,
    )  # fmt: skip
    # A split's partial is [BLOCK_N, BLOCK_M], contiguous for the program that writes it and the one that sums.
    cell = cell_n[:, None] * BLOCK_M + m[None, :]
    final = True
    if SPLIT > 1:
        base = partial_ptr + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M)
        tl.store(base + split * (BLOCK_N * BLOCK_M) + cell, acc)
        tl.debug_barrier()
        final = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if final:
            tl.store(counter_ptr + tile, 0)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for s in tl.static_range(SPLIT):
                acc += tl.load(base + s * (BLOCK_N * BLOCK_M) + cell, cache_modifier=".cg")
    if final:
        if SQUARES:
            acc *= norm_scale(squares, eps, K)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        if GATED:
            gate, up = both_of_pair(acc, BLOCK_M, COLUMNS)
            out = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
        else:
            out = tl.trans(acc)
        if ADD_NORM:
            total = (out + residual.to(tl.float32)).to(y_ptr.dtype.element_ty)
            tl.store(at, total, mask=mask)
            wide = tl.where(mask, total.to(tl.float32), 0.0)
            scaled = (wide * norm_weight.to(tl.float32)[None, :]).to(scaled_ptr.dtype.element_ty)
            tl.store(scaled_ptr + m[:, None] * N + n[None, :], scaled, mask=mask)
            tl.store(out_squares_ptr + tile * ROW_STRIDE + m, tl.sum(wide * wide, 1))
        else:
            tl.store(at, out.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """How one product is cut; ``choose_tiling`` gives a measured one."""

    block_n: int = 64
    block_k: int = 128
    split: int = 1
    num_stages: int = 4
    num_warps: int = 4
    tma: bool = False
    lines_ahead: int = 8
    """Lines of 128 bytes that a program fetches of each of its rows of w before its inputs are there."""


def choose_tiling(n: int, k: int, sm_count: int, rows: int) -> SkinnyTiling:
    """Enough programs for about three an SM, in whole tiles of K."""
    block_k = next((b for b in (128, 64, 32, 16) if k % b == 0), 0)
    if not block_k:
        raise ValueError(f"K={k} is not a multiple of 16: use torch.nn.functional.linear for it")
    tiles = triton.cdiv(n, 64)
    split = 1
    while split < 8 and tiles * split < sm_count * 3 and k % (split * 2 * block_k) == 0 and k // (split * 2) >= 512:
        split *= 2
    return SkinnyTiling(block_k=block_k, split=split)


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """RMS-normed rows but for the factor 1 / rms of each row, which the product that reads them applies."""

    scaled: torch.Tensor
    """[M, K]: x * norm_weight."""
    squares: torch.Tensor
    """[parts, MAX_ROWS] float32: each part's share of a row's sum of squares of x."""
    eps: float

    def __len__(self) -> int:
        return self.scaled.shape[0]


class SkinnyLinear:
    """A weight [N, K] with the workspace of its product. One stream at a time: all calls share the workspace."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        tiling: SkinnyTiling | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """``out_dtype``: None, the input's. ``gated``: weight is gate over up [2 * N, K], y ``silu(gate) * up``."""
        n, k = weight.shape
        if weight.stride(1) != 1:
            raise ValueError("the weight's last dimension must be contiguous: call .contiguous() once at load")
        sm_count = (
            torch.cuda.get_device_properties(weight.device).multi_processor_count if weight.device.type == "cuda" else 4
        )
        self.weight, self.bias, self.out_dtype, self.gated = weight, bias, out_dtype, gated
        self.tiling = tiling or choose_tiling(n, k, sm_count, MAX_ROWS)
        t = self.tiling
        if k % (t.split * t.block_k):
            raise ValueError(
                f"K={k} does not divide into {t.split} splits of whole tiles of {t.block_k}: lower the split"
            )
        self._outputs = n // 2 if gated else n
        self._tiles = triton.cdiv(self._outputs, t.block_n // 2 if gated else t.block_n)
        cells = self._tiles * t.split * t.block_n * MAX_ROWS if t.split > 1 else 1
        self._partial = torch.empty(cells, dtype=torch.float32, device=weight.device)
        self._counters = torch.zeros(self._tiles, dtype=torch.int32, device=weight.device)
        self._descriptor: object = weight
        if t.tma:
            from triton.tools.tensor_descriptor import TensorDescriptor

            halves = (weight.view(2, -1, k), [2, t.block_n // 2, t.block_k])
            self._descriptor = TensorDescriptor.from_tensor(*(halves if gated else (weight, [t.block_n, t.block_k])))

    def __call__(self, x: torch.Tensor | DeferredNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] -> x @ weight.T (+ bias) [M, N], for M <= 64."""
        if out is None:
            like = x.scaled if isinstance(x, DeferredNorm) else x
            out = torch.empty(len(x), self._outputs, dtype=self.out_dtype or like.dtype, device=like.device)
        self._run(x, out, None)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> DeferredNorm:
        """``residual += x @ weight.T (+ bias)``, in place, and its norm."""
        normed = DeferredNorm(
            torch.empty(len(x), self._outputs, dtype=x.dtype, device=x.device),
            torch.empty(self._tiles, MAX_ROWS, dtype=torch.float32, device=x.device),
            eps,
        )
        self._run(x, residual, (norm_weight, normed))
        return normed

    def _run(
        self, x: torch.Tensor | DeferredNorm, y: torch.Tensor, norm: tuple[torch.Tensor, DeferredNorm] | None
    ) -> None:
        deferred = x if isinstance(x, DeferredNorm) else None
        a = x.scaled if isinstance(x, DeferredNorm) else x
        rows, k = a.shape
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows: use a library product above {MAX_ROWS}")
        t = self.tiling
        norm_weight, out = norm or (a, None)
        launch(_skinny_kernel, (self._tiles, t.split),
            a, self._partial if deferred is None else deferred.squares, self.weight, self._descriptor,
            self.weight if self.bias is None else self.bias, y, norm_weight, y if out is None else out.scaled,
            self._partial if out is None else out.squares, self._partial, self._counters, rows, self._outputs,
            0.0 if deferred is None else deferred.eps, a.stride(0), self.weight.stride(0), y.stride(0),
            K=k, BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=t.block_n, BLOCK_K=t.block_k, SPLIT=t.split,
            TMA=t.tma, BIAS=self.bias is not None, GATED=self.gated, ADD_NORM=out is not None,
            SQUARES=0 if deferred is None else len(deferred.squares), ROW_STRIDE=MAX_ROWS, STAGES=t.num_stages,
            LINES_AHEAD=min(t.lines_ahead, triton.next_power_of_2(triton.cdiv(k // t.split, 64))),
            num_warps=t.num_warps, **pdl(a.device),
        )  # fmt: skip
