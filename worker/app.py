"""A worker's service process: puts the parts together, runs them until a signal, and takes them apart.

    routers == Generation.Session ==> SessionServer --> WorkerService --.
    peers   == KVHandoff.Stream ====> HandoffServicer (decode) ----------+--> EngineSupervisor == ZeroMQ ==> engine
    peers   <= KVHandoff.Stream ===== HandoffClient (prefill) ----------'
    Redis   <-- Registration, KVPublisher    StatusServer: /metrics, /health, /live
    Redis   --> PeerCheck (part of being ready)    SIGTERM, operators == WorkerAdmin.Drain ==> Drain: how it ends

Never imports torch: Python work here must not delay a step, nor a step delay a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable
from typing import Any

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from engine import messages
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    PeerAlive,
    PeerFrame,
    PeerLost,
    SendKVSnapshot,
    StepOutputs,
)
from pdserve import tls
from pdserve.address import join_address
from pdserve.channel import Servicer, serve
from pdserve.identity import new_identity
from pdserve.session_server import SessionServer
from registry import StaleIncarnation, WorkerLoad, WorkerRecord, WorkerRegistry
from registry.ownership import Ownership
from telemetry import logs
from telemetry.http import StatusServer
from telemetry.metrics import EngineMetrics, WorkerMetrics
from telemetry.tracing import start_tracer
from worker.config import WorkerConfig
from worker.drain import AdminServicer, Drain
from worker.engine_client import EngineLost
from worker.engine_supervisor import EngineSupervisor
from worker.handoff_client import HandoffClient
from worker.handoff_servicer import HandoffServicer
from worker.kv_publisher import KVPublisher
from worker.launch import EngineLaunch
from worker.peers import PeerCheck
from worker.registration import Registration
from worker.service import WorkerService

STOP_TIMEOUT_S = 5.0
CANCEL_S = 2.0

log = structlog.get_logger()


def run(config: WorkerConfig) -> int:
    """The exit code: 0 after SIGTERM or SIGINT, 1 when the worker cannot start or must not go on."""
    logs.set_up(config.worker_id)
    return uvloop.run(WorkerApp(config).run())


class WorkerApp:
    """The engine's listener; everything else is told from here when engines come and go."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._identity = new_identity(config.role, config.worker_id)
        self._prometheus = CollectorRegistry()
        self._metrics = WorkerMetrics(self._prometheus)
        self._engine_metrics = EngineMetrics(self._prometheus, config.model)
        self._ports = {"port": 0, "metrics_port": 0}
        self._is_told_ready = False

    async def run(self) -> int:
        config = self._config
        ownership = Ownership(config.redis_url)
        self._publisher = KVPublisher(ownership, config.worker_id, lambda: self._supervisor.send(SendKVSnapshot()))
        self._supervisor = EngineSupervisor(config.engine_module, self, silence_s=config.engine_silence_s)
        try:
            credentials = tls.from_option(config.tls_dir)
            tracer = start_tracer(config.role, config.worker_id, config.otlp_endpoint)
        except ValueError as error:
            log.error("cannot_start", reason=str(error))
            return 1
        self._service = WorkerService(self._to_engine, self._metrics, tracer, config.role)
        self._sessions = SessionServer(self._identity, self._service, load=self._service.load)
        self._sessions.draining = True  # until the engine is ready
        self._handoff_client = HandoffClient(self._to_engine, credentials)
        self._handoff_servicer = HandoffServicer(self._identity, self._to_engine)
        registry = WorkerRegistry(config.redis_url)
        self._registration = Registration(registry, self._record)
        self._peers = PeerCheck(registry, self._record, credentials)
        self._drain = Drain(
            config.drain_timeout_s,
            num_open=lambda: self._service.num_open,
            begin=self._begin_drain,
            give_back=lambda: self._service.give_back_all("this worker is leaving"),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain.on_signal)
        status = StatusServer(self._prometheus, self._not_ready)
        try:
            self._ports["metrics_port"] = await status.start(config.host, config.metrics_port)
            servicers: list[Servicer] = [self._sessions, AdminServicer(self._drain)]
            if config.role != "prefill":
                servicers.append(self._handoff_servicer)
            server, self._ports["port"] = await serve(
                servicers, config.host, config.port, is_ready=lambda: self._not_ready() is None, tls=credentials
            )
        except OSError as error:
            log.error("cannot_listen", reason=str(error), remedy="use another --port or --metrics-port")
            return 1
        self._identity.address = join_address(config.reachable_host, self._ports["port"])
        engine = asyncio.create_task(self._supervisor.run(self._launch()), name="engine")
        known = {  # what makes it known, and to be chosen
            asyncio.create_task(self._registration.run(), name="registration"),
            asyncio.create_task(self._publisher.run(), name="kv events"),
            asyncio.create_task(self._peers.run(), name="peers"),
        }
        drained = asyncio.create_task(self._drain.run(), name="drain")
        try:
            done, _ = await asyncio.wait({engine, *known, drained}, return_when=asyncio.FIRST_COMPLETED)
            return self._exit_code(done - {drained})
        finally:
            self._sessions.draining = True
            await told_twice(*known)  # a heartbeat would register it again
            await self._registration.leave()
            await self._publisher.leave()
            await self._sessions.flush()
            await self._handoff_client.close()
            self._handoff_servicer.close_all()
            await cancelled(engine, drained)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._sessions.close()
                    await server.stop(grace=0.5)
            await status.close()
            await asyncio.to_thread(tracer.close)
            log.info("stopped")

    # ---- from the engine

    def new_incarnation(self, launch: EngineLaunch) -> None:
        self._identity = launch.identity()
        self._publisher.new_incarnation(launch.incarnation)
        self._sessions.identity = self._handoff_servicer.identity = self._handoff_client.identity = self._identity

    def engine_ready(self, ready: EngineReady) -> None:
        self._sessions.draining = self._drain.is_asked
        self._service.model_fingerprint = ready.model_fingerprint
        self._publisher.engine_ready(ready.num_blocks)
        self._handoff_servicer.not_ready = None
        self._registration.changed()
        log.info(
            "ready",
            **self._ports,
            role=self._config.role,
            worker_id=self._config.worker_id,
            incarnation=self._identity.incarnation,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            max_model_len=ready.max_model_len,
        )

    def engine_said(self, message: StepOutputs | PeerFrame) -> None:
        if isinstance(message, StepOutputs):
            self._service.take(message)
            if message.kv_events is not None:
                self._publisher.take(message.kv_events)
            if message.stats is not None:
                self._engine_metrics.update(message.stats)
                self._metrics.sessions.set(len(self._sessions.sessions))
                self._metrics.handoff_streams.set(len(self._handoff_client) + len(self._handoff_servicer))
        elif self._config.role == "prefill":
            self._handoff_client.send(message)
        else:
            self._handoff_servicer.send(message)

    def engine_lost(self, reason: str) -> None:
        """What the incarnation owned ends now, everywhere: its requests here, its transfers at the peers."""
        self._sessions.draining = True
        self._service.engine_lost(reason)
        self._handoff_servicer.not_ready = "the engine is starting"
        self._handoff_servicer.close_all()
        self._handoff_client.close_all()
        for session in list(self._sessions.sessions.values()):
            session.close("the engine of this worker was lost; a new incarnation starts")
        self._metrics.engine_restarts.inc()
        self._registration.changed()

    # ---- inside

    def _begin_drain(self) -> None:
        """Before anything is handed back, so that it does not come here again."""
        self._sessions.draining = self._service.draining = True
        self._registration.changed()
        self._supervisor.send(messages.Drain())

    def _to_engine(self, message: AddRequest | AbortRequests | PeerFrame | PeerAlive | PeerLost) -> bool:
        return self._supervisor.send(message)

    def _launch(self) -> EngineLaunch:
        return EngineLaunch(
            engine_options={"model": self._config.model, **self._config.engine_options},
            to_engine="",
            from_engine="",
            parent_pid=0,
            role=self._config.role,
            worker_id=self._config.worker_id,
            incarnation=self._identity.incarnation,
            address=self._identity.address,
            host=self._config.host,
            advertised_host=self._config.reachable_host,
            transfer=self._config.transfer,
            data_port=self._config.data_port,
        )

    def _record(self) -> WorkerRecord | None:
        ready = self._supervisor.ready
        if ready is None:
            return None
        load = self._service.load()
        return WorkerRecord(
            worker_id=self._config.worker_id,
            role=self._config.role,
            address=self._identity.address,
            incarnation=self._identity.incarnation,
            fingerprint=ready.model_fingerprint,
            model=self._config.model,
            max_model_len=ready.max_model_len,
            pool_tokens=ready.num_blocks * ready.block_size,
            hash_block_tokens=ready.hash_block_tokens,
            block_size=ready.block_size,
            kv_wire=ready.kv_wire,
            draining=self._drain.is_asked,
            load=WorkerLoad(
                running=load.running,
                waiting=load.waiting,
                queued_tokens=load.queued_tokens,
                free_blocks=load.free_blocks,
                total_blocks=load.total_blocks,
            ),
        )

    def _not_ready(self) -> str | None:
        if self._drain.is_asked:
            return "draining"
        if self._supervisor.ready is None:
            return "the engine is starting"
        if self._registration.incarnation < self._identity.incarnation:
            return "not registered: Redis has not answered yet"
        return self._peers.why_not

    def _exit_code(self, ended: Iterable[asyncio.Task[Any]]) -> int:
        """A task that ended by itself says why the worker cannot go on."""
        for task in ended:
            error = task.exception()
            if isinstance(error, EngineLost):
                log.error("engine_cannot_start", reason=str(error))
            elif isinstance(error, StaleIncarnation):
                log.error("replaced", reason=str(error))
            elif error is not None:
                raise error
        return 1 if ended else 0


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them, and wait until they have ended, which they do in bounded time."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def told_twice(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks that run for ever: twice, as libraries lose a cancellation now and then, and not for ever."""
    for _ in range(2):
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=CANCEL_S)
        if not late:
            return
    log.error("left_behind", tasks=[task.get_name() for task in late])
