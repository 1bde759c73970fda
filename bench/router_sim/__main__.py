"""``python -m bench.router_sim``: replay traces against simulated fleets."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from bench.router_sim.memory import bytes_per_entry
from bench.router_sim.report import print_table, row
from bench.router_sim.simulation import Setup, Simulation
from bench.router_sim.trace import TraceRequest, ideal_hit_rate, poisson, read_mooncake, shared_lru_hit_rate, synthetic
from bench.router_sim.worker import WorkerSpeed
from router.policies import POLICIES

MOONCAKE_FILES = {
    "conversation": "mooncake_conversation_trace.head.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
}
REFERENCE_WORKERS = 16
"""Larger fleets get proportionally faster arrivals."""


def main(
    traces: Annotated[
        str, typer.Option(help="conversation, synthetic (Mooncake), made-up or poisson:INPUT:OUTPUT:RATE")
    ] = "conversation",
    workers: Annotated[str, typer.Option(help="fleet sizes; half prefill, half decode")] = "16",
    policies: Annotated[str, typer.Option(help="names, or all")] = "all",
    routers: Annotated[int, typer.Option(help="that share the requests")] = 1,
    requests: Annotated[int, typer.Option(help="of each trace at most; 0: all")] = 0,
    load: Annotated[float, typer.Option(help="arrivals compared with the trace, at 16 workers")] = 1.0,
    hash_block_tokens: Annotated[int, typer.Option(help="unit of the hashes")] = 512,
    block_tokens: Annotated[int, typer.Option(help="block size of the workers; 0: the unit")] = 0,
    slow_prefills: Annotated[float, typer.Option(help="share of the prefill workers that are half as fast")] = 0.0,
    prefill_rate: Annotated[float, typer.Option(help="prompt tokens/s of a prefill worker")] = 16_000,
    decode_step_s: Annotated[float, typer.Option(help="a token of an output takes so long")] = 0.02,
    shared_rates: Annotated[
        str, typer.Option(help="prompt tokens/s that a decode worker takes while prefill workers are busy; 0: none")
    ] = "0",
    learn: Annotated[bool, typer.Option(help="routers learn how fast each worker is")] = True,
    memory: Annotated[bool, typer.Option(help="also measure the index's memory")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON")] = None,
    data: Annotated[Path | None, typer.Option(help="folder of the traces", show_default="$PDSERVE_DATA")] = None,
) -> None:
    """Hit rate, load spread and decision time of routing policies."""
    rows = []
    names = sorted(POLICIES) if policies == "all" else policies.split(",")
    for trace in traces.split(","):
        chosen = _read(trace, data, requests or None)
        ideal = ideal_hit_rate(chosen)
        for size in (int(size) for size in workers.split(",")):
            for policy, rate in product(names, map(float, shared_rates.split(","))):
                setup = Setup(
                    policy=policy,
                    speed=WorkerSpeed(prefill_rate, decode_step_s, shared_tokens_per_s=rate),
                    prefills=size // 2,
                    decodes=size - size // 2,
                    routers=routers,
                    speedup=load * size / REFERENCE_WORKERS,
                    hash_block_tokens=hash_block_tokens,
                    block_tokens=block_tokens or hash_block_tokens,
                    slow_prefills=round(slow_prefills * (size // 2)),
                    learns=learn,
                )
                outcome = asyncio.run(Simulation(setup).run(chosen))
                shared = shared_lru_hit_rate(chosen, setup.prefills * setup.speed.pool_tokens)
                rows.append(row(trace, ideal, shared, setup, outcome))
                typer.echo(json.dumps(rows[-1]), err=True)
    print_table(rows)
    result: dict[str, object] = {"rows": rows}
    if memory:
        result["bytes_per_entry"] = {
            f"{size} workers, {owners} owners of each block": round(bytes_per_entry(size, blocks, owners), 1)
            for size, blocks, owners in ((16, 65_536, 1), (16, 65_536, 4), (1000, 1024, 1), (1000, 1024, 4))
        }
        typer.echo(json.dumps(result["bytes_per_entry"], indent=2))
    if output is not None:
        output.write_text(json.dumps(result, indent=2))


def _read(trace: str, data: Path | None, limit: int | None) -> list[TraceRequest]:
    if trace == "made-up":
        return synthetic(limit or 5000)
    if trace.startswith("poisson:"):
        input_tokens, output_tokens, rate = trace.split(":")[1:]
        return poisson(limit or 2000, int(input_tokens), int(output_tokens), float(rate))
    folder = data or Path(os.environ.get("PDSERVE_DATA", "no-folder"))
    if trace not in MOONCAKE_FILES or not (folder / MOONCAKE_FILES[trace]).exists():
        raise typer.BadParameter(
            f"trace {trace}: use made-up, poisson:INPUT:OUTPUT:RATE, or {', '.join(MOONCAKE_FILES)} with --data FOLDER"
        )
    return read_mooncake(folder / MOONCAKE_FILES[trace], limit)


if __name__ == "__main__":
    typer.run(main)
