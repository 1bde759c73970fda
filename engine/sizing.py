"""What a model takes: parameters, KV of a token, and how much KV a device's memory leaves room for. No torch.

``bench.plan`` asks this before there is an engine. An engine measures what its largest step needs (``gpu_runner``);
here that is estimated, from above, so that what is promised is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.launch_cost import LaunchCost
from engine.model_config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SPARE_BYTES = 3 << 29
"""What an engine on a GPU leaves for what it does not measure (``gpu_runner``)."""
_WORK_BYTES = 400 << 20
"""Of a step, beside what grows with it: workspaces of products and attention, buffers of graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRoom:
    """How the part of a device's memory that an engine may take is used. Bytes."""

    weights: int
    work: int
    graphs: int
    spare: int
    staging: int
    kv_pool: int
    """Negative: the model does not fit."""


def num_parameters(model: ModelConfig) -> int:
    """All weights of the checkpoint that are kept; shared ones once."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = hidden * (q + 2 * kv) + q * hidden
    attention += (q + 2 * kv) * model.qkv_bias + hidden * model.o_bias + 2 * model.head_dim * model.qk_norm
    mlp = 3 * hidden * inner + (2 * inner + hidden) * model.mlp_bias
    layers = model.num_layers * (attention + mlp + 2 * hidden)
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return layers + embeddings + hidden


def kv_token_bytes(model: ModelConfig, dtype_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype_bytes


def gpu_room(
    model: ModelConfig,
    *,
    dtype_bytes: int,
    memory_bytes: int,
    utilization: float,
    step_tokens: int,
    step_requests: int,
    staged_steps: int,
) -> GpuRoom:
    """Where ``utilization`` of a device's memory goes."""
    weights = num_parameters(model) * dtype_bytes
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    activations = step_tokens * dtype_bytes * (3 * model.hidden_size + 3 * model.intermediate_size + 2 * q + 2 * kv)
    work = activations + 4 * step_requests * model.vocab_size + _WORK_BYTES
    graphs = work * min(LaunchCost(model).max_tokens, step_tokens) // step_tokens
    staging = staged_steps * step_tokens * kv_token_bytes(model, dtype_bytes)
    pool = int(memory_bytes * utilization) - weights - work - graphs - SPARE_BYTES - staging
    return GpuRoom(weights=weights, work=work, graphs=graphs, spare=SPARE_BYTES, staging=staging, kv_pool=pool)
