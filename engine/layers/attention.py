"""Self-attention over the paged KV cache: merged QKV projection, rope and KV write, attention, output projection.

The norm after it, which the MLP begins with, goes with the output projection.
"""

from __future__ import annotations

import torch

from engine.batch import ForwardBatch
from engine.kernels import Kernels, Normed
from engine.model_config import ModelConfig
from engine.weights import Weights


class Attention:
    """One layer's attention. The three input projections are one matrix: fewer, larger products."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, kernels: Kernels, cos_sin: torch.Tensor
    ) -> None:
        self._kernels = kernels
        self._scale = config.head_dim**-0.5
        self._window = config.windows[layer]

        prefix = f"model.layers.{layer}.self_attn."
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = kernels.qkv_rope_kv_write(
            torch.cat([weights.take(f"{prefix}{name}.weight", (n, config.hidden_size)) for name, n in sizes.items()]),
            torch.cat([weights.take(f"{prefix}{name}.bias", (n,)) for name, n in sizes.items()])
            if config.qkv_bias
            else None,
            config.num_heads,
            config.num_kv_heads,
            cos_sin,
            weights.take(f"{prefix}q_norm.weight", (config.head_dim,)) if config.qk_norm else None,
            weights.take(f"{prefix}k_norm.weight", (config.head_dim,)) if config.qk_norm else None,
            config.rms_norm_eps,
        )
        self._o = kernels.linear_add_norm(
            weights.take(f"{prefix}o_proj.weight", (config.hidden_size, q_size)),
            weights.take(f"{prefix}o_proj.bias", (config.hidden_size,)) if config.o_bias else None,
            weights.take(f"model.layers.{layer}.post_attention_layernorm.weight", (config.hidden_size,)),
            config.rms_norm_eps,
            plain=False,
        )

    def mix(self, normed: Normed, batch: ForwardBatch, kv_layer: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, heads * head_dim]; writes the tokens' keys and values into ``kv_layer``."""
        q = self._qkv(normed, batch.positions, batch.slot_mapping, kv_layer)
        mixed = self._kernels.paged_attention(
            q,
            kv_layer,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            self._scale,
            batch.max_q_len,
            self._window,
        )
        return mixed.view(len(normed), -1)

    def mix_drawn(self, normed: Normed, batch: ForwardBatch, kv_layer: torch.Tensor) -> torch.Tensor:
        """``mix`` of the rows that a token is drawn from, the last ones of their requests; writes all keys and values.

        [T, hidden] -> [R, heads * head_dim], as ``batch.logits_index`` has them.
        """
        rows = batch.logits_index
        q = self._qkv(normed, batch.positions, batch.slot_mapping, kv_layer, rows)
        if not len(rows):
            return q.flatten(1)
        request = torch.searchsorted(batch.cu_seqlens_q, rows.to(batch.cu_seqlens_q.dtype), right=True) - 1
        mixed = self._kernels.paged_attention(
            q,
            kv_layer,
            batch.block_table[request],
            torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            batch.seq_lens[request],
            self._scale,
            1,
            self._window,
        )
        return mixed.view(len(rows), -1)

    def project(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[Normed, torch.Tensor]:
        """[rows, heads * head_dim] and the residual -> the norm of their sum and the residual, [rows, hidden]."""
        return self._o(mixed, residual)
