"""``pdserve plan``: what of a model fits where, and how many prefill and decode workers a load needs.

    config.json, memory of a GPU       -> tokens that each role's KV pool holds, requests at a time, bytes of a hand-off
    + a load, + speeds that were measured -> workers of each role, and what limits them

Sizes are computed from the configuration; speeds are not guessed: measure them on one worker of each role (see the help
of the flags). Runs on a machine without a GPU, and reads nothing of a model but its config.json.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.model_config import ModelConfig, load_model_config
from engine.sizing import DTYPE_BYTES, gpu_room, kv_token_bytes, num_parameters

GPU_BLOCK_TOKENS, GPU_STEP_TOKENS, GPU_STEP_REQUESTS = 64, 8192, 1024
"""An engine's own defaults on a GPU (``engine.devices``)."""
STAGED_STEPS = {"prefill": 2, "decode": 0, "aggregated": 0}
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the fleet. ``None``: not said."""

    input_len: int
    output_len: int
    request_rate: float | None = None
    cached_share: float = 0.0
    prefill_tokens_per_s: float | None = None
    tpot_ms: float | None = None
    streams_per_decode: int | None = None
    busy: float = 0.8


def prefill_workers(load: Load) -> tuple[int, float] | None:
    """How many, and how busy they are; None without rate and speed."""
    if load.request_rate is None or load.prefill_tokens_per_s is None:
        return None
    demand = load.request_rate * load.input_len * (1 - load.cached_share) / load.prefill_tokens_per_s
    count = max(math.ceil(demand / load.busy - 1e-9), 1)
    return count, demand / count


def decode_streams(load: Load) -> float | None:
    """Answers that are being written at a time: Little's law, on the rate and the time that an answer takes."""
    if load.request_rate is None or load.tpot_ms is None:
        return None
    return load.request_rate * load.output_len * load.tpot_ms / 1000


def decode_workers(load: Load, pool_tokens: int) -> tuple[int, str] | None:
    """How many, and whether KV memory or speed is the limit; None without rate and speed. An answer holds its prompt
    and, on average, half of its output."""
    streams = decode_streams(load)
    if streams is None:
        return None
    by_memory = math.ceil(streams * (load.input_len + load.output_len / 2) / (pool_tokens * load.busy))
    by_speed = math.ceil(streams / load.streams_per_decode) if load.streams_per_decode else 0
    return max(by_memory, by_speed, 1), "memory of the KV pool" if by_memory >= by_speed else "streams of a worker"


def gpu_pool_tokens(
    model: ModelConfig, role: str, dtype: str, memory_bytes: int, utilization: float, max_model_len: int
) -> int:
    """Tokens that the pool of a worker in that role holds; 0 when the model does not fit."""
    dtype_bytes = DTYPE_BYTES[dtype]
    room = gpu_room(
        model,
        dtype_bytes=dtype_bytes,
        memory_bytes=memory_bytes,
        utilization=utilization,
        step_tokens=GPU_STEP_TOKENS,
        step_requests=GPU_STEP_REQUESTS,
        staged_steps=STAGED_STEPS[role],
    )
    num_blocks = room.kv_pool // (GPU_BLOCK_TOKENS * kv_token_bytes(model, dtype_bytes))
    most = GPU_STEP_REQUESTS * (max_model_len // GPU_BLOCK_TOKENS + 1)
    return max(min(num_blocks, most), 0) * GPU_BLOCK_TOKENS


def main(
    model: Annotated[Path, typer.Argument(help="Directory with the model's config.json.")],
    gpu_memory_gib: Annotated[float, typer.Option(help="Memory of one GPU, as nvidia-smi or torch tells it.")],
    gpu_memory_utilization: Annotated[float, typer.Option(help="Part of it for one worker.")] = 0.9,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt + output.", show_default="the model's")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 2048,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    request_rate: Annotated[float | None, typer.Option(help="Requests/s of the whole fleet.")] = None,
    cached_share: Annotated[float, typer.Option(help="Part of the prompts that prefix caches have, 0 to 1.")] = 0.0,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            help="Of one prefill worker; measure: prompt tokens/s of `pdserve bench serve` with answers of 1."
        ),
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Time between two tokens that decode workers are to keep; measure as TPOT.")
    ] = None,
    streams_per_decode: Annotated[
        int | None, typer.Option(help="Answers at a time with which one decode worker keeps --tpot-ms; measure, too.")
    ] = None,
    busy: Annotated[float, typer.Option(help="How full workers may be on average; the rest is for bursts.")] = 0.8,
) -> None:
    """Say what fits on a GPU, and how many workers of each role a load needs."""
    try:
        config = load_model_config(model)
        dtype = config.dtype if dtype == "auto" else dtype
        load = Load(
            input_len=input_len,
            output_len=output_len,
            request_rate=request_rate,
            cached_share=cached_share,
            prefill_tokens_per_s=prefill_tokens_per_s,
            tpot_ms=tpot_ms,
            streams_per_decode=streams_per_decode,
            busy=busy,
        )
        longest = max_model_len or config.max_position_embeddings
        _check(load, dtype, gpu_memory_gib, gpu_memory_utilization, longest, config)
    except (ValueError, OSError) as error:
        print(f"pdserve: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    tokens = {
        role: gpu_pool_tokens(config, role, dtype, int(gpu_memory_gib * GIB), gpu_memory_utilization, longest)
        for role in STAGED_STEPS
    }
    console = Console(highlight=False)
    _print_sizes(console, config, dtype, tokens, load)
    if min(tokens.values()) < input_len + output_len:
        console.print("The model does not fit with a request of this length: more memory, or --dtype bfloat16.")
        raise typer.Exit(1)
    _print_workers(console, load, tokens)


def _check(load: Load, dtype: str, memory_gib: float, utilization: float, longest: int, config: ModelConfig) -> None:
    """Raises ValueError, with the remedy."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known: use --dtype {', '.join(DTYPE_BYTES)}")
    if not 0 < longest <= config.max_position_embeddings:
        raise ValueError(f"the model was made for {config.max_position_embeddings} tokens: lower --max-model-len")
    if load.input_len < 1 or load.output_len < 1 or load.input_len + load.output_len > longest:
        raise ValueError(
            f"--input-len {load.input_len} and --output-len {load.output_len} must be at least 1 and together at most "
            f"{longest}"
        )
    positive: Mapping[str, float | None] = {
        "--gpu-memory-gib": memory_gib,
        "--request-rate": load.request_rate,
        "--prefill-tokens-per-s": load.prefill_tokens_per_s,
        "--tpot-ms": load.tpot_ms,
        "--streams-per-decode": load.streams_per_decode,
    }
    for flag, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} {value:g} must be more than 0, and not infinite")
    if not (0 < utilization <= 1 and 0 < load.busy <= 1 and 0 <= load.cached_share < 1):
        raise ValueError("--gpu-memory-utilization, --busy and --cached-share are parts of 1")


def _print_sizes(console: Console, config: ModelConfig, dtype: str, tokens: Mapping[str, int], load: Load) -> None:
    kv_bytes = kv_token_bytes(config, DTYPE_BYTES[dtype])
    parameters = num_parameters(config)
    console.print(
        f"{config.architecture}, {parameters / 1e9:.2f} billion parameters in {dtype}: "
        f"{parameters * DTYPE_BYTES[dtype] / GIB:.2f} GiB of weights, {kv_bytes / 1024:.0f} KiB of KV a token; "
        f"a hand-off of {load.input_len} tokens is {load.input_len * kv_bytes / (1 << 20):.0f} MiB."
    )
    table = Table(box=None, padding=(0, 2))
    for heading in ("worker", "KV pool", "tokens", f"requests of {load.input_len} + {load.output_len}"):
        table.add_column(heading, justify="left" if heading == "worker" else "right")
    for role, held in tokens.items():
        needs = load.input_len if role == "prefill" else load.input_len + load.output_len
        table.add_row(role, f"{held * kv_bytes / GIB:.1f} GiB", f"{held:,}", f"{held // needs:,}")
    console.print(table)
    console.print(
        "What the largest step needs is estimated here; an engine measures it, and logs its pool (model_loaded)."
    )


def _print_workers(console: Console, load: Load, tokens: Mapping[str, int]) -> None:
    prefill, decode = prefill_workers(load), decode_workers(load, tokens["decode"])
    if prefill is not None:
        count, share = prefill
        console.print(f"Prefill workers: {count}, each busy {share:.0%} of the time.")
    else:
        console.print("Prefill workers: give --request-rate and --prefill-tokens-per-s.")
    streams = decode_streams(load)
    if decode is not None and streams is not None:
        console.print(f"Decode workers: {decode[0]} for {streams:.1f} answers at a time; the limit is the {decode[1]}.")
        if load.streams_per_decode is None:
            console.print("  by memory alone: give --streams-per-decode, which --tpot-ms limits, too.")
    else:
        console.print("Decode workers: give --request-rate and --tpot-ms.")


if __name__ == "__main__":
    typer.run(main)
