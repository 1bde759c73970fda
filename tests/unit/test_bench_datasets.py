"""Datasets and arrivals of ``bench serve``: seeds decide everything, equal blocks are equal, rates are as asked."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serve.arrivals import arrivals_s
from bench.serve.datasets import PrefixRepetitionDataset, PromptsFile, RandomDataset
from bench.serve.options import parse_rates
from bench.serve.traces import TraceDataset, TraceEntry, TraceOptions, read_azure, read_mooncake
from bench.serve.workload import TokenSource, as_text

FIRST, END = 1000, 30_000


def source(seed: int = 0) -> TokenSource:
    return TokenSource(seed, FIRST, END)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ids(dataset: object, index: int) -> list[int]:
    content = dataset.request(index).content  # type: ignore[attr-defined]
    assert isinstance(content, list)
    return content


def test_tokens_are_spread_over_the_range_and_streams_differ() -> None:
    tokens = source().tokens(0, 5, 100_000)
    assert tokens.min() >= FIRST
    assert tokens.max() < END
    counts = np.histogram(tokens, bins=29, range=(FIRST, END))[0]
    expected = len(tokens) / 29
    assert ((counts - expected) ** 2 / expected).sum() < 70, "chi square, 28 degrees of freedom: 70 is past 1 in 10,000"
    for other in (source().tokens(1, 5, 1000), source().tokens(0, 6, 1000), source(1).tokens(0, 5, 1000)):
        assert (other == tokens[:1000]).mean() < 0.01


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 500), st.integers(0, 500))
def test_a_stream_is_the_same_from_wherever_it_is_read(seed: int, stream: int, start: int, count: int) -> None:
    whole = source(seed).tokens(3, stream, start + count)
    assert (source(seed).tokens(3, stream, count, start) == whole[start:]).all()


def test_random_dataset() -> None:
    def make(seed: int) -> RandomDataset:
        return RandomDataset(
            source(seed), 200, seed=seed, input_tokens=100, output_tokens=20, range_ratio=0.5, prefix_tokens=7
        )

    dataset = make(3)
    prompts = [ids(dataset, i) for i in range(200)]
    assert {len(prompt) - 7 for prompt in prompts} <= set(range(50, 151))
    assert len({len(prompt) for prompt in prompts}) > 30
    assert {dataset.request(i).max_tokens for i in range(200)} <= set(range(10, 31))
    assert {tuple(prompt[:7]) for prompt in prompts} == {tuple(prompts[0][:7])}
    assert max(common_prefix(a, b) for a, b in itertools.pairwise(prompts)) <= 9
    assert [ids(make(3), i) for i in range(200)] == prompts
    assert ids(make(4), 0) != prompts[0]


def test_prefix_repetition() -> None:
    dataset = PrefixRepetitionDataset(
        source(), 60, seed=1, num_prefixes=4, prefix_tokens=32, suffix_tokens=8, output_tokens=5
    )
    prompts = [ids(dataset, i) for i in range(60)]
    assert {len(prompt) for prompt in prompts} == {40}
    groups = dict.fromkeys({tuple(prompt[:32]) for prompt in prompts}, 0)
    for prompt in prompts:
        groups[tuple(prompt[:32])] += 1
    assert sorted(groups.values()) == [15, 15, 15, 15]
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 60
    order = [tuple(prompt[:32]) for prompt in prompts]
    assert order[:15] != [order[0]] * 15, "they come mixed"


def test_prompts_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    entries = [
        {"prompt": "a text", "output_tokens": 9},
        {"prompt": [1, 2, 3]},
        {"messages": chat},
        {"turns": ["first", "second"]},
        {"question": "why?", "answer": "so"},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    dataset = PromptsFile(path, 7, output_tokens=50)
    contents = [dataset.request(i).content for i in range(7)]
    assert contents == ["a text", [1, 2, 3], chat, "first", "why?", "a text", [1, 2, 3]]
    assert [dataset.request(i).max_tokens for i in range(3)] == [9, 50, 50]
    path.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2 has none"):
        PromptsFile(path, 1, output_tokens=None)


traces = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=6).flatmap(
        lambda blocks: st.integers(1, 512).map(lambda rest: (blocks, (len(blocks) - 1) * 512 + rest))
    ),
    min_size=2,
    max_size=6,
)


@given(traces, st.sampled_from([512, 64, 7, 1]))
def test_equal_hash_ids_are_equal_blocks(trace: list[tuple[list[int], int]], block_tokens: int) -> None:
    """Two prompts share as many whole blocks as their hash ids do, at any shrinking; other blocks differ."""
    entries = [TraceEntry(0.0, length, 1, tuple(blocks)) for blocks, length in trace]
    dataset = TraceDataset(entries, source(), len(entries), TraceOptions(block_tokens=block_tokens))
    prompts = [ids(dataset, i) for i in range(len(entries))]
    for entry, prompt in zip(entries, prompts, strict=True):
        assert len(prompt) == max(math.ceil(entry.input_tokens * block_tokens / 512), 1)
    for (one, a), (two, b) in itertools.combinations(zip(entries, prompts, strict=True), 2):
        shared = common_prefix(list(one.hash_ids), list(two.hash_ids)) * block_tokens
        assert common_prefix(a, b) >= min(shared, len(a), len(b))
        if block_tokens >= 64:
            assert common_prefix(a, b) <= min(shared + 8, len(a), len(b))


def test_mooncake_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]},
        {"timestamp": 500, "input_length": 500, "output_length": 400, "hash_ids": [0]},
        {"timestamp": 4500, "input_length": 5000, "output_length": 3, "hash_ids": list(range(10))},
        {"timestamp": 8500, "input_length": 10, "output_length": 0, "hash_ids": [3]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = TraceOptions(time_stretch=0.5, max_input_tokens=1000, max_output_tokens=100)
    dataset = TraceDataset(read_mooncake(path), source(), 100, options)
    requests = [dataset.request(i) for i in range(len(dataset))]
    assert [request.arrival_s for request in requests] == [0.0, 0.75, 4.0]
    assert [request.max_tokens for request in requests] == [100, 9, 1]
    assert [len(request.content) for request in requests] == [500, 600, 10]
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:1"):
        read_mooncake(path)


def test_requests_of_one_moment_are_spread_until_the_next() -> None:
    entries = [TraceEntry(moment_s, 8, 1) for moment_s in (9.0, 3.0, 3.0, 3.0, 6.0, 6.0, 9.0)]
    options = TraceOptions(spread=True, time_stretch=2.0)
    dataset = TraceDataset(entries, source(), 6, options)
    # Three within 3 s, two within 3 s, and nothing is known of how long the last moment was.
    arrivals = [dataset.request(i).arrival_s for i in range(6)]
    assert arrivals == [0.0, 2.0, 4.0, 6.0, 9.0, 12.0]


def test_azure_file(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.4799610,31,8\n"
    )
    dataset = TraceDataset(read_azure(path), source(), 10, TraceOptions())
    requests = [dataset.request(i) for i in range(2)]
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.500001], abs=1e-6)
    assert [(len(request.content), request.max_tokens) for request in requests] == [(48, 10), (31, 8)]
    assert common_prefix(ids(dataset, 0), ids(dataset, 1)) <= 2


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_are_gamma_gaps_at_the_rate(burstiness: float) -> None:
    moments = np.array(list(itertools.islice(arrivals_s(8.0, burstiness, seed=5), 20_000)))
    gaps = np.diff(moments, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    again = np.array(list(itertools.islice(arrivals_s(8.0, burstiness, seed=5), 20_000)))
    assert (again == moments).all()
    other = next(arrivals_s(8.0, burstiness, seed=6))
    assert other != moments[0]


def test_poisson_counts() -> None:
    """Counts in windows of a Poisson process have equal mean and variance."""
    moments = np.array(list(itertools.islice(arrivals_s(10.0, 1.0, seed=2), 50_000)))
    counts = np.bincount(moments.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_rates() -> None:
    assert list(itertools.islice(arrivals_s(math.inf, 1.0, seed=0), 3)) == [0.0, 0.0, 0.0]
    assert parse_rates("1,2.5,inf") == [1.0, 2.5, math.inf]
    for wrong in ("", "0", "fast", "1,-2"):
        with pytest.raises(ValueError, match="request-rate"):
            parse_rates(wrong)
    with pytest.raises(ValueError, match="burstiness"):
        arrivals_s(1.0, 0.0, seed=0)


def test_text_stands_for_ids() -> None:
    one, two = as_text([1000, 1001, 5000]), as_text([1000, 1001, 6001])
    assert one.split()[:2] == two.split()[:2]
    assert len(one.split()) == 3
