"""Counter-based Gumbel noise: a pure function of (seed, output position, vocabulary id).

Owns the hash. Because no generator has a state, a request draws the same token alone, in any batch, after preemption,
on another worker. Drawing ``argmax(logit / temperature + noise)`` is drawing from the softmax (Gumbel 1954; Maddison
et al. 2014, "A* sampling", section 2).

    key   = splitmix64(splitmix64(seed) + position)                        64 bits, once per request and step
    bits  = lowbias32(lowbias32(token_id ^ key_low) + key_high)            32 bits per token
    u     = (bits + 1/2) / 2^32, at most 1 - 2^-24                         in (0, 1)
    noise = -log(-log(1 - u))                                              large noise is small u: finely resolved
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """The 64-bit key of one draw, as (low, high) 32-bit words."""
    key = _splitmix64((_splitmix64(seed & _MASK64) + position) & _MASK64)
    return key & 0xFFFFFFFF, key >> 32


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Noise of these vocabulary ids at this output position."""
    low, high = noise_key(seed, position)
    bits = _lowbias32(_lowbias32(token_ids ^ np.uint32(low)) + np.uint32(high))
    u = bits.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.minimum(u, np.float32(1 - 2.0**-24), out=u)
    np.negative(u, out=u)
    np.log1p(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)


def _splitmix64(x: int) -> int:
    """Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": the output function."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _lowbias32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """A 32-bit finalizer of low bias (Wellons 2018, "Prospecting for hash functions"); overwrites ``x``."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def splitmix64_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``_splitmix64`` of many words; ``splitmix64_array(splitmix64_array(seeds) + positions)`` are their keys."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
