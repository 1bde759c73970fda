"""What others reach, what the hardware would allow, and what we want to reach: every such figure of the benchmarks.

Owns the figures and where they are from, not ours. Times hold on that kind of device only; on another one compare
ratios within a run.

    H200        one NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, triton 3.6, bf16, random weights of the true shape,
                greedy, fixed output lengths, medians
    vLLM        0.26.0, V1 engine, FlashAttention 3, async scheduling, full and piecewise CUDA graphs, on an H200
    FlashInfer  0.6.14, page 16, on an H200 ("flat": its paged decode)
    NCCL        2.28, send and receive between two H200s (NV18)
    CPU         two cores of an AMD EPYC (Zen 5), SmolLM2-135M-Instruct, prompt 256, output 64; measured side by side
    limit       the larger of bytes / 4.27 TB/s and flops / 700 TFLOP/s on an H200; on the CPU of bytes / 37 GB/s and
                flops / 932 (bf16) or 496 (fp32) GFLOP/s
"""

from __future__ import annotations

from typing import NamedTuple

_LOWER_IS_BETTER = frozenset({"ms", "us", "s", "%", "x TTFT"})


class Goal(NamedTuple):
    """Of one figure; None where there is none."""

    peer: float | None = None
    limit: float | None = None
    target: float | None = None


NO_GOAL = Goal()


def is_met(unit: str, ours: float, target: float | None) -> bool | None:
    """None without a target."""
    if target is None:
        return None
    return ours <= target if unit in _LOWER_IS_BETTER else ours >= target


# ---- the engine on an H200; the peer is vLLM

# (requests, prompt tokens) -> ms
PREFILL: dict[str, dict[tuple[int, int], Goal]] = {
    "llama-3.1-8b": {
        (1, 512): Goal(17.6, 10.3, 13),
        (1, 2048): Goal(53.7, 42.4, 48),
        (1, 8192): Goal(216.7, 188, 205),
        (16, 2048): Goal(782, 679, 740),
        (4, 32768): Goal(4833, 4220, 4700),
    },
    "qwen3-0.6b": {
        (1, 512): Goal(12.1, None, 6),
        (1, 2048): Goal(25.2, None, 10),
        (1, 8192): Goal(39.0, None, 30),
        (16, 2048): Goal(113.7, None, 95),
        (4, 32768): Goal(1129, None, 1000),
    },
}
# (requests, context, shared) -> ms a token
DECODE: dict[str, dict[tuple[int, int, int], Goal]] = {
    "llama-3.1-8b": {
        (1, 1024, 0): Goal(5.006, 3.55, 4.1),
        (8, 1024, 0): Goal(5.268, 3.78, 4.4),
        (32, 1024, 0): Goal(6.138, 4.59, 5.4),
        (128, 1024, 0): Goal(10.483, 7.79, 9.2),
        (256, 1024, 0): Goal(17.680, 12.07, 14.2),
        (16, 16384, 0): Goal(13.558, 11.58, 12.8),
        (4, 32000, 0): Goal(8.586, 7.45, 8.2),
        (128, 8256, 8192): Goal(26.706, 4.9, 7.5),
    },
    "qwen3-0.6b": {
        (1, 1024, 0): Goal(1.900, 0.31, 1.0),
        (8, 1024, 0): Goal(3.378, 0.5, 1.3),
        (32, 1024, 0): Goal(4.240, 1.2, 2.0),
        (128, 1024, 0): Goal(7.734, 4.0, 5.2),
        (256, 1024, 0): Goal(13.408, 7.8, 9.5),
        (16, 16384, 0): Goal(9.196, 7.3, 8.2),
        (4, 32000, 0): Goal(5.088, 3.7, 4.4),
        (128, 8256, 8192): Goal(21.217, 1.1, 4.0),
    },
}
# Output tokens/s of 1000 requests of 512 -> 128 tokens at once.
BURST = {"llama-3.1-8b": Goal(6810, None, 8500), "qwen3-0.6b": Goal(16679, None, 28000)}
# The same with temperature 0.8, top-p 0.95, top-k 50; the target is 3 % below greedy's.
SAMPLED_BURST = {"llama-3.1-8b": Goal(4762, None, 8245)}
# Requests/s of 128 x (2048 -> 128) of the 8B model, by per cent of the prompt in the prefix cache.
PREFIX = {0: Goal(15.7, None, 17), 25: Goal(19.5, None, 21.5), 50: Goal(25.8, None, 29), 75: Goal(39.2, None, 46)}
# % of the throughput that the prefix cache costs where nothing hits; vLLM says so of its V1 engine.
PREFIX_COST = Goal(1, None, 1)
# Seconds until a worker is ready, graphs captured.
START = Goal(115, None, 30)

# ---- kernels on an H200, us

# (requests, context), 32 query and 8 KV heads; the target is what 4.0 TB/s of KV take, but where one is given here.
FLASHINFER_DECODE = {(256, 1024): 267.9, (64, 4096): 255.6, (16, 16384): 257.6, (1, 131072): 142.0, (8, 1024): 25.4}
DECODE_BYTES_PER_US = 4.0e6
TARGET_DECODE = {(1, 131072): 140.0, (8, 1024): 18.0}
# (requests, shared, own, heads, kv heads): (flat, cascade); without a target: not slower than our own flat kernel.
FLASHINFER_CASCADE = {
    (256, 32768, 128, 32, 32): (13353.0, 767.0),
    (256, 32768, 256, 32, 8): (3598.0, 836.0),
    (128, 8192, 64, 32, 8): (469.0, 224.0),
    (64, 2048, 512, 32, 8): (105.0, 210.0),
}
TARGET_CASCADE = {(256, 32768, 128, 32, 32): 430.0, (256, 32768, 256, 32, 8): 420.0, (128, 8192, 64, 32, 8): 110.0}

# ---- KV between GPUs

# GB/s between two GPUs by segment; the limit is a plain copy in the same run, the target a part of it from 16 MiB on.
NCCL_GB_PER_S = {"64 KiB": 2.6, "1 MiB": 44.0, "16 MiB": 288.0, "128 MiB": 350.0, "1 GiB": 369.0}
LINK_SHARE = 0.9
LINK_SHARE_FROM = ("16 MiB", "32 MiB", "128 MiB", "1 GiB")
# Exposed part of a hand-off, % of TTFT, by prompt tokens. The peer: Mooncake's transfer engine, Qwen3-8B, 8 x 400G.
EXPOSED = {8192: Goal(None, None, 1.0), 32768: Goal(4.2, None, 4.0)}

# ---- the whole service on two H200s


class Served(NamedTuple):
    """One H200, vLLM aggregated (chunked prefill, budget 8192), Poisson arrivals; ms."""

    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    share_steady: float
    """Of the requests with TTFT <= 2 s and own p99 ITL <= 25 ms."""


# "input -> output, rate" of the one GPU; two of ours get twice the rate.
VLLM_SERVED = {
    "2048 -> 256, 2/s": Served(60, 124, 27.9, 0.30),
    "2048 -> 256, 4/s": Served(68, 167, 35.9, 0.07),
    "2048 -> 256, 8/s": Served(103, 209, 52.8, 0.04),
    "2048 -> 256, 12/s": Served(190, 659, 64.4, 0.03),
    "2048 -> 256, 16/s": Served(413, 1321, 126.9, 0.02),
    "8192 -> 256, 1.5/s": Served(294, 706, 64.7, 0.08),
    "8192 -> 256, 3/s": Served(877, 1691, 72.6, 0.03),
}
APART_ITL_P99_MS = 15.0
APART_TTFT_P50_RATIO = 1.25
APART_SHARE_STEADY = 0.90
"""At 2048 -> 256 and 16/s."""
# Times by which the p99 of ITL falls against two aggregated workers; the peer: SGLang with Mooncake, 295 -> 19.7 ms.
ITL_CUT = Goal(15.0, None, 10.0)
# TTFT's median against two aggregated workers; the same peer: 310 -> 1112 ms.
TTFT_RATIO = Goal(3.6, None, 1.0)

# ---- the CPU

# (weights, streams) -> output tokens/s; the best of vLLM, OpenVINO GenAI and llama.cpp's server.
CPU_TOKENS_PER_S = {
    ("bfloat16", 16): Goal(377, 1580, 500),
    ("float32", 1): Goal(53, 67, 50),
    ("float32", 16): Goal(231, 790, 231),
}
CPU_TTFT_MS = Goal(84, 60, 90)
"""Through the gateway, bf16, one stream; vLLM."""
CPU_TPOT_MS = Goal(10.1, 7.5, 10)
"""The same; OpenVINO GenAI, without a server."""
CPU_SHARED_PREFIX_S = {"cold": Goal(3.1, None, 2.5), "warm": Goal(2.5, None, 1.5)}
"""16 requests at once that share 1,500 tokens; vLLM."""
CPU_START_S = Goal(1.0, None, 6.0)
"""To the first answer, the model prepared; llama.cpp's server, one process."""
CPU_APART_RATE = Goal(0.25, 1.0, 0.8)
"""One prefill and one decode worker against one aggregated: tokens/s at 16 streams; vLLM over NIXL."""
CPU_APART_TTFT = Goal(4.3, 1.0, 1.3)
"""The same: TTFT at one stream, as a multiple."""
# GB/s of bytes on one host by segment. Peers: ucxx's shared memory for shm and ucx, Mooncake for tcp.
CPU_TRANSFER: dict[str, dict[str, Goal]] = {
    "shm": {
        "64 KiB": Goal(1.7, 76, 15), "1 MiB": Goal(14, 54, 15), "16 MiB": Goal(12, 15, 8), "128 MiB": Goal(13, 15, 8),
    },
    "ucx": {
        "64 KiB": Goal(1.7, 76, 0.8), "1 MiB": Goal(14, 54, 5), "16 MiB": Goal(12, 15, 10), "128 MiB": Goal(13, 15, 10),
    },
    "tcp": {
        "64 KiB": Goal(0.9, 76, 2), "1 MiB": Goal(2.0, 54, 4), "16 MiB": Goal(2.2, 15, 4), "128 MiB": Goal(2.4, 15, 3),
    },
}  # fmt: skip
