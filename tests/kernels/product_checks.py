"""Products, and what is fused with them, against float64, for any device and size."""

from __future__ import annotations

import torch

from engine.kernels import reference
from engine.kernels.hopper_swiglu import HopperSwiGLU
from engine.kernels.skinny_gemm import MAX_ROWS, DeferredNorm, SkinnyLinear, SkinnyTiling
from engine.kernels.skinny_qkv import SkinnyQKV
from tests.kernels.paged_inputs import NAN, randn, relative_error, tolerance


def check_qkv(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int, heads: tuple[int, int, int], block_size: int,
    tiling: SkinnyTiling,
) -> None:  # fmt: skip
    """From rows, and from rows whose norm is deferred, with and without bias; a row of padding."""
    num_heads, num_kv_heads, head_dim = heads
    outputs = (num_heads + 2 * num_kv_heads) * head_dim
    weight = randn(outputs, hidden, dtype=dtype, device=device) * hidden**-0.5
    bias = randn(outputs, dtype=dtype, device=device)
    x, cos_sin = randn(rows, hidden, dtype=dtype, device=device), torch.randn(50, head_dim, device=device)
    squares = torch.full((8, MAX_ROWS), NAN, device=device)
    squares[:, :rows] = x.float().square().sum(1) / 8
    normed = reference.rms_norm(x.double(), torch.ones(hidden, device=device).double(), 1e-5)
    positions = torch.randint(50, (rows,), device=device)
    cache = randn(rows // block_size + 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    slots = torch.randperm(cache.shape[0] * block_size, device=device)[:rows]
    padding = torch.arange(rows, device=device) == rows // 2
    for b, given, plain in ((None, x, x.double()), (bias, DeferredNorm(x, squares, 1e-5), normed)):
        product = plain @ weight.double().T + (0.0 if b is None else b.double())
        q, k, v = product.view(rows, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        wide = cache.double()
        rest = (cos_sin.double(), positions, slots)
        expected = reference.rope_kv_write(q, k, v, *rest, wide.clone())
        real = ~padding
        reference.rope_kv_write(q[real], k[real], v[real], rest[0], positions[real], slots[real], wide)
        kv = cache.clone()
        out = torch.full((rows, num_heads, head_dim), NAN, dtype=dtype, device=device)
        qkv = SkinnyQKV(weight, b, num_heads, num_kv_heads, cos_sin, tiling)
        qkv(given, positions, torch.where(padding, -1, slots), kv, out)
        assert relative_error(out, expected) < tolerance(dtype)
        assert relative_error(kv, wide) < tolerance(dtype)
        untouched = torch.ones(kv.shape[0] * block_size, dtype=torch.bool, device=device)
        untouched[slots[real]] = False
        old, new = (layer.permute(0, 3, 1, 2, 4).flatten(0, 1)[untouched] for layer in (cache, kv))
        assert torch.equal(old, new)


def check_skinny(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], tiling: SkinnyTiling | None
) -> None:
    rows, n, k = shape
    weight, bias = randn(n, k, dtype=dtype, device=device), randn(n, dtype=dtype, device=device)
    x = randn(rows, 2 * k, dtype=dtype, device=device)[:, :k]
    for b in (None, bias):
        linear = SkinnyLinear(weight, b, tiling)
        expected = x.double() @ weight.double().T + (0.0 if b is None else b.double())
        for _ in range(2):  # the second run finds the counters as the first left them
            out = torch.full((rows, n), NAN, dtype=dtype, device=device)
            assert relative_error(linear(x, out), expected) < tolerance(dtype)


def check_gated_rows(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Many rows: ``HopperSwiGLU``."""
    rows, n, k = shape
    weight, bias = randn(2 * n, k, dtype=dtype, device=device) * k**-0.5, randn(2 * n, dtype=dtype, device=device)
    x = randn(rows, k + 64, dtype=dtype, device=device)[:, :k]
    for b in (None, bias):
        expected = reference.silu_and_mul(x.double() @ weight.double().T + (0.0 if b is None else b.double()))
        out = torch.full((rows, n), NAN, dtype=dtype, device=device)
        HopperSwiGLU(weight, b)(x, out)
        assert relative_error(out, expected) < tolerance(dtype)


def check_gated(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], tiling: SkinnyTiling | None
) -> None:
    rows, n, k = shape
    weight = randn(2 * n, k, dtype=dtype, device=device) * k**-0.5
    bias = randn(2 * n, dtype=dtype, device=device)
    x = randn(rows, 2 * k, dtype=dtype, device=device)[:, :k]
    for b in (None, bias):
        expected = reference.silu_and_mul(x.double() @ weight.double().T + (0.0 if b is None else b.double()))
        linear = SkinnyLinear(weight, b, tiling, gated=True)
        for _ in range(2):
            out = torch.full((rows, n), NAN, dtype=dtype, device=device)
            assert relative_error(linear(x, out), expected) < tolerance(dtype)


def check_add_norm(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], tiling: SkinnyTiling | None
) -> None:
    """A product that leaves its norm to the next ones: a plain one with a bias, a gated one, and one more sum."""
    rows, hidden, k = shape
    x = randn(rows, 2 * k, dtype=dtype, device=device)[:, :k]
    first, third = (randn(hidden, k, dtype=dtype, device=device) * k**-0.5 for _ in range(2))
    second = randn(2 * k, hidden, dtype=dtype, device=device) * hidden**-0.5
    bias, norm_weight = randn(2 * k, dtype=dtype, device=device), randn(hidden, dtype=dtype, device=device)
    residual = randn(rows, hidden, dtype=dtype, device=device) * 7
    total = (residual.double() + x.double() @ first.double().T).to(dtype)
    normed = reference.rms_norm(total.double(), norm_weight.double(), 1e-5)
    for _ in range(2):
        stream = residual.clone()
        deferred = SkinnyLinear(first, None, tiling).add_norm(x, stream, norm_weight, 1e-5)
        assert relative_error(stream, total.double()) < tolerance(dtype)
        plain = SkinnyLinear(second, bias, tiling)(deferred)
        assert relative_error(plain, normed @ second.double().T + bias.double()) < tolerance(dtype)
        gated = SkinnyLinear(second, None, tiling, gated=True)(deferred)
        expected = reference.silu_and_mul(normed @ second.double().T)
        assert relative_error(gated, expected) < tolerance(dtype)
        deferred = SkinnyLinear(third, None, tiling).add_norm(gated, stream, norm_weight, 1e-5)
        assert relative_error(stream, total.double() + expected @ third.double().T) < tolerance(dtype)
        assert len(deferred) == rows
