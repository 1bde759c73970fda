"""From how many tokens on is a hand-off worth it? The same prompts, prefilled by the decode worker and by another.

    python -m bench.local_prefill --output-json break_even.json

For each length, one after the other: the time to the first token alone, and beside running streams; and what the
streams suffer, as the median of their longest gap around each prompt. ``--local-prefill-tokens`` is best where the
streams begin to suffer more from a local prefill than from a remote one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import httpx
import typer

from bench.local_serve import local_cluster

ALWAYS_LOCAL = 1_000_000
TIMEOUT_S = 120.0
STREAM_TOKENS = 2000
SETTLE_S = 0.15
"""Between two prompts, so that each finds the engines at rest, or at their streams only."""


@dataclass(frozen=True, slots=True)
class Row:
    tokens: int
    alone_s: float
    """Median TTFT."""
    beside_s: float
    """Median TTFT beside the streams."""
    gap_s: float
    """Median, over the prompts, of the longest gap that a stream had meanwhile."""


class Client:
    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http = http
        self._rng = random.Random(seed)
        self.arrivals: dict[int, list[float]] = {}
        """Of the streams' chunks."""

    async def first_token_s(self, num_tokens: int) -> float:
        since_s = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=self._body(num_tokens, 1)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if '"text":"' in line:
                    return time.perf_counter() - since_s
        raise RuntimeError("an answer without text")

    async def stream(self, number: int) -> None:
        times = self.arrivals[number] = []
        while True:
            async with self._http.stream("POST", "/v1/completions", json=self._body(8, STREAM_TOKENS)) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        times.append(time.perf_counter())

    def longest_gap_s(self, start_s: float, end_s: float) -> float:
        gaps = [
            min(after, end_s + 1) - before
            for times in self.arrivals.values()
            for before, after in pairwise(times)
            if after > start_s and before < end_s
        ]
        return max(gaps, default=0.0)

    def _body(self, num_tokens: int, max_tokens: int) -> dict[str, object]:
        prompt = [self._rng.randrange(1000, 40_000) for _ in range(num_tokens)]
        return {
            "model": "smollm2-135m-instruct",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }


async def measure(url: str, lengths: list[int], repeats: int, streams: int) -> list[Row]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        client = Client(http, seed=1)
        alone, beside, gaps = ({length: [0.0] * 0 for length in lengths} for _ in range(3))
        for _ in range(repeats):
            for length in lengths:
                alone[length].append(await client.first_token_s(length))
                await asyncio.sleep(SETTLE_S)
        running = [asyncio.create_task(client.stream(number)) for number in range(streams)]
        await asyncio.sleep(2)
        for _ in range(repeats):
            for length in lengths:
                since_s = time.perf_counter()
                beside[length].append(await client.first_token_s(length))
                until_s = time.perf_counter()
                await asyncio.sleep(SETTLE_S)
                gaps[length].append(client.longest_gap_s(since_s, until_s))
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running)
        median = statistics.median
        return [Row(n, median(alone[n][1:]), median(beside[n]), median(gaps[n])) for n in lengths]


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "8,16,32,48,64,128,256,512",
    repeats: Annotated[int, typer.Option(help="Prompts of each length.")] = 9,
    streams: Annotated[int, typer.Option(help="That run beside.")] = 4,
    output_json: Annotated[Path | None, typer.Option(help="Rows as JSON.")] = None,
) -> None:
    """TTFT and the streams' gaps, prefilled by the decode worker and by a prefill worker."""
    chosen = [int(length) for length in lengths.split(",")]
    rows: dict[str, list[Row]] = {}
    for name, tokens in (("remote", 0), ("local", ALWAYS_LOCAL)):
        with local_cluster(["--local-prefill-tokens", str(tokens)]) as url:
            rows[name] = asyncio.run(measure(url, chosen, repeats, streams))
    print(f"| tokens | TTFT alone, local / remote | beside {streams} streams | their longest gap |")
    print("| --- | --- | --- | --- |")
    for local, remote in zip(rows["local"], rows["remote"], strict=True):
        cells = [
            f"{1e3 * getattr(local, name):.0f} / {1e3 * getattr(remote, name):.0f} ms"
            for name in ("alone_s", "beside_s", "gap_s")
        ]
        print(f"| {local.tokens} | {' | '.join(cells)} |")
    if output_json is not None:
        output_json.write_text(json.dumps({name: [asdict(row) for row in each] for name, each in rows.items()}))


if __name__ == "__main__":
    typer.run(main)
