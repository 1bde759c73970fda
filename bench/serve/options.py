"""What a run is asked for, checked, and the dataset that it means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.serve.datasets import PrefixRepetitionDataset, PromptsFile, RandomDataset
from bench.serve.traces import TraceDataset, TraceOptions, read_azure, read_mooncake
from bench.serve.workload import Dataset, TokenSource

DATASETS = ("random", "prefix_repetition", "custom", "mooncake", "azure")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """One set for all datasets; each uses its own."""

    name: str
    path: Path | None
    num_requests: int
    token_ids: str
    input_tokens: int
    output_tokens: int
    range_ratio: float
    shared_prefix_tokens: int
    num_prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    prefix_output_tokens: int
    custom_output_tokens: int | None
    trace: TraceOptions


def make_dataset(options: DatasetOptions, seed: int) -> Dataset:
    """Raises ValueError, with the remedy."""
    if options.num_requests < 1:
        raise ValueError(f"--num-prompts {options.num_requests}: at least 1 is needed")
    tokens = _token_source(options.token_ids, seed)
    match options.name:
        case "random":
            return RandomDataset(
                tokens,
                options.num_requests,
                seed=seed,
                input_tokens=options.input_tokens,
                output_tokens=options.output_tokens,
                range_ratio=options.range_ratio,
                prefix_tokens=options.shared_prefix_tokens,
            )
        case "prefix_repetition":
            return PrefixRepetitionDataset(
                tokens,
                options.num_requests,
                seed=seed,
                num_prefixes=options.num_prefixes,
                prefix_tokens=options.prefix_tokens,
                suffix_tokens=options.suffix_tokens,
                output_tokens=options.prefix_output_tokens,
            )
        case "custom":
            return PromptsFile(_path(options), options.num_requests, output_tokens=options.custom_output_tokens)
        case "mooncake":
            return TraceDataset(read_mooncake(_path(options)), tokens, options.num_requests, options.trace)
        case "azure":
            return TraceDataset(read_azure(_path(options)), tokens, options.num_requests, options.trace)
    raise ValueError(f"--dataset-name {options.name}: there are {', '.join(DATASETS)}")


def parse_rates(text: str) -> list[float]:
    """``4``, ``inf`` or ``1,2,4``. Raises ValueError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise ValueError(f"--request-rate {text}: give requests a second, several with commas between them, or inf")
    return rates


def _path(options: DatasetOptions) -> Path:
    if options.path is None:
        raise ValueError(f"--dataset-name {options.name} needs --dataset-path FILE")
    if not options.path.is_file():
        raise ValueError(f"--dataset-path {options.path} is no file")
    return options.path


def _token_source(text: str, seed: int) -> TokenSource:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit()):
        raise ValueError(f"--token-ids {text}: use FIRST:END, for example 1000:30000")
    return TokenSource(seed, int(first), int(end))
