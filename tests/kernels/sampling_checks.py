"""Drawing tokens without a sort, and penalties, against the plain twins, for any device and size."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.kernels.noise import gumbel_noise, noise_key
from engine.kernels.sampling import DrawParams, TokenDrawer, penalise
from tests.kernels.paged_inputs import relative_error


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
