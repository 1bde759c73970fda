"""The Llama family's decoder (Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2), by composition.

What tells its members apart (biases, query and key norms, windows, tied embeddings, rope) is in ``ModelConfig``.
Called by the model runner with a step's tensors; knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from engine.kernels import Kernels
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.layers.rope import rope_table
from engine.model_config import ModelConfig
from engine.weights import Weights


class DecoderLayer:
    """Pre-norm attention and MLP around one residual stream."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, kernels: Kernels, cos_sin: torch.Tensor
    ) -> None:
        prefix, hidden = f"model.layers.{layer}.", (config.hidden_size,)
        self._norm = kernels.fused_add_rms_norm
        self._eps = config.rms_norm_eps
        self._input_norm = weights.take(f"{prefix}input_layernorm.weight", hidden)
        self._attention = Attention(config, layer, weights, kernels, cos_sin)
        self._post_norm = weights.take(f"{prefix}post_attention_layernorm.weight", hidden)
        self._mlp = GatedMLP(config, layer, weights, kernels)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        kv_layer: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rows``: those whose output is wanted; None: all. The keys and values of all are written."""
        x, residual = self._norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, batch, kv_layer, rows)
        if rows is not None:
            residual = residual[rows]
        x, residual = self._norm(x, residual, self._post_norm, self._eps)
        return self._mlp(x), residual


class LlamaForCausalLM:
    """Token ids in, hidden states and logits out."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, max_model_len: int) -> None:
        self.config = config
        self._norm = kernels.fused_add_rms_norm
        self._embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        cos_sin = rope_table(config.rope, config.head_dim, max_model_len).to(self._embedding.device)
        self._layers = [DecoderLayer(config, i, weights, kernels, cos_sin) for i in range(config.num_layers)]
        self._final_norm = weights.take("model.norm.weight", (config.hidden_size,))
        if config.tie_word_embeddings:
            weights.discard("lm_head.weight")
            head = self._embedding
        else:
            head = weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        # Logits in float32: the sums are, and rounding them to half precision would make ties.
        self._head = kernels.linear(head, None, torch.float32)

    def forward(
        self, batch: ForwardBatch, kv_layers: list[torch.Tensor], after_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Run all layers over the step's tokens, writing their KV; ``after_layer(i)`` once that of layer i is written.

        Returns:
            The normed hidden states at ``batch.logits_index``, the only ones that become logits.
        """
        x = F.embedding(batch.token_ids, self._embedding)
        residual: torch.Tensor | None = None
        # Most rows of a prefill chunk are done once the last layer has their keys and values.
        wanted = None if batch.logits_index.shape[0] == batch.num_tokens else batch.logits_index
        for i, layer in enumerate(self._layers):
            x, residual = layer(x, residual, batch, kv_layers[i], wanted if i == self.config.num_layers - 1 else None)
            if after_layer is not None:
                after_layer(i)
        return self._norm(x, residual, self._final_norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab_size] float32."""
        return self._head(hidden)
