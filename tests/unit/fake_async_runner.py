"""``FakeRunner`` as a device that lags: a launched step runs only when a later one is launched or its result is read.

So KV is written as late as it can be, and a token that a step draws is known to the host one step later. Block tables
are snapshots of the launch, as a device has them: a block freed while a step that writes into it is in flight shows as
another request's wrong KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from tests.unit.fake_runner import FakeHostMemory, FakeRunner, next_token


@dataclass
class LaunchedItem:
    request: Request
    known: list[int]
    """The request's tokens that the host knew at the launch."""
    start: int
    end: int
    needs_sample: bool
    block_table: list[int]


@dataclass
class LaunchedStep:
    runner: FakeAsyncRunner
    items: list[LaunchedItem]
    sampled: SampledBatch | None = None

    def is_done(self) -> bool:
        return self.runner.is_done()

    def result(self) -> SampledBatch:
        assert self.runner.unread.pop(0) is self, "results are read in the order of launches"
        self.runner.execute(self)
        assert self.sampled is not None
        return self.sampled


@dataclass
class FakeAsyncRunner(FakeRunner):
    padded_rows: Sequence[int] = ()
    unread: list[LaunchedStep] = field(default_factory=list)
    is_done: Callable[[], bool] = lambda: True
    tokens: dict[Request, list[int]] = field(default_factory=dict)
    """What the device knows of each request: all its tokens."""

    def launch(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> LaunchedStep:
        assert batch.items, "an empty batch must not be launched"
        assert len(self.unread) < 2, "two steps are launched and not read"
        assert len({item.request for item in batch.items}) == len(batch.items)
        assert sum(item.num_tokens for item in batch.items) <= self.config.max_num_batched_tokens
        assert len(batch.items) <= self.config.max_num_seqs
        step = LaunchedStep(
            self,
            [
                LaunchedItem(
                    item.request,
                    list(item.request.all_token_ids),
                    item.start,
                    item.start + item.num_tokens,
                    item.needs_sample,
                    list(item.request.block_table),
                )
                for item in batch.items
            ],
        )
        self.batches.append([(item.request.request_id, item.start, item.num_tokens) for item in batch.items])
        self.unread.append(step)
        if on_layers is not None:  # a hand-off reads the KV at once: the device catches up
            for unread in self.unread:
                self.execute(unread)
            for layer in range(self.num_layers):
                on_layers(layer, layer + 1)
        return step

    def execute(self, step: LaunchedStep) -> None:
        if step.sampled is not None:
            return
        token_ids: list[int | None] = []
        for item in step.items:
            tokens = self.tokens.get(item.request, [])
            assert tokens[: len(item.known)] == item.known[: len(tokens)], "the host and the device disagree"
            tokens = tokens if len(tokens) > len(item.known) else list(item.known)
            assert item.end <= len(tokens), "a token was scheduled that nobody knows"
            for layer in range(self.num_layers):
                for position in range(item.start, item.end):
                    self.kv_cache.write(item.block_table, position, layer, tokens[position])
                seen = self.kv_cache.pack(item.block_table, 0, item.end, layer, layer + 1)
                assert seen == tokens[: item.end], f"{item.request.request_id}: layer {layer} holds other tokens' KV"
            if item.needs_sample:
                assert item.end == len(tokens)
                tokens = [*tokens, next_token(tokens)]
            token_ids.append(tokens[-1] if item.needs_sample else None)
            self.tokens[item.request] = tokens
        step.sampled = SampledBatch(token_ids, [None] * len(token_ids))


def make_async_core(
    *,
    num_blocks: int = 16,
    max_model_len: int = 64,
    num_host_blocks: int = 0,
    host_bytes_per_s: float = 1e12,
    clock: Callable[[], float] | None = None,
    **options: object,
) -> EngineCore:
    settings: dict[str, object] = {
        "model": "fake",
        "block_size": 4,
        "hash_block_tokens": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        **options,
    }
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    runner = FakeAsyncRunner(config, num_blocks=num_blocks, max_model_len=max_model_len)
    host = FakeHostMemory(runner.kv_cache, num_host_blocks, host_bytes_per_s) if num_host_blocks else None
    return EngineCore(config, runner, host_memory=host, **({} if clock is None else {"clock": clock}))


def batches_of(core: EngineCore) -> Sequence[list[tuple[str, int, int]]]:
    assert isinstance(core.runner, FakeAsyncRunner)
    return core.runner.batches
