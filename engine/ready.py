"""What an engine says of itself once it can take requests: the values that were measured at start.

Called by the services' ``engine_main``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.messages import EngineReady

if TYPE_CHECKING:
    from engine.gpu_runner import GpuRunner
    from engine.model_runner import ModelRunner


def engine_ready(config: EngineConfig, runner: ModelRunner | GpuRunner) -> EngineReady:
    """Without ``data_endpoints``, which only a decode engine has, once it listens."""
    cache = runner.kv_cache
    return EngineReady(
        model_fingerprint=runner.model_fingerprint,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        block_size=config.block_size,
        hash_block_tokens=config.hash_block_tokens,
        num_blocks=runner.num_blocks,
        num_layers=cache.num_layers,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        kv_dtype=str(cache.dtype).removeprefix("torch."),
        kv_bytes=cache.num_bytes,
        eos_token_ids=list(runner.eos_token_ids),
    )
