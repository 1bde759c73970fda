"""Draws the next token of each request from its logits.

Owns the order and the meaning of the sampling parameters; keeps no state between steps (penalties are counted from the
request's tokens, noise is a function of seed and position), so preemption, migration and batching change nothing.

    logits -> + logit_bias -> repetition -> frequency, presence -> min_tokens mask    "processed": logprobs are of these
           -> / temperature -> top_k -> top_p -> min_p                                "kept": some vocabulary ids
           -> argmax(kept logits + Gumbel noise of (seed, output position, id))        temperature 0: argmax(processed)

Definitions are those of the Hugging Face logits processors (and of the OpenAI API for presence, frequency and bias);
tokens tied with the last one that a cut keeps are kept too, so a cut never depends on the order of a sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.noise import gumbel_noise
from engine.messages import SamplingParams, TokenLogprobs
from engine.request import Request

Floats = npt.NDArray[np.float32]

# Noise lies between -2.82 (u = 1 - 2^-24) and 22.88 (u = 2^-33): a score so far below the best one cannot win.
_NEVER_DRAWN = -25.8


class Sampler:
    """Stateless but for what the model says: its end-of-sequence ids."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """``logits`` [R, vocab_size] of R requests; may be overwritten. One token and, if asked for, logprobs each."""
        # numpy: its argmax, exp and log are several times faster than torch's on one core.
        rows: Floats = logits.float().numpy(force=True)
        for row, request in zip(rows, requests, strict=True):
            self._process(row, request)
        token_ids: list[int] = rows.argmax(axis=-1).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        for i, request in enumerate(requests):
            if request.sampling.temperature > 0:
                token_ids[i] = self._draw(rows[i], rows[i, token_ids[i]], request)
            if request.sampling.logprobs is not None:
                logprobs[i] = _logprobs(rows[i], token_ids[i], request.sampling.logprobs)
        return token_ids, logprobs

    def _process(self, row: Floats, request: Request) -> None:
        """Bias, penalties and mask, in place."""
        sampling, output = request.sampling, request.output_token_ids
        if sampling.logit_bias:
            row[list(sampling.logit_bias)] += np.array(list(sampling.logit_bias.values()), np.float32)
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            seen = np.unique(request.prompt_token_ids + output)
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if output and (sampling.frequency_penalty or sampling.presence_penalty):
            used, counts = np.unique(output, return_counts=True)
            row[used] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(np.float32)
        if len(output) < sampling.min_tokens:
            row[sampling.stop_token_ids + ([] if sampling.ignore_eos else self._eos_token_ids)] = -np.inf

    def _draw(self, row: Floats, best: np.float32, request: Request) -> int:
        """One token of the softmax of ``row`` / temperature, after the cuts. ``best`` is the row's maximum."""
        sampling = request.sampling
        scores = row - best  # the best token is at 0: exp() cannot overflow, min_p is a constant cut
        scores /= np.float32(sampling.temperature)
        cut = _NEVER_DRAWN
        if 0 < sampling.top_k < len(scores):
            cut = max(cut, float(np.partition(scores, len(scores) - sampling.top_k)[-sampling.top_k]))
        ids = np.flatnonzero(scores >= cut)
        if sampling.top_p < 1.0:
            ids = _nucleus(ids, scores, sampling)
        kept = scores[ids]
        if sampling.min_p > 0.0:
            ids = ids[kept >= math.log(sampling.min_p)]
            kept = scores[ids]
        kept += gumbel_noise(sampling.seed, len(request.output_token_ids), ids.astype(np.uint32))
        return int(ids[kept.argmax()])


def _nucleus(ids: npt.NDArray[np.int64], scores: Floats, sampling: SamplingParams) -> npt.NDArray[np.int64]:
    """The likeliest of ``ids``, as few as together hold ``top_p`` of their weight; at least one."""
    weights = np.exp(scores[ids])
    total = float(weights.sum(dtype=np.float64))
    # All tokens below this together hold less than 1 - top_p: none of them is needed, so few are sorted.
    likely = weights >= min(1.0, (1.0 - sampling.top_p) * total / len(weights))
    falling = np.sort(weights[likely])[::-1]
    held = np.cumsum(falling, dtype=np.float64)
    last = min(int(np.searchsorted(held, sampling.top_p * total)), len(falling) - 1)
    kept: npt.NDArray[np.int64] = ids[weights >= falling[last]]
    return kept


def _logprobs(row: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the processed logits of one request."""
    best = float(row.max())
    norm = best + math.log(float(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    logprob = float(row[token_id]) - norm
    if not num_top:
        return TokenLogprobs(logprob=logprob)
    num_top = min(num_top, len(row))
    ids = np.flatnonzero(row >= np.partition(row, len(row) - num_top)[-num_top])
    ids = ids[np.argsort(-row[ids], kind="stable")][:num_top]
    return TokenLogprobs(
        logprob=logprob, top_token_ids=ids.tolist(), top_logprobs=(row[ids].astype(np.float64) - norm).tolist()
    )
