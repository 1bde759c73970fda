"""A running router: puts the parts together, starts them, ends them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from pdserve import tls
from pdserve.address import join_address
from pdserve.channel import serve
from pdserve.identity import new_identity
from pdserve.session_server import SessionServer
from registry import WorkerRegistry
from registry.ownership import Ownership
from router.breaker import Breakers
from router.config import RouterConfig
from router.ownership_feed import OwnershipFeed
from router.placement import Placer
from router.policies import make_policy
from router.prefix_index import PrefixIndex
from router.service import RouterService
from router.workers import STATES, Workers
from telemetry.http import StatusServer
from telemetry.metrics import RouterMetrics
from telemetry.tracing import start_tracer

GRPC_STOP_S = 1.0

log = structlog.get_logger()


class Router:
    """``start`` it, ``stop`` it; ``port`` and ``metrics_port`` are the bound ones."""

    def __init__(self, config: RouterConfig) -> None:
        self.port = 0
        self.metrics_port = 0
        self._config = config
        self._metrics_registry = CollectorRegistry()
        metrics = RouterMetrics(self._metrics_registry)
        identity = new_identity("router", config.router_id or f"router-{socket.gethostname()}-{os.getpid()}")
        self._tls = tls.from_option(config.tls_dir)
        self._registry = WorkerRegistry(config.redis_url)
        self.workers = Workers(
            self._registry,
            identity,
            config.poll_interval_s,
            on_registry_failure=metrics.registry_failures.inc,
            tls=self._tls,
        )
        policy = make_policy(config.policy)
        self.index = PrefixIndex()
        self._ownership = Ownership(config.redis_url)
        self.feed = OwnershipFeed(self._ownership, self.index, self.workers.known, metrics)
        self._follows = policy.uses_prefixes or config.local_prefill_tokens > 0
        breakers = Breakers(time.monotonic, lambda worker_id: metrics.ejections.labels(worker_id).inc())
        metrics.ejected_workers.set_function(lambda: breakers.num_open)
        placer = Placer(self.workers, policy, self.index, config, breakers, lambda: self.feed.is_blind)
        self._tracer = start_tracer("router", identity.worker_id, config.otlp_endpoint)
        self._service = RouterService(
            self.workers, placer, config, metrics, self._why_behind, self._tracer, identity.worker_id
        )
        self._sessions = SessionServer(identity, self._service, load=self.workers.emitting_load)
        self._status = StatusServer(self._metrics_registry, self._service.not_ready)
        self._show_fleet(metrics)

    async def start(self) -> None:
        """Listen and look for workers. Raises OSError when a port cannot be had."""
        config = self._config
        self.metrics_port = await self._status.start(config.host, config.metrics_port)
        self._server, self.port = await serve(
            [self._sessions],
            config.host,
            config.port,
            is_ready=lambda: self._service.not_ready() is None,
            tls=self._tls,
        )
        self._sessions.identity.address = join_address(config.host, self.port)
        self._tasks = [asyncio.create_task(self.workers.run(), name="workers")]
        if self._follows:
            self._tasks.append(asyncio.create_task(self.feed.run(), name="ownership"))

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Let finish what runs (bounded; not when ``hurry`` is set), then end everything."""
        self._sessions.draining = True
        await self._service.drain(self._config.drain_timeout_s, hurry or asyncio.Event())
        await self._sessions.flush()
        await self._sessions.close()
        await self._server.stop(GRPC_STOP_S)
        del self._server  # its finalizer wants the running event loop
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ownership.close()
        await self._registry.close()
        await self._status.close()
        await asyncio.to_thread(self._tracer.close)

    async def run_until_signal(self) -> None:
        """Start, say so, and stop on SIGTERM or SIGINT (or when one of the tasks breaks)."""
        await self.start()
        stop, hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):  # a second one ends it at once
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        for task in self._tasks:
            task.add_done_callback(lambda _: stop.set())
        log.info("ready", host=self._config.host, port=self.port, metrics_port=self.metrics_port)
        await stop.wait()
        errors = [task.exception() for task in self._tasks if task.done()]
        await self.stop(hurry)
        for error in errors:
            if error is not None:
                raise error

    def _why_behind(self) -> str | None:
        return self.feed.why_behind() if self._follows else None

    def _show_fleet(self, metrics: RouterMetrics) -> None:
        """Gauges that are read off when somebody looks."""
        workers = self.workers

        def count(role: str, state: str) -> int:
            return sum(worker.state == state for worker in workers.with_role(role))

        for role in ("prefill", "decode", "aggregated"):
            for state in STATES:
                metrics.workers.labels(role, state).set_function(partial(count, role, state))
        metrics.prefix_index_blocks.set_function(lambda: self.index.num_blocks)
        metrics.prefix_index_entries.set_function(lambda: self.index.num_entries)
        metrics.prefix_index_caught_up.set_function(lambda: not self.feed.is_blind)
        metrics.sessions.set_function(lambda: len(self._sessions.sessions))
        metrics.dropped_outputs.set_function(
            lambda: sum(worker.session.unknown_outputs_total for worker in workers.known.values())
        )
