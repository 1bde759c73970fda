"""Settings of a router. Read once in ``__main__``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.address import check_listen_port
from router.policies import DEFAULT_POLICY, POLICIES

DEFAULT_LOCAL_PREFILL_TOKENS = 32
"""Measured (docs/performance.md, KV transfer): with fewer, the request is faster without a hand-off, and the decode
worker's streams are held up no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Every field has its unit in its name. Errors are raised by ``__post_init__`` with the remedy."""

    redis_url: str
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    router_id: str = ""
    """Empty: made from host name and process id."""
    policy: str = DEFAULT_POLICY
    local_prefill_tokens: int = DEFAULT_LOCAL_PREFILL_TOKENS
    """Prompts with fewer uncached tokens are prefilled by the decode worker itself; 0: always by a prefill worker,
    also while decode workers that offer to help have time and all prefill workers are busy."""
    max_open_requests: int = 4096
    """More are refused as overloaded."""
    max_queued_tokens: int = 0
    """Prompt tokens that may wait at one worker; when all have more, requests are refused as overloaded. 0: no limit of
    the router's own (workers have theirs)."""
    max_queue_s: float = 0.0
    """How long a new request may wait until its prompt is computed, by what the queues' pace is; beyond that it is
    refused as overloaded. 0: as long as its deadline allows."""
    max_attempts: int = 3
    """Pairs of workers that one request may try in all."""
    no_worker_wait_s: float = 5.0
    """How long a request waits for a worker to appear."""
    max_timeout_s: float = 3600.0
    """Longer deadlines are cut to this."""
    poll_interval_s: float = 0.5
    """Between two looks at the registry."""
    drain_timeout_s: float = 10.0
    """What runs when the router is told to end may go on for so long."""
    min_prefill_workers: int = 0
    min_decode_workers: int = 1
    """Ready only once so many workers were reached; after that, while there is any worker that can decode."""
    tls_dir: str = ""
    """Certificate, key and authority for every link of the cluster; empty: no TLS."""
    otlp_endpoint: str = ""
    """Collector of traces; empty: no traces."""

    def __post_init__(self) -> None:
        check_listen_port("--port", self.port)
        check_listen_port("--metrics-port", self.metrics_port)
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not known: use {', '.join(sorted(POLICIES))}")
        for name in ("max_open_requests", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("no_worker_wait_s", "max_timeout_s", "poll_interval_s", "drain_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0, and not infinite")
        for name in (
            "local_prefill_tokens",
            "max_queued_tokens",
            "max_queue_s",
            "min_prefill_workers",
            "min_decode_workers",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative, nor infinite")
