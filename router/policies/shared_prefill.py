"""When a decode worker computes a prompt by itself: when it has the first token sooner than a busy prefill worker.

    by a prefill worker    what waits there and the prompt, at its pace, and what of the hand-off shows
    by a decode worker     what waits there and the prompt, at the pace that its ITL budget leaves (it says so itself)

The decode worker gets it when it is sooner by a margin. Every placement counts on both sides at once, so a burst fills
both queues evenly. The margin is wider where the prefill worker has a part of the prompt, whose rest it would lack the
next time, and much wider for a prompt that would keep the decode worker busy for long: what that offers now says little
about then. It shrinks where the decode worker lacks less of the prompt than the prefill worker: then the prefill worker
would compute twice what the decode worker has.

Only decode workers that offer it are asked: they have an ITL budget, and room in it. A step of theirs stays within the
budget whatever is queued, so the queue may be as long as the other one. Plain, like a policy: no clock, no network.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from router.policies.base import Candidate, Choice, Pool, PromptInfo

SOONER = 1.15
"""The prefill worker takes so many times as long, at least."""
SOONER_THAN_KNOWN = 1.5
"""Where it has a part of the prompt."""
MIN_GAIN_S = 0.01
"""And so much longer: less is noise."""
LONG_S = 1.0
LONG = 4.0
"""What takes a decode worker longer than that needs this margin: by then more may decode there, with longer contexts,
and little of its budget be left for a prompt that cannot go elsewhere any more."""
UNTRIED = 0.5
"""Of a prefill worker's pace, for a decode worker that does not know its own yet."""
POOL_PART = 0.9
"""Of a decode worker's KV may be in use after that; it must not preempt for helping."""
EXPECTED_OUTPUT_TOKENS = 256
MAX_LOOKED_AT = 32
"""Decode workers, at random in a large fleet, beside the one that the policy chose."""


class Waits(Candidate, Protocol):
    @property
    def prefill_s_per_token(self) -> float:
        """0: not known."""

    def likely_wait_s(self, now_s: float) -> float:
        """What a new prompt would wait before it is computed here; 0: not known."""


W = TypeVar("W", bound=Waits)


class SharedPrefill:
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def sooner(self, prompt: PromptInfo, choice: Choice[W], pools: Sequence[Pool[W]], now_s: float) -> list[Pool[W]]:
        """The decode workers that would have the first token by themselves sooner than the chosen pair. Empty: none."""
        prefill = choice.prefill
        if prefill is None or not (s_per_token := prefill.prefill_s_per_token):
            return []
        lacks = _uncached(prompt, prefill)
        handoff_s = choice.decode.load.exposed.seconds_per_token * _uncached(prompt, choice.decode)
        usual = SOONER if lacks == prompt.num_tokens else SOONER_THAN_KNOWN
        limit_s = _wait_s(prefill, s_per_token, now_s) + lacks * s_per_token + handoff_s - MIN_GAIN_S

        def prompt_s(worker: W) -> float:
            return _uncached(prompt, worker) * _shared_s_per_token(worker, s_per_token)

        def is_sooner(worker: W) -> bool:
            less = _uncached(prompt, worker) / lacks
            margin = LONG if prompt_s(worker) > LONG_S else usual
            needs_s = _wait_s(worker, _shared_s_per_token(worker, s_per_token), now_s) + prompt_s(worker)
            return needs_s * max(1.0, margin * min(1.0, less)) < limit_s

        decodes = next(pool.decodes for pool in pools if choice.decode in pool.decodes)
        if len(decodes) > MAX_LOOKED_AT:
            decodes = [choice.decode, *self._random.sample(decodes, MAX_LOOKED_AT)]
        found = [worker for worker in decodes if _has_room(prompt, worker) and is_sooner(worker)]
        return [Pool((), found)] if found else []

    def within(self, prompt: PromptInfo, pools: Sequence[Pool[W]], limit_s: float, now_s: float) -> list[Pool[W]]:
        """Decode workers that would begin with it by then, whatever the prefill workers do."""
        found = []
        for pool in pools:
            slowest = max((worker.prefill_s_per_token for worker in pool.prefills), default=0.0)
            decodes = [
                worker
                for worker in pool.decodes
                if _has_room(prompt, worker) and _wait_s(worker, _shared_s_per_token(worker, slowest), now_s) < limit_s
            ]
            found += [Pool((), decodes)] if decodes and pool.prefills else []
        return found


def _wait_s(worker: Waits, s_per_token: float, now_s: float) -> float:
    """Until it begins with another prompt."""
    return max(worker.load.queued_tokens * s_per_token, worker.likely_wait_s(now_s))


def _shared_s_per_token(worker: Waits, prefill_s_per_token: float) -> float:
    """Of a decode worker, within its budget."""
    rate = worker.load.shared_tokens_per_s
    return 1 / rate if rate else prefill_s_per_token / UNTRIED


def _has_room(prompt: PromptInfo, worker: Waits) -> bool:
    load = worker.load
    if not load.shares_prefill:
        return False
    growth = min(prompt.max_new_tokens or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS)
    # What waits at the prefill workers holds nothing here yet, however much that is.
    needed = load.used_kv_tokens + load.queued_tokens + prompt.num_tokens + growth
    return not load.pool_tokens or needed <= POOL_PART * load.pool_tokens


def _uncached(prompt: PromptInfo, worker: Waits) -> int:
    """At least the last token is computed."""
    return max(1, prompt.num_tokens - prompt.cached_tokens.get(worker.worker_id, 0))
