"""Defaults that differ by device; what was given wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.batch import ScheduledBatch, ScheduledItem
from engine.config import EngineConfig
from engine.devices import config_for_device, resolve_device
from engine.kernels import fastest_kernels
from engine.messages import SamplingParams
from engine.model_runner import ModelRunner
from engine.request import Request, RequestStatus
from tests.unit.test_model_config import LLAMA


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


def test_only_a_decode_worker_on_a_gpu_has_an_itl_budget_unless_told() -> None:
    budgets = {
        (device, role): config_for_device({"model": "m", "device": device}, role).itl_budget_ms
        for device in ("cpu", "cuda:0")
        for role in ("decode", "aggregated", "prefill")
    }
    assert {where: budget for where, budget in budgets.items() if budget} == {("cuda:0", "decode"): 14.0}
    told = [config_for_device({"model": "m", "device": d, "itl_budget_ms": 40.0}, "decode") for d in ("cpu", "cuda")]
    assert [config.itl_budget_ms for config in told] == [40.0, 40.0]
    assert config_for_device({"model": "m", "device": "cuda", "itl_budget_ms": 0.0}, "decode").itl_budget_ms == 0
    with pytest.raises(ValueError, match="0 for no limit"):
        EngineConfig(model="m", itl_budget_ms=-1)


def test_cuda_takes_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    assert fastest_kernels(torch.device("cuda"))[0].name == "triton"


def test_dummy_weights_are_the_same_for_workers_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32", num_blocks=4)
    one, two = ModelRunner(config), ModelRunner(config)
    assert one.model_fingerprint == two.model_fingerprint
    batch = ScheduledBatch([ScheduledItem(a_request(), 5, 0, True)], 1)
    assert one.run(batch).token_ids == two.run(batch).token_ids != [None]
    with pytest.raises(ValueError, match="use auto or dummy"):
        EngineConfig(model="m", load_format="gguf")


def a_request() -> Request:
    request = Request("r", [5, 6, 7, 8, 9], [], SamplingParams(max_tokens=2), 0.0, 1.0)
    request.transition(RequestStatus.RUNNING)
    request.block_table = [1]
    return request
