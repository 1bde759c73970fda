"""Runs one step on the device: a scheduled batch in, sampled tokens out.

Owns the model, its weights and the KV cache's memory, and measures at start what the configuration leaves open (number
of blocks, longest request). Decides nothing about requests. Called by the engine core, from its one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import torch

from engine.batch import SampledBatch, ScheduledBatch, build_forward_batch
from engine.config import EngineConfig
from engine.cpu_threads import CpuThreads
from engine.dummy_weights import open_weights
from engine.kernels import Kernels, fastest_kernels
from engine.kv_cache import KVCache
from engine.messages import TokenLogprobs
from engine.model_config import ModelConfig, load_model_config
from engine.models import build_model
from engine.sampler import Sampler
from engine.weights import resolve_model

log = structlog.get_logger()

_KV_CACHE_BYTES = 1 << 30

OnLayers = Callable[[int, int], None]
"""``(layer_start, layer_end)``: the KV that this step computes in these layers is in the cache now."""


class ModelRunner:
    """One model on one device."""

    def __init__(self, config: EngineConfig, kernels: Kernels | None = None) -> None:
        """Load the model. ``kernels``: None takes the fastest that the device and the dtype allow."""
        self.config = config
        self.device = torch.device(config.device)
        directory = resolve_model(config.model)
        self.model_config: ModelConfig = load_model_config(directory)
        self.dtype = getattr(torch, self.model_config.dtype if config.dtype == "auto" else config.dtype)
        self.max_model_len = longest_request(config, self.model_config)
        self.eos_token_ids = list(self.model_config.eos_token_ids)
        self.vocab_size = self.model_config.vocab_size

        self._kernels, slower_because = (kernels, "") if kernels else fastest_kernels(self.device)
        self._cpu_threads = CpuThreads(config.num_threads)
        # Loading is bound by memory, and mostly happens while other processes start: threads that wait for each other's
        # cores made it five times slower. ``run`` sets the number for computing.
        self._num_threads = 1
        self._kernels.set_num_threads(self._num_threads)
        source, self.model_fingerprint = open_weights(config, directory, self.model_config, self.dtype, self.device)
        with source as weights, torch.inference_mode():
            self._model = build_model(self.model_config, weights, self._kernels, self.max_model_len)
        self.num_blocks = _num_blocks(config, self.model_config, self.dtype, self.max_model_len)
        self.kv_cache = KVCache(
            num_layers=self.model_config.num_layers,
            num_blocks=self.num_blocks,
            num_kv_heads=self.model_config.num_kv_heads,
            block_size=config.block_size,
            head_dim=self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self._sampler = Sampler(self.eos_token_ids)
        log.info(
            "model_loaded",
            model=config.model,
            architecture=self.model_config.architecture,
            dtype=str(self.dtype).removeprefix("torch."),
            kernels=self._kernels.name + (f" (native unavailable: {slower_because})" if slower_because else ""),
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            kv_bytes=self.kv_cache.num_bytes,
            max_model_len=self.max_model_len,
        )

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, on_layers: OnLayers | None = None) -> SampledBatch:
        """Compute the batch's tokens, write their KV, draw a token for each item that needs one.

        ``on_layers`` is called after each group of ``config.layer_group_size`` layers, in order.
        """
        self._take_cores()
        try:
            return self._run(batch, on_layers)
        finally:
            self._cpu_threads.end_step()

    def rest(self) -> None:
        """No step will follow soon: other engines may have the cores."""
        self._cpu_threads.rest()

    def _take_cores(self) -> None:
        num_threads = self._cpu_threads.begin_step()
        if num_threads != self._num_threads:
            self._kernels.set_num_threads(num_threads)
            self._num_threads = num_threads

    def _run(self, batch: ScheduledBatch, on_layers: OnLayers | None) -> SampledBatch:
        forward = build_forward_batch(batch, self.config.block_size, self.device)
        after_layer = None if on_layers is None else self._grouped(on_layers)
        hidden = self._model.forward(forward, self.kv_cache.layers, after_layer)
        token_ids: list[int | None] = [None] * len(batch.items)
        logprobs: list[TokenLogprobs | None] = [None] * len(batch.items)
        rows = [row for row, item in enumerate(batch.items) if item.needs_sample]
        if rows:
            drawn, asked = self._sampler.sample(self._model.logits(hidden), [batch.items[row].request for row in rows])
            for row, token_id, logprob in zip(rows, drawn, asked, strict=True):
                token_ids[row], logprobs[row] = token_id, logprob
        return SampledBatch(token_ids=token_ids, logprobs=logprobs)

    def _grouped(self, on_layers: OnLayers) -> Callable[[int], None]:
        size, num_layers = self.config.layer_group_size, self.model_config.num_layers

        def after_layer(layer: int) -> None:
            end = layer + 1
            if end % size == 0 or end == num_layers:
                on_layers((layer // size) * size, end)

        return after_layer


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if not 0 < config.max_model_len <= model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model was made for {model.max_position_embeddings} tokens; "
            f"use --max-model-len {model.max_position_embeddings} or less"
        )
    return config.max_model_len


def _num_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """As many blocks as ``kv_cache_bytes`` holds, but no more than all requests of a step can fill."""
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = KVCache.bytes_per_block(
        model.num_layers, model.num_kv_heads, config.block_size, model.head_dim, dtype
    )
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    kv_cache_bytes = config.kv_cache_bytes or _KV_CACHE_BYTES
    num_blocks = min(kv_cache_bytes // block_bytes, most)
    if num_blocks < 2:
        raise ValueError(
            f"kv_cache_bytes={kv_cache_bytes} holds {num_blocks} blocks of {block_bytes} bytes: "
            f"use --kv-cache-bytes {16 * block_bytes} or more"
        )
    return num_blocks
