"""A worker as a simulated router sees it: what the policies ask of one."""

from __future__ import annotations

from router.pace import QueuePace
from router.policies.load import WorkerLoad


class View:
    """Of a worker with room for so many tokens of KV."""

    def __init__(self, worker_id: str, pool_tokens: int) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad(pool_tokens=pool_tokens)
        self.pace = QueuePace()

    @property
    def prefill_s_per_token(self) -> float:
        return self.load.prefill.seconds_per_token or self.pace.s_per_token

    def likely_wait_s(self, now_s: float) -> float:
        queued = self.load.own_queued_tokens
        return max(self.pace.wait_s(queued, now_s), self.pace.stalled_s(queued, now_s))
