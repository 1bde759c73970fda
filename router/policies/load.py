"""How busy a worker is: its last report, corrected by what this router has sent there and seen end since.

A report is up to half a second old. Taken as it is, a burst would all run to whoever was idle then, and a worker would
look busy with requests that ended long ago. What this router itself has going there is exact at every moment; from a
report it learns what the others have: the reported number less its own. The numbers in a report were taken a little
before it came; whatever the router had there since the report before may be in them.

    estimate = own now + max(0, reported - most of its own since the report before)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from router.policies.rates import Rate


class LoadReport(Protocol):
    """What a worker says of itself (inference.proto, Load)."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def shares_prefill(self) -> bool: ...
    @property
    def prefill_tokens_per_s(self) -> float: ...


@dataclass(slots=True)
class WorkerLoad:
    """Counted up and down by whoever sends requests (``add``), and told of reports."""

    pool_tokens: int = 0
    """Tokens that its KV pool holds; 0: not known."""
    own_requests: int = 0
    """Sent there by this router and not ended."""
    own_queued_tokens: int = 0
    """Prompt tokens of those that it has yet to compute: without cached ones, and without those whose prefill ended."""
    own_kv_tokens: int = 0
    """Tokens of those: KV that they hold there, or will hold."""
    prefill: Rate = field(default_factory=Rate)
    """Of computing a prompt here, while nothing else is computed."""
    exposed: Rate = field(default_factory=Rate)
    """Of receiving KV: what is still on its way when the prefill has ended."""
    shares_prefill: bool = False
    """A decode worker that may compute prompts now, within its ITL budget, as it last said."""
    shared_tokens_per_s: float = 0.0
    """So fast; 0: not known yet."""
    used_kv_tokens: float = 0.0
    """In blocks that were in use when it last said so; without what is only on its way."""
    _most: tuple[int, int, int] = (0, 0, 0)
    """Of the three since the last report."""
    _others_requests: int = 0
    _others_queued_tokens: int = 0
    _others_kv_tokens: float = 0.0

    def add(self, requests: int, queued_tokens: int, kv_tokens: int) -> None:
        """Negative: they have ended."""
        self.own_requests += requests
        self.own_queued_tokens += queued_tokens
        self.own_kv_tokens += kv_tokens
        if requests > 0:
            most = self._most
            self._most = (
                max(most[0], self.own_requests),
                max(most[1], self.own_queued_tokens),
                max(most[2], self.own_kv_tokens),
            )

    def report(self, report: LoadReport) -> None:
        used_part = 1 - report.free_blocks / report.total_blocks if report.total_blocks else 0.0
        requests, queued_tokens, kv_tokens = self._most
        self._others_requests = max(0, report.running + report.waiting - requests)
        self._others_queued_tokens = max(0, report.queued_tokens - queued_tokens)
        self._others_kv_tokens = max(0.0, used_part * self.pool_tokens - kv_tokens)
        self._most = (self.own_requests, self.own_queued_tokens, self.own_kv_tokens)
        self.used_kv_tokens = used_part * self.pool_tokens
        self.shares_prefill, self.shared_tokens_per_s = report.shares_prefill, report.prefill_tokens_per_s

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return self.own_requests + self._others_requests

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are computed before those of the next request."""
        return self.own_queued_tokens + self._others_queued_tokens

    @property
    def kv_tokens(self) -> float:
        """In blocks that are in use, or will be."""
        return self.own_kv_tokens + self._others_kv_tokens

    @property
    def is_at_rest(self) -> bool:
        """Nothing of this router's is there."""
        return self.own_requests == self.own_queued_tokens == self.own_kv_tokens == 0
