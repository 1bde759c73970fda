"""Steps through a whole tiny model with the GPU's kernels, interpreted, without a GPU.

Run as a program with TRITON_INTERPRET=1 (test_triton_interpreter.py). The oracle is the same model with the torch
kernels in float64. What is particular in a step of few rows: the residual that layers add to in place, norms left to
the next product, a last layer that leaves plain rows, keys and values written by the q/k/v product. In a step of
decodes and prompts: a last layer that attends for the rows only that a token is drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
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
LENGTHS = [20, 1, 33, 40]


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


def step(
    architecture: str,
    kernels: Kernels,
    dtype: torch.dtype,
    new_tokens: Sequence[int],
    drawn: Sequence[int],
    *,
    narrow: bool = False,
) -> list[torch.Tensor]:
    """Logits of the requests ``drawn``, and every layer's cache after the step, in which each has ``new_tokens``."""
    model = build_model(config_of(architecture), RandomWeights(dtype), kernels, 64)
    rows, generator = len(new_tokens), torch.Generator().manual_seed(8)
    table = torch.arange(rows * 3).view(rows, 3)
    shape = (rows * 3, 2, KV_HEADS, BLOCK, DIM)
    layers = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    owner = torch.arange(rows).repeat_interleave(torch.tensor(new_tokens))
    positions = torch.cat([torch.arange(LENGTHS[r] - new_tokens[r], LENGTHS[r]) for r in range(rows)])
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    ends = torch.tensor([0, *new_tokens]).cumsum(0)
    batch = ForwardBatch(
        token_ids=(5 + torch.arange(len(positions)) % 90).int(), positions=positions.int(), slot_mapping=slots.int(),
        cu_seqlens_q=ends.int(), seq_lens=torch.tensor(LENGTHS[:rows], dtype=torch.int32), block_table=table.int(),
        logits_index=ends[1:][list(drawn)] - 1, max_q_len=max(new_tokens),
    )  # fmt: skip
    if isinstance(kernels, TritonKernels):
        decodes = next((row for row, count in enumerate(new_tokens) if count > 1), rows)
        kernels.begin_step(decodes, is_mixed=decodes < rows)
    with torch.inference_mode():
        if not narrow:
            return [model.logits(model.forward(batch, layers)), *layers]
        mixed, residual = model.attend(batch, layers, narrow=True)
        return [model.logits(model.finish(mixed, residual)) if drawn else mixed, *layers]


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, exact in zip(found, expected, strict=True):
        assert ours.shape == exact.shape
        assert float((ours.double() - exact.double()).norm() / exact.double().norm()) < 2e-6


def check_narrow(architecture: str) -> None:
    """Two decodes, a prompt, the first part of a prompt; then nothing to draw from at all."""
    for new_tokens, drawn in (((1, 1, 33, 17), (0, 1, 2)), ((20, 1, 33, 40), (0, 2, 3)), ((20, 1, 33, 40), (3,))):
        expected = step(architecture, TorchKernels(), torch.float64, new_tokens, drawn)
        for kernels in (TritonKernels(), TorchKernels()):
            agree(step(architecture, kernels, torch.float32, new_tokens, drawn, narrow=True), expected)
    expected = step(architecture, TorchKernels(), torch.float64, (20, 1, 33, 40), ())
    found = step(architecture, TritonKernels(), torch.float32, (20, 1, 33, 40), (), narrow=True)
    assert found[0].shape == (0, HEADS * DIM)
    agree(found[1:], expected[1:])


def check_model(architecture: str) -> None:
    expected = step(architecture, TorchKernels(), torch.float64, (1, 1, 1), (0, 1, 2))
    # Where K is split, queries and keys are rotated by a launch of their own, and the down projection is the library's.
    tiling = SkinnyTiling(16, 32, split=2 if architecture.startswith("Qwen3") else 1)

    def cut(weight: torch.Tensor, narrow: bool = False) -> SkinnyTiling | None:
        return None if weight.shape[1] % (32 * tiling.split) else tiling

    with mock.patch.multiple(triton_gpu, _SKINNY_BLOCK_K=32, _tiling=cut):
        found = step(architecture, TritonKernels(), torch.float32, (1, 1, 1), (0, 1, 2))
    agree(found, expected)


if __name__ == "__main__":
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        check_model(name)
        check_narrow(name)
        print(f"{name}: agrees with float64", flush=True)
