"""``pdserve plan`` against published sizes, what engines measured on a GPU, and arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench import plan
from bench.plan import Load, decode_streams, decode_workers, gpu_pool_tokens, prefill_workers
from bench.random_models import SHAPES
from engine import sizing
from engine.devices import config_for_device
from engine.model_config import load_model_config, parse_model_config
from engine.sizing import kv_token_bytes, num_parameters
from pdserve.model_store import prepare_default_model

H200_BYTES = 150_109_880_320
"""As torch tells it."""


def parsed(name: str) -> Any:
    return parse_model_config(SHAPES[name])


def test_parameters_are_those_that_the_models_makers_publish() -> None:
    assert num_parameters(parsed("llama-3.1-8b")) == 8_030_261_248
    assert num_parameters(parsed("qwen3-0.6b")) == 596_049_920


def test_parameters_are_those_of_the_demo_model_on_disk() -> None:
    directory = prepare_default_model()
    (weights,) = directory.glob("*.safetensors")
    head = weights.read_bytes()
    header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    on_disk = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    )
    assert num_parameters(load_model_config(directory)) * 2 == on_disk


@pytest.mark.parametrize(("name", "measured_blocks"), [("llama-3.1-8b", 13804), ("qwen3-0.6b", 17864)])
def test_the_pool_of_a_gpu_is_what_engines_measured_there(name: str, measured_blocks: int) -> None:
    """As they logged it on one H200: 0.9 of its memory, bfloat16, blocks of 64, 36000 tokens at most. That was before
    they left room for graphs of large steps, which is less than what such a step needs."""
    model = parsed(name)
    planned = gpu_pool_tokens(model, "aggregated", "bfloat16", H200_BYTES, 0.9, 36000)
    room = sizing.gpu_room(
        model,
        dtype_bytes=2,
        memory_bytes=H200_BYTES,
        utilization=0.9,
        step_tokens=plan.GPU_STEP_TOKENS,
        step_requests=plan.GPU_STEP_REQUESTS,
        staged_steps=0,
    )
    graph_tokens = room.graphs // kv_token_bytes(model, 2)
    assert planned + graph_tokens == pytest.approx(measured_blocks * 64, rel=0.01)
    assert 0 < room.graphs <= room.work


def test_sizes_are_the_engine_s_own() -> None:
    for role, steps in plan.STAGED_STEPS.items():
        config = config_for_device({"model": "m", "device": "cuda"}, role)
        assert config.staged_steps == steps
        assert (config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (
            plan.GPU_BLOCK_TOKENS,
            plan.GPU_STEP_TOKENS,
            plan.GPU_STEP_REQUESTS,
        )
    pytest.importorskip("triton")
    from engine import gpu_runner

    assert gpu_runner._SPARE_BYTES == sizing.SPARE_BYTES


def test_a_token_s_kv_is_the_cache_s() -> None:
    import torch

    from engine.kv_cache import KVCache

    model = parsed("llama-3.1-8b")
    block = KVCache.bytes_per_block(model.num_layers, model.num_kv_heads, 64, model.head_dim, torch.bfloat16)
    assert kv_token_bytes(model, 2) * 64 == block


def test_workers_by_hand() -> None:
    load = Load(input_len=2000, output_len=200, request_rate=10, prefill_tokens_per_s=20_000, tpot_ms=20, busy=0.5)
    assert prefill_workers(load) == (2, 0.5)
    assert prefill_workers(Load(input_len=2000, output_len=1, request_rate=10, prefill_tokens_per_s=20_000)) == (2, 0.5)
    half = Load(input_len=2000, output_len=1, request_rate=10, prefill_tokens_per_s=20_000, cached_share=0.75)
    assert prefill_workers(half) == (1, 0.25)
    assert decode_streams(load) == 40  # 10 a second, each 4 s long
    assert decode_workers(load, 84_000) == (2, "memory of the KV pool")  # 40 of 2100 tokens, half of a pool each
    fewer = Load(input_len=2000, output_len=200, request_rate=10, tpot_ms=20, streams_per_decode=16)
    assert decode_workers(fewer, 1_000_000) == (3, "streams of a worker")
    assert prefill_workers(Load(input_len=1, output_len=1)) is None
    assert decode_workers(Load(input_len=1, output_len=1), 100) is None


def asked(directory: Path, *flags: str) -> Any:
    app = typer.Typer()
    app.command()(plan.main)
    (directory / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    return CliRunner().invoke(app, [str(directory), *flags], env={"COLUMNS": "200"})


def test_the_command_says_sizes_and_workers(tmp_path: Path) -> None:
    result = asked(tmp_path, "--gpu-memory-gib", "80", "--request-rate", "16", "--prefill-tokens-per-s", "40000")
    assert result.exit_code == 0
    assert "14.96 GiB of weights, 128 KiB of KV a token; a hand-off of 2048 tokens is 256 MiB" in result.output
    assert "Prefill workers: 2, each busy 41% of the time" in result.output
    assert "Decode workers: give --request-rate and --tpot-ms" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpu-memory-gib", "16"), "does not fit"),
        (("--gpu-memory-gib", "80", "--dtype", "int3"), "is not known"),
        (("--gpu-memory-gib", "80", "--input-len", "200000"), "together at most"),
        (("--gpu-memory-gib", "80", "--request-rate", "0"), "must be more than 0"),
        (("--gpu-memory-gib", "nan"), "must be more than 0, and not infinite"),
        (("--gpu-memory-gib", "80", "--cached-share", "1.5"), "parts of 1"),
        (("--gpu-memory-gib", "80", "--max-model-len", "200000"), "lower --max-model-len"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    result = asked(tmp_path, *flags)
    assert result.exit_code == 1
    assert words in result.output
