"""Drives a model runner without the scheduler: a step loop simple enough to be trusted by the tests that use it."""

from __future__ import annotations

import random

from engine.batch import SampledBatch, ScheduledBatch, ScheduledItem
from engine.messages import SamplingParams
from engine.model_runner import ModelRunner
from engine.request import Request


def make_request(prompt: list[int], output: list[int] | None = None, **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": 16, **sampling})  # type: ignore[arg-type]
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        output_token_ids=list(output or []),
        sampling=params,
        arrival_s=0.0,
        deadline_s=float("inf"),
    )


class Driver:
    """Blocks are dealt from a shuffled pool and never freed; every step takes ``chunk`` tokens of each request."""

    def __init__(self, runner: ModelRunner, chunk: int = 1 << 30, seed: int = 0) -> None:
        self.runner = runner
        self.chunk = chunk
        self._free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._step = 0

    def step(self, requests: list[Request]) -> SampledBatch:
        items = []
        for request in sorted(requests, key=lambda r: r.num_tokens - r.num_computed_tokens != 1):
            num_tokens = min(self.chunk, request.num_tokens - request.num_computed_tokens)
            end = request.num_computed_tokens + num_tokens
            while len(request.block_table) * self.runner.config.block_size < end:
                request.block_table.append(self._free.pop())
            items.append(ScheduledItem(request, num_tokens, request.num_computed_tokens, end == request.num_tokens))
        sampled = self.runner.run(ScheduledBatch(items, self._step))
        self._step += 1
        for item, token_id in zip(items, sampled.token_ids, strict=True):
            item.request.num_computed_tokens += item.num_tokens
            assert (token_id is not None) == item.needs_sample
            if token_id is not None:
                item.request.append_token(token_id)
        return sampled

    def generate(self, requests: list[Request], num_tokens: int) -> list[list[int]]:
        """Until each request has ``num_tokens`` output tokens, whatever they are."""
        while running := [r for r in requests if len(r.output_token_ids) < num_tokens]:
            self.step(running)
        return [r.output_token_ids for r in requests]
