"""Defaults that differ by device; what was given wins."""

from __future__ import annotations

import pytest
import torch

from engine.devices import config_for_device, resolve_device
from engine.kernels import fastest_kernels


def test_the_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert resolve_device(None) == resolve_device("auto") == device
        assert resolve_device("cuda:1") == "cuda:1"


def test_a_gpu_gets_larger_blocks_and_steps() -> None:
    gpu = config_for_device({"model": "m", "device": "cuda:1"})
    assert (gpu.block_size, gpu.max_num_seqs, gpu.max_num_batched_tokens) == (64, 1024, 8192)
    cpu = config_for_device({"model": "m", "device": "cpu"})
    assert (cpu.block_size, cpu.max_num_seqs, cpu.max_num_batched_tokens) == (32, 64, 512)
    assert gpu.hash_block_tokens == cpu.hash_block_tokens
    given = config_for_device({"model": "m", "device": "cuda", "block_size": 16, "max_num_seqs": 4})
    assert (given.block_size, given.max_num_seqs, given.max_num_batched_tokens) == (16, 4, 8192)


def test_cuda_takes_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    assert fastest_kernels(torch.device("cuda"))[0].name == "triton"
