"""What a routing policy sees and answers. Policies are plain: no network, no clock of their own, no router objects.

The router filters first (reachable, compatible, large enough, not avoided); a policy chooses among what is left,
prefill and decode worker together. ``bench`` drives the same policies with simulated workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from router.policies.load import WorkerLoad


class Candidate(Protocol):
    """A worker that can take the request."""

    @property
    def worker_id(self) -> str: ...
    @property
    def load(self) -> WorkerLoad: ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Pool(Generic[C]):
    """Workers of one model fingerprint: any prefill and any decode worker of a pool are a pair."""

    prefills: Sequence[C]
    """Empty: the decode worker prefills by itself."""
    decodes: Sequence[C]
    """Never empty."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    prefill: C | None
    decode: C


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What a policy may know of a request."""

    num_tokens: int
    """Prompt and output so far."""
    max_new_tokens: int = 0
    """It may grow by so many."""
    session: str = ""
    """Requests that belong together, as the client sees it; empty: it did not say."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Worker id -> how much of the prompt it has cached. Those that have nothing are left out. Empty for a policy that
    does not ask (``uses_prefixes``)."""


class Policy(Protocol):
    """Chooses a pair. Asynchronous, so that one may ask somebody else."""

    uses_prefixes: bool
    """Whether to look up who has the prompt's prefix cached."""
    goes_by_load: bool
    """Whether a prompt may be left to a decode worker while the prefill worker that was chosen is busy
    (``shared_prefill``). Not where the choice means something else: everybody's turn, or a session's place."""

    async def choose(self, prompt: PromptInfo, pools: Sequence[Pool[C]]) -> Choice[C]:
        """One worker of each kind from one of the pools (at least one pool). Never waits for workers to appear."""
