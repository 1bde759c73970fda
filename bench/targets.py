"""Runs the benchmarks that have targets, and prints our figures beside the peers', the limits and the targets.

    python -m bench.targets --output targets.json                 # all parts that this machine can run
    python -m bench.targets --only check,kernels,llama --output targets.json
    python -m bench.targets --read llama=llama.json --read serve=serve.json      # a table of what was measured before
    python -m bench.targets --list

On a machine with GPUs the parts are those of GPUs, else those of the CPU. Each part is a benchmark (or tests) in a
process of its own with a time limit; one that fails, or takes too long, ends neither the others nor what it had
written by then. The table comes last, then what was skipped and why, and the last lines of what failed. The JSON holds
all of it, with each part's own. GPU kernels are built as they are first used; "check" does that, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import target_lines
from bench.target_lines import Line, table
from pdserve.model_store import ModelUnavailableError, prepare_default_model

_STOP_TIMEOUT_S = 20.0
_TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark. In its arguments OUTPUT, GPUS, MODEL and LOADS are put in."""

    name: str
    arguments: str
    """Of ``python -m``."""
    lines: Callable[[Any], list[Line]] | None
    """From its JSON; None: tests, which only pass or fail."""
    limit_s: float
    gpus: int = 1
    """It needs as many; 0: none."""


PARTS = (
    Part("check", "pytest -m gpu -q tests/kernels tests/gpu tests/conformance", None, 900),
    Part("kernels", "bench.kernels --output OUTPUT", target_lines.kernels, 600),
    Part("llama", "bench.gpu_engine --model llama-3.1-8b --output OUTPUT", target_lines.gpu_engine, 600),
    Part("qwen", "bench.gpu_engine --model qwen3-0.6b --output OUTPUT", target_lines.gpu_engine, 400),
    Part("transfer", "bench.gpu_transfer --output OUTPUT", target_lines.gpu_transfer, 300),
    Part("handoff", "bench.gpu_handoff --repeats 3 --output OUTPUT", target_lines.gpu_handoff, 300),
    Part("serve", "bench.gpu_serve --gpus GPUS --seconds 9 --loads LOADS --output OUTPUT", target_lines.gpu_serve, 600),
    Part("service", "bench.cpu_service --output OUTPUT", target_lines.cpu_service, 300, gpus=0),
    Part("engines", "bench.cpu_engines --model MODEL --output OUTPUT", target_lines.cpu_engines, 1200, gpus=0),
    Part("wire", "bench.transfer --output OUTPUT", target_lines.cpu_transfer, 300, gpus=0),
    Part("apart", "bench.apart --output OUTPUT", target_lines.cpu_apart, 600, gpus=0),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}


@dataclass(slots=True)
class Ran:
    """What became of a part."""

    name: str
    command: str = ""
    seconds: float = 0.0
    state: str = "ok"
    """ok | failed | too long | skipped"""
    why: str = ""
    tail: str = ""
    """The last of what it printed, when it is not ok."""
    raw: Any = None
    lines: list[Line] = field(default_factory=list)


def run(part: Part, gpus: int, limit_s: float | None, loads: str) -> Ran:
    """It, in a process group of its own, which is ended at the limit."""
    if part.gpus > gpus:
        return Ran(part.name, state="skipped", why=f"needs {part.gpus} CUDA device(s), there are {gpus}")
    limit_s = part.limit_s if limit_s is None else limit_s
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "output.json", Path(folder) / "log"
        try:
            command = fill_in(part, gpus, loads, output)
        except ModelUnavailableError as error:
            return Ran(part.name, state="skipped", why=str(error))
        ran = Ran(part.name, f"python -m {' '.join(command)}")
        began_s = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=file, stderr=file, start_new_session=True
            )
            try:
                status = process.wait(limit_s)
                if status:
                    ran.state, ran.why = "failed", f"exit status {status}"
            except subprocess.TimeoutExpired:
                ran.state, ran.why = "too long", f"no end within {limit_s:g} s"
            finally:
                end_group(process)
        ran.seconds = round(time.monotonic() - began_s, 1)
        printed = log.read_text(errors="replace").splitlines()
        read_json(part, ran, output)
    if ran.state != "ok":
        ran.tail = "\n".join(printed[-_TAIL_LINES:])
    return ran


def read_json(part: Part, ran: Ran, output: Path) -> None:
    """Its JSON, also of one that failed after it had written some."""
    if part.lines is None:
        return
    try:
        ran.raw = json.loads(output.read_text())
        ran.lines = part.lines(ran.raw)
    except (OSError, ValueError, LookupError, TypeError) as error:
        if ran.state == "ok":
            ran.state, ran.why = "failed", f"its JSON is not as expected: {error!r}"


def read_only(text: str) -> Ran:
    """Of ``NAME=FILE``: what was measured before. Raises typer.BadParameter."""
    name, _, file = text.partition("=")
    if name not in BY_NAME or BY_NAME[name].lines is None or not Path(file).is_file():
        raise typer.BadParameter(f"--read {text}: give a part with figures, and its JSON, as llama=llama.json")
    ran = Ran(name, f"read from {file}")
    read_json(BY_NAME[name], ran, Path(file))
    return ran


def fill_in(part: Part, gpus: int, loads: str, output: Path) -> list[str]:
    """Raises ModelUnavailableError."""
    values = {"OUTPUT": str(output), "GPUS": str(min(gpus, 2)), "LOADS": loads}
    words = part.arguments.split()
    if "MODEL" in words:
        values["MODEL"] = str(prepare_default_model())
    return [values.get(word, word) for word in words]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """And whatever it has started: clusters end by themselves on SIGTERM, if they are given a moment."""
    for number, patience_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, 2.0)):
        deadline_s = time.monotonic() + patience_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < deadline_s:
                process.poll()  # a zombie is still a member
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def loads_of(gpus: int, traces: Path | None) -> str:
    """Rates of which vLLM's figures are known, for each GPU; and traces, at shares of the capacity."""
    found = [f"poisson:2048:256:{rate * min(gpus, 2)}" for rate in (4, 8)]
    for kind, pattern in (("mooncake", "mooncake_conversation*.jsonl"), ("azure", "azure*.csv")):
        files = sorted(traces.glob(pattern)) if traces else []
        found += [f"{kind}:{file}" for file in files[:1]]
    return ",".join(found)


def report(every: list[Ran]) -> str:
    lines = [line for ran in every for line in ran.lines]
    met = [cells[-1] for cells in (line.cells() for line in lines) if cells[-1]]
    texts = [table(lines), f"\n{met.count('met')} of {len(met)} targets met"] if lines else []
    texts += [f"{ran.name}: {ran.state}: {ran.why}" for ran in every if ran.state != "ok"]
    texts += [f"\n---- the last of what {ran.name} printed\n{ran.tail}" for ran in every if ran.tail]
    return "\n".join(texts)


def machine(gpus: int) -> dict[str, str]:
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else platform.processor() or platform.machine()
    return {"device": device, "torch": torch.__version__}


def main(
    output: Annotated[Path | None, typer.Option(help="JSON with everything.")] = None,
    only: Annotated[str, typer.Option(help="Parts, separated by commas.", show_default="those of this machine")] = "",
    limit_s: Annotated[float | None, typer.Option(help="Of each part.", show_default="its own")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Folder with Mooncake's and Azure's traces.", envvar="PDSERVE_DATA")
    ] = None,
    read: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="Run nothing; a part's JSON.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Name the parts, and run none.")] = False,
) -> None:
    """Our figures beside the peers', the limits and the targets."""
    gpus = torch.cuda.device_count()
    if show:
        print("\n".join(f"{part.name:<10}{part.gpus} GPU  {part.limit_s:>5.0f} s  {part.arguments}" for part in PARTS))
        return
    names = only.split(",") if only else [part.name for part in PARTS if (part.gpus > 0) == (gpus > 0)]
    if unknown := [name for name in names if name not in BY_NAME]:
        raise typer.BadParameter(f"no part {', '.join(unknown)}: there are {', '.join(BY_NAME)}")
    every = [read_only(text) for text in read or ()]
    if not every:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and so end the part that runs
    for name in names if not every else ():
        print(f"{name} ...", file=sys.stderr, flush=True)
        every.append(run(BY_NAME[name], gpus, limit_s, loads_of(gpus, traces)))
        print(f"{name}: {every[-1].state}, {every[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        if output is not None:
            output.write_text(json.dumps({**machine(gpus), "parts": [asdict(ran) for ran in every]}, indent=1))
    print(report(every))
    if any(ran.state in ("failed", "too long") for ran in every):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
