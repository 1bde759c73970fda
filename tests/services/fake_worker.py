"""A worker without an engine: answers as a prefill or decode worker would, with tokens that can be foretold.

Runs inside a test (``FakeWorker``) or as a process of its own (``python -m tests.services.fake_worker``) that a test
can kill or stop; then it writes one JSON line per event to its standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from pdserve import terminal
from pdserve.channel import serve
from pdserve.identity import new_identity
from pdserve.session_server import ServerSession, SessionServer
from pdserve.v1 import inference_pb2 as pb
from registry import RegistryUnavailable, WorkerRecord, WorkerRegistry

LEASE_S = 2.0


def token_at(prompt_token_ids: list[int], position: int) -> int:
    """The token at an output position: what every worker would draw."""
    return (sum(prompt_token_ids) * 31 + position * 7) % 50_000


@dataclass
class Behaviour:
    """How the worker answers."""

    first_token_s: float = 0.0
    """Decode: until the first token. Prefill: until the terminal output."""
    token_interval_s: float = 0.0
    silent: bool = False
    """Take requests and never answer."""
    fail_code: str = ""
    """End each request with this error, after ``first_token_s``."""
    fail_retryable: bool = True
    gives_back: bool = False
    """End each request as aborted, as a worker that leaves does: at once, or after ``fail_after_tokens``."""
    fail_peer_lost: bool = False
    """And say that the other worker of the pair is the reason."""
    fail_after_tokens: int = 0
    last_word: bool = True
    """Whether the last token comes with the finish."""
    waits_for_kv: bool = False
    """Decode: until the prefill worker of the same fleet has done its part of the attempt."""
    handoff_s: float = 0.0
    """Decode: so much later where the KV comes from elsewhere."""


@dataclass
class FakeWorker:
    """``start`` it, ``stop`` it. ``opened`` and ``aborted`` are what it was asked."""

    worker_id: str
    role: str
    redis_url: str = ""
    """Empty: it does not register."""
    fingerprint: str = "model-a"
    kv_wire: str = ""
    draining: bool = False
    """Only in its record."""
    pool_tokens: int = 10_000
    prefill_tokens_per_s: float | None = None
    """Decode: what it offers to prefill while prefill workers are busy; None: nothing."""
    free_blocks: int = 100
    """Of 100."""
    behaviour: Behaviour = field(default_factory=Behaviour)
    on_event: Callable[[dict[str, object]], None] = lambda event: None
    handed_over: set[tuple[str, int]] = field(default_factory=set)
    """Transfers and attempts whose KV is there: of all workers of a fleet."""
    opened: list[pb.GenerateRequest] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)
    lost: list[list[str]] = field(default_factory=list)

    async def start(self, port: int = 0) -> str:
        self.tasks: dict[tuple[ServerSession, str], asyncio.Task[None]] = {}
        self.identity = new_identity(self.role, self.worker_id)
        self.sessions = SessionServer(self.identity, self, load=self.load)
        self.server: grpc.aio.Server
        self.server, self.port = await serve([self.sessions], "127.0.0.1", port)
        self.address = self.identity.address = f"127.0.0.1:{self.port}"
        self.lease = asyncio.create_task(self._keep_lease()) if self.redis_url else None
        self.on_event({"event": "ready", "port": self.port})
        return self.address

    async def stop(self) -> None:
        if self.lease is not None:
            self.lease.cancel()
            await asyncio.gather(self.lease, return_exceptions=True)
        await self.sessions.close()
        await self.server.stop(0.5)
        del self.server  # its finalizer wants the running event loop
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def drain(self) -> None:
        """Leave as a real worker does that waits for nothing: everything is handed back."""
        self.draining = self.sessions.draining = True
        for (session, request_id), task in list(self.tasks.items()):
            task.cancel()
            session.send([terminal.aborted(request_id, "it leaves")])
        registry = WorkerRegistry(self.redis_url)
        if self.lease is not None:
            self.lease.cancel()
            await asyncio.gather(self.lease, return_exceptions=True)
        with contextlib.suppress(RegistryUnavailable):
            await registry.remove(self.worker_id, self.identity.incarnation)
        await registry.close()
        await self.sessions.flush()
        await self.stop()

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            incarnation=self.identity.incarnation,
            fingerprint=self.fingerprint,
            model="fake",
            max_model_len=8192,
            pool_tokens=self.pool_tokens,
            hash_block_tokens=16,
            kv_wire=self.kv_wire,
            draining=self.draining,
        )

    def load(self) -> pb.Load:
        return pb.Load(
            running=len(self.tasks),
            total_blocks=100,
            free_blocks=self.free_blocks,
            shares_prefill=self.prefill_tokens_per_s is not None,
            prefill_tokens_per_s=self.prefill_tokens_per_s or 0.0,
        )

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        self.opened.append(request)
        self.on_event(
            {
                "event": "open",
                "request_id": request.request_id,
                "side": request.handoff.side,
                "output_so_far": len(request.output_so_far),
            }
        )
        if self.sessions.draining:
            session.send([terminal.aborted(request.request_id, "it leaves")])
            return
        key = (session, request.request_id)
        self.tasks[key] = asyncio.create_task(self._answer(session, request))
        self.tasks[key].add_done_callback(lambda _: self.tasks.pop(key))

    def abort(self, session: ServerSession, request_id: str, reason: str) -> None:
        self.aborted.append((request_id, reason))
        self.on_event({"event": "abort", "request_id": request_id, "reason": reason})
        if (task := self.tasks.get((session, request_id))) is not None:
            task.cancel()

    def session_lost(self, session: ServerSession, request_ids: list[str]) -> None:
        self.lost.append(request_ids)
        self.on_event({"event": "session_lost", "request_ids": request_ids})
        for request_id in request_ids:
            if (task := self.tasks.get((session, request_id))) is not None:
                task.cancel()

    async def _answer(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        behaviour, request_id = self.behaviour, request.request_id
        if behaviour.silent:
            await asyncio.Event().wait()
        is_received = request.handoff.side == pb.Handoff.SIDE_RECEIVE
        await asyncio.sleep(behaviour.first_token_s + behaviour.handoff_s * is_received)
        fails = bool(behaviour.fail_code) or behaviour.gives_back
        if fails and not behaviour.fail_after_tokens:
            session.send([self._failure(request_id)])
            return
        attempt = (request.handoff.transfer_id, request.handoff.attempt)
        if request.handoff.side == pb.Handoff.SIDE_SEND:
            self.handed_over.add(attempt)
            finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
            session.send([pb.Output(request_id=request_id, finish=finish, cached_tokens=3)])
            return
        while behaviour.waits_for_kv and is_received and attempt not in self.handed_over:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        first = len(request.output_so_far)
        for position in range(first, request.sampling.max_tokens):
            output = pb.Output(request_id=request_id, token_ids=[token_at(request.prompt_token_ids, position)])
            if position == first:
                output.phases.prefill_s = 0.25
                output.cached_tokens = 3
            if position == request.sampling.max_tokens - 1 and behaviour.last_word:
                output.finish.reason = pb.FINISH_REASON_LENGTH
            session.send([output])
            if fails and position - first + 1 >= behaviour.fail_after_tokens:
                session.send([self._failure(request_id)])
                return
            await asyncio.sleep(behaviour.token_interval_s)

    def _failure(self, request_id: str) -> pb.Output:
        if self.behaviour.gives_back:
            return terminal.aborted(request_id, "as told")
        code = pb.ErrorCode.Value(self.behaviour.fail_code)
        output = terminal.failed(
            request_id, code, "as told", retryable=self.behaviour.fail_retryable, retry_after_s=0.5
        )
        output.finish.failure.peer_lost = self.behaviour.fail_peer_lost
        return output

    async def _keep_lease(self) -> None:
        registry = WorkerRegistry(self.redis_url)
        try:
            while True:
                with contextlib.suppress(RegistryUnavailable):
                    await registry.heartbeat(self.record, LEASE_S)
                await asyncio.sleep(0.2)
        finally:
            await registry.close()


def _print_event(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


async def _serve(arguments: argparse.Namespace) -> None:
    worker = FakeWorker(
        arguments.worker_id,
        arguments.role,
        arguments.redis,
        behaviour=Behaviour(arguments.first_token_s, arguments.token_interval_s, arguments.silent),
        on_event=_print_event,
    )
    await worker.start(arguments.port)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the test closes it, or dies


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--redis", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--token-interval-s", type=float, default=0.0)
    parser.add_argument("--silent", action="store_true")
    asyncio.run(_serve(parser.parse_args()))
