"""Draws a step's tokens on the device, without waiting for it.

Owns what ``engine.sampler`` owns on a CPU (same order, same meaning), in the form of the fused kernels; parameters come
packed with the step's inputs. Rows that ask for more than temperature and cuts (bias, penalties, ``min_tokens``,
logprobs) are "special": their entries are listed on the host. Penalties need the tokens drawn so far, so the scheduler
settles the step in flight before it schedules such a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import ScheduledItem
from engine.kernels.sampling import DrawParams, TokenDrawer, penalise
from engine.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Of the rows that asked; on the device, or on its way to the host."""

    rows: list[int]
    num_top: list[int]
    chosen: torch.Tensor  # [r]
    top: torch.Tensor  # [r, most] float32
    top_ids: torch.Tensor  # [r, most] int64

    def to_host(self) -> DrawnLogprobs:
        """Starts the copies, on the current stream; readable when it is done."""
        chosen, top, top_ids = (t.to("cpu", non_blocking=True) for t in (self.chosen, self.top, self.top_ids))
        return DrawnLogprobs(self.rows, self.num_top, chosen, top, top_ids)

    def read(self) -> dict[int, TokenLogprobs]:
        chosen, top, top_ids = self.chosen.tolist(), self.top.tolist(), self.top_ids.tolist()
        return {
            row: TokenLogprobs(logprob=chosen[i], top_token_ids=top_ids[i][:num], top_logprobs=top[i][:num])
            for i, (row, num) in enumerate(zip(self.rows, self.num_top, strict=True))
        }


class GpuSampler:
    """Workspace for up to ``max_rows`` tokens a step."""

    def __init__(self, max_rows: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._device = device
        self._drawer = TokenDrawer(max_rows, device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def draw(self, logits: torch.Tensor, params: DrawParams | None, cut: bool) -> torch.Tensor:
        """[R] int64, valid until the next call; ``params`` None: all greedy, ``cut``: some row has a cut."""
        return self._drawer.draw(logits, params, cut=cut, out=self._tokens[: logits.shape[0]])

    def process(self, logits: torch.Tensor, items: Sequence[ScheduledItem], rows: Sequence[int]) -> None:
        """Bias, penalties and the mask of ``min_tokens``, in place; ``items[r]`` is row r's, ``rows`` are special."""
        entry_rows, ids, counts, seen, bias = [], [], [], [], []
        num_rows = logits.shape[0]
        repetition = np.ones(num_rows, np.float32)
        frequency = np.zeros(num_rows, np.float32)
        presence = np.zeros(num_rows, np.float32)
        for row in rows:
            request, sampling = items[row].request, items[row].request.sampling
            repetition[row] = sampling.repetition_penalty
            frequency[row], presence[row] = sampling.frequency_penalty, sampling.presence_penalty
            listed = self._entries(items[row])
            entry_rows.append(np.full(len(listed), row, np.int32))
            ids.append(listed)
            counts.append(_counts(request.output_token_ids if sampling.uses_history else [], listed))
            known = request.all_token_ids if sampling.uses_history else []
            seen.append(_counts(known, listed))
            bias.append(self._bias(items[row], listed))
        if not ids or not sum(map(len, ids)):
            return
        penalise(
            logits,
            self._upload(np.concatenate(entry_rows)),
            self._upload(np.concatenate(ids)),
            self._upload(np.concatenate(counts)),
            self._upload(np.concatenate(seen)),
            self._upload(np.concatenate(bias)),
            self._upload(repetition),
            self._upload(frequency),
            self._upload(presence),
        )

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, items: Sequence[ScheduledItem], rows: Sequence[int]
    ) -> DrawnLogprobs | None:
        """Of the processed logits, for the special rows that asked."""
        asked = [row for row in rows if items[row].request.sampling.logprobs is not None]
        if not asked:
            return None
        num_top = [items[row].request.sampling.logprobs or 0 for row in asked]
        index = self._upload(np.array(asked, np.int64))
        scores = logits[index].float()
        norm = scores.logsumexp(dim=-1, keepdim=True)
        chosen = (scores.gather(1, tokens[index].unsqueeze(1)) - norm).squeeze(1)
        top, top_ids = torch.topk(scores, max(num_top), dim=-1)
        return DrawnLogprobs(asked, num_top, chosen, top - norm, top_ids)

    def _masked_ids(self, item: ScheduledItem) -> list[int]:
        """What would end the request before its ``min_tokens``."""
        request, sampling = item.request, item.request.sampling
        if item.start + item.num_tokens - len(request.prompt_token_ids) >= sampling.min_tokens:
            return []
        return sampling.stop_token_ids + ([] if sampling.ignore_eos else self._eos_token_ids)

    def _entries(self, item: ScheduledItem) -> NDArray[Any]:
        """The ids whose logits change, once each, sorted."""
        request, sampling = item.request, item.request.sampling
        known = request.all_token_ids if sampling.uses_history else []
        return np.unique(np.array([*known, *sampling.logit_bias, *self._masked_ids(item)], np.int32))

    def _bias(self, item: ScheduledItem, listed: NDArray[Any]) -> NDArray[Any]:
        bias = np.zeros(len(listed), np.float32)
        given = item.request.sampling.logit_bias
        if given:
            bias[np.searchsorted(listed, np.array(list(given), np.int32))] = list(given.values())
        masked = self._masked_ids(item)
        if masked:
            bias[np.searchsorted(listed, np.array(masked, np.int32))] = -np.inf
        return bias

    def _upload(self, array: NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _counts(token_ids: list[int], listed: NDArray[Any]) -> NDArray[Any]:
    """How often each of the ``listed`` ids (sorted, a superset) is among ``token_ids``."""
    counts = np.zeros(len(listed), np.int32)
    if token_ids:
        used, times = np.unique(np.array(token_ids, np.int32), return_counts=True)
        counts[np.searchsorted(listed, used)] = times
    return counts


def draw_params(inputs: dict[str, torch.Tensor], rows: int) -> DrawParams:
    """The packed sampling parameters (``StepLayout``'s fields, all int32) of the first ``rows`` rows."""
    return DrawParams(
        temperature=inputs["temperature"].view(torch.float32)[:rows],
        top_k=inputs["top_k"][:rows],
        top_p=inputs["top_p"].view(torch.float32)[:rows],
        min_p=inputs["min_p"].view(torch.float32)[:rows],
        keys=inputs["keys"].view(-1, 2)[:rows],
    )
