"""Which workers there are: polls the registry, holds one session per worker, knows who can take requests.

The registry (Redis) only introduces workers. A worker is gone when its session is lost or a newer incarnation of it has
registered, never because its key is missing; one that is lost *and* missing is forgotten. With Redis down the known
workers stay.

    registry record --first seen--> connecting --hello--> usable --lost--> reconnecting --hello--> usable
                                        newer incarnation, other address: a new session, the old one's requests end
                                        lost (or its address is another's now) and missing in the registry: forgotten
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from pdserve.session import Session
from pdserve.tls import Tls
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import kv_pb2
from registry import RegistryUnavailable, WorkerRecord, WorkerRegistry
from router.pace import QueuePace
from router.policies.load import WorkerLoad
from router.prompt import ModelKind

MAX_WORKERS = 4096
STATES = ("usable", "draining", "connecting", "lost", "stale", "impostor")

log = structlog.get_logger()


class Worker:
    """A worker as this router sees it. A routing Candidate."""

    def __init__(self, record: WorkerRecord, session: Session, load: WorkerLoad) -> None:
        self.record = record
        self.session = session
        self.met_s = asyncio.get_running_loop().time()
        self.load = load
        self.pace = QueuePace()

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    @property
    def kind(self) -> ModelKind:
        """Workers of one kind name their blocks alike."""
        return self.record.fingerprint, self.record.hash_block_tokens

    @property
    def stride(self) -> int:
        """Hash units in one of its blocks."""
        return max(1, self.record.block_size // max(1, self.record.hash_block_tokens))

    @property
    def state(self) -> str:
        """One of STATES."""
        peer = self.session.peer
        if not self.session.alive or peer is None:
            return "lost" if self.session.connects_total else "connecting"
        if peer.worker_id != self.record.worker_id:
            return "impostor"  # another worker took over the address
        if peer.incarnation < self.record.incarnation:
            return "stale"
        leaves = self.record.draining and peer.incarnation == self.record.incarnation
        return "draining" if self.session.draining or leaves else "usable"

    @property
    def usable(self) -> bool:
        return self.state == "usable"

    @property
    def identity(self) -> kv_pb2.WorkerIdentity:
        """Who answers on the session now, at the registered address."""
        assert self.session.peer is not None, "only a worker that has answered is asked"
        peer = self.session.peer
        return kv_pb2.WorkerIdentity(
            worker_id=peer.worker_id, incarnation=peer.incarnation, role=peer.role, address=self.record.address
        )

    def wait_s(self, now_s: float) -> float:
        """What a new prompt would wait before it is computed here, as far as is known."""
        return self.pace.wait_s(self.load.own_queued_tokens, now_s)

    def likely_wait_s(self, now_s: float) -> float:
        """The same; and where nothing comes out of the queue, as long again as nothing has."""
        return max(self.wait_s(now_s), self.pace.stalled_s(self.load.own_queued_tokens, now_s))

    @property
    def prefill_s_per_token(self) -> float:
        """At rest, if it was seen so, else as its queue goes; 0: not known."""
        return self.load.prefill.seconds_per_token or self.pace.s_per_token

    def fits(self, num_tokens: int) -> bool:
        """Whether its pool could ever hold so many tokens."""
        return not self.record.pool_tokens or num_tokens <= self.record.pool_tokens


class Workers:
    """All known workers. ``run`` is the polling task; ``wait_change`` wakes whoever waits for a worker."""

    def __init__(
        self,
        registry: WorkerRegistry,
        identity: kv_pb2.WorkerIdentity,
        poll_interval_s: float,
        on_registry_failure: Callable[[], None] = lambda: None,
        tls: Tls | None = None,
    ) -> None:
        self.known: dict[str, Worker] = {}
        """By worker_id."""
        self._registry = registry
        self._identity = identity
        self._tls = tls
        self._poll_interval_s = poll_interval_s
        self._on_registry_failure = on_registry_failure
        self._registry_answers = True
        self._changed = asyncio.Event()
        self._usable: list[Worker] | None = None
        self._version = 0

    def with_role(self, *roles: str) -> list[Worker]:
        return [worker for worker in self.known.values() if worker.record.role in roles]

    @property
    def version(self) -> int:
        """Another one whenever a worker came, went or changed."""
        return self._version

    def usable(self) -> list[Worker]:
        """Those that can take requests; made anew when one has changed, not for every request."""
        if self._usable is None:
            self._usable = [worker for worker in self.known.values() if worker.usable]
        return self._usable

    def emitting_load(self) -> pb.Load:
        """Sum over the usable workers that emit tokens; without any, all zero (which tells gateways so)."""
        workers = [worker for worker in self.with_role("decode", "aggregated") if worker.usable]
        loads = [worker.session.load for worker in workers]
        return pb.Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            queued_tokens=sum(load.queued_tokens for load in loads),
            free_blocks=sum(load.free_blocks for load in loads),
            total_blocks=sum(load.total_blocks for load in loads),
            pool_tokens=max((worker.record.pool_tokens for worker in workers), default=0),
        )

    async def run(self) -> None:
        """Poll until cancelled; then close all sessions."""
        try:
            while True:
                await self.poll()
                await asyncio.sleep(self._poll_interval_s)
        finally:
            known, self.known = self.known, {}
            await asyncio.gather(*(worker.session.close() for worker in known.values()))

    async def poll(self) -> None:
        """One look at the registry. With Redis down nothing changes."""
        try:
            records = await self._registry.list_workers()
        except RegistryUnavailable as error:
            self._on_registry_failure()
            if self._registry_answers:
                log.warning("registry unavailable, going on with the known workers", error=str(error))
            self._registry_answers = False
            return
        if not self._registry_answers:
            log.info("registry is back")
        self._registry_answers = True
        for record in records:
            await self._meet(record)
        listed = {record.worker_id for record in records}
        for worker in [worker for worker in self.known.values() if worker.worker_id not in listed]:
            if not worker.session.alive or worker.state == "impostor":
                log.info("forgot worker", worker=worker.worker_id, incarnation=worker.record.incarnation)
                del self.known[worker.worker_id]
                await worker.session.close()
                self._notify()

    async def wait_change(self, timeout_s: float) -> None:
        """Until a worker came, went or changed, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _meet(self, record: WorkerRecord) -> None:
        worker = self.known.get(record.worker_id)
        if worker is None:
            if len(self.known) >= MAX_WORKERS:
                log.error("too many workers, ignored", worker=record.worker_id, limit=MAX_WORKERS)
                return
            log.info("met worker", worker=record.worker_id, role=record.role, address=record.address)
            load = WorkerLoad(record.pool_tokens)
            self.known[record.worker_id] = Worker(record, self._connect(record, load), load)
        elif record.incarnation >= worker.record.incarnation:
            worker.record, older = record, worker.record
            worker.load.pool_tokens = record.pool_tokens
            if record.address != older.address or worker.state == "stale":
                log.info("worker has a new incarnation", worker=record.worker_id, incarnation=record.incarnation)
                session, worker.session = worker.session, self._connect(record, worker.load)
                self._notify()  # before anything waits: the new session has not met anybody yet
                await session.close()  # ends what the older incarnation had
        self._notify()

    def _connect(self, record: WorkerRecord, load: WorkerLoad) -> Session:
        return Session.start(
            record.address,
            self._identity,
            on_change=lambda _: self._notify(),
            on_load=load.report,
            tls=self._tls,
        )

    def _notify(self) -> None:
        self._usable = None
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
