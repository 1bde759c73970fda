"""Sampling: processors and cuts against those of transformers, draws against the distribution they must follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.kernels.noise import gumbel_noise, noise_key
from engine.sampler import Sampler
from tests.unit.engine_driver import make_request

VOCAB = 50
EOS = 7


@pytest.fixture
def sampler() -> Sampler:
    return Sampler([EOS])


def logits_of(*seeds: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.stack([torch.randn(vocab, generator=torch.Generator().manual_seed(s)) * 3 for s in seeds])


def processed(sampler: Sampler, logits: torch.Tensor, request) -> torch.Tensor:
    """Processed logits, as the logprobs of the whole vocabulary show them (up to a constant)."""
    _, (logprobs,) = sampler.sample(logits.clone(), [request])
    row = torch.full((logits.shape[-1],), float("nan"))
    row[logprobs.top_token_ids] = torch.tensor(logprobs.top_logprobs)
    return row


def draws(sampler: Sampler, row: torch.Tensor, num: int, **sampling) -> np.ndarray:
    """Counts of ``num`` draws: consecutive output positions of one request."""
    vocab = row.shape[-1]
    requests = [make_request([1], [0] * position, seed=11, **sampling) for position in range(num)]
    token_ids, _ = sampler.sample(row.expand(num, -1).clone(), requests)
    return np.bincount(token_ids, minlength=vocab)


def assert_follows(counts: np.ndarray, probabilities: torch.Tensor) -> None:
    """Chi-square with a fixed seed, rare outcomes pooled; 5 standard deviations of the statistic."""
    expected = probabilities.double().numpy() * counts.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    keep = wanted > 1e-6
    freedom = keep.sum() - 1
    statistic = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


# ---- greedy and processors


def test_greedy_takes_the_first_maximum(sampler: Sampler) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [30, 40]] = 2.0
    assert sampler.sample(logits, [make_request([1]), make_request([1])]) == ([0, 30], [None, None])


def test_repetition_penalty_is_that_of_transformers(sampler: Sampler) -> None:
    logits = logits_of(1)
    request = make_request([3, 4, 4, 9], [5, 9], repetition_penalty=1.7, logprobs=VOCAB)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, 9, 5, 9]]), logits.clone())
    torch.testing.assert_close(processed(sampler, logits, request), theirs[0].log_softmax(-1))


def test_presence_and_frequency_are_counted_over_the_output(sampler: Sampler) -> None:
    logits = logits_of(2)
    request = make_request([3, 3, 3], [5, 9, 5], presence_penalty=0.5, frequency_penalty=0.25, logprobs=VOCAB)
    exact = logits[0].clone()
    exact[5] -= 0.5 + 2 * 0.25
    exact[9] -= 0.5 + 1 * 0.25
    torch.testing.assert_close(processed(sampler, logits, request), exact.log_softmax(-1))


def test_bias_comes_before_the_repetition_penalty(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -1.0)
    request = make_request([3], logit_bias={3: 5.0, 8: -100.0}, repetition_penalty=2.0, logprobs=VOCAB)
    exact = logits[0].clone()
    exact[3], exact[8] = (-1.0 + 5.0) / 2.0, -101.0
    torch.testing.assert_close(processed(sampler, logits, request), exact.log_softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_whatever_would_end_the_request(sampler: Sampler, temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 8], logits[0, 9] = 90.0, 80.0, 60.0
    options = {"min_tokens": 2, "stop_token_ids": [8], "temperature": temperature}
    assert sampler.sample(logits.clone(), [make_request([1], [4], **options)])[0] == [9]
    assert sampler.sample(logits.clone(), [make_request([1], [4], ignore_eos=True, **options)])[0] == [EOS]
    assert sampler.sample(logits.clone(), [make_request([1], [4, 4], **options)])[0] == [EOS]


# ---- cuts


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 500}, []),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"top_p": 0.999}, [TopPLogitsWarper(0.999)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 8, "top_p": 0.6}, [TopKLogitsWarper(8), TopPLogitsWarper(0.6)]),
        (
            {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
            [TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_draws_follow_the_warpers_of_transformers(sampler, options, warpers, temperature, seed) -> None:
    (row,) = logits_of(seed)
    scores = TemperatureLogitsWarper(temperature)(None, row[None].clone())
    for warper in warpers:
        scores = warper(None, scores)
    assert_follows(draws(sampler, row, 3000, temperature=temperature, **options), scores[0].softmax(-1))


def test_tokens_tied_at_a_cut_are_all_kept(sampler: Sampler) -> None:
    row = torch.full((VOCAB,), -20.0)
    row[[3, 11, 20, 41]] = 1.0
    for options in ({"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.5}):
        counts = draws(sampler, row, 400, temperature=1.0, **options)
        assert sorted(np.flatnonzero(counts)) == [3, 11, 20, 41]


def test_one_row_of_a_mixed_batch_is_that_row_alone(sampler: Sampler) -> None:
    """Whatever the neighbours ask for; also after preemption or on another worker: nothing but these inputs matters."""
    options = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.3},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
        {"logit_bias": {4: 9.0}, "logprobs": 3},
    ]
    for position in range(40):
        logits = logits_of(*range(position, position + len(options)))
        requests = [make_request([2], [5] * position, seed=position, **o) for o in options]
        together, _ = sampler.sample(logits.clone(), requests)
        alone = [sampler.sample(logits[i : i + 1].clone(), [r])[0][0] for i, r in enumerate(requests)]
        assert together == alone


def test_seed_and_position_matter(sampler: Sampler) -> None:
    row = torch.zeros(1, VOCAB)

    def draw(seed: int, position: int) -> int:
        return sampler.sample(row.clone(), [make_request([1], [0] * position, seed=seed, temperature=1.0)])[0][0]

    assert draw(5, 3) == draw(5, 3)
    assert len({draw(seed, 0) for seed in range(60)}) > 25
    assert len({draw(0, position) for position in range(60)}) > 25


# ---- logprobs


def test_logprobs_are_of_the_processed_logits_before_temperature_and_cuts(sampler: Sampler) -> None:
    logits = logits_of(4)
    request = make_request([1], temperature=0.3, top_k=2, seed=1, logprobs=4, logit_bias={9: 2.0})
    exact = logits[0].clone()
    exact[9] += 2.0
    exact = exact.log_softmax(-1)
    (token_id,), (logprobs,) = sampler.sample(logits, [request])
    assert logprobs.logprob == pytest.approx(exact[token_id].item(), abs=1e-5)
    top = exact.topk(4)
    assert logprobs.top_token_ids == top.indices.tolist()
    assert logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_zero_top_logprobs(sampler: Sampler) -> None:
    _, (logprobs,) = sampler.sample(logits_of(4), [make_request([1], logprobs=0)])
    assert logprobs.top_token_ids == []
    assert logprobs.logprob < 0


# ---- noise


def test_noise_is_gumbel_and_independent_between_neighbours() -> None:
    ids = np.arange(200_000, dtype=np.uint32)
    rows = [
        gumbel_noise(seed, position, ids).astype(np.float64) for seed, position in ((0, 0), (0, 1), (1, 0), (-1, 2**31))
    ]
    for row in rows:
        u = np.sort(np.exp(-np.exp(-row)))
        distance = np.abs(u - (np.arange(len(u)) + 0.5) / len(u)).max()
        assert distance < 1.95 / math.sqrt(len(u))  # Kolmogorov-Smirnov, 0.1 %
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 4 / math.sqrt(len(u))
    for i in range(len(rows)):
        for j in range(i):
            assert abs(np.corrcoef(rows[i], rows[j])[0, 1]) < 4 / math.sqrt(len(ids))


def test_noise_is_finite() -> None:
    assert np.isfinite(gumbel_noise(7, 7, np.arange(1 << 20, dtype=np.uint32))).all()


def test_noise_is_fixed_for_ever() -> None:
    """Other workers, of other versions too, must draw the same: these values may not change."""
    assert noise_key(42, 3) == (2319239696, 1779996252)
    values = gumbel_noise(42, 3, np.array([0, 1, 49151], np.uint32))
    assert values == pytest.approx([-0.86099315, 2.875425, -0.7608216], rel=1e-6)
