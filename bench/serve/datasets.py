"""Made-up prompts and prompts from a file. Traces are in ``traces``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve.workload import BenchRequest, Content, TokenSource

_RANDOM, _PREFIX, _SUFFIX = range(3)  # kinds of token streams


class RandomDataset:
    """Random token ids; lengths uniform within ``range_ratio`` around the given ones; optionally one shared prefix."""

    ignore_eos = True

    def __init__(
        self,
        tokens: TokenSource,
        num_requests: int,
        *,
        seed: int,
        input_tokens: int,
        output_tokens: int,
        range_ratio: float = 0.0,
        prefix_tokens: int = 0,
    ) -> None:
        if not 0 <= range_ratio < 1:
            raise ValueError(f"range ratio {range_ratio}: it must be at least 0 and below 1")
        if input_tokens < 1 or output_tokens < 1:
            raise ValueError("input and output need at least one token")
        rng = np.random.default_rng(seed)
        self._tokens = tokens
        self._prefix = tokens.tokens(_PREFIX, 0, prefix_tokens)
        self._input_tokens = _lengths(rng, input_tokens, range_ratio, num_requests)
        self._output_tokens = _lengths(rng, output_tokens, range_ratio, num_requests)

    def __len__(self) -> int:
        return len(self._input_tokens)

    def request(self, index: int) -> BenchRequest:
        own = self._tokens.tokens(_RANDOM, index, int(self._input_tokens[index]))
        return BenchRequest([*self._prefix.tolist(), *own.tolist()], int(self._output_tokens[index]))


class PrefixRepetitionDataset:
    """Each of ``num_prefixes`` prefixes is asked with many suffixes of their own, in random order."""

    ignore_eos = True

    def __init__(
        self,
        tokens: TokenSource,
        num_requests: int,
        *,
        seed: int,
        num_prefixes: int,
        prefix_tokens: int,
        suffix_tokens: int,
        output_tokens: int,
    ) -> None:
        if num_prefixes < 1 or prefix_tokens + suffix_tokens < 1 or output_tokens < 1:
            raise ValueError("prefix_repetition needs a prefix, a token in prefix or suffix, and one of output")
        order = np.random.default_rng(seed).permutation(num_requests)
        self._tokens = tokens
        self._prefix_of = order % num_prefixes
        self._prefix_tokens = prefix_tokens
        self._suffix_tokens = suffix_tokens
        self._output_tokens = output_tokens

    def __len__(self) -> int:
        return len(self._prefix_of)

    def request(self, index: int) -> BenchRequest:
        prefix = self._tokens.tokens(_PREFIX, int(self._prefix_of[index]), self._prefix_tokens)
        suffix = self._tokens.tokens(_SUFFIX, index, self._suffix_tokens)
        return BenchRequest([*prefix.tolist(), *suffix.tolist()], self._output_tokens)


class PromptsFile:
    """A JSON object a line: ``prompt`` (text or token ids), ``messages``, ``turns`` (the first is used) or
    ``question``; optionally ``output_tokens``. Begins anew when more requests are asked for than it has."""

    ignore_eos = False

    def __init__(self, path: Path, num_requests: int, *, output_tokens: int | None) -> None:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path} has no prompts: it needs one JSON object a line")
        self._entries = [_entry(path, number, line) for number, line in enumerate(lines, start=1)]
        self._num_requests = num_requests
        self._output_tokens = output_tokens

    def __len__(self) -> int:
        return self._num_requests

    def request(self, index: int) -> BenchRequest:
        content, output_tokens = self._entries[index % len(self._entries)]
        return BenchRequest(content, output_tokens if output_tokens is not None else self._output_tokens)


def _lengths(rng: np.random.Generator, mean: int, range_ratio: float, count: int) -> np.ndarray[Any, Any]:
    low, high = max(int(mean * (1 - range_ratio)), 1), int(mean * (1 + range_ratio))
    return rng.integers(low, high, count, endpoint=True)


def _entry(path: Path, number: int, line: str) -> tuple[Content, int | None]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number} is not JSON: {error}") from error
    for key in ("prompt", "messages", "turns", "question"):
        if isinstance(data, dict) and data.get(key):
            content: Content = data[key][0] if key == "turns" else data[key]
            return content, data.get("output_tokens")
    raise ValueError(f"{path}:{number} has none of `prompt`, `messages`, `turns`, `question`")
