# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Draws tokens without sorting the vocabulary: argmax, thresholds for top-k / top-p / min-p, sparse penalties.

The meaning is ``engine.sampler``'s and the noise ``engine.kernels.noise``'s, computed in place. A cut is a threshold
on the logit. ``top_k`` and ``top_p`` are searched five ways at once (counts or masses of four thresholds a pass
over the row, which the cache holds), until at most CANDIDATES tokens are left between the bounds; those few are
sorted in registers, which makes the cut exact. Then one pass takes ``argmax(logit / temperature + noise)`` of what is
kept.

    logits [R, V] --penalise, sparse--> --_threshold_kernel, a program a row--> threshold [R]
        --_argmax_kernel, a program a (row, part)--> token [R]

Gumbel-max: Maddison et al., "A* sampling", 2014, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch

CANDIDATES = 1024
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _lowbias32(x):
    x ^= x >> 16
    x *= tl.full((), 0x7FEB352D, tl.uint32)
    x ^= x >> 15
    x *= tl.full((), 0x846CA68B, tl.uint32)
    x ^= x >> 16
    return x


@triton.jit
def _gumbel(token_ids, low, high):
    """-log(-log(1 - u)) of the counter-based hash; a small u may vanish against 1, so there log1p is its series."""
    bits = _lowbias32(_lowbias32(token_ids.to(tl.uint32) ^ low) + high)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = 1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7))))))
    return -tl.log(tl.where(u < 0.0625, u * series, -tl.log(1.0 - u)))


@triton.jit
def _tally(row_ptr, V, t0, t1, t2, t3, best, inverse_t, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Counts and, if MASS, masses (of exp((x - best) / T)) of the logits at or above four thresholds, each as [4]."""
    c0 = tl.zeros([BLOCK], tl.int32)
    c1, c2, c3 = c0, c0, c0
    m0 = tl.zeros([BLOCK], tl.float32)
    m1, m2, m3 = m0, m0, m0
    for start in tl.range(0, V, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < V, other=_NEGATIVE_INFINITY).to(tl.float32)
        c0 += (x >= t0).to(tl.int32)
        c1 += (x >= t1).to(tl.int32)
        c2 += (x >= t2).to(tl.int32)
        c3 += (x >= t3).to(tl.int32)
        if MASS:
            weight = tl.exp((x - best) * inverse_t)
            m0 += tl.where(x >= t0, weight, 0.0)
            m1 += tl.where(x >= t1, weight, 0.0)
            m2 += tl.where(x >= t2, weight, 0.0)
            m3 += tl.where(x >= t3, weight, 0.0)
    counts = _four(tl.sum(c0, 0), tl.sum(c1, 0), tl.sum(c2, 0), tl.sum(c3, 0))
    masses = _four(tl.sum(m0, 0), tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0))
    return counts, masses


@triton.jit
def _four(a, b, c, d):
    way = tl.arange(0, 4)
    return tl.where(way == 0, a, tl.where(way == 1, b, tl.where(way == 2, c, d)))


@triton.jit
def _pick(values, index):
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0), 0)


@triton.jit
def _search(row_ptr, V, low, high, kept, needed, best, inverse_t,
            BLOCK: tl.constexpr, POOL: tl.constexpr, PASSES: tl.constexpr, MASS: tl.constexpr):  # fmt: skip
    """Narrow [low, high) around a cut until at most POOL tokens are in it.

    At or above ``low`` (``kept`` tokens) the count or mass reaches ``needed``, above ``high`` it does not, and at first
    nothing is above it. Returns (low, high, tokens between, tokens at or above high).
    """
    way = tl.arange(0, 4)
    above = kept * 0
    step = 0
    while (step < PASSES) & (kept - above > POOL):
        # Ascending. The first pass knows no lower end: 27, 9, 3, 1 temperatures below the best.
        start = tl.where(low == _NEGATIVE_INFINITY, best, low)
        spread = start + (high - start) * ((way + 1).to(tl.float32) * 0.2)
        first = best - _four(27.0, 9.0, 3.0, 1.0) / inverse_t
        thresholds = tl.where(low == _NEGATIVE_INFINITY, first, spread)
        counts, masses = _tally(
            row_ptr, V, _pick(thresholds, 0), _pick(thresholds, 1), _pick(thresholds, 2), _pick(thresholds, 3), best,
            inverse_t, BLOCK, MASS,
        )  # fmt: skip
        enough = masses >= needed if MASS else counts >= needed
        taken = tl.sum(enough.to(tl.int32), 0)  # nested: the lowest ones reach it
        if taken < 4:
            high = _pick(thresholds, taken)
            above = _pick(counts, taken)
        if taken > 0:
            low = _pick(thresholds, taken - 1)
            kept = _pick(counts, taken - 1)
        else:
            # Below the first pass's reach; no logit is (or weighs anything) as far down as this.
            low = tl.where(low == _NEGATIVE_INFINITY, high - 1.0e4 / inverse_t, low)
        step += 1
    return low, high, kept - above, above


@triton.jit
def _band(row_ptr, V, low, high, between, best, inverse_t, pool_ptr, pool_count_ptr,
          BLOCK: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """The logits in [low, high), falling, padded with -inf to POOL; and the mass at or above ``high``."""
    over = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < V, other=_NEGATIVE_INFINITY).to(tl.float32)
        over += tl.where(x >= high, tl.exp((x - best) * inverse_t), 0.0)
        chosen = (x >= low) & (x < high) & (at < V)  # low may be -inf, as padding is
        slot = tl.atomic_add(pool_count_ptr + tl.zeros([BLOCK], tl.int32), 1, mask=chosen, sem="relaxed")
        tl.store(pool_ptr + slot, x, mask=chosen & (slot < POOL))
    tl.debug_barrier()
    tl.store(pool_count_ptr, 0)
    i = tl.arange(0, POOL)
    x = tl.load(pool_ptr + i, mask=i < between, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
    return tl.sort(x, descending=True), tl.sum(over, 0)


@triton.jit
def _threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, pool_ptr, pool_count_ptr, V, stride,
    BLOCK: tl.constexpr, POOL: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = tl.full((), _NEGATIVE_INFINITY, tl.float32)
    cut_k = (top_k > 0) & (top_k < V)
    cut_p = top_p < 1.0
    if (temperature > 0) & (cut_k | cut_p | (min_p > 0.0)):
        row_ptr = logits_ptr + row * stride
        pool = pool_ptr + row * POOL
        counter = pool_count_ptr + row
        inverse_t = 1.0 / temperature
        tops = tl.full([BLOCK], _NEGATIVE_INFINITY, tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=3):
            at = start + tl.arange(0, BLOCK)
            tops = tl.maximum(tops, tl.load(row_ptr + at, mask=at < V, other=_NEGATIVE_INFINITY).to(tl.float32))
        best = tl.max(tops, 0)
        top = best + temperature * 1.0e-3 + tl.abs(best) * 1.0e-6  # above every logit
        low, high = threshold, top
        between, above = top_k * 0, top_k * 0
        mass_above, total = best * 0.0, best * 0.0
        everything = top_k * 0 + V
        if cut_k:
            low, high, between, above = _search(
                row_ptr, V, low, high, everything, top_k, best, inverse_t, BLOCK, POOL, PASSES, False
            )
            x, mass_above = _band(row_ptr, V, low, high, between, best, inverse_t, pool, counter, BLOCK, POOL)
            i = tl.arange(0, POOL)
            threshold = tl.max(tl.where(i == top_k - above - 1, x, _NEGATIVE_INFINITY), 0)
            threshold = tl.where(between > POOL, low, threshold)  # only thousands of equal logits are left undivided
            between = tl.sum((x >= threshold).to(tl.int32), 0)
            total = mass_above + tl.sum(tl.where(x >= threshold, tl.exp((x - best) * inverse_t), 0.0), 0)
            low = threshold
        if cut_p:
            if not cut_k:
                sums = tl.zeros([BLOCK], tl.float32)
                for start in tl.range(0, V, BLOCK, num_stages=3):
                    at = start + tl.arange(0, BLOCK)
                    x = tl.load(row_ptr + at, mask=at < V, other=_NEGATIVE_INFINITY).to(tl.float32)
                    sums += tl.exp((x - best) * inverse_t)
                total = tl.sum(sums, 0)
            needed = top_p * total
            # The band that top_k left may hold this cut too; else it is above the band, or anywhere.
            if (not cut_k) | (mass_above >= needed):
                kept = tl.where(cut_k, above, everything)
                low = tl.where(cut_k, high, low)
                low, high, between, above = _search(
                    row_ptr, V, low, top, kept, needed, best, inverse_t, BLOCK, POOL, PASSES, True
                )
            x, mass_above = _band(
                row_ptr, V, low, high, tl.minimum(between, POOL), best, inverse_t, pool, counter, BLOCK, POOL
            )
            weight = tl.where(x >= low, tl.exp((x - best) * inverse_t), 0.0)
            before = mass_above + tl.cumsum(weight, 0) - weight
            kept_here = (before < needed) & (x >= low)
            cut = tl.min(tl.where(kept_here, x, high), 0)
            threshold = tl.maximum(threshold, tl.where(between > POOL, low, cut))
        if min_p > 0.0:
            threshold = tl.maximum(threshold, best + temperature * tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _argmax_kernel(
    logits_ptr, temperature_ptr, key_ptr, threshold_ptr, best_ptr, arrived_ptr, token_ptr, V, stride,
    BLOCK: tl.constexpr, TILES: tl.constexpr, THRESHOLD: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    best = tl.full([BLOCK], _NEGATIVE_INFINITY, tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32) + V
    temperature = 0.0
    threshold = _NEGATIVE_INFINITY
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        low = tl.load(key_ptr + row * 2).to(tl.uint32, bitcast=True)
        high = tl.load(key_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        if THRESHOLD:
            threshold = tl.load(threshold_ptr + row)
    for tile in range(TILES):
        at = (part * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + at, mask=at < V, other=_NEGATIVE_INFINITY).to(tl.float32)
        if NOISE and temperature > 0:
            if THRESHOLD and tl.max(x, 0) < threshold:  # most tiles keep nothing: no noise for them
                x = tl.full([BLOCK], _NEGATIVE_INFINITY, tl.float32)
            else:
                x = tl.where(x >= threshold, x / temperature + _gumbel(at, low, high), _NEGATIVE_INFINITY)
        better = x > best
        best = tl.where(better, x, best)
        best_at = tl.where(better, at, best_at)
    # Order-preserving bits of the value above, the inverted id below: ties go to the lowest id.
    bits = best.to(tl.uint32, bitcast=True)
    ordered = tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)
    packed = (ordered.to(tl.uint64) << 32) | (0x7FFFFFFF - best_at).to(tl.uint64)
    tl.atomic_max(best_ptr + row, tl.max(packed, 0), sem="acq_rel")
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        winner = tl.atomic_xchg(best_ptr + row, tl.full((), 0, tl.uint64), sem="acq_rel")
        tl.store(token_ptr + row, 0x7FFFFFFF - (winner & 0x7FFFFFFF).to(tl.int64))
        tl.store(arrived_ptr + row, 0)


@triton.jit(do_not_specialize=["entries"])
def _penalise_kernel(
    logits_ptr, row_ptr, id_ptr, count_ptr, seen_ptr, bias_ptr, repetition_ptr, frequency_ptr, presence_ptr, entries,
    stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < entries
    row = tl.load(row_ptr + i, mask=mask, other=0)
    at = logits_ptr + row.to(tl.int64) * stride + tl.load(id_ptr + i, mask=mask, other=0)
    count = tl.load(count_ptr + i, mask=mask, other=0).to(tl.float32)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32) + tl.load(bias_ptr + i, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + row, mask=mask, other=1.0)
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where(tl.load(seen_ptr + i, mask=mask, other=0) != 0, repeated, x)
    presence = tl.load(presence_ptr + row, mask=mask, other=0.0)
    x -= count * tl.load(frequency_ptr + row, mask=mask, other=0.0) + tl.where(count > 0, presence, 0.0)
    tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """One row a request, on the device. ``keys`` are ``noise_key(seed, position)`` as two int32 words."""

    temperature: torch.Tensor  # [R] float32; 0: greedy
    top_k: torch.Tensor  # [R] int32; 0: all
    top_p: torch.Tensor  # [R] float32
    min_p: torch.Tensor  # [R] float32
    keys: torch.Tensor  # [R, 2] int32


class TokenDrawer:
    """Workspace for drawing up to ``max_rows`` tokens a step; one stream at a time."""

    def __init__(self, max_rows: int, device: torch.device, candidates: int = CANDIDATES) -> None:
        self.candidates = candidates
        self._pool = torch.empty(max_rows, candidates, dtype=torch.float32, device=device)
        self._pool_count = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._threshold = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._best = torch.zeros(max_rows, dtype=torch.uint64, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._sm_count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

    def draw(
        self,
        logits: torch.Tensor,
        params: DrawParams | None = None,
        *,
        cut: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids [R] int64 of logits [R, V]. ``params`` None: all greedy; ``cut`` False: no row has a cut."""
        rows, vocab_size = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
        temperature = self._threshold if params is None else params.temperature
        keys = self._arrived if params is None else params.keys
        cut = cut and params is not None
        if cut and params is not None:
            launch(_threshold_kernel, (rows,),
                logits, params.temperature, params.top_k, params.top_p, params.min_p, self._threshold, self._pool,
                self._pool_count, vocab_size, logits.stride(0),
                BLOCK=min(2048, triton.next_power_of_2(vocab_size)), POOL=self.candidates, PASSES=16,
                num_warps=16,
            )  # fmt: skip
        block = min(1024, triton.next_power_of_2(vocab_size))
        tiles = 1 << (max(1, min(16, rows * vocab_size // (block * self._sm_count * 4))).bit_length() - 1)
        launch(_argmax_kernel, (rows, triton.cdiv(vocab_size, block * tiles)),
            logits, temperature, keys, self._threshold, self._best, self._arrived, tokens, vocab_size, logits.stride(0),
            BLOCK=block, TILES=tiles, THRESHOLD=cut, NOISE=params is not None,
        )  # fmt: skip
        return tokens


def penalise(
    logits: torch.Tensor,  # [R, V], changed in place
    rows: torch.Tensor,  # [E] int32: each (row, id) pair at most once
    ids: torch.Tensor,  # [E] int32
    counts: torch.Tensor,  # [E] int32: times in the output
    seen: torch.Tensor,  # [E] int32: in the prompt or the output
    bias: torch.Tensor,  # [E] float32
    repetition: torch.Tensor,  # [R] float32
    frequency: torch.Tensor,  # [R] float32
    presence: torch.Tensor,  # [R] float32
) -> None:
    """logit_bias, then repetition, frequency and presence penalties, of the listed entries only."""
    entries = rows.shape[0]
    if entries:
        launch(_penalise_kernel, (triton.cdiv(entries, 256),),
            logits, rows, ids, counts, seen, bias, repetition, frequency, presence, entries, logits.stride(0),
            BLOCK=256,
        )  # fmt: skip
