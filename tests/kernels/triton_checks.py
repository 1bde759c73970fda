"""Checks of the Triton kernels against float64, for any device and size. Not a test module: two call it.

``test_triton_interpreter`` runs ``python -m tests.kernels.triton_checks FAMILY`` with TRITON_INTERPRET=1 (tiny, on
the CPU; the interpreter must be chosen before triton is imported); ``test_triton_gpu`` calls the functions with full
sizes. Inputs are drawn afresh with the given seed, outputs, workspaces and unused KV slots are NaN before the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels import elementwise, hopper_launch, reference
from engine.kernels.cascade_attention import CascadePlan
from engine.kernels.cascade_plan import CascadeCost
from engine.kernels.decode_attention import DecodePlan, paged_decode
from engine.kernels.hopper_swiglu import HopperSwiGLU
from engine.kernels.kv_pack import ROW_WORDS, copy_words, digest_value, pack_kv, unpack_kv
from engine.kernels.noise import gumbel_noise, noise_key
from engine.kernels.prefill_attention import paged_prefill
from engine.kernels.sampling import DrawParams, TokenDrawer, penalise
from engine.kernels.skinny_gemm import MAX_ROWS, DeferredNorm, SkinnyLinear, SkinnyTiling
from engine.kernels.skinny_qkv import SkinnyQKV
from kv_transfer.block_mix import mix_words

NAN = float("nan")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


class Paged:
    """A KV layer with requests of the given lengths in shuffled blocks; slots that hold no token are NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        blocks = [-(-length // block_size) for length in lengths]
        self.block_size = block_size
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.kv = randn(sum(blocks) + 3, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
        ids = torch.randperm(len(self.kv)).int().tolist()
        self.table = torch.zeros(len(lengths), max(blocks) + 1, dtype=torch.int32)
        for row, (length, used) in enumerate(zip(lengths, blocks, strict=True)):
            self.table[row, :used] = torch.tensor([ids.pop() for _ in range(used)], dtype=torch.int32)
            if length % block_size:
                self.kv[int(self.table[row, used - 1]), :, :, length % block_size :] = NAN
        self.table = self.table.to(device)

    def scale_keys(self, scales: Sequence[float]) -> None:
        """Each request's keys, its first part by the first scale and so on: maxima of the scores that rise or fall."""
        for row, length in enumerate(self.seq_lens.tolist()):
            blocks = -(-length // self.block_size)
            of_block = torch.tensor([scales[i * len(scales) // blocks] for i in range(blocks)])
            ids = self.table[row, :blocks].long()
            self.kv[ids, 0] *= of_block.to(self.kv)[:, None, None, None]

    def expected(self, q: torch.Tensor, bounds: Sequence[int], scale: float, window: int | None) -> torch.Tensor:
        kv = torch.nan_to_num(self.kv.double())
        cu = torch.tensor(bounds, dtype=torch.int32)
        longest = max(b - a for a, b in pairwise(bounds))
        return reference.paged_attention(q.double(), kv, self.table, cu, self.seq_lens, scale, longest, window)


def check_decode(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int], heads: tuple[int, int, int], block_size: int,
    window: int | None = None, chunks: int | None = None, block_n: int = 32,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, dtype, device)
    plan = DecodePlan(len(lengths) + 3, num_heads, num_kv_heads, head_dim, device, chunks)
    plan.partial.fill_(NAN)
    plan.update(paged.seq_lens, window)
    q = randn(len(lengths), 2 * num_heads, head_dim, dtype=dtype, device=device)[:, ::2]  # strided heads
    expected = paged.expected(q, range(len(lengths) + 1), head_dim**-0.5, window)
    for _ in range(2):  # the second run finds the counters as the first left them
        out = torch.full((len(lengths), num_heads, head_dim), NAN, dtype=dtype, device=device)
        paged_decode(q, paged.kv, paged.table, paged.seq_lens, head_dim**-0.5, plan, out, block_n=block_n)
        alive = paged.seq_lens > 0
        assert relative_error(out[alive], expected[alive]) < tolerance(dtype)
        assert not out[~alive].any()


def check_prefill(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int], query_lens: Sequence[int], heads: tuple[int,
    int, int],
    block_size: int, window: int | None = None, *, portable: bool, block_m: int = 128, block_n: int = 64,
    key_scales: Sequence[float] = (1.0,), spare: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    """``spare``: tokens and requests that are not there, as in a graph: no query, no KV, no blocks; twice in a row."""
    num_heads, num_kv_heads, head_dim = heads
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, dtype, device)
    paged.scale_keys(key_scales)
    bounds = [0, *np.cumsum(query_lens).tolist()]
    tokens = bounds[-1] + spare[0]
    q = torch.full((tokens, num_heads, head_dim), NAN, dtype=dtype, device=device)
    q[: bounds[-1]] = randn(bounds[-1], num_heads, head_dim, dtype=dtype, device=device)
    cu = torch.tensor([*bounds, *[bounds[-1]] * spare[1]], dtype=torch.int32, device=device)
    seq_lens = F.pad(paged.seq_lens, (0, spare[1]))
    table = F.pad(paged.table, (0, 0, 0, spare[1]), value=1 << 30)
    most = tokens if any(spare) else max(query_lens)
    tickets = hopper_launch.new_tickets(device)
    for _ in range(2 if any(spare) else 1):
        out = torch.full_like(q, NAN)
        paged_prefill(
            q, paged.kv, table, cu, seq_lens, head_dim**-0.5, most, window, out, tickets,
            portable=portable, block_m=block_m, block_n=block_n,
        )  # fmt: skip
        expected = paged.expected(q[: bounds[-1]], bounds, head_dim**-0.5, window)
        assert relative_error(out[: bounds[-1]], expected) < tolerance(dtype)
        assert out[bounds[-1] :].isnan().all()


def check_cascade(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, shared_blocks: tuple[int,
    int],
    *, portable: bool, block_m: int = 128, block_n: int = 64, key_scales: Sequence[float] = (1.0,),
) -> None:  # fmt: skip
    """A tree: all but the last request share a prefix, the first three share more; one has no token of its own."""
    num_heads, num_kv_heads, head_dim = heads
    outer, inner = shared_blocks
    lengths = [
        inner * block_size + 5, inner * block_size + 40, inner * block_size, outer * block_size + 1,
        outer * block_size + 3 * block_size, 2 * block_size + 3,
    ]  # fmt: skip
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, dtype, device)
    paged.table[1:5, :outer] = paged.table[0, :outer]
    paged.table[1:3, :inner] = paged.table[0, :inner]
    cost = CascadeCost(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, launch_us=0.0, min_range_us=0.0,
        flat_bytes_per_us=1.0, stream_bytes_per_us=1e12, shared_flops_per_us=1e12, tile_rows=1,
    )  # fmt: skip  # sharing is nearly free, so that everything shared is taken
    paged.scale_keys(key_scales)  # shared blocks once for each that has them
    cascade = CascadePlan(len(lengths) + 2, cost, device, block_m=block_m, min_chunk_tokens=2 * block_size)
    cascade.regroup(paged.table.cpu().numpy(), paged.seq_lens.cpu().numpy(), block_size)
    assert cascade.prefix is not None
    covered = [inner * block_size] * 3 + [outer * block_size] * 2 + [0]
    assert cascade.prefix.kv_begin[: len(lengths)].tolist() == covered
    cascade.prefix.partial.fill_(NAN)
    plan = DecodePlan(len(lengths), num_heads, num_kv_heads, head_dim, device, chunks=4)
    plan.partial.fill_(NAN)
    plan.update(paged.seq_lens, prefix=cascade.prefix)
    q = randn(len(lengths), num_heads, head_dim, dtype=dtype, device=device)
    out = torch.full_like(q, NAN)
    cascade.run(q, paged.kv, paged.table, head_dim**-0.5, portable=portable, block_n=block_n)
    paged_decode(q, paged.kv, paged.table, paged.seq_lens, head_dim**-0.5, plan, out)
    expected = paged.expected(q, range(len(lengths) + 1), head_dim**-0.5, None)
    assert relative_error(out, expected) < tolerance(dtype)


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


def _drawn(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """The definition, with a sort, in float64."""
    if temperature == 0:
        return int(x.argmax())
    score = (x - x.max()) / temperature
    odds = np.exp(score)
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep &= score >= np.sort(score)[-top_k]
    if top_p < 1:
        falling = np.sort(odds[keep])[::-1]
        held = np.cumsum(falling)
        keep &= odds >= falling[min(int(np.searchsorted(held, top_p * held[-1])), len(falling) - 1)]
    if min_p > 0:
        keep &= odds >= min_p
    noisy = score + gumbel_noise(seed, position, np.arange(len(x), dtype=np.uint32))
    noisy[~keep] = -np.inf
    return int(noisy.argmax())


DRAWS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 0.95, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (0.7, 1,
    1.0, 0.0),
    (1.0, 300, 0.5, 0.01), (2.0, 0, 0.99, 0.0), (1.0, 0, 0.1, 0.0), (1.0, 5, 0.2, 0.0), (1.5, 10**9, 0.8, 0.0), (0.5,
    700, 0.999, 0.0),
]  # fmt: skip


def check_sampling(device: torch.device, dtype: torch.dtype, vocab_size: int, candidates: int, seed: int) -> None:
    rows = len(DRAWS)
    logits = (torch.randn(rows, vocab_size, device=device) * 2).to(dtype)
    logits[1, 7] = -math.inf
    columns = list(zip(*DRAWS, strict=True))
    keys = np.array([noise_key(seed + row, row) for row in range(rows)], np.uint32).view(np.int32)
    params = DrawParams(
        torch.tensor(columns[0], device=device), torch.tensor(columns[1], dtype=torch.int32, device=device),
        torch.tensor(columns[2], device=device), torch.tensor(columns[3], device=device),
        torch.from_numpy(keys).to(device),
    )  # fmt: skip
    drawer = TokenDrawer(rows, device, candidates)
    wide = logits.double().cpu().numpy()
    expected = [_drawn(wide[row], *DRAWS[row], seed + row, row) for row in range(rows)]
    for _ in range(2):
        assert drawer.draw(logits, params).tolist() == expected
    assert drawer.draw(logits).tolist() == wide.argmax(-1).tolist()


def check_penalties(device: torch.device) -> None:
    logits = torch.randn(2, 40, device=device)
    expected = logits.double()
    rows, ids, counts, seen = [0, 0, 1, 1], [3, 5, 3, 39], [2, 0, 1, 0], [1, 1, 1, 0]
    bias = [0.0, 1.5, 0.0, -2.0]
    repetition, frequency, presence = [1.3, 0.8], [0.5, 0.0], [0.25, 1.0]
    for row, token, count, was_seen, extra in zip(rows, ids, counts, seen, bias, strict=True):
        x = expected[row, token] + extra
        if was_seen:
            x = x / repetition[row] if x > 0 else x * repetition[row]
        expected[row, token] = x - count * frequency[row] - (presence[row] if count else 0.0)
    ints = [torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, ids, counts, seen)]
    floats = [torch.tensor(values, device=device) for values in (bias, repetition, frequency, presence)]
    penalise(logits, *ints, *floats)
    assert relative_error(logits, expected) < 1e-6


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
