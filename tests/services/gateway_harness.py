"""What the gateway's tests share: a router that says what the test tells it, and a gateway on a real port.

``FakeRouter`` speaks the real session protocol (``SessionServer``); ``running_gateway`` is the real app in uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from gateway.__main__ import listening
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.model import ServedModel, load_model
from gateway.routers import RouterPool
from pdserve.channel import serve
from pdserve.identity import new_identity
from pdserve.session_server import ServerSession, SessionServer
from pdserve.v1 import inference_pb2 as pb

MODEL_NAME = "test-model"
WAIT_S = 30.0


@dataclass
class Script:
    """What the router answers to one request. Tokens already given (output_so_far) are left out."""

    token_ids: Sequence[int]
    finish: pb.Finish = field(default_factory=lambda: pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    tokens_per_output: int = 1
    pause_after: int | None = None
    """Tokens after which it waits for ``FakeRouter.go``."""
    cached_tokens: int = 0
    phases: pb.Phases | None = None
    top: Sequence[tuple[int, float]] = ()
    """Top logprobs at every position; the drawn token's own is -0.5."""


@dataclass
class FakeRouter:
    """Handler of a SessionServer. ``script`` decides each answer; ``requests`` and ``aborts`` are what it was sent."""

    script: Callable[[pb.GenerateRequest], Script]
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    aborts: list[tuple[str, str]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    total_blocks: int = 100
    address: str = ""

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        self.requests.append(request)
        task = asyncio.create_task(self._answer(session, request))
        self._tasks[request.request_id] = task

    def abort(self, session: ServerSession, request_id: str, reason: str) -> None:
        self.aborts.append((request_id, reason))
        self._tasks[request_id].cancel()

    def session_lost(self, session: ServerSession, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._tasks[request_id].cancel()

    async def _answer(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        script = self.script(request)
        todo = list(script.token_ids)
        at = len(request.output_so_far)
        is_first = True
        while at < len(todo):
            if script.pause_after is not None and at >= script.pause_after:
                await self.go.wait()
            tokens = todo[at : at + script.tokens_per_output]
            at += len(tokens)
            output = pb.Output(request_id=request.request_id, token_ids=tokens)
            if request.sampling.HasField("logprobs"):
                output.logprobs.extend(self._logprobs(script, request.sampling.logprobs) for _ in tokens)
            if is_first:
                is_first = False
                output.model_fingerprint = request.model_fingerprint or "model-a"
                output.cached_tokens = script.cached_tokens
                output.sent_kv_tokens = len(request.prompt_token_ids) - script.cached_tokens
                output.phases.CopyFrom(script.phases or pb.Phases(route_s=0.001, worker_s=0.002, prefill_s=0.002))
            if at >= len(todo):
                output.finish.CopyFrom(script.finish)
            session.send([output])
            await asyncio.sleep(0)
        if not todo:
            session.send([pb.Output(request_id=request.request_id, finish=script.finish)])

    def _logprobs(self, script: Script, count: int) -> pb.TokenLogprobs:
        top = script.top[:count]
        return pb.TokenLogprobs(
            logprob=-0.5, top_token_ids=[token for token, _ in top], top_logprobs=[logprob for _, logprob in top]
        )

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.server = SessionServer(
            new_identity("router", "fake-router"), self, load=lambda: pb.Load(total_blocks=self.total_blocks)
        )

    async def wait_requests(self, count: int) -> None:
        await eventually(lambda: len(self.requests) >= count)

    async def wait_aborts(self, count: int) -> None:
        await eventually(lambda: len(self.aborts) >= count)

    def lose_sessions(self) -> None:
        """As if the router had been killed and started again."""
        for session in list(self.server.sessions.values()):
            session.close("the test says so")


async def eventually(check: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not check():  # noqa: ASYNC110  # what it waits for is in other objects
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_router(router: FakeRouter, port: int = 0) -> AsyncIterator[FakeRouter]:
    grpc_server, bound = await serve([router.server], "127.0.0.1", port)
    router.address = f"127.0.0.1:{bound}"
    try:
        yield router
    finally:
        await router.server.close()
        await grpc_server.stop(None)


class QuietServer(uvicorn.Server):
    """Leaves the test runner's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def running_gateway(
    model: ServedModel, routers: Sequence[str], *, num_usable: int | None = None, **settings: object
) -> AsyncIterator[str]:
    """The URL of a gateway whose sessions to ``num_usable`` of the routers are up and may be used; None: to all."""
    config = GatewayConfig(model="test", served_model_name=model.name, routers=tuple(routers), **settings)  # type: ignore[arg-type]
    with listening("127.0.0.1", 0) as listener:
        # Small, so that a client that does not read is noticed after kilobytes and not megabytes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        host, port = listener.getsockname()
        app = create_app(config, model)
        server = QuietServer(
            uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=2)
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started or task.done())
            pool: RouterPool = app.state.gateway.routers
            await eventually(lambda: len(pool.usable) == (len(routers) if num_usable is None else num_usable))
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            await task


def load_test_model(directory: Path, **options: int) -> ServedModel:
    return load_model(directory, MODEL_NAME, **options)


def text_script(model: ServedModel, text: str, **options: object) -> Callable[[pb.GenerateRequest], Script]:
    """Always answers ``text``, token by token, then EOS."""
    eos = model.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    token_ids = model.tokenizer.encode(text, add_special_tokens=False) + eos
    finish = pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=eos[0])
    return lambda request: Script(token_ids, finish, **options)  # type: ignore[arg-type]
