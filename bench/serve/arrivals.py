"""When requests are sent: at a rate, as a Poisson process or burstier, or as a trace says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

_BATCH = 1024


def arrivals_s(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds since the start, for ever. Gaps are gamma distributed with shape ``burstiness`` and mean 1 / ``rate``:
    1 is a Poisson process, below 1 bursts, far above 1 a steady beat. At an infinite rate all come at once.

    Raises ValueError.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request rate {rate} and burstiness {burstiness} must be above 0; rate inf sends all at once")
    return _arrivals(rate, burstiness, seed)


def _arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    now_s = 0.0
    while True:
        if math.isinf(rate):
            yield 0.0
            continue
        for gap_s in rng.gamma(burstiness, 1 / (rate * burstiness), _BATCH):
            now_s += float(gap_s)
            yield now_s
