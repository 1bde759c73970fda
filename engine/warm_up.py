"""What a CPU engine does before it says that it is ready, so that the first request is as fast as the next one.

    touch the KV pool   a page that nobody has written yet costs the step that writes it: with huge pages that is a
                        hundred blocks in every layer at once, 20 to 150 ms whenever a prompt reaches them. The first of
                        them before the engine is ready, the others by a thread that mostly sleeps, well ahead of need
    two steps           the largest prompt that one step takes, then one more token, in blocks that nobody has yet:
                        builds what is built at first use; what they leave is overwritten, and was never published

Called by ``runners.build_runner``.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import structlog
import torch

from engine.batch import SampledBatch, ScheduledBatch, ScheduledItem
from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.request import Request

MAX_TOUCHED_BYTES = 16 << 30
"""Of the pool. Blocks are handed out from the lowest on."""
SLICE_BYTES = 2 << 20
"""Of each layer, at once."""
SLEEP_RATIO = 4
"""The thread sleeps so many times as long as it works."""
_MADV_POPULATE_WRITE = 23

log = structlog.get_logger()


class Cache(Protocol):
    layers: list[torch.Tensor]


class Runner(Protocol):
    config: EngineConfig
    num_blocks: int
    max_model_len: int

    @property
    def kv_cache(self) -> Cache: ...

    def run(self, batch: ScheduledBatch) -> SampledBatch: ...


def warm_up(runner: Runner) -> None:
    since_s = time.monotonic()
    slices = _touch(runner.kv_cache.layers)
    next(slices, None)
    num_tokens = _step_twice(runner)
    threading.Thread(target=_touch_rest, args=(slices,), name="touch KV pool", daemon=True).start()
    log.info("warm", step_tokens=num_tokens, seconds=round(time.monotonic() - since_s, 3))


def _touch(layers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Has the kernel give the pages of a slice of every layer, then of the next one, without writing to them. Ends
    early where the kernel cannot (Linux before 5.14): then requests pay."""
    libc = ctypes.CDLL(None, use_errno=True)
    share = min(layers[0].nbytes, MAX_TOUCHED_BYTES // len(layers))
    for offset in range(0, share, SLICE_BYTES):
        for layer in layers:
            start = (layer.data_ptr() + offset) // mmap.PAGESIZE * mmap.PAGESIZE
            size = layer.data_ptr() + min(share, offset + SLICE_BYTES) - start
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                log.info("pages_not_touched", errno=ctypes.get_errno())
                return
        yield


def _touch_rest(slices: Iterator[None]) -> None:
    """Alone it takes a second for each GiB or less; so it never has more than a fifth of a core."""
    begun_s = since_s = time.monotonic()
    for _ in slices:
        time.sleep(SLEEP_RATIO * (time.monotonic() - since_s))
        since_s = time.monotonic()
    log.info("kv_pool_touched", seconds=round(since_s - begun_s, 3))


def _step_twice(runner: Runner) -> int:
    """Tokens of the prompt."""
    config = runner.config
    room = min(runner.num_blocks * config.block_size, runner.max_model_len) - 1
    num_tokens = max(1, min(config.max_num_batched_tokens, room))
    request = Request("warm up", [0] * num_tokens, [], SamplingParams(max_tokens=2), 0.0, float("inf"))
    request.block_table = list(range(-(-(num_tokens + 1) // config.block_size)))
    runner.run(ScheduledBatch([ScheduledItem(request, num_tokens, 0, needs_sample=True)], step=0))
    request.append_token(0)
    runner.run(ScheduledBatch([ScheduledItem(request, 1, num_tokens, needs_sample=True)], step=0))
    return num_tokens
