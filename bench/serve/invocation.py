"""One invocation of the tool: warms the endpoint up, does one run per request rate, prints and writes the results."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console

from bench.serve.arrivals import arrivals_s
from bench.serve.endpoint import Endpoint, EndpointError
from bench.serve.metrics import Limits, Summary, summarize
from bench.serve.options import DatasetOptions, make_dataset
from bench.serve.progress import ProgressBar
from bench.serve.records import Outcome, Record, Samples
from bench.serve.report import as_json, remarks, table
from bench.serve.runner import Run, run_load
from bench.serve.workload import BenchRequest, Dataset

_WARMUP_PROMPT_TOKENS = 16
_WARMUP_OUTPUT_TOKENS = 4
_MODELS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of one invocation."""

    base_url: str
    endpoint_path: str
    is_chat: bool
    model: str | None
    api_key: str | None
    dataset: DatasetOptions
    rates: list[float] | None
    """None: as the trace says, else all at once."""
    burstiness: float
    max_concurrency: int | None
    seed: int
    limits: Limits
    ignore_eos: bool | None
    """None: as the dataset wants."""
    temperature: float | None
    extra_body: dict[str, Any] = field(default_factory=dict)
    text_prompts: bool = False
    timeout_s: float = 600.0
    num_warmups: int = 1
    show_progress: bool = True
    result_path: Path | None = None
    """Where the JSON goes; with several rates, one file each."""
    detailed: bool = False
    plot_path: Path | None = None
    """A PNG of each run, and with several rates one more."""
    label: str = ""


async def bench(options: Options, console: Console) -> int:
    """Returns the exit status: 1 when nothing was answered. Raises EndpointError and ValueError."""
    make_dataset(options.dataset, options.seed)  # what is wrong with it is said before anything is sent
    model = options.model or await _served_model(options)
    rates: list[float | None] = list(options.rates) if options.rates else [None]
    summaries: list[Summary] = []
    for number, rate in enumerate(rates):
        # Other tokens for each rate, so that the second run does not find the first one's prompts cached.
        seed = options.seed + number
        dataset = make_dataset(options.dataset, seed)
        async with _endpoint(options, model, dataset) as endpoint:
            if number == 0:
                await _warm_up(endpoint, options.num_warmups)
            run = await _run(endpoint, dataset, rate, seed, options)
        summary = summarize(run, options.limits)
        summaries.append(summary)
        console.print(
            table(summary, request_rate=rate, max_concurrency=options.max_concurrency), highlight=False, markup=False
        )
        for remark in remarks(summary, run.records, options.max_concurrency):
            console.print(f"note: {remark}", highlight=False, markup=False, soft_wrap=True)
        suffix = f"-{rate:g}qps" if rate is not None and len(rates) > 1 else ""
        _save(run, summary, dataset, model, rate, options, suffix)
    if options.plot_path is not None and options.rates and len(options.rates) > 1:
        from bench.serve.plots import draw_rates

        path = options.plot_path.with_stem(f"{options.plot_path.stem}-rates")
        draw_rates(options.rates, summaries, f"{model} over the request rate", path)
    return 0 if any(summary.completed for summary in summaries) else 1


async def _run(endpoint: Endpoint, dataset: Dataset, rate: float | None, seed: int, options: Options) -> Run:
    arrivals = (
        None
        if rate is None and _has_arrivals(dataset)
        else arrivals_s(math.inf if rate is None else rate, options.burstiness, seed)
    )
    with ProgressBar(options.show_progress, len(dataset)) as on_progress:
        return await run_load(
            endpoint, dataset, arrivals, max_concurrency=options.max_concurrency, on_progress=on_progress
        )


def _endpoint(options: Options, model: str, dataset: Dataset) -> Endpoint:
    return Endpoint(
        options.base_url.rstrip("/") + options.endpoint_path,
        is_chat=options.is_chat,
        model=model,
        ignore_eos=dataset.ignore_eos if options.ignore_eos is None else options.ignore_eos,
        temperature=options.temperature,
        extra_body=options.extra_body,
        text_only=options.text_prompts,
        api_key=options.api_key,
        timeout_s=options.timeout_s,
    )


async def _served_model(options: Options) -> str:
    """The first one that the server lists."""
    url = options.base_url.rstrip("/") + "/v1/models"
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as response:
            return str(orjson.loads(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise EndpointError(
            f"{url} names no model ({error or type(error).__name__}): is the server up, is --base-url right? "
            "--model NAME skips this question"
        ) from error


async def _warm_up(endpoint: Endpoint, count: int) -> None:
    """A few tokens, not counted: a wrong endpoint fails here, with its answer, and not ``num_prompts`` times."""
    for number in range(count):
        prompt = list(range(1000 + number, 1000 + number + _WARMUP_PROMPT_TOKENS))
        record = Record(number, 0.0)
        body = endpoint.encode(BenchRequest(prompt, _WARMUP_OUTPUT_TOKENS))
        await endpoint.send(body, record, time.perf_counter(), Samples())
        if record.outcome is not Outcome.OK:
            raise EndpointError(f"the first request to {endpoint.url} failed: {record.error}")


def _has_arrivals(dataset: Dataset) -> bool:
    return dataset.request(0).arrival_s is not None


def _save(
    run: Run, summary: Summary, dataset: Dataset, model: str, rate: float | None, options: Options, suffix: str
) -> None:
    if options.result_path is not None:
        source = "trace" if rate is None and _has_arrivals(dataset) else "inf"
        settings = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "label": options.label,
            "backend": "openai-chat" if options.is_chat else "openai",
            "base_url": options.base_url,
            "model_id": model,
            "dataset_name": options.dataset.name,
            "num_prompts": len(run.records),
            "request_rate": source if rate is None or math.isinf(rate) else rate,
            "burstiness": options.burstiness,
            "max_concurrency": options.max_concurrency,
            "seed": options.seed,
        }
        path = options.result_path.with_stem(options.result_path.stem + suffix)
        data = as_json(summary, settings, run.records, detailed=options.detailed)
        path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
    if options.plot_path is not None:
        from bench.serve.plots import draw_run

        rate_text = "" if rate is None else f", {rate:g} requests/s"
        title = f"{options.label or model}: {options.dataset.name}{rate_text}"
        draw_run(run, title, options.plot_path.with_stem(options.plot_path.stem + suffix))
