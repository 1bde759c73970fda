"""Prefill and decode apart against together, on the cores of this host: output tokens a second, TTFT, its phases.

    python -m bench.apart                       # each lane, then one aggregated worker, in one run
    python -m bench.apart --lanes shm --streams 16

Every cluster is started by ``pdserve up`` and measured by ``bench.serve`` with the same prompts. The phases of TTFT are
the gateway's, means of single requests, one at a time; "exposed" is from the end of the prefill until D had verified
everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from bench.local_serve import local_cluster
from telemetry import metrics

TIMEOUT_S = 300.0
PHASES = {
    "prefill": "prefill",
    "handoff_wait": "hand-off wait",
    "transfer": "exposed",
    "relay": "relay",
    "rest": "rest",
}
"""The gateway's names, and the table's."""


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_per_s: float
    ttft_s: float
    """Median, one request at a time."""
    phases_s: dict[str, float]
    """Means, one request at a time."""


def measure(up_flags: list[str], load: list[str], streams: int) -> Figures:
    with local_cluster(up_flags) as url:
        serve(url, load, requests=streams, streams=streams)  # warm: caches, kernels, channels
        before = phases(url)
        alone = serve(url, load, requests=16, streams=1, seed=2)
        after = phases(url)
        together = serve(url, load, requests=3 * streams, streams=streams, seed=4)
    means_s = {name: (after[name][0] - before[name][0]) / (after[name][1] - before[name][1]) for name in PHASES}
    return Figures(together["output_throughput"], alone["median_ttft_ms"] / 1e3, means_s)


def serve(url: str, load: list[str], *, requests: int, streams: int, seed: int = 1) -> dict[str, float]:
    """Its results. Another seed is other prompts: nothing is found in a prefix cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.serve", "--base-url", url, *load, "--num-prompts", str(requests)]
        command += ["--max-concurrency", str(streams), "--seed", str(seed), "--ignore-eos"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
        result: dict[str, float] = json.loads((Path(folder) / "result.json").read_text())
        return result


def phases(url: str) -> dict[str, tuple[float, float]]:
    """Sum in seconds and count of each phase of TTFT, those that the table leaves out, too."""
    found = {name: {"sum": 0.0, "count": 0.0} for name in metrics.PHASES}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text):
        for sample in family.samples:
            kind = sample.name.removeprefix("pdserve_ttft_phase_seconds_")
            name = sample.labels.get("phase", "")
            if name in found and kind in ("sum", "count"):
                found[name][kind] += sample.value
    return {name: (value["sum"], value["count"]) for name, value in found.items()}


def main(
    lanes: Annotated[str, typer.Option(help="Transfer backends, separated by commas.")] = "shm,tcp,ucx",
    streams: Annotated[int, typer.Option(help="Requests at once for the throughput.")] = 16,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 256,
    output_len: Annotated[int, typer.Option(help="Tokens of an output.")] = 64,
    output: Annotated[Path | None, typer.Option(help="JSON of all figures.")] = None,
) -> None:
    """One prefill and one decode worker against one aggregated worker."""
    load = ["--random-input-len", str(input_len), "--random-output-len", str(output_len)]
    base = measure(["--aggregated"], load, streams)
    measured = {"aggregated": base}
    print(f"| cluster | tok/s at {streams} | TTFT at 1 | {' | '.join(PHASES.values())} |")
    print("| --- " * (3 + len(PHASES)) + "|")
    report("aggregated", base, base)
    for lane in lanes.split(","):
        measured[lane] = measure(["--transfer", lane], load, streams)
        report(f"1 prefill + 1 decode, {lane}", measured[lane], base)
    if output is not None:
        output.write_text(json.dumps({name: asdict(figures) for name, figures in measured.items()}, indent=1))


def report(name: str, figures: Figures, base: Figures) -> None:
    rate, ttft = figures.tokens_per_s / base.tokens_per_s, figures.ttft_s / base.ttft_s
    cells = [name, f"{figures.tokens_per_s:.0f} ({rate:.2f}x)", f"{figures.ttft_s * 1e3:.0f} ms ({ttft:.2f}x)"]
    cells += [f"{figures.phases_s[phase] * 1e3:.1f}" for phase in PHASES]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
