"""Settings of one engine. Read once, by the service's ``engine_main``; values measured at start: ``EngineReady``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every field has its unit in its name. Errors in it are raised by ``__post_init__`` with the remedy."""

    model: str
    """Directory or hub name (org/name)."""
    device: str = "cpu"
    load_format: str = "auto"
    """auto (safetensors) | dummy (random weights: to measure without a checkpoint)."""
    dtype: str = "auto"
    """auto (of the checkpoint) | float32 | bfloat16: weights, activations and KV."""
    block_size: int = 32
    """Tokens a block; a multiple of ``hash_block_tokens``."""
    hash_block_tokens: int = 16
    """Tokens a prefix hash covers; must be the same in the whole fleet."""
    num_blocks: int | None = None
    """Size of the pool; None: from ``kv_cache_bytes``."""
    kv_cache_bytes: int | None = None
    """None: 1 GiB on a CPU; on a GPU what ``gpu_memory_utilization`` leaves."""
    host_kv_bytes: int = 256 << 20
    """Decode and aggregated: host memory for the KV of preempted requests; 0: all of it is computed again."""
    max_model_len: int | None = None
    """None: what the model's config says."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of a step: what decode leaves of it goes to prefill chunks."""
    itl_budget_ms: float = 0.0
    """While any request decodes, a step takes only so many prefill tokens that it is no longer than this, as far as is
    known by then (engine.itl_budget); 0: no limit. A decode worker that has one offers to prefill prompts itself."""
    max_waiting_requests: int = 1024
    """More are refused as overloaded."""
    enable_prefix_caching: bool = True
    max_peer_pool_fraction: float = 0.5
    """Prefill: part of the pool that requests of one decode worker may hold, so that a stuck one cannot take it all."""
    layer_group_size: int = 8
    """Layers whose KV leaves as one segment while the next ones are computed."""
    staged_steps: int = 0
    """CUDA: memory left to transfers, in KV that so many full steps compute; a prefill worker stages what it sends."""
    gpu_memory_utilization: float = 0.9
    """CUDA: part of the device's memory that this engine may take for weights, activations and the KV pool."""
    async_scheduling: bool = True
    """Where the runner can: launch a step before the results of the one before are read."""
    num_threads: int | None = None
    """Compute threads; None: the host's cores divided by the engines on it."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size % self.hash_block_tokens:
            raise ValueError(
                f"block_size={self.block_size} is not a multiple of hash_block_tokens={self.hash_block_tokens}: "
                f"use --block-size {self.hash_block_tokens * max(1, round(self.block_size / self.hash_block_tokens))}"
            )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} is not supported: use auto, float32, bfloat16 or float16")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format={self.load_format!r} is not supported: use auto or dummy")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1")
        if not 0 < self.max_peer_pool_fraction <= 1:
            raise ValueError(f"max_peer_pool_fraction={self.max_peer_pool_fraction} must be above 0 and at most 1")
        if not 0 <= self.itl_budget_ms < float("inf"):
            raise ValueError(f"itl_budget_ms={self.itl_budget_ms}: use milliseconds, or 0 for no limit")
        if self.staged_steps < 0:
            raise ValueError(f"staged_steps={self.staged_steps} must be 0 (none) or more")
        if self.host_kv_bytes < 0:
            raise ValueError(f"host_kv_bytes={self.host_kv_bytes} must be 0 (none) or more")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests", "layer_group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_blocks", "num_threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1: leave --{name.replace('_', '-')} out")
