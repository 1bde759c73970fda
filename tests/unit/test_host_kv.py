"""Blocks go to host memory and come back elsewhere, bit for bit, and nothing else changes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.host_kv
from engine.config import EngineConfig
from engine.host_kv import HostKV
from engine.kv_cache import KVCache
from engine.wire_memory import WireMemory
from tests.unit import played_device

LAYERS, BLOCKS = 3, 12


def make_cache(dtype: torch.dtype) -> KVCache:
    cache = KVCache(
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        num_kv_heads=2,
        block_size=4,
        head_dim=8,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def contents(cache: KVCache) -> torch.Tensor:
    return torch.stack(cache.layers).clone()


@settings(deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 5))
def test_there_and_back(data: st.DataObject, dtype: torch.dtype, group: int) -> None:
    cache = make_cache(dtype)
    before = contents(cache)
    host = HostKV(cache, BLOCKS * cache.layers[0][0].nbytes * LAYERS)
    host._group = group
    assert torch.equal(contents(cache), before), "measuring changes nothing"
    assert host.num_blocks == BLOCKS
    count = data.draw(st.integers(1, BLOCKS))
    sources, slots, targets = (data.draw(st.permutations(range(BLOCKS)))[:count] for _ in range(3))
    host.copy_out(sources, slots)
    for layer in cache.layers:
        layer.zero_()
    host.copy_in(slots, targets)
    expected = torch.zeros_like(before)
    for source, target in zip(sources, targets, strict=True):
        expected[:, target] = before[:, source]
    assert torch.equal(contents(cache), expected)


def test_who_writes_beside_the_runner_is_told_when_the_copies_out_are_on_their_way() -> None:
    cache = make_cache(torch.float32)
    before = contents(cache)
    told: list[str] = []
    host = HostKV(cache, 1 << 20, lambda: told.append("left"))
    told.clear()  # by the measuring
    host.copy_out([3], [5])
    assert told == ["left"]
    for layer in cache.layers:
        layer[3].zero_()  # as a hand-off would, once told
    host.copy_in([5], [7])
    assert told == ["left"]
    assert torch.equal(contents(cache)[:, 7], before[:, 3])


def test_memory_is_bounded_and_too_little_is_refused() -> None:
    cache = make_cache(torch.float32)
    block_bytes = 2 * 2 * 4 * 8 * 4 * LAYERS
    assert HostKV(cache, 3 * block_bytes + 5).num_blocks == 3
    with pytest.raises(ValueError, match="use --host-kv-bytes"):
        HostKV(cache, block_bytes - 1)


def test_it_measures_what_copies_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes one way over seconds: the second round counts, it takes 2 s here."""
    times = iter([0.0, 100.0, 100.0, 102.0])
    monkeypatch.setattr(engine.host_kv.time, "perf_counter", lambda: next(times))
    host = HostKV(make_cache(torch.float32), 1 << 20)
    assert host.bytes_per_s == 2 * 8 * host.block_bytes / 2.0


@pytest.mark.parametrize("told", [True, False])
def test_what_leaves_for_host_memory_is_read_before_its_blocks_are_written(told: bool) -> None:
    """Blocks of a preempted request that was aborted in the same step: free for a hand-off, and still being read."""
    device = played_device.PlayedDevice(0)
    with played_device.played(device):
        config = EngineConfig(model="played", block_size=4, hash_block_tokens=2)
        runner = played_device.PlayedRunner(config, device, num_blocks=8)
        host = played_device.PlayedHostKV(runner, device, 6, runner.copies.follow if told else lambda: None)
        host.copy_out([3], [0])
        words = np.zeros(4 * played_device.LAYERS * 2, np.int64)
        wire = WireMemory(words.ctypes.data, words.nbytes)
        runner.copies.unpack([3], 0, 4, 0, played_device.LAYERS, wire, torch.float32)
        with contextlib.nullcontext() if told else pytest.raises(played_device.Race, match=r"'unpack'.*'to the host'"):
            runner.copies.start()
