"""Sessions over real gRPC: many requests on one stream, lost peers, bounds, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest

from pdserve import pulse, session_server
from pdserve.channel import open_channel, serve
from pdserve.identity import new_identity
from pdserve.session import Handle, OutputBuffer, Session
from pdserve.session_server import SessionServer
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.ports import free_port
from tests.services.fake_worker import Behaviour, FakeWorker, token_at
from tests.services.processes import eventually, worker_process

PROMPT = [5, 6, 7]


def generate(request_id: str, max_tokens: int = 20) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens)
    return pb.GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling, timeout_s=30)


async def collect(handle: Handle) -> tuple[list[int], pb.Finish]:
    """All tokens, and how it ended; asserts that it ended once."""
    tokens: list[int] = []
    finishes: list[pb.Finish] = []
    async with asyncio.timeout(60):
        async for output in handle:
            tokens.extend(output.token_ids)
            if output.HasField("finish"):
                finishes.append(output.finish)
    assert len(finishes) == 1
    return tokens, finishes[0]


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker("d0", "decode")
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def session(worker: FakeWorker) -> AsyncIterator[Session]:
    session = await Session.connect(worker.address, new_identity("router", "r0"))
    yield session
    await session.close()


async def test_many_requests_share_one_stream(worker: FakeWorker, session: Session) -> None:
    handles = [session.open(generate(f"q{i}", 1 + i % 40)) for i in range(256)]
    answers = await asyncio.gather(*(collect(handle) for handle in handles))
    for i, (tokens, finish) in enumerate(answers):
        assert tokens == [token_at(PROMPT, position) for position in range(1 + i % 40)]
        assert finish.reason == pb.FINISH_REASON_LENGTH
    assert session.num_open == 0
    assert len(worker.sessions.sessions) == 1
    assert worker.sessions.sessions["r0"].num_open == 0


async def test_peer_and_load_are_known(worker: FakeWorker, session: Session) -> None:
    assert session.peer is not None
    assert session.peer.worker_id == "d0"
    assert session.peer.incarnation == worker.identity.incarnation
    worker.behaviour = Behaviour(silent=True)
    handles = [session.open(generate(str(i))) for i in range(3)]
    await eventually(lambda: session.load.running == 3, "the load arrives with a heartbeat")
    worker.sessions.draining = True
    await eventually(lambda: session.draining, "draining is told")
    for handle in handles:
        handle.abort("client")


async def test_a_slow_consumer_loses_its_request_and_nobody_else_is_held_up(
    worker: FakeWorker, session: Session
) -> None:
    slow = session.open(generate("slow", 10**9), max_buffered_outputs=10)
    tokens, finish = await collect(session.open(generate("quick", 100)))
    assert len(tokens) == 100
    assert finish.reason == pb.FINISH_REASON_LENGTH
    tokens, finish = await collect(slow)
    assert tokens == [token_at(PROMPT, position) for position in range(10)]  # what fitted, then the end
    assert finish.failure.code == pb.ERROR_CODE_SLOW_CONSUMER
    await eventually(lambda: worker.aborted == [("slow", "slow_consumer")], "the worker is told")


async def test_abort_ends_it_here_and_there(worker: FakeWorker, session: Session) -> None:
    worker.behaviour = Behaviour(token_interval_s=0.01)
    handle = session.open(generate("q", 100_000))
    other = session.open(generate("other", 30))
    async for _ in handle:
        break
    handle.abort("stop")
    handle.abort("stop")
    _, finish = await collect(handle)
    assert finish.reason == pb.FINISH_REASON_ABORT
    assert (await collect(other))[1].reason == pb.FINISH_REASON_LENGTH
    await eventually(lambda: worker.aborted == [("q", "stop")], "the worker is told once")
    await eventually(lambda: not worker.tasks, "the worker has ended it")


async def test_opened_and_aborted_in_one_tick(worker: FakeWorker, session: Session) -> None:
    worker.behaviour = Behaviour(silent=True)
    session.open(generate("q")).abort("client")
    await eventually(lambda: worker.aborted == [("q", "client")], "open comes before abort")


async def test_handles_may_share_a_buffer(session: Session) -> None:
    buffer = OutputBuffer()
    handles = {session.open(generate(name, 3), buffer=buffer) for name in ("a", "b")}
    ended: list[Handle] = []
    async with asyncio.timeout(30):
        while len(ended) < 2:
            handle, output = await buffer.get()
            assert output.request_id == handle.request_id
            if output.HasField("finish"):
                ended.append(handle)
    assert set(ended) == handles


async def test_an_id_is_open_once(worker: FakeWorker, session: Session) -> None:
    worker.behaviour = Behaviour(silent=True)
    handle = session.open(generate("q"))
    with pytest.raises(ValueError, match="unique"):
        session.open(generate("q"))
    handle.abort("client")


@pytest.mark.faults
async def test_a_killed_peer_ends_its_requests_and_comes_back_as_another_incarnation() -> None:
    port = free_port()  # once the first one is dead, nobody else gets it
    async with worker_process("d0", "decode", "--token-interval-s", "0.02", "--port", str(port)) as first:
        session = await Session.connect(f"127.0.0.1:{port}", new_identity("router", "r0"), timeout_s=30)
        before = session.peer.incarnation if session.peer else 0
        handle = session.open(generate("q", 100_000))
        async for _ in handle:
            break
        first.signal(signal.SIGKILL)
        _, finish = await collect(handle)
        assert finish.failure.code == pb.ERROR_CODE_WORKER_LOST
        assert finish.failure.retryable
        assert not session.alive
        _, finish = await collect(session.open(generate("while it is away")))
        assert finish.failure.code == pb.ERROR_CODE_WORKER_LOST
    async with worker_process("d0", "decode", "--port", str(port)):
        assert await session.wait_alive(30)
        assert session.peer is not None
        assert session.peer.incarnation > before
        tokens, _ = await collect(session.open(generate("q", 5)))
        assert len(tokens) == 5
        await session.close()


@pytest.mark.faults
async def test_a_stopped_peer_is_noticed_and_taken_back() -> None:
    async with worker_process("d0", "decode", "--token-interval-s", "0.02") as process:
        session = await Session.connect(
            f"127.0.0.1:{await process.ready()}", new_identity("router", "r0"), timeout_s=30
        )
        handle = session.open(generate("q", 100_000))
        async for _ in handle:
            break
        process.signal(signal.SIGSTOP)
        _, finish = await collect(handle)
        assert finish.failure.code == pb.ERROR_CODE_WORKER_LOST
        process.signal(signal.SIGCONT)
        assert await session.wait_alive(30)
        await eventually(
            lambda: {"event": "session_lost", "request_ids": ["q"]} in process.events, "the woken side ends it, too"
        )
        assert len((await collect(session.open(generate("q2", 5))))[0]) == 5
        await session.close()


CLIENT = """
import asyncio, sys
from pdserve.identity import new_identity
from pdserve.session import Session
from pdserve.v1 import inference_pb2 as pb

async def main():
    session = await Session.connect(sys.argv[1], new_identity("router", "client"), timeout_s=30)
    sampling = pb.SamplingParams(max_tokens=100000)
    async for _ in session.open(pb.GenerateRequest(request_id="q", prompt_token_ids=[1], sampling=sampling)):
        pass

asyncio.run(main())
"""


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_stopped_client_ends_its_requests(worker: FakeWorker, number: signal.Signals) -> None:
    worker.behaviour = Behaviour(token_interval_s=0.02)
    root = Path(__file__).parents[2]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, worker.address, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    try:
        await eventually(lambda: worker.opened, "the request arrives", 60)
        client.send_signal(number)
        await eventually(lambda: worker.lost == [["q"]], "the handler is told")
        await eventually(lambda: not worker.tasks, "nothing runs for it any more")
        assert not worker.sessions.sessions
    finally:
        if client.returncode is None:
            client.kill()
        await client.wait()


async def test_a_newer_incarnation_replaces_the_older_which_is_then_refused(worker: FakeWorker) -> None:
    worker.behaviour = Behaviour(silent=True)
    old = new_identity("router", "r0")
    new = new_identity("router", "r0")
    assert new.incarnation > old.incarnation
    old_session = await Session.connect(worker.address, old)
    handle = old_session.open(generate("q"))
    await eventually(lambda: worker.opened, "the request arrives")
    new_session = await Session.connect(worker.address, new)
    assert (await collect(handle))[1].failure.code == pb.ERROR_CODE_WORKER_LOST
    assert worker.lost == [["q"]]
    with pytest.raises(ConnectionError):
        await Session.connect(worker.address, old, timeout_s=1.0)
    assert new_session.alive
    assert list(worker.sessions.sessions) == ["r0"]
    await old_session.close()
    await new_session.close()


async def test_a_peer_that_does_not_read_loses_its_session(worker: FakeWorker) -> None:
    """It writes its heartbeats and takes nothing: the flow control window fills, then the bound is reached."""
    worker.sessions = SessionServer(worker.identity, worker, max_pending_outputs=1000)
    server, port = await serve([worker.sessions], "127.0.0.1", 0)
    channel = open_channel(f"127.0.0.1:{port}")
    call = inference_pb2_grpc.GenerationStub(channel).Session()
    await call.write(pb.ClientFrame(hello=new_identity("router", "deaf"), open=[generate("q", 10**9)]))

    async def beat() -> None:
        while True:
            await call.write(pb.ClientFrame())
            await asyncio.sleep(0.2)

    beating = asyncio.create_task(beat())
    await eventually(lambda: worker.lost == [["q"]], "the session is given up", 60)
    await eventually(lambda: not worker.tasks, "nothing runs for it any more")
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    call.cancel()
    await channel.close(None)
    await server.stop(0.5)


class Mute(inference_pb2_grpc.GenerationServicer):
    """Accepts streams and never says a word."""

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await asyncio.sleep(3600)


async def test_a_mute_server_is_no_session() -> None:
    server, port = await serve([Mute()], "127.0.0.1", 0)
    with pytest.raises(ConnectionError, match="nobody answers"):
        await Session.connect(f"127.0.0.1:{port}", new_identity("router", "r0"), timeout_s=1.0)
    await server.stop(0)


async def test_a_port_in_use_is_one_clear_line(worker: FakeWorker) -> None:
    with pytest.raises(OSError, match="--port"):
        await serve([Mute()], "127.0.0.1", worker.port)


async def test_own_stall_is_not_the_peers_silence() -> None:
    """A process that was stopped, or whose loop was blocked, first reads what waits."""
    beat = pulse.Pulse(heartbeat_s=0.01, lost_after_s=0.04)
    await beat.beat()
    await asyncio.sleep(0.2)  # many heartbeats long
    await beat.beat()
    beat.heard()
    for _ in range(4):
        await beat.beat()
    with pytest.raises(pulse.PeerSilent):
        await beat.beat()


async def test_frames_are_bounded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests and outputs than one frame may hold go in several."""
    monkeypatch.setattr("pdserve.session.MAX_FRAME_BYTES", 2000)
    monkeypatch.setattr(session_server, "MAX_OUTPUTS_IN_FRAME", 3)
    answers = await asyncio.gather(*(collect(session.open(generate(f"q{i}", 7))) for i in range(200)))
    assert all(len(tokens) == 7 for tokens, _ in answers)


async def test_nothing_is_left_behind(worker: FakeWorker) -> None:
    """Tasks, streams and file descriptors are back to what they were after sessions came and went."""
    identity = new_identity("router", "r0")

    async def come_and_go() -> None:
        session = await Session.connect(worker.address, identity)
        await collect(session.open(generate("done", 5)))
        session.open(generate("left open", 10**6))
        await asyncio.sleep(0.05)
        await session.close()

    await come_and_go()
    await eventually(lambda: not worker.tasks and not worker.sessions.sessions, "the server has noticed")
    gc.collect()
    tasks, fds = len(asyncio.all_tasks()), psutil.Process().num_fds()
    for _ in range(5):
        await come_and_go()
    await eventually(lambda: not worker.tasks and not worker.sessions.sessions, "the server has noticed")
    gc.collect()
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, "all tasks have ended")
    await eventually(lambda: psutil.Process().num_fds() <= fds + 1, "all connections are closed")


async def test_a_cancellation_that_grpc_swallows_ends_it_all_the_same(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc.aio's read may come back with a frame although its task was cancelled meanwhile."""
    reads = asyncio.Event()
    real = inference_pb2_grpc.GenerationStub

    class Swallowing:
        """The stub's call, real but for the first read."""

        def __init__(self, channel: grpc.aio.Channel) -> None:
            self._channel = channel

        def Session(self) -> Swallowing:
            self._call = real(self._channel).Session()
            return self

        async def read(self) -> object:
            frame = await self._call.read()
            if not reads.is_set():
                reads.set()
                try:
                    await asyncio.sleep(1.5)
                except asyncio.CancelledError:
                    return frame
            return frame

        def __getattr__(self, name: str) -> object:
            return getattr(self._call, name)

    monkeypatch.setattr(inference_pb2_grpc, "GenerationStub", Swallowing)
    session = Session.start(worker.address, new_identity("router", "r1"))
    await asyncio.wait_for(reads.wait(), 10)
    await asyncio.wait_for(session.close(), 10)
    assert not session.alive


async def test_a_lost_connection_is_closed_at_once(worker: FakeWorker) -> None:
    """Also that of a peer which fell silent: nothing of it waits for the garbage collector, which may take its time."""
    flowing = asyncio.Event()
    flowing.set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await flowing.wait()
                writer.write(data)
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = worker.address.split(":")
        to_worker = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, to_worker[1]), pipe(to_worker[0], writer))

    network = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = network.sockets[0].getsockname()[1]

    def num_connections() -> int:
        mine = psutil.Process().net_connections("tcp")
        return sum(c.status == "ESTABLISHED" and c.raddr and c.raddr.port == port for c in mine)

    gc.disable()
    try:
        session = await Session.connect(f"127.0.0.1:{port}", new_identity("router", "r1"))
        for connects in (2, 3):
            flowing.clear()
            await eventually(lambda: not session.alive, "the peer is silent")
            flowing.set()
            await eventually(lambda connects=connects: session.connects_total >= connects, "it is back")  # type: ignore[misc]
        await eventually(lambda: session.alive and num_connections() == 1, "only the new connection is left")
        await session.close()
        await eventually(lambda: num_connections() == 0, "none is left")
    finally:
        gc.enable()
        network.close()
