"""One aggregated worker on this host's cores through the gateway: start, one stream, sixteen, a prefix that all share.

    python -m bench.cpu_service --output service.json

"start" is from starting ``pdserve up`` until the first request has been answered, the model prepared. The shared prefix
is 1,500 tokens, then 31 of each of 16 requests at once, 64 output tokens; "warm" are the same prompts again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from bench.apart import serve
from bench.local_serve import local_cluster

LOAD = ["--random-input-len", "256", "--random-output-len", "64"]
SHARED = ["--random-prefix-len", "1500", "--random-input-len", "31", "--random-output-len", "64"]
STREAMS = 16


def main(
    output: Annotated[Path, typer.Option(help="JSON of all figures.")],
    up_flags: Annotated[str, typer.Option(help="More flags of `pdserve up`.")] = "--dtype bfloat16",
) -> None:
    """What a user of one CPU worker sees."""
    began_s = time.monotonic()
    with local_cluster(["--aggregated", *up_flags.split()]) as url:
        model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
        body = {"model": model, "prompt": "The ship left", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        figures = {"start_s": time.monotonic() - began_s}
        serve(url, LOAD, requests=STREAMS, streams=STREAMS)  # warm: caches, memory, channels
        alone = serve(url, LOAD, requests=STREAMS, streams=1, seed=2)
        together = serve(url, LOAD, requests=3 * STREAMS, streams=STREAMS, seed=3)
        cold, warm = (serve(url, SHARED, requests=STREAMS, streams=STREAMS, seed=4) for _ in range(2))
    figures |= {
        "ttft_ms": alone["median_ttft_ms"],
        "tpot_ms": alone["median_tpot_ms"],
        "tokens_per_s": together["output_throughput"],
        "shared_cold_s": cold["duration"],
        "shared_warm_s": warm["duration"],
    }
    output.write_text(json.dumps(figures, indent=1))
    print("\n".join(f"{name:<16}{value:>10.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    typer.run(main)
