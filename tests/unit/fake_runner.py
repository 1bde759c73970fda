"""A runner without a model: the next token is a hash of all tokens before it, read back from a fake KV memory.

Every slot of the fake KV memory holds the token that was written there, per layer. So a wrong block table, a block
freed too early, a wrong prefix hit or a gap in a hand-off changes the output, as it would with a real model.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import AddRequest, FinishReason, SamplingParams

EOS = 7
VOCAB = 50


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids)) % VOCAB


def oracle(message: AddRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The output that ``message`` must get, from its definition alone; ``output_token_ids`` excluded."""
    sampling, given = message.sampling, len(message.output_token_ids)
    tokens = message.prompt_token_ids + message.output_token_ids
    num_prompt = len(message.prompt_token_ids)
    while True:
        token = next_token(tokens)
        tokens = [*tokens, token]
        num_output = len(tokens) - num_prompt
        is_stop = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if is_stop and num_output > sampling.min_tokens:
            return tokens[num_prompt + given :], FinishReason.STOP
        if num_output == sampling.max_tokens or len(tokens) == max_model_len:
            return tokens[num_prompt + given :], FinishReason.LENGTH


class FakeKVMemory:
    """``slots[layer][block][offset]`` is the token whose KV lies there, or -1."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self.slots = [[[-1] * block_size for _ in range(num_blocks)] for _ in range(num_layers)]

    def write(self, block_table: list[int], position: int, layer: int, token_id: int) -> None:
        self.slots[layer][block_table[position // self.block_size]][position % self.block_size] = token_id

    def read(self, block_table: list[int], position: int, layer: int) -> int:
        return self.slots[layer][block_table[position // self.block_size]][position % self.block_size]

    def pack(
        self, block_table: list[int], token_start: int, token_end: int, layer_start: int, layer_end: int
    ) -> list[int]:
        return [
            self.read(block_table, position, layer)
            for layer in range(layer_start, layer_end)
            for position in range(token_start, token_end)
        ]

    def unpack(
        self,
        block_table: list[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        payload: list[int],
        dtype: object,
    ) -> None:
        tokens = iter(payload)
        for layer in range(layer_start, layer_end):
            for position in range(token_start, token_end):
                self.write(block_table, position, layer, next(tokens))


class FakeHostMemory:
    """``slots[slot][layer]`` is what a block of that layer held. ``bytes_per_s`` says what the cost model chooses."""

    block_bytes = 1

    def __init__(self, memory: FakeKVMemory, num_blocks: int, bytes_per_s: float = 1e12) -> None:
        self.memory = memory
        self.num_blocks = num_blocks
        self.bytes_per_s = bytes_per_s
        self.slots: list[list[list[int]]] = [[] for _ in range(num_blocks)]

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            self.slots[slot] = [list(layer[block_id]) for layer in self.memory.slots]

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            for layer, content in zip(self.memory.slots, self.slots[slot], strict=True):
                layer[block_id] = list(content)


@dataclass
class FakeRunner:
    config: EngineConfig
    num_blocks: int = 16
    max_model_len: int = 64
    eos_token_ids: Sequence[int] = (EOS,)
    model_fingerprint: str = "fake"
    vocab_size: int = VOCAB
    num_layers: int = 3
    batches: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """What each step ran: (request_id, start, num_tokens)."""
    kv_cache: FakeKVMemory = field(init=False)

    def __post_init__(self) -> None:
        self.kv_cache = FakeKVMemory(self.num_layers, self.num_blocks, self.config.block_size)

    def run(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> SampledBatch:
        self.batches.append([(item.request.request_id, item.start, item.num_tokens) for item in batch.items])
        assert batch.items, "an empty batch must not be run"
        assert sum(item.num_tokens for item in batch.items) <= self.config.max_num_batched_tokens
        assert len(batch.items) <= self.config.max_num_seqs
        sizes = [item.num_tokens > 1 for item in batch.items]
        assert sizes == sorted(sizes), "decodes come first"
        for layer in range(self.num_layers):
            for item in batch.items:
                assert item.num_tokens >= 1
                for position in range(item.start, item.start + item.num_tokens):
                    token = item.request.all_token_ids[position]
                    self.kv_cache.write(item.request.block_table, position, layer, token)
            if on_layers is not None:
                on_layers(layer, layer + 1)
        token_ids: list[int | None] = []
        for item in batch.items:
            request, end = item.request, item.start + item.num_tokens
            assert item.needs_sample == (end == request.num_tokens)
            for layer in range(self.num_layers):
                seen = self.kv_cache.pack(request.block_table, 0, end, layer, layer + 1)
                assert seen == request.all_token_ids[:end], (
                    f"{request.request_id}: layer {layer} holds other tokens' KV"
                )
            token_ids.append(next_token(request.all_token_ids) if item.needs_sample else None)
        return SampledBatch(token_ids, [None] * len(token_ids))


def make_core(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_waiting_requests: int = 100,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    host_bytes_per_s: float = 1e12,
    itl_budget_ms: float = 0.0,
    clock: Callable[[], float] | None = None,
) -> EngineCore:
    config = EngineConfig(
        model="fake",
        block_size=block_size,
        hash_block_tokens=2,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_requests=max_waiting_requests,
        enable_prefix_caching=enable_prefix_caching,
        itl_budget_ms=itl_budget_ms,
    )
    runner = FakeRunner(config, num_blocks=num_blocks, max_model_len=max_model_len)
    host = FakeHostMemory(runner.kv_cache, num_host_blocks, host_bytes_per_s) if num_host_blocks else None
    return EngineCore(config, runner, host_memory=host, **({} if clock is None else {"clock": clock}))


def make_message(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    output: Sequence[int] = (),
    timeout_s: float = 100.0,
    priority: int = 0,
    cache_salt: str = "",
    handoff: object = None,
    **sampling: object,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        timeout_s=timeout_s,
        priority=priority,
        cache_salt=cache_salt,
        handoff=handoff,  # type: ignore[arg-type]
    )
