"""Requests with their prompts as names of 512-token blocks (equal name, equal content and prefix).

Mooncake's traces (FAST '25) are read as they are published; ``synthetic`` makes conversations over shared system
prompts, one of them hot.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    num_tokens: int
    output_tokens: int
    block_names: Sequence[int]

    @property
    def session(self) -> str:
        """The traces have none: the first block after that which many begin with."""
        return str(self.block_names[min(1, len(self.block_names) - 1)])

    def token_ids(self) -> list[int]:
        """Tokens that are equal where the names are."""
        tokens: list[int] = []
        for name in self.block_names:
            tokens += [name] * TRACE_BLOCK_TOKENS
        return tokens[: self.num_tokens]


def read_mooncake(path: Path, limit: int | None = None) -> list[TraceRequest]:
    requests = []
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            names = entry["hash_ids"]
            num_tokens = min(entry["input_length"], len(names) * TRACE_BLOCK_TOKENS)
            requests.append(TraceRequest(entry["timestamp"] / 1000, num_tokens, entry["output_length"], names))
            if len(requests) == limit:
                break
    return requests


def synthetic(num_requests: int, *, rate: float = 20.0, seed: int = 0) -> list[TraceRequest]:
    """Conversations of up to 8 turns. Half of them begin with one system prompt, the others with one of 20."""
    rng = random.Random(seed)
    next_name = 1_000
    requests: list[TraceRequest] = []
    open_ones: list[tuple[list[int], int]] = []
    now_s = 0.0
    while len(requests) < num_requests:
        now_s += rng.expovariate(rate)
        if open_ones and rng.random() < 0.75:
            names, turns = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            system = 0 if rng.random() < 0.5 else rng.randrange(1, 21)
            names, turns = [system * 8 + i for i in range(8)], 8
        grown = names + list(range(next_name, next_name + rng.randrange(1, 6)))
        next_name += len(grown) - len(names)
        requests.append(TraceRequest(now_s, len(grown) * TRACE_BLOCK_TOKENS, rng.randrange(50, 400), tuple(grown)))
        if turns > 1:
            open_ones.append((grown, turns - 1))
    return requests


def poisson(num_requests: int, input_tokens: int, output_tokens: int, rate: float, seed: int = 0) -> list[TraceRequest]:
    """Prompts that have nothing in common."""
    rng = random.Random(seed)
    blocks = -(-input_tokens // TRACE_BLOCK_TOKENS)
    now_s, requests = 0.0, []
    for number in range(num_requests):
        now_s += rng.expovariate(rate)
        names = tuple(range(number * blocks, (number + 1) * blocks))
        requests.append(TraceRequest(now_s, input_tokens, output_tokens, names))
    return requests


def shared_lru_hit_rate(requests: Iterable[TraceRequest], capacity_tokens: int) -> float:
    """Share of tokens that one cache as large as those of all prefill workers together would have."""
    cache: OrderedDict[int, None] = OrderedDict()
    tokens = cached = 0
    for request in requests:
        tokens += request.num_tokens
        for index, name in enumerate(request.block_names):
            if name not in cache:
                break
            cached += min(TRACE_BLOCK_TOKENS, request.num_tokens - index * TRACE_BLOCK_TOKENS)
        for name in reversed(request.block_names):  # the tail of a chain goes first
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) * TRACE_BLOCK_TOKENS > capacity_tokens:
            cache.popitem(last=False)
    return cached / tokens


def ideal_hit_rate(requests: Iterable[TraceRequest]) -> float:
    """Share of tokens that a cache without limits, shared by all, would have."""
    seen: set[int] = set()
    tokens = cached = 0
    for request in requests:
        tokens += request.num_tokens
        for index, name in enumerate(request.block_names):
            if name not in seen:
                break
            cached += min(TRACE_BLOCK_TOKENS, request.num_tokens - index * TRACE_BLOCK_TOKENS)
        seen.update(request.block_names)
    return cached / tokens
