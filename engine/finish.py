"""When a request has its last token: by an EOS or stop token id, by ``max_tokens`` or by the model's length.

Pure; the same on P (token 0), on D and after a resume, since all of it counts from the request's own tokens. Stop
strings are the gateway's. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.messages import FinishReason
from engine.request import Request


class FinishRules:
    def __init__(self, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

    def check(self, request: Request) -> tuple[FinishReason | None, int | None]:
        """Whether the newest token ends the request, and the stop token's id if it is one."""
        sampling, num_output = request.sampling, len(request.output_token_ids)
        token_id = request.output_token_ids[-1]
        is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
        # The sampler masks stop tokens up to min_tokens; this keeps the promise with any sampler.
        if (is_eos or token_id in sampling.stop_token_ids) and num_output > sampling.min_tokens:
            return FinishReason.STOP, token_id
        return (FinishReason.LENGTH if self.is_last(request, 0) else None), None

    def is_last(self, request: Request, num_pending_tokens: int) -> bool:
        """Whether, with these tokens more, it is as long as it may get, whatever the tokens are."""
        return (
            len(request.output_token_ids) + num_pending_tokens >= request.sampling.max_tokens
            or request.num_tokens + num_pending_tokens >= self._max_model_len
        )
