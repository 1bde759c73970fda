"""Replay of recorded traces: when requests came, how long they were, and (Mooncake) what they had in common.

A Mooncake line's ``hash_ids`` name blocks of 512 tokens: equal ids are equal contents after equal contents. Here each
id becomes a block of tokens of its own, so replayed prompts share exactly the prefixes that the recorded ones shared.
With ``block_tokens`` below 512 prompts shrink in proportion and keep what they share.

Its times are multiples of 3 s: replayed as they are, ten prompts come at once and then none for a while. ``spread``
lets those of a moment come one by one until the next.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, zip_longest
from pathlib import Path

from bench.serve.workload import BenchRequest, TokenSource

RECORDED_BLOCK_TOKENS = 512
_BLOCK, _TAIL, _AZURE = range(10, 13)  # kinds of token streams


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One recorded request."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How a trace is cut to the size of what serves it."""

    time_stretch: float = 1.0
    """Above 1: slower than recorded."""
    spread: bool = False
    """Requests with the same time come evenly until the next time."""
    block_tokens: int = RECORDED_BLOCK_TOKENS
    max_input_tokens: int | None = None
    """Longer requests are left out (after the shrinking)."""
    max_output_tokens: int | None = None
    """Longer outputs are cut."""

    def __post_init__(self) -> None:
        if not 0 < self.time_stretch < math.inf:
            raise ValueError(f"time stretch {self.time_stretch}: it must be above 0; 2 replays at half the speed")
        if not 1 <= self.block_tokens <= RECORDED_BLOCK_TOKENS:
            raise ValueError(f"block tokens {self.block_tokens}: 1 to {RECORDED_BLOCK_TOKENS}")


class TraceDataset:
    """The first ``num_requests`` entries that fit."""

    ignore_eos = True

    def __init__(
        self, entries: list[TraceEntry], tokens: TokenSource, num_requests: int, options: TraceOptions
    ) -> None:
        self._tokens = tokens
        self._options = options
        fitting = [
            entry
            for entry in sorted(entries, key=lambda entry: entry.arrival_s)
            if options.max_input_tokens is None or self._input_tokens(entry) <= options.max_input_tokens
        ]
        if not fitting:
            raise ValueError("no request of the trace fits: raise --max-input-tokens, or lower --trace-block-tokens")
        self._entries = (spread(fitting) if options.spread else fitting)[:num_requests]
        self._start_s = self._entries[0].arrival_s

    def __len__(self) -> int:
        return len(self._entries)

    def request(self, index: int) -> BenchRequest:
        entry, options = self._entries[index], self._options
        output_tokens = max(entry.output_tokens, 1)
        if options.max_output_tokens is not None:
            output_tokens = min(output_tokens, options.max_output_tokens)
        arrival_s = (entry.arrival_s - self._start_s) * options.time_stretch
        return BenchRequest(self._prompt(entry, index), output_tokens, arrival_s)

    def _prompt(self, entry: TraceEntry, index: int) -> list[int]:
        count = self._input_tokens(entry)
        if not entry.hash_ids:
            return list(self._tokens.tokens(_AZURE, index, count).tolist())
        prompt: list[int] = []
        for hash_id in entry.hash_ids:
            prompt.extend(self._tokens.tokens(_BLOCK, hash_id, self._options.block_tokens).tolist())
        if len(prompt) < count:  # more tokens than the blocks that were recorded
            prompt.extend(self._tokens.tokens(_TAIL, index, count - len(prompt)).tolist())
        return prompt[:count]

    def _input_tokens(self, entry: TraceEntry) -> int:
        return max(-(-entry.input_tokens * self._options.block_tokens // RECORDED_BLOCK_TOKENS), 1)


def spread(entries: list[TraceEntry]) -> list[TraceEntry]:
    """``entries`` in order of time, those of one moment evenly until the next; those of the last stay."""
    moments = {arrival_s: list(group) for arrival_s, group in groupby(entries, key=lambda entry: entry.arrival_s)}
    found: list[TraceEntry] = []
    for begin_s, end_s in zip_longest(moments, list(moments)[1:]):
        group = moments[begin_s]
        gap_s = 0.0 if end_s is None else (end_s - begin_s) / len(group)
        found += [replace(entry, arrival_s=begin_s + i * gap_s) for i, entry in enumerate(group)]
    return found


def read_mooncake(path: Path) -> list[TraceEntry]:
    """{"timestamp": ms, "input_length", "output_length", "hash_ids"} a line. Raises ValueError."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            data = json.loads(line)
            entries.append(
                TraceEntry(
                    data["timestamp"] / 1000, data["input_length"], data["output_length"], tuple(data["hash_ids"])
                )
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a line of a Mooncake trace: {error!r}") from error
    return entries


def read_azure(path: Path) -> list[TraceEntry]:
    """TIMESTAMP,ContextTokens,GeneratedTokens with a header. Raises ValueError."""
    entries = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                # Seven digits after the point are one more than datetime takes.
                moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
                entries.append(TraceEntry(moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number} is not a line of an Azure trace: {error!r}") from error
    return entries
