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

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.noise import gumbel_noise
from engine.messages import SamplingParams, TokenLogprobs
from engine.request import Request

Floats = npt.NDArray[np.float32]


class Sampler:
    """Stateless but for what the model says: its end-of-sequence ids and the size of its vocabulary."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._all_ids = np.arange(vocab_size, dtype=np.uint32)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """``logits`` [R, vocab_size] of R requests; may be overwritten. One token and, if asked for, logprobs each."""
        changed = [row for row, request in enumerate(requests) if self._changes_logits(request)]
        logits = logits.float()
        for row in changed:
            self._process(logits[row], requests[row])
        token_ids: list[int] = logits.argmax(dim=-1).tolist()
        drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
        if drawn:
            for row, token_id in zip(drawn, self._draw(logits[drawn], [requests[row] for row in drawn]), strict=True):
                token_ids[row] = token_id
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        for row, request in enumerate(requests):
            if request.sampling.logprobs is not None:
                logprobs[row] = _logprobs(logits[row], token_ids[row], request.sampling.logprobs)
        return token_ids, logprobs

    def _masked_ids(self, request: Request) -> list[int]:
        """What would end the request before its ``min_tokens``."""
        sampling = request.sampling
        if len(request.output_token_ids) >= sampling.min_tokens:
            return []
        return sampling.stop_token_ids + ([] if sampling.ignore_eos else self._eos_token_ids)

    def _changes_logits(self, request: Request) -> bool:
        sampling = request.sampling
        return bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or self._masked_ids(request)
        )

    def _process(self, row: torch.Tensor, request: Request) -> None:
        """Bias, penalties and mask, in place."""
        sampling = request.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(np.asarray(request.prompt_token_ids + request.output_token_ids, np.int64))
            ids = torch.from_numpy(seen).to(row.device)
            score = row[ids]
            row[ids] = torch.where(score > 0, score / sampling.repetition_penalty, score * sampling.repetition_penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and request.output_token_ids:
            used, counts = np.unique(np.asarray(request.output_token_ids, np.int64), return_counts=True)
            penalty = counts.astype(np.float32) * sampling.frequency_penalty + np.float32(sampling.presence_penalty)
            row[torch.from_numpy(used).to(row.device)] -= torch.from_numpy(penalty.astype(np.float32)).to(row.device)
        masked = self._masked_ids(request)
        if masked:
            row[torch.tensor(masked, device=row.device)] = float("-inf")

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """Rows with a temperature; ``logits`` is theirs alone and overwritten."""
        temperatures = torch.tensor([[request.sampling.temperature] for request in requests], device=logits.device)
        logits /= temperatures
        best = logits.max(dim=-1, keepdim=True).values
        logits -= best  # the best token is at 0 now: exp() cannot overflow, min_p is a constant cut
        weights = logits.exp()
        totals = weights.sum(dim=-1).tolist()
        cuts = self._first_cuts(logits, [request.sampling for request in requests])
        drawn = []
        for row, request in enumerate(requests):
            scores, odds = logits[row].numpy(force=True), weights[row].numpy(force=True)
            drawn.append(self._draw_row(scores, odds, totals[row], cuts[row], request))
        return drawn

    def _first_cuts(self, scores: torch.Tensor, sampling: Sequence[SamplingParams]) -> list[float]:
        """Per row, the score of the ``top_k``-th token (-inf: no such cut). One partial sort for all rows."""
        vocab_size = scores.shape[-1]
        limited = [row for row, params in enumerate(sampling) if 0 < params.top_k < vocab_size]
        cuts = [float("-inf")] * len(sampling)
        if limited:
            most = max(sampling[row].top_k for row in limited)
            highest = torch.topk(scores[limited], most, dim=-1).values
            at = torch.tensor([[sampling[row].top_k - 1] for row in limited], device=scores.device)
            for row, cut in zip(limited, highest.gather(1, at).squeeze(1).tolist(), strict=True):
                cuts[row] = cut
        return cuts

    def _draw_row(self, scores: Floats, odds: Floats, total: float, cut: float, request: Request) -> int:
        """``odds`` is exp(scores), ``total`` their sum; ``cut`` the lowest score that top_k keeps."""
        sampling = request.sampling
        ids = self._all_ids
        if cut > float("-inf"):
            ids = np.flatnonzero(scores >= np.float32(cut)).astype(np.uint32)
        if sampling.top_p < 1.0:
            if ids is self._all_ids:
                # All tokens below this together hold less than 1 - top_p: none of them is needed, so few are sorted.
                floor = (1.0 - sampling.top_p) * total / len(odds)
                ids = np.flatnonzero(odds >= min(floor, 1.0)).astype(np.uint32)
            else:
                total = float(odds[ids].sum(dtype=np.float64))
            ids = _nucleus(ids, odds[ids], sampling.top_p * total)
        if sampling.min_p > 0.0:
            ids = ids[odds[ids] >= sampling.min_p]
        position = len(request.output_token_ids)
        noisy = scores[ids] + gumbel_noise(sampling.seed, position, ids)
        return int(ids[noisy.argmax()])


def _nucleus(ids: npt.NDArray[np.uint32], odds: Floats, needed: float) -> npt.NDArray[np.uint32]:
    """The likeliest of ``ids``, as few as together hold ``needed``; at least one."""
    falling = np.sort(odds)[::-1]
    held = np.cumsum(falling, dtype=np.float64)
    last = min(int(np.searchsorted(held, needed)), len(falling) - 1)
    kept: npt.NDArray[np.uint32] = ids[odds >= falling[last]]
    return kept


def _logprobs(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the processed logits of one request."""
    norm = torch.logsumexp(row, dim=-1)
    logprob = float(row[token_id] - norm)
    if not num_top:
        return TokenLogprobs(logprob=logprob)
    values, ids = torch.topk(row, num_top)
    return TokenLogprobs(logprob=logprob, top_token_ids=ids.tolist(), top_logprobs=(values - norm).tolist())
