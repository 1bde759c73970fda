"""The gateway's servers, HTTP and gRPC, and how they end.

    SERVING --SIGTERM--> LAME DUCK --lame_duck_s--> CLOSED to new requests --none runs--> ended, exit status 0
                         not ready, serves all,     503 for new ones          ^
                         closes connections                '--drain_timeout_s, or a second signal: what runs is cut off

Ports are open to the end, so that ``/live`` and ``/health`` are answered, and an idle kept-alive connection is closed
after an answer that says so, or when nothing runs any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from typing import cast

import grpc
import structlog
import uvicorn
from fastapi import FastAPI

from gateway.config import GatewayConfig
from gateway.grpc_service import serve_grpc
from gateway.serving import Gateway
from gateway.silent_connections import SWEEP_S, Connection, SilentConnections

KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection, so that they close it first."""
SILENT_S = 90
"""A connection that does not even begin a request, or does not go on with one, is closed."""
CLOSE_S = 1
"""For what is left after the drain, of HTTP and then of gRPC."""

log = structlog.get_logger()


class GatewayServer(uvicorn.Server):
    """Says on the log when both servers listen, and where."""

    def __init__(self, app: FastAPI, config: GatewayConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                ws="none",
                log_level="warning",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._gateway: Gateway = app.state.gateway
        self._settings = config
        self._grpc: grpc.aio.Server | None = None
        self._draining: asyncio.Task[None] | None = None
        self._patience: asyncio.Timeout | None = None
        """Of the drain with what runs."""
        self._silent = SilentConnections(SILENT_S)
        self._next_sweep_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises OSError when the gRPC port cannot be had."""
        settings = self._settings
        self._grpc, grpc_port = await serve_grpc(
            self._gateway, settings.host, settings.bound_grpc_port, share_port=settings.share_ports
        )
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            own = {} if self._settings.own_port is None else {"own_port": self._settings.own_port}
            log.info("ready", host=host, port=port, grpc_port=grpc_port, **own)

    async def on_tick(self, counter: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            self._silent.sweep(cast("set[Connection]", self.server_state.connections), now_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """gRPC's first, as the router sessions are closed with the app."""
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)
        if self._grpc is not None:
            stopping = asyncio.create_task(self._grpc.stop(CLOSE_S))
            self._grpc = None  # its finalizer wants the running event loop
            await stopping
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's own, which stops listening at once and ends the process by the signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        """The first one begins the drain, a second one ends it."""
        if self._draining is None:
            self._patience = asyncio.timeout(self._settings.drain_timeout_s)
            self._draining = asyncio.create_task(self._drain(), name="drain")
        elif self._patience is not None and not self._gateway.admission.cut_off.is_set():
            self._patience.reschedule(asyncio.get_running_loop().time())

    async def _drain(self) -> None:
        admission = self._gateway.admission
        admission.draining = True
        log.info("draining", open_requests=admission.num_open, timeout_s=self._settings.drain_timeout_s)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s) as self._patience:
                await asyncio.sleep(self._settings.lame_duck_s)
                admission.closed = True
                await admission.until_idle()
        except TimeoutError:
            log.warning("requests are cut off", open_requests=admission.num_open)
        admission.closed = True
        admission.cut_off.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await admission.until_idle()
        self.should_exit = True
