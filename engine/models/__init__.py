"""Which class serves which architecture of a ``config.json``. A new model is a file here and a line in ``MODELS``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import torch

from engine.batch import ForwardBatch
from engine.kernels import Kernels
from engine.model_config import ModelConfig, UnsupportedModelError
from engine.weights import Weights

MODELS = {
    "LlamaForCausalLM": "engine.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "engine.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "engine.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "engine.models.llama:LlamaForCausalLM",
}


class CausalLM(Protocol):
    """What the model runner asks of a model."""

    def excerpt(self) -> CausalLM:
        """A model that launches every kernel that this one does, with as few layers as that takes."""
        ...

    def forward(
        self, batch: ForwardBatch, kv_layers: list[torch.Tensor], after_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Write the step's KV; return the hidden states at ``batch.logits_index``."""
        ...

    def attend(
        self,
        batch: ForwardBatch,
        kv_layers: list[torch.Tensor],
        after_layer: Callable[[int], None] | None = None,
        *,
        narrow: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` up to the last layer's attention: what it mixed, and the residual, of all rows.

        ``narrow``: of those at ``batch.logits_index``, and the last layer attends for no others.
        """
        ...

    def finish(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of ``forward``, of those rows: their hidden states."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab_size]."""
        ...


def build_model(config: ModelConfig, weights: Weights, kernels: Kernels, max_model_len: int) -> CausalLM:
    """The model of that architecture, its weights taken from ``weights``."""
    if config.architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {config.architecture} is not supported; supported: {', '.join(MODELS)}"
        )
    module, _, attribute = MODELS[config.architecture].partition(":")
    model: CausalLM = getattr(import_module(module), attribute)(config, weights, kernels, max_model_len)
    return model
