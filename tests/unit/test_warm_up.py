"""A warm engine: the pages of its pool are there, its blocks hold nothing that counts, its first step is its third."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.warm_up import warm_up


@dataclass
class Cache:
    layers: list[torch.Tensor]


@dataclass
class Runner:
    config: EngineConfig
    num_blocks: int
    max_model_len: int
    kv_cache: Cache
    steps: list[tuple[int, int]] = field(default_factory=list)
    """First position and number of tokens."""

    def run(self, batch: ScheduledBatch) -> SampledBatch:
        (item,) = batch.items
        end = item.start + item.num_tokens
        assert item.request.num_tokens == end
        assert len(item.request.block_table) * self.config.block_size >= end
        assert set(item.request.block_table) <= set(range(self.num_blocks))
        self.steps.append((item.start, item.num_tokens))
        return SampledBatch([1], [None])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def make_runner(num_bytes: int, **config: int) -> Runner:
    layers = torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(4, -1)
    return Runner(EngineConfig(model="none", **config), 64, 8192, Cache(list(layers.unbind(0))))  # type: ignore[arg-type]


def test_the_pages_of_the_whole_pool_come_though_nobody_writes() -> None:
    runner, size = make_runner(96 << 20), 96 << 20
    before = resident_bytes()
    warm_up(runner)
    assert resident_bytes() - before > 6 << 20  # the first slice of every layer, at once
    deadline_s = time.monotonic() + 30
    while any(thread.name == "touch KV pool" for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert resident_bytes() - before > 0.9 * size
    assert not any(layer.any() for layer in runner.kv_cache.layers)


def test_the_steps_are_a_full_prompt_and_a_token_and_fit_any_pool() -> None:
    for config, num_blocks, max_model_len, tokens in (
        ({"max_num_batched_tokens": 512}, 64, 8192, 512),
        ({"max_num_batched_tokens": 512}, 2, 8192, 63),
        ({"max_num_batched_tokens": 512}, 64, 16, 15),
        ({"max_num_batched_tokens": 1}, 64, 8192, 1),
    ):
        runner = make_runner(1 << 20, **config)
        runner.num_blocks, runner.max_model_len = num_blocks, max_model_len
        warm_up(runner)
        assert runner.steps == [(0, tokens), (tokens, 1)]
