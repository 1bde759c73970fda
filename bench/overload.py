"""Three times the load that the cluster can carry: what still gets done in time, and how the rest is refused.

    python -m bench.overload                        # finds the capacity, then 120 s of three times as much
    python -m bench.overload --seconds 30 --factor 5

Starts a cluster with ``pdserve up --max-queue-s``, finds the peak of its goodput (requests a second within both limits)
over rising rates, overloads it, and lets it come back. Prints one table row for each rate; memory is that of all
processes of the cluster together, refusals are timed at the client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from bench.local_serve import local_cluster

FLAGS = "--prefill 1 --decode 1 --dtype bfloat16 --num-threads 1"
FIRST_SHARE = 0.8
"""Of the throughput with 8 open: the rate where the search for the best goodput begins."""
RISE = 1.25
FOLLOWS = 0.93
"""A goodput that is a smaller part of its rate does not follow any more: the search ends."""
MAX_RATES = 6
MEMORY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    rate: float
    seconds: float
    goodput: float
    completed: int
    refused: int
    failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    refusal_p50_s: float
    refusal_p99_s: float
    memory_first_bytes: int
    memory_last_bytes: int
    """Means of the first and the last tenth of the run."""

    def cells(self) -> list[str]:
        return [
            self.name,
            f"{self.rate:.2f}",
            f"{self.goodput:.2f}",
            f"{self.completed} / {self.refused} / {self.failed}",
            f"{self.ttft_p50_s:.2f} / {self.ttft_p99_s:.2f}",
            f"{self.tpot_p99_s * 1e3:.0f}",
            f"{self.refusal_p50_s * 1e3:.1f} / {self.refusal_p99_s * 1e3:.1f}" if self.refused else "-",
            f"{self.memory_first_bytes / 2**20:.0f} -> {self.memory_last_bytes / 2**20:.0f}",
        ]


HEAD = (
    "| load | requests/s | goodput/s | done / refused / failed | TTFT P50 / P99 s | TPOT P99 ms "
    "| refusal P50 / P99 ms | memory MiB |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


class Bench:
    def __init__(self, url: str, load: list[str], goodput: str) -> None:
        self._url, self._load, self._goodput = url, load, goodput
        self._seed = 0

    def run(self, name: str, rate: float, seconds: float) -> Row:
        """``rate`` requests a second for so long, with prompts that nobody has seen."""
        self._seed += 1
        count = max(4, round(rate * seconds))
        flags = ["--request-rate", f"{rate:.4f}", "--num-prompts", str(count), "--goodput", self._goodput]
        with memory_of_children() as memory:
            data = self._serve(flags)
        refusals = [r["e2e_s"] for r in data["requests"] if r["outcome"] == "refused"] or [0.0]
        tenth = max(1, len(memory) // 10)
        row = Row(
            name,
            rate,
            data["duration"],
            # Not over the tail in which the last ones end: over the time in which requests came.
            data["request_goodput"] * data["duration"] / max(seconds, 1e-9),
            data["completed"],
            data["refused"],
            data["failed"],
            data["median_ttft_ms"] / 1e3,
            data["p99_ttft_ms"] / 1e3,
            data["p99_tpot_ms"] / 1e3,
            float(np.percentile(refusals, 50)),
            float(np.percentile(refusals, 99)),
            round(float(np.mean(memory[:tenth]))),
            round(float(np.mean(memory[-tenth:]))),
        )
        print(f"| {' | '.join(row.cells())} |", flush=True)
        return row

    def throughput(self, count: int, streams: int) -> float:
        """Requests a second when as many as that are always open."""
        self._seed += 1
        data = self._serve(["--num-prompts", str(count), "--max-concurrency", str(streams)])
        return float(data["request_throughput"])

    def _serve(self, flags: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "bench.serve", "--base-url", self._url, *self._load, *flags]
            command += ["--seed", str(self._seed), "--ignore-eos", "--save-detailed", "--no-progress"]
            command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            data: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
            return data


@contextmanager
def memory_of_children() -> Iterator[list[int]]:
    """Bytes that the cluster's processes have for themselves, again and again while it runs."""
    samples: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            samples.append(sum(_unique_bytes(p) for p in psutil.Process().children(recursive=True)))
            over.wait(MEMORY_INTERVAL_S)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _unique_bytes(process: psutil.Process) -> int:
    """The client is a child, too, and not what is measured."""
    try:
        return 0 if "bench.serve" in process.cmdline() else int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def main(
    seconds: Annotated[float, typer.Option(help="Of the overload.")] = 120.0,
    search_seconds: Annotated[float, typer.Option(help="Of each rate below it.")] = 30.0,
    factor: Annotated[float, typer.Option(help="Times the rate of the best goodput.")] = 3.0,
    max_queue_s: Annotated[float, typer.Option(help="The cluster refuses what would wait longer.")] = 2.0,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 256,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 32,
    ttft_s: Annotated[float, typer.Option(help="Limit of a good request.")] = 5.0,
    tpot_s: Annotated[float, typer.Option(help="Limit of a good request.")] = 0.25,
    up_flags: Annotated[str, typer.Option(help="Of pdserve up.")] = FLAGS,
) -> None:
    """Overload a cluster of this host."""
    load = ["--random-input-len", str(input_len), "--random-output-len", str(output_len)]
    limits = f"ttft:{ttft_s * 1e3:.0f},tpot:{tpot_s * 1e3:.0f}"
    with local_cluster([*up_flags.split(), "--max-queue-s", str(max_queue_s)]) as url:
        bench = Bench(url, load, limits)
        bench.throughput(32, 8)  # warm
        capacity = bench.throughput(24, 8)
        print(f"limits {limits}, prompts {input_len}, outputs {output_len}, with 8 open: {capacity:.2f} requests/s")
        print(HEAD, flush=True)
        rows: list[Row] = []
        while len(rows) < MAX_RATES and (not rows or rows[-1].goodput > FOLLOWS * rows[-1].rate):
            rate = rows[-1].rate * RISE if rows else FIRST_SHARE * capacity
            rows.append(bench.run("search", rate, search_seconds))
        best = max(rows, key=lambda row: row.goodput)
        over = bench.run(f"{factor:g}x overload", factor * best.rate, seconds)
        after = bench.run("just after", FIRST_SHARE * capacity, search_seconds)
    print(f"goodput under overload: {over.goodput / best.goodput:.0%} of its peak ({best.goodput:.2f}/s)")
    print(f"refused just after: {after.refused}")


if __name__ == "__main__":
    typer.run(main)
