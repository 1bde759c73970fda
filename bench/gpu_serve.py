"""The whole service on GPUs: aggregated workers against prefill and decode apart, behind the same router, same load.

    python -m bench.gpu_serve --gpus 1 --loads poisson:2048:256:4,poisson:2048:256:8 --output out.json
    python -m bench.gpu_serve --gpus 2 --loads poisson:2048:256:16,mooncake:FILE:1.0,azure:FILE:0.3 --output out.json
    python -m bench.gpu_serve --gpus 2 --share 0.5,0.8,1.0 --loads mooncake:FILE,azure:FILE --output out.json

Every cluster is started by ``pdserve up`` with random weights of the true shape and measured by ``bench.serve`` through
the gateway. ``--gpus``: aggregated, a worker on each; apart, one prefill and one decode worker, on one GPU (each with
half of its memory) or on two. Loads: Poisson arrivals (input, output tokens, requests/s), or a trace and its time
stretch; each for ``--seconds``. A trace without a stretch is sent at each ``--share`` of the capacity, that is the rate
at which the aggregated cluster completes its requests when they come all at once; so every cluster gets the same. Two
goodputs, as shares of the requests sent: within (TTFT 2 s, own p99 ITL 25 ms) and within (TTFT 0.25 s, TPOT 0.1 s).
``apart-mps`` is apart on one GPU with NVIDIA's MPS, ``@2048`` after a cluster's name the token budget of its workers'
steps (8192), and ``@2048@20`` also its decode worker's ITL budget in ms (14). The JSON also has what the services
counted during each load: how many prompts the decode worker computed, its steps, what it aimed at, the phases of TTFT.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from bench.apart import phases
from bench.cluster_metrics import Metrics, changed, read_metrics
from bench.gpu_loads import Load, Trace, capacity, parse
from bench.local_serve import local_cluster
from bench.random_models import SHAPES, write_model

_MAX_MODEL_LEN = 36_000
_TIMEOUT_S = 400.0


class Answer(NamedTuple):
    """One request; times in milliseconds."""

    input_tokens: int
    output_tokens: int
    ttft: float
    tpot: float
    itl_p99: float


@dataclass(frozen=True, slots=True)
class Row:
    """One load on one cluster; latencies in milliseconds."""

    cluster: str
    load: str
    sent: int
    done: int
    done_per_s: float
    output_tokens_per_s: float
    cached_tokens: int
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    share_steady: float
    """TTFT <= 2 s and own p99 ITL <= 25 ms."""
    share_prompt: float
    """TTFT <= 0.25 s and TPOT <= 0.1 s."""
    exposed_transfer_ms: float
    """Mean of the gateway's phase: from the end of the prefill until D had verified everything."""
    client_cpu_share: float
    phases_ms: dict[str, float] = field(default_factory=dict)
    """Of TTFT, the gateway's, as means of those that had it."""
    counted: Metrics = field(default_factory=dict)
    requests: list[Answer] = field(default_factory=list)

    @classmethod
    def of(cls, cluster: str, load: str, result: dict[str, Any], phases_ms: dict[str, float], counted: Metrics) -> Row:
        requests = result["requests"]
        answered = [each for each in requests if each["outcome"] == "ok"]
        steady = sum(each["ttft_s"] <= 2 and each["itl_p99_s"] <= 0.025 for each in answered)
        prompt = sum(each["ttft_s"] <= 0.25 and (each["tpot_s"] or 0) <= 0.1 for each in answered)
        return cls(
            cluster=cluster,
            load=load,
            sent=len(requests),
            done=len(answered),
            done_per_s=result["request_throughput"],
            output_tokens_per_s=result["output_throughput"],
            cached_tokens=result["total_cached_tokens"],
            ttft_p50=result["median_ttft_ms"],
            ttft_p99=result["p99_ttft_ms"],
            tpot_p50=result["median_tpot_ms"],
            tpot_p99=result["p99_tpot_ms"],
            itl_p50=result["median_itl_ms"],
            itl_p99=result["p99_itl_ms"],
            share_steady=steady / len(requests),
            share_prompt=prompt / len(requests),
            exposed_transfer_ms=phases_ms.get("transfer", 0.0),
            client_cpu_share=result["client_cpu_share"],
            phases_ms={name: round(value, 1) for name, value in phases_ms.items()},
            counted=counted,
            requests=[
                Answer(
                    each["input_tokens"],
                    each["output_tokens"],
                    round(1e3 * each["ttft_s"], 1),
                    round(1e3 * (each["tpot_s"] or 0), 2),
                    round(1e3 * each["itl_p99_s"], 2),
                )
                for each in answered
            ],
        )

    def __str__(self) -> str:
        cells = [
            self.cluster,
            self.load,
            f"{self.done}/{self.sent}",
            f"{self.done_per_s:.2f}",
            f"{self.ttft_p50:.0f} / {self.ttft_p99:.0f}",
            f"{self.tpot_p50:.1f} / {self.tpot_p99:.1f}",
            f"{self.itl_p50:.1f} / {self.itl_p99:.1f}",
            f"{self.share_steady:.2f}",
            f"{self.share_prompt:.2f}",
            f"{self.exposed_transfer_ms:.1f}",
        ]
        return f"| {' | '.join(cells)} |"


@dataclass(slots=True)
class Measured:
    """What the JSON holds."""

    model: str
    gpus: int
    up_flags: str
    ready_s: dict[str, float] = field(default_factory=dict)
    capacity: dict[str, float] = field(default_factory=dict)
    """Requests/s by the trace's file."""
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What was not measured, and why."""


COUNTED = (
    "pdserve_local_prefills", "pdserve_steps", "pdserve_mixed_steps", "pdserve_itl", "pdserve_shared_prefill",
    "vllm:prompt_tokens", "vllm:num_preemptions",
)  # fmt: skip
"""Metrics of the services that say why."""
COLUMNS = [
    "cluster", "load", "done", "done/s", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p50 / p99", "TTFT 2 s, ITL 25 ms",
    "TTFT 0.25 s, TPOT 0.1 s", "exposed transfer",
]  # fmt: skip


def clusters(gpus: int, chosen: list[str], more: list[str]) -> dict[str, list[str]]:
    """Flags of ``pdserve up`` by name; ``@N`` after a name is a step's token budget, ``@N@M`` also an ITL budget."""
    common = ["--device", "cuda", *more]
    apart = ["--prefill", "1", "--decode", "1", *common]
    every = {"aggregated": ["--aggregated", "--decode", str(gpus), *common], "apart": apart, "apart-mps": apart}
    found: dict[str, list[str]] = {}
    for name in chosen:
        kind, *budgets = name.split("@")
        flags = zip(("--max-num-batched-tokens", "--itl-budget-ms"), budgets, strict=False)
        found[name] = every[kind] + [part for flag in flags for part in flag]
    return found


def serve(url: str, flags: tuple[str, ...], seed: int) -> dict[str, Any]:
    """One run of ``bench.serve``, with every request in its result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.serve", "--base-url", url, *flags, "--seed", str(seed), "--ignore-eos"]
        command += ["--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
        done = subprocess.run(command, check=False, timeout=_TIMEOUT_S, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
            )
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


def main(
    output: Annotated[Path, typer.Option(help="JSON with every figure.")],
    loads: Annotated[str, typer.Option(help="Loads, separated by commas.")],
    model: Annotated[str, typer.Option(help=" or ".join(SHAPES))] = "llama-3.1-8b",
    gpus: Annotated[int, typer.Option(help="1 or 2.")] = 1,
    seconds: Annotated[float, typer.Option(help="Of each load.")] = 20.0,
    share: Annotated[str, typer.Option(help="Of the capacity, for traces without a stretch.")] = "0.5,0.8,1.0",
    given: Annotated[str, typer.Option("--capacity", help="Requests/s of traces, as FILE=RATE,FILE=RATE.")] = "",
    only: Annotated[str, typer.Option(help="Of aggregated, apart, apart-mps; each also @TOKENS.")] = "aggregated,apart",
    up_flags: Annotated[str, typer.Option(help="More flags of `pdserve up` for all clusters.")] = "",
) -> None:
    """Aggregated workers against prefill and decode apart."""
    try:
        chosen = [parse(text, seconds) for text in loads.split(",")]
        rates = {name: float(rate) for name, rate in (part.split("=") for part in given.split(",") if part)}
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    unknown = [each for each in chosen if isinstance(each, Trace) and Path(each.file).name not in rates]
    if unknown and not only.startswith("aggregated"):
        raise typer.BadParameter(
            "shares are of what the aggregated cluster carries: begin --only with aggregated, or give --capacity"
        )
    shares = [float(part) for part in share.split(",")]
    measured = Measured(model, gpus, up_flags, capacity=rates)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(model, Path(folder) / model, with_tokenizer=True)
        more = ["--model", directory, "--load-format", "dummy", "--max-model-len", str(_MAX_MODEL_LEN)]
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
        for name, flags in clusters(gpus, only.split(","), [*more, *up_flags.split()]).items():
            begin_s = time.monotonic()
            with mps() if name.startswith("apart-mps") else contextlib.nullcontext(), local_cluster(flags) as url:
                measured.ready_s[name] = time.monotonic() - begin_s
                warm_up(url)
                for number, each in enumerate(chosen):
                    try:
                        for which, load in enumerate(resolve(each, shares, seconds, url, measured)):
                            # Prompts that nobody has cached; the same on every cluster.
                            measured.rows.append(measure(name, load, url, seed=1000 + 100 * number + which))
                            print(measured.rows[-1], flush=True)
                            print(f"  {measured.rows[-1].counted}", file=sys.stderr, flush=True)
                    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                        measured.failed.append(f"{name}, load {number + 1}: {error}")
                    output.write_text(json.dumps(asdict(measured), indent=1))  # an interrupted run leaves what it has
    started = measured.ready_s.items()
    print(f"ready after: {', '.join(f'{name} {value:.1f} s' for name, value in started)}")
    if measured.failed:
        print("\n".join(measured.failed), file=sys.stderr)
        raise typer.Exit(1)


def resolve(each: Load | Trace, shares: list[float], seconds: float, url: str, measured: Measured) -> list[Load]:
    """A trace becomes a load at each share of its capacity, which the first cluster shows."""
    if isinstance(each, Load):
        return [each]
    name = Path(each.file).name
    if name not in measured.capacity:
        measured.capacity[name] = capacity(serve(url, each.burst(measured.gpus).flags, seed=5))
        print(f"capacity of {name}: {measured.capacity[name]:.2f}/s", file=sys.stderr, flush=True)
    return [each.at_share(share, measured.capacity[name], seconds) for share in shares]


def measure(cluster: str, load: Load, url: str, seed: int) -> Row:
    phases_before, metrics_before = phases(url), read_metrics()
    result = serve(url, load.flags, seed)
    phases_ms = {}
    for name, (seconds, count) in phases(url).items():
        seconds_before, count_before = phases_before[name]
        if count > count_before:
            phases_ms[name] = 1e3 * (seconds - seconds_before) / (count - count_before)
    return Row.of(cluster, load.name, result, phases_ms, changed(metrics_before, read_metrics(), COUNTED))


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Let processes share a GPU at the same time, rather than in turns, by NVIDIA's MPS daemon."""
    with tempfile.TemporaryDirectory() as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for directory in names.values():
            Path(directory).mkdir()
        os.environ.update(names)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, timeout=20)
            for name in names:
                del os.environ[name]


def warm_up(url: str) -> None:
    """What compiles or connects at first use is not measured: prompts of several lengths, alone and many at once."""
    for count, length, output_len in ((16, 700, 32), (12, 2048, 32), (2, 20_000, 8)):
        flags = ("--num-prompts", str(count), "--random-input-len", str(length), "--random-output-len", str(output_len))
        serve(url, (*flags, "--random-range-ratio", "0.3" if length != 2048 else "0"), seed=count)


if __name__ == "__main__":
    typer.run(main)
