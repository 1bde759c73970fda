"""A step of few rows through a whole tiny model with the GPU's own products, interpreted, without a GPU.

Run as a program with TRITON_INTERPRET=1 (test_triton_interpreter.py). The oracle is the same model with the torch
kernels in float64. What is particular: the residual that layers add to in place, norms left to the next product, a
last layer that leaves plain rows, keys and values written by the q/k/v product.
"""

from __future__ import annotations

from unittest import mock

import torch

from engine.batch import ForwardBatch
from engine.kernels import Kernels, triton_gpu
from engine.kernels.skinny_gemm import SkinnyTiling
from engine.kernels.torch_cpu import TorchKernels
from engine.kernels.triton_gpu import TritonKernels
from engine.model_config import ModelConfig, RopeConfig
from engine.models import build_model

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 64, 96, 4, 2, 32, 16
LENGTHS = [20, 1, 33]


class RandomWeights:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(7)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator, dtype=torch.float64) * 0.3).to(self._dtype)

    def discard(self, name: str) -> None: ...


def config_of(architecture: str) -> ModelConfig:
    return ModelConfig(
        architecture=architecture, vocab_size=96, hidden_size=HIDDEN, intermediate_size=INNER, num_layers=2,
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4),
        max_position_embeddings=64, tie_word_embeddings=False, qkv_bias=architecture.startswith("Qwen2"), o_bias=False,
        mlp_bias=False, qk_norm=architecture.startswith("Qwen3"), windows=(None, None), dtype="float32",
        eos_token_ids=(0,),
    )  # fmt: skip


def step(architecture: str, kernels: Kernels, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits, and every layer's cache after the step."""
    model = build_model(config_of(architecture), RandomWeights(dtype), kernels, 64)
    rows, generator = len(LENGTHS), torch.Generator().manual_seed(8)
    table = torch.arange(rows * 3).view(rows, 3)
    shape = (rows * 3, 2, KV_HEADS, BLOCK, DIM)
    layers = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    positions = torch.tensor(LENGTHS) - 1
    slots = table[torch.arange(rows), positions // BLOCK] * BLOCK + positions % BLOCK
    batch = ForwardBatch(
        token_ids=torch.tensor([5, 6, 7], dtype=torch.int32), positions=positions.int(), slot_mapping=slots.int(),
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32), seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=table.int(), logits_index=torch.arange(rows), max_q_len=1,
    )  # fmt: skip
    with torch.inference_mode():
        return [model.logits(model.forward(batch, layers)), *layers]


def check_model(architecture: str) -> None:
    expected = step(architecture, TorchKernels(), torch.float64)
    # Where K is split, queries and keys are rotated by a launch of their own, and the down projection is the library's.
    tiling = SkinnyTiling(16, 32, split=2 if architecture.startswith("Qwen3") else 1)

    def cut(weight: torch.Tensor, narrow: bool = False) -> SkinnyTiling | None:
        return None if weight.shape[1] % (32 * tiling.split) else tiling

    with mock.patch.multiple(triton_gpu, _SKINNY_BLOCK_K=32, _tiling=cut):
        found = step(architecture, TritonKernels(), torch.float32)
    for ours, exact in zip(found, expected, strict=True):
        assert float((ours.double() - exact.double()).norm() / exact.double().norm()) < 2e-6


if __name__ == "__main__":
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        check_model(name)
        print(f"{name}: agrees with float64", flush=True)
