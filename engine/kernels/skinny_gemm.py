# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""``y = x @ w.T`` for a few rows of x (M <= 64): the product that decode waits for, bound by reading w once.

The weight tile is the left operand of the matrix unit and the padded x the right one (``y.T = w @ x.T``), so that 16
columns cost no more than they must: wgmma takes 64 rows of w straight from shared memory. w [N, K] is row-major and
streamed through ``num_stages`` tiles; several programs an SM keep the memory busy while another one starts or ends.
Splits of K write float32 partials; the last one to arrive sums them in fixed order, so the result does not depend on
timing.

    program (n, s): rows n*BLOCK_N.. of w, columns s*K/SPLIT..;   partial[s, n] --last of SPLIT--> y[:, n]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import await_inputs, pdl

MAX_ROWS = 64


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr, w_ptr, w_desc, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr, M, N, stride_x, stride_w,
    stride_r, stride_y,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    PER_SPLIT: tl.constexpr = K // SPLIT
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    kk = tl.arange(0, BLOCK_K)
    rows = tl.minimum(n, N - 1).to(tl.int64) * stride_w
    first = split * PER_SPLIT
    if PDL:
        # Weights are nobody's output: fetch the first ones into the cache while the kernel before still runs.
        ahead = tl.minimum(first + tl.arange(0, 16) * 64, K - 1)
        lines = w_ptr + rows[:, None] + ahead[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )
    await_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(first, first + PER_SPLIT, BLOCK_K, num_stages=STAGES):
        if TMA:  # noqa: SIM108
            w = w_desc.load([tile * BLOCK_N, k])
        else:
            w = tl.load(w_ptr + rows[:, None] + (k + kk)[None, :])
        x = tl.load(x_ptr + m[:, None] * stride_x + (k + kk)[None, :], mask=m[:, None] < M, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    # A split's partial is [BLOCK_N, BLOCK_M], contiguous for the program that writes it and the one that sums.
    cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
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
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        out = tl.trans(acc)
        mask = (m[:, None] < M) & (n[None, :] < N)
        if RESIDUAL:
            out += tl.load(residual_ptr + m[:, None] * stride_r + n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + m[:, None] * stride_y + n[None, :], out.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """How one product is cut; ``choose_tiling`` gives a measured one."""

    block_n: int = 64
    block_k: int = 128
    split: int = 1
    num_stages: int = 4
    num_warps: int = 4
    tma: bool = False


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


class SkinnyLinear:
    """A weight [N, K] with the workspace of its product. One stream at a time: all calls share the workspace."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        tiling: SkinnyTiling | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """``out_dtype``: None, the input's."""
        n, k = weight.shape
        if weight.stride(1) != 1:
            raise ValueError("the weight's last dimension must be contiguous: call .contiguous() once at load")
        sm_count = (
            torch.cuda.get_device_properties(weight.device).multi_processor_count if weight.device.type == "cuda" else 4
        )
        self.weight, self.bias, self.out_dtype = weight, bias, out_dtype
        self.tiling = tiling or choose_tiling(n, k, sm_count, MAX_ROWS)
        t = self.tiling
        if k % (t.split * t.block_k):
            raise ValueError(
                f"K={k} does not divide into {t.split} splits of whole tiles of {t.block_k}: lower the split"
            )
        tiles = triton.cdiv(n, t.block_n)
        cells = tiles * t.split * t.block_n * MAX_ROWS if t.split > 1 else 1
        self._partial = torch.empty(cells, dtype=torch.float32, device=weight.device)
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
        self._descriptor: object = weight
        if t.tma:
            from triton.tools.tensor_descriptor import TensorDescriptor

            self._descriptor = TensorDescriptor.from_tensor(weight, [t.block_n, t.block_k])

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [M, K] -> x @ weight.T (+ bias) (+ residual) [M, N], for M <= 64."""
        rows = x.shape[0]
        n, k = self.weight.shape
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows: use a library product above {MAX_ROWS}")
        t = self.tiling
        y = torch.empty(rows, n, dtype=self.out_dtype or x.dtype, device=x.device) if out is None else out
        other = x if residual is None else residual
        _skinny_kernel[(triton.cdiv(n, t.block_n), t.split)](
            x, self.weight, self._descriptor, self.weight if self.bias is None else self.bias, other, y, self._partial,
            self._counters, rows, n, x.stride(0), self.weight.stride(0), other.stride(0), y.stride(0),
            K=k, BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=t.block_n, BLOCK_K=t.block_k, SPLIT=t.split,
            TMA=t.tma, BIAS=self.bias is not None, RESIDUAL=residual is not None, STAGES=t.num_stages,
            num_warps=t.num_warps, **pdl(x.device),
        )  # fmt: skip
        return y
