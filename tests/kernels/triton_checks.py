"""Checks of the Triton kernels against float64, for any device and size. Not a test module: two call it.

``test_triton_interpreter`` runs ``python -m tests.kernels.triton_checks FAMILY`` with TRITON_INTERPRET=1 (tiny, on
the CPU; the interpreter must be chosen before triton is imported); ``test_triton_gpu`` calls the functions with full
sizes. Inputs are drawn afresh with the given seed, outputs, workspaces and unused KV slots are NaN before the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from engine.kernels import elementwise, reference
from engine.kernels.kv_pack import ROW_WORDS, copy_words, digest_value, pack_kv, unpack_kv
from engine.kernels.skinny_gemm import SkinnyTiling
from kv_transfer.block_mix import mix_words
from tests.kernels.attention_checks import check_cascade, check_decode, check_prefill
from tests.kernels.paged_inputs import randn, relative_error, tolerance
from tests.kernels.product_checks import check_add_norm, check_gated, check_gated_rows, check_qkv, check_skinny
from tests.kernels.sampling_checks import check_penalties, check_sampling


def check_norm_and_silu(device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> None:
    x, residual = (randn(rows, hidden * 2, dtype=dtype, device=device)[:, :hidden] for _ in range(2))
    weight = randn(hidden, dtype=dtype, device=device)
    for start in (None, residual):
        normed, total = elementwise.fused_add_rms_norm(x, start, weight, 1e-5)
        wide = x if start is None else x + start
        expected = reference.rms_norm(wide.double(), weight.double(), 1e-5)
        assert torch.equal(total, wide)
        assert relative_error(normed, expected) < tolerance(dtype)
    gate_up = randn(rows, hidden * 2, dtype=dtype, device=device)
    expected = reference.silu_and_mul(gate_up.double())
    assert relative_error(elementwise.silu_and_mul(gate_up), expected) < tolerance(dtype)


def check_rope(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int, int], block_size: int, norm: bool
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    merged = randn(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    q, k, v = merged.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos_sin = torch.randn(50, head_dim, device=device)
    positions = torch.randint(50, (tokens,), device=device)
    kv = randn(tokens // block_size + 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    slots = torch.randperm(kv.shape[0] * block_size, device=device)[:tokens]
    slots[0] = -1  # padding
    weights = [randn(head_dim, dtype=dtype, device=device) if norm else None for _ in range(2)]
    wide_kv = kv.double()
    wide = [None if w is None else w.double() for w in weights]
    live = slots >= 0
    expected = reference.rope_kv_write(
        q.double(), k.double(), v.double(), cos_sin.double(), positions, slots.clamp(min=0), wide_kv.clone(), *wide
    )
    reference.rope_kv_write(
        q[live].double(),
        k[live].double(),
        v[live].double(),
        cos_sin.double(),
        positions[live],
        slots[live],
        wide_kv,
        *wide,
    )
    out = elementwise.rope_kv_write(q, k, v, cos_sin, positions, slots, kv, *weights)
    assert relative_error(out, expected) < tolerance(dtype)
    assert relative_error(kv, wide_kv) < tolerance(dtype)


def check_kv_pack(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, span: tuple[int, int]
) -> None:
    start, end = span
    blocks = -(-end // block_size)
    cache = randn(4, blocks + 2, 2, 3, block_size, head_dim, dtype=dtype, device=device)
    table = torch.randperm(blocks + 2, device=device)[:blocks].int()
    gathered = cache[1:3][:, table.long()].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, start:end].contiguous()
    wire = torch.full((gathered.nbytes,), 0xAA, dtype=torch.uint8, device=device)
    digest = digest_value(pack_kv(cache[1:3], table, start, end, wire))
    assert torch.equal(wire, gathered.view(torch.uint8).flatten())
    words = wire.cpu().numpy().view(np.uint64)
    assert digest == mix_words(words)
    assert digest == (mix_words(words[:100]) + mix_words(words[100:], 100)) % 2**64
    target = torch.zeros_like(cache)
    assert digest_value(unpack_kv(target[1:3], table, start, end, wire)) == digest
    again = torch.empty_like(wire)
    pack_kv(target[1:3], table, start, end, again)
    assert torch.equal(again, wire)
    assert int((target != 0).sum()) == int((gathered != 0).sum())
    wire.view(torch.int64)[[0, 5]] = wire.view(torch.int64)[[5, 0]]  # misplaced words are noticed
    assert digest_value(unpack_kv(target[1:3], table, start, end, wire)) != digest
    copied, row = torch.zeros_like(wire), torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)
    mix = torch.zeros(1, dtype=torch.int64, device=device)
    copy_words(wire.view(torch.int64), copied.view(torch.int64), row, mix)
    assert torch.equal(copied, wire)
    assert digest_value(mix) == mix_words(wire.cpu().numpy().view(np.uint64))
    assert not row.any()  # as it was, for the next one


def _tiny(device: torch.device) -> dict[str, Callable[[], None]]:
    f32, f16 = torch.float32, torch.float16

    def decode() -> None:
        check_decode(device, f32, [300, 1, 17, 0, 128], (4, 2, 32), 16, chunks=4)
        check_decode(device, f16, [300, 33], (6, 2, 48), 16, window=40, chunks=4)
        check_decode(device, f32, [70, 64], (2, 2, 16), 64, window=64, chunks=2)

    def prefill() -> None:
        check_prefill(
            device, f32, [70, 1, 17, 40], [20, 1, 17, 3], (4, 2, 32), 16, portable=True, block_m=16, block_n=16
        )
        check_prefill(device, f16, [90, 33], [33, 33], (3, 1, 48), 16, 20, portable=True, block_m=32, block_n=16)
        check_prefill(
            device, f32, [90, 33], [33, 33], (2, 1, 16), 16, portable=True, block_m=16, block_n=16,
            key_scales=(0.02, 1.0, 6.0),
        )  # fmt: skip
        check_prefill(
            device, f32, [70, 1, 17], [20, 1, 3], (4, 2, 32), 16, portable=True, block_m=16, block_n=16, spare=(8, 2)
        )

    def cascade() -> None:
        check_cascade(device, f32, (4, 2, 32), 16, (4, 7), portable=True, block_m=16, block_n=16)

    def between() -> None:
        check_norm_and_silu(device, f32, 3, 96)
        check_norm_and_silu(device, f16, 3, 64)
        for norm in (False, True):
            check_rope(device, f32, 5, (4, 2, 16), 4, norm)

    def skinny() -> None:
        check_skinny(device, f32, (5, 70, 128), SkinnyTiling(16, 32, 2))
        check_skinny(device, f16, (1, 40, 64), SkinnyTiling(16, 32, 2, tma=True))
        check_skinny(device, f32, (17, 33, 96), None)
        check_skinny(device, f32, (3, 70, 64), SkinnyTiling(32, 32))

    def fused() -> None:
        check_gated(device, f32, (5, 35, 128), SkinnyTiling(16, 32, 2))
        check_gated(device, f16, (1, 40, 64), SkinnyTiling(16, 32, 2, tma=True))
        check_gated(device, f32, (17, 33, 96), None)
        check_add_norm(device, f32, (3, 192, 64), SkinnyTiling(16, 32, 2))
        check_add_norm(device, f32, (17, 96, 64), SkinnyTiling(16, 32, tma=True))
        check_add_norm(device, f32, (2, 128, 64), SkinnyTiling(64, 32))
        check_qkv(device, f32, 5, 64, (4, 2, 32), 16, SkinnyTiling(16, 32))
        check_qkv(device, f32, 17, 64, (3, 1, 16), 4, SkinnyTiling(16, 32, tma=True))

    def sampling() -> None:
        check_sampling(device, f32, 1500, 64, seed=3)
        check_penalties(device)

    def kv_pack() -> None:
        check_kv_pack(device, f32, 20, 8, (5, 40))
        check_kv_pack(device, torch.bfloat16, 16, 16, (0, 33))

    def hopper() -> None:
        """The kernels that only the device runs: TMA, mbarriers, wgmma."""
        bf16 = torch.bfloat16
        check_prefill(device, bf16, [200, 1, 70], [70, 1, 70], (4, 2, 128), 64, portable=False)
        check_prefill(device, bf16, [90, 33], [33, 33], (4, 2, 128), 16, 20, portable=False)
        check_prefill(device, bf16, [500], [90], (4, 2, 128), 16, portable=False, key_scales=(0.02, 40.0))
        check_prefill(device, bf16, [200, 1, 70], [70, 1, 70], (4, 2, 128), 64, portable=False, spare=(51, 29))
        check_cascade(device, bf16, (4, 2, 128), 64, (4, 7), portable=False)
        check_skinny(device, bf16, (3, 100, 512), SkinnyTiling(64, 256, tma=True, num_stages=4))
        check_gated(device, bf16, (3, 100, 512), SkinnyTiling(64, 256, tma=True, num_stages=4))
        check_add_norm(device, bf16, (3, 256, 512), SkinnyTiling(64, 256, tma=True, num_stages=4))
        check_qkv(device, bf16, 3, 512, (4, 2, 128), 64, SkinnyTiling(64, 256, tma=True, num_stages=4))
        check_gated_rows(device, bf16, (130, 256, 192))

    checks = (decode, prefill, cascade, between, skinny, fused, sampling, kv_pack, hopper)
    return {check.__name__: check for check in checks}


FAMILIES = ("decode", "prefill", "cascade", "between", "skinny", "fused", "sampling", "kv_pack")


if __name__ == "__main__":  # DEVICE FAMILY ...
    torch.manual_seed(0)
    for family in sys.argv[2:]:
        _tiny(torch.device(sys.argv[1]))[family]()
        print(f"{family}: agrees with float64", flush=True)
