"""``python -m bench.serve``, also ``pdserve bench serve``; flags are named as those of ``vllm bench serve``.

pdserve bench serve --base-url http://127.0.0.1:8000 --request-rate 2,4,8 --goodput ttft:500,tpot:50 --plot out.png
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from bench.serve.endpoint import EndpointError
from bench.serve.invocation import Options, bench
from bench.serve.metrics import Limits
from bench.serve.options import DATASETS, DatasetOptions, parse_rates
from bench.serve.traces import RECORDED_BLOCK_TOKENS, TraceOptions

_PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main(
    base_url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="openai (completions, token ids) or openai-chat.")] = "openai",
    endpoint: Annotated[str | None, typer.Option(help="Path of the API.", show_default="by backend")] = None,
    model: Annotated[str | None, typer.Option(help="Name in the API.", show_default="the first one served")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer token.")
    ] = None,
    dataset_name: Annotated[str, typer.Option(help=", ".join(DATASETS))] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="File of custom, mooncake, azure.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests of a run.")] = 1000,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens of its output.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share, 0 to 1.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens before it that all prompts share.")] = 0,
    prefix_repetition_prefix_len: Annotated[int, typer.Option()] = 256,
    prefix_repetition_suffix_len: Annotated[int, typer.Option()] = 256,
    prefix_repetition_num_prefixes: Annotated[int, typer.Option()] = 10,
    prefix_repetition_output_len: Annotated[int, typer.Option()] = 128,
    custom_output_len: Annotated[int | None, typer.Option(help="Where a custom prompt says nothing.")] = 256,
    time_stretch: Annotated[float, typer.Option(help="Trace replay: 2 is half the recorded speed.")] = 1.0,
    trace_spread: Annotated[
        bool, typer.Option("--trace-spread", help="Those of one moment come until the next.")
    ] = False,
    trace_block_tokens: Annotated[
        int, typer.Option(help="Trace replay: tokens per recorded block of 512; fewer shrink the prompts.")
    ] = RECORDED_BLOCK_TOKENS,
    max_input_tokens: Annotated[int | None, typer.Option(help="Trace replay: leave longer requests out.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Trace replay: cut longer outputs.")] = None,
    token_ids: Annotated[str, typer.Option(help="Range FIRST:END of made-up token ids.")] = "1000:30000",
    text_prompts: Annotated[bool, typer.Option("--text-prompts", help="Words in place of token ids.")] = False,
    request_rate: Annotated[
        str | None, typer.Option(help="Requests/s; several (1,2,4) for a run each.", show_default="the trace's, or inf")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1 Poisson, below 1 bursts, above 1 steadier.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Open requests at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    goodput: Annotated[str, typer.Option(help="Limits in ms: ttft:500,tpot:50,itl_p99:100,e2el:9000.")] = "",
    ignore_eos: Annotated[
        bool | None, typer.Option(help="Outputs of exact length.", show_default="not for custom")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="-1: the server's default.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help="JSON object with more fields of each request.")] = "{}",
    request_timeout_s: Annotated[float, typer.Option(help="A request that takes longer has failed.")] = 600.0,
    num_warmups: Annotated[int, typer.Option(help="Short requests before the run, not counted.")] = 1,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write JSON.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With every request.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of the JSON.")] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="Its name.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG: TTFT and ITL distributions, timeline, goodput.")] = None,
    label: Annotated[str, typer.Option(help="Of the JSON and the plots.")] = "",
    no_progress: Annotated[bool, typer.Option("--no-progress", "--disable-tqdm", help="No progress bar.")] = False,
) -> None:
    """Send requests to an OpenAI endpoint and measure the answers."""
    try:
        if backend not in _PATHS:
            raise ValueError(f"--backend {backend}: there are {' and '.join(_PATHS)}")
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'pdserve[bench]'")
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"--max-concurrency {max_concurrency}: at least 1 is needed")
        options = Options(
            base_url=base_url,
            endpoint_path=endpoint or _PATHS[backend],
            is_chat=backend == "openai-chat",
            model=model,
            api_key=api_key,
            dataset=DatasetOptions(
                name=dataset_name,
                path=dataset_path,
                num_requests=num_prompts,
                token_ids=token_ids,
                input_tokens=random_input_len,
                output_tokens=random_output_len,
                range_ratio=random_range_ratio,
                shared_prefix_tokens=random_prefix_len,
                num_prefixes=prefix_repetition_num_prefixes,
                prefix_tokens=prefix_repetition_prefix_len,
                suffix_tokens=prefix_repetition_suffix_len,
                prefix_output_tokens=prefix_repetition_output_len,
                custom_output_tokens=custom_output_len,
                trace=TraceOptions(
                    time_stretch=time_stretch,
                    spread=trace_spread,
                    block_tokens=trace_block_tokens,
                    max_input_tokens=max_input_tokens,
                    max_output_tokens=max_output_tokens,
                ),
            ),
            rates=None if request_rate is None else parse_rates(request_rate),
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            seed=seed,
            limits=Limits.parse(goodput),
            ignore_eos=ignore_eos,
            temperature=None if temperature is not None and temperature < 0 else temperature,
            extra_body=_json_object(extra_body),
            text_prompts=text_prompts,
            timeout_s=request_timeout_s,
            num_warmups=num_warmups,
            show_progress=not no_progress and sys.stderr.isatty(),
            result_path=_result_path(result_dir, result_filename, backend) if save_result or result_filename else None,
            detailed=save_detailed,
            plot_path=plot,
            label=label,
        )
        status = _run(options)
    except (ValueError, EndpointError, OSError) as error:
        print(f"bench serve: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(status)


def _run(options: Options) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bench(options, Console()))


def _json_object(text: str) -> dict[str, Any]:
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("--extra-body must be a JSON object")
    return data


def _result_path(folder: Path, name: str | None, backend: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (name or f"{backend}-{time.strftime('%Y%m%d-%H%M%S')}.json")


if __name__ == "__main__":
    typer.run(main)
