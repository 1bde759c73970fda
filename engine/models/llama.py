"""The Llama family's decoder (Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2), by composition.

What tells its members apart (biases, query and key norms, windows, tied embeddings, rope) is in ``ModelConfig``.
Called by the model runner with a step's tensors; knows nothing of requests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from engine.kernels import Kernels, Normed
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.layers.rope import rope_table
from engine.model_config import ModelConfig
from engine.weights import Weights


class DecoderLayer:
    """Attention and MLP around one residual stream. Each norms what it leaves for what follows."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: Weights,
        kernels: Kernels,
        cos_sin: torch.Tensor,
        next_norm: torch.Tensor,
    ) -> None:
        self._attention = Attention(config, layer, weights, kernels, cos_sin)
        self._mlp = GatedMLP(config, layer, weights, kernels, next_norm)

    def attend(self, normed: Normed, batch: ForwardBatch, kv_layer: torch.Tensor) -> torch.Tensor:
        """What depends on other tokens; writes the keys and values. Returns what attention mixed."""
        return self._attention.mix(normed, batch, kv_layer)

    def attend_drawn(self, normed: Normed, batch: ForwardBatch, kv_layer: torch.Tensor) -> torch.Tensor:
        """``attend``, of the rows that a token is drawn from only."""
        return self._attention.mix_drawn(normed, batch, kv_layer)

    def finish(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[Normed, torch.Tensor]:
        """The rest, of any of the rows; ``residual`` may be overwritten."""
        return self._mlp(*self._attention.project(mixed, residual))


class LlamaForCausalLM:
    """Token ids in, hidden states and logits out."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, max_model_len: int) -> None:
        self.config = config
        self._norm = kernels.fused_add_rms_norm
        self._embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        cos_sin = rope_table(config.rope, config.head_dim, max_model_len).to(self._embedding.device)
        norms = [f"model.layers.{i}.input_layernorm.weight" for i in range(config.num_layers)] + ["model.norm.weight"]
        self._first_norm, *next_norms = [weights.take(name, (config.hidden_size,)) for name in norms]
        self._layers = [
            DecoderLayer(config, i, weights, kernels, cos_sin, next_norm) for i, next_norm in enumerate(next_norms)
        ]
        if config.tie_word_embeddings:
            weights.discard("lm_head.weight")
            head = self._embedding
        else:
            head = weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        # Logits in float32: the sums are, and rounding them to half precision would make ties.
        self._head = kernels.linear(head, None, torch.float32)

    def excerpt(self) -> LlamaForCausalLM:
        """Its first layer, its last and one of each kind between: the same kernels, in far fewer launches."""
        between = dict(zip(self.config.windows[1:-1], self._layers[1:-1], strict=True))
        short = copy.copy(self)
        short._layers = [*self._layers[:1], *between.values(), *self._layers[1:][-1:]]
        return short

    def forward(
        self, batch: ForwardBatch, kv_layers: list[torch.Tensor], after_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Run all layers over the step's tokens, writing their KV; ``after_layer(i)`` once that of layer i is written.

        Returns:
            The normed hidden states at ``batch.logits_index``, the only ones that become logits.
        """
        mixed, residual = self.attend(batch, kv_layers, after_layer)
        if batch.logits_index.shape[0] == batch.num_tokens:
            return self.finish(mixed, residual)
        return self.finish(mixed[batch.logits_index], residual[batch.logits_index])

    def attend(
        self,
        batch: ForwardBatch,
        kv_layers: list[torch.Tensor],
        after_layer: Callable[[int], None] | None = None,
        *,
        narrow: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All that every row must pass: most rows of a prefill chunk are done once the last layer has attended.

        Or sooner: ``narrow`` has the last layer attend for the rows only that become logits.

        Returns:
            What the last layer's attention mixed, and the residual, for ``finish``; of all rows, or narrow.
        """
        normed, residual = self._up_to_last(batch, kv_layers, after_layer)
        last = self._layers[-1]
        if narrow:
            mixed, residual = last.attend_drawn(normed, batch, kv_layers[-1]), residual[batch.logits_index]
        else:
            mixed = last.attend(normed, batch, kv_layers[-1])
        if after_layer is not None:
            after_layer(len(self._layers) - 1)
        return mixed, residual

    def _up_to_last(
        self, batch: ForwardBatch, kv_layers: list[torch.Tensor], after_layer: Callable[[int], None] | None
    ) -> tuple[Normed, torch.Tensor]:
        """All layers but one: what the last one begins with, and the residual."""
        x = F.embedding(batch.token_ids, self._embedding)
        normed: Normed
        normed, residual = self._norm(x, None, self._first_norm, self.config.rms_norm_eps)
        for i, layer in enumerate(self._layers[:-1]):
            mixed = layer.attend(normed, batch, kv_layers[i])
            if after_layer is not None:
                after_layer(i)
            normed, residual = layer.finish(mixed, residual)
        return normed, residual

    def finish(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The normed hidden states of these rows; ``residual`` may be overwritten."""
        normed: torch.Tensor = self._layers[-1].finish(mixed, residual)[0]
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab_size] float32."""
        return self._head(hidden)
