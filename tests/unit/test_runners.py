"""Which runner a device gets, the sizes of graphs, and the sampler's host side; what needs no GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.batch import ScheduledItem
from engine.config import EngineConfig
from engine.cuda_graphs import decode_buckets, token_buckets
from engine.gpu_sampler import GpuSampler
from engine.messages import SamplingParams
from engine.request import Request
from engine.runners import build_runner


def test_unknown_and_absent_devices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mps' is not supported: use cpu or cuda"):
        build_runner(EngineConfig(model="unused", device="mps"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA device"):
            build_runner(EngineConfig(model="unused", device="cuda:0"))


def test_a_cpu_engine_does_not_import_the_gpu_runner() -> None:
    code = (
        "import sys, engine.runners, engine.ready; print('engine.gpu_runner' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 1000])
def test_every_batch_size_has_a_decode_graph_at_most_a_little_larger(most: int) -> None:
    sizes = decode_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(s for s in sizes if s >= count)
        assert size <= max(count * 2, 8)
        assert count < 64 or size <= count * 1.25


@pytest.mark.parametrize("most", [2048, 8192, 32768])
def test_token_counts_up_to_the_most_have_a_graph(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(next(s for s in sizes if s >= n) <= max(16, 1.34 * n + 15) for n in range(1, most + 1))


def item(output: list[int], **sampling: object) -> ScheduledItem:
    params = SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
    request = Request("r", [5, 6, 5], output, params, 0.0, 1.0)
    return ScheduledItem(request, 1, request.num_tokens - 1, True)


def sampler() -> GpuSampler:
    return GpuSampler(4, [1], torch.device("cpu"))


def test_listed_entries_are_history_bias_and_what_would_end_the_request() -> None:
    asked = item([8, 8], repetition_penalty=1.2, logit_bias={6: 2.0, 40: -1.0}, min_tokens=3, stop_token_ids=[30])
    listed = sampler()._entries(asked)
    assert listed.tolist() == [1, 5, 6, 8, 30, 40]
    assert sampler()._bias(asked, listed).tolist() == [-np.inf, 0, 2.0, 0, -np.inf, -1.0]


def test_min_tokens_counts_the_token_that_is_being_drawn() -> None:
    assert sampler()._masked_ids(item([8, 8], min_tokens=3)) == [1]
    assert sampler()._masked_ids(item([8, 8, 8], min_tokens=3)) == []
    assert sampler()._masked_ids(item([], min_tokens=1, ignore_eos=True)) == []


def test_logprobs_are_those_of_a_log_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    items = [item([]), item([], logprobs=2), item([], logprobs=0)]
    tokens = torch.tensor([3, 4, 5])
    drawn = sampler().logprobs(logits, tokens, items, [1, 2])
    assert drawn is not None
    found = drawn.to_host().read()
    truth = logits.double().log_softmax(-1)
    assert found.keys() == {1, 2}
    assert found[1].logprob == pytest.approx(truth[1, 4].item(), abs=1e-5)
    assert found[1].top_token_ids == truth[1].topk(2).indices.tolist()
    assert found[1].top_logprobs == pytest.approx(truth[1].topk(2).values.tolist(), abs=1e-5)
    assert found[2].top_token_ids == []
    assert sampler().logprobs(logits, tokens, items, [0]) is None
