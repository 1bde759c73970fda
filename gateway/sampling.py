"""From a client's request to the sampling parameters of each choice, checked against the model.

Owns the defaults (generation_config.json where the client says nothing), the token budget, and the pinned seeds.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TypeVar

from gateway.errors import GatewayError, context_length_exceeded, invalid
from gateway.model import ServedModel
from gateway.openai import SamplingFields
from pdserve.v1 import inference_pb2 as pb

Number = TypeVar("Number", int, float)
_UINT64 = (1 << 64) - 1
MAX_ID_DIGITS = 10


def sampling_params(
    request: SamplingFields, model: ServedModel, *, max_tokens: int, logprobs: int | None
) -> pb.SamplingParams:
    """Everything but the seed, which each choice has its own of. Raises GatewayError."""
    if request.min_tokens > max_tokens:
        raise invalid(f"min_tokens={request.min_tokens} is more than max_tokens={max_tokens}", "min_tokens")
    defaults = model.defaults
    top_k = _given(request.top_k, defaults.top_k)
    top_p = _given(request.top_p, defaults.top_p)
    if top_p == 0:  # the smallest nucleus is the most likely token
        top_k, top_p = 1, 1.0
    params = pb.SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=_given(request.min_p, defaults.min_p),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request, model),
        stop_token_ids=check_token_ids(request.stop_token_ids or (), model, "stop_token_ids"),
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
    )
    if logprobs is not None:
        params.logprobs = logprobs
    return params


def token_budget(
    model: ServedModel, prompt_tokens: int, asked: int | None, default: int | None, param: str, pool_tokens: int = 0
) -> int:
    """max_tokens of a prompt: as asked, else ``default`` or the rest of the context. Raises GatewayError.

    What nobody asked for is also no more than a worker's pool can hold (``pool_tokens``, 0 = unknown): else a chat with
    a long-context model on a small pool would be refused for a length that the client never named.
    """
    if prompt_tokens == 0:
        raise invalid("the prompt is empty: it needs at least one token", param)
    rest = model.max_model_len - prompt_tokens
    wanted = asked if asked is not None else min(rest, default or rest)
    if asked is None and pool_tokens > prompt_tokens:
        wanted = min(wanted, pool_tokens - prompt_tokens)
    if rest < max(wanted, 1):
        raise context_length_exceeded(model.max_model_len, prompt_tokens, max(wanted, 1), param)
    return wanted


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> Sequence[int]:
    """The same ids; raises GatewayError for one that the model does not have."""
    if token_ids and (largest := max(token_ids)) >= model.vocab_size:
        raise _beyond_vocabulary(largest, model, param)
    return token_ids


def prompt_seed(client_seed: int | None) -> int:
    """The seed of one prompt: the client's, or a fresh one, so that a retry draws the same tokens."""
    return secrets.randbits(64) if client_seed is None else client_seed & _UINT64


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a prompt; the first has the prompt's own, so that n=1 is the first of n."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _logit_bias(request: SamplingFields, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise invalid(f"logit_bias has the key {key!r}: keys are token ids", "logit_bias")
        if int(key) >= model.vocab_size:
            raise _beyond_vocabulary(int(key), model, "logit_bias")
        bias[int(key)] = value
    return bias


def _beyond_vocabulary(token_id: int, model: ServedModel, param: str) -> GatewayError:
    return invalid(f"token id {token_id} is beyond the model's vocabulary of {model.vocab_size}", param)
