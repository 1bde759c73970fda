"""Control streams between a prefill and a decode service: frames in order, loss told once, incarnations kept apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from engine.messages import PeerAlive, PeerFrame, PeerLost
from pdserve.channel import open_channel, serve
from pdserve.v1 import kv_pb2, worker_pb2, worker_pb2_grpc
from tests.services.processes import eventually
from worker.handoff_client import HandoffClient
from worker.handoff_servicer import HandoffServicer
from worker.peer import Peer, decode_peer

P = kv_pb2.WorkerIdentity(worker_id="p", incarnation=5)


class Engine:
    """What a service told its engine."""

    def __init__(self) -> None:
        self.frames: list[PeerFrame] = []
        self.alive: list[str] = []
        self.lost: list[PeerLost] = []

    def __call__(self, message: PeerFrame | PeerAlive | PeerLost) -> None:
        match message:
            case PeerFrame():
                self.frames.append(message)
            case PeerAlive(peer):
                self.alive.append(peer)
            case PeerLost():
                self.lost.append(message)


class Pair:
    def __init__(self) -> None:
        self.p_engine, self.d_engine = Engine(), Engine()
        self.client = HandoffClient(self.p_engine)
        self.client.identity = P
        self.servicer = HandoffServicer(kv_pb2.WorkerIdentity(worker_id="d", incarnation=8), self.d_engine)
        self.servicer.not_ready = None
        self.address = ""

    def peer(self, incarnation: int = 8) -> str:
        return Peer("d", incarnation, self.address).encode()

    def send(self, transfer_id: str, incarnation: int = 8) -> None:
        payload = worker_pb2.HandoffFrame(transfer_id=transfer_id, done=worker_pb2.Done()).SerializeToString()
        self.client.send(PeerFrame(self.peer(incarnation), payload))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    server, port = await serve([pair.servicer], "127.0.0.1", 0)
    pair.address = f"127.0.0.1:{port}"
    yield pair
    await pair.client.close()
    pair.servicer.close_all()
    await server.stop(grace=0.5)
    assert len(pair.client) == len(pair.servicer) == 0


def ids(engine: Engine) -> list[str]:
    return [worker_pb2.HandoffFrame.FromString(frame.payload).transfer_id for frame in engine.frames]


def test_peer_names() -> None:
    peer = Peer("a worker: 1", 7, "[::1]:80")
    assert decode_peer(peer.encode()) == peer


async def test_frames_both_ways_in_order_over_one_stream(pair: Pair) -> None:
    names = [f"t{n}" for n in range(3000)]
    for name in names:
        pair.send(name)
    await eventually(lambda: len(pair.d_engine.frames) == len(names), "all frames arrive")
    assert ids(pair.d_engine) == names
    assert len(pair.servicer) == 1
    (stream,) = {frame.peer for frame in pair.d_engine.frames}
    for frame in pair.d_engine.frames[:10]:
        pair.servicer.send(PeerFrame(stream, frame.payload))
    await eventually(lambda: len(pair.p_engine.frames) == 10, "the answers arrive")
    assert ids(pair.p_engine) == names[:10]
    assert {frame.peer for frame in pair.p_engine.frames} == {pair.peer()}


async def test_heartbeats_are_told_to_both_engines(pair: Pair) -> None:
    pair.send("t")
    await eventually(lambda: len(pair.d_engine.alive) > 2, "P's heartbeats arrive")
    await eventually(lambda: len(pair.p_engine.alive) > 1, "D's heartbeats arrive")


async def test_nobody_there(pair: Pair) -> None:
    payload = worker_pb2.HandoffFrame(transfer_id="t").SerializeToString()
    peer = Peer("x", 1, "127.0.0.1:1").encode()
    pair.client.send(PeerFrame(peer, payload))
    await eventually(lambda: pair.p_engine.lost, "the loss is told")
    assert [lost.peer for lost in pair.p_engine.lost] == [peer]
    assert len(pair.client) == 0


async def test_another_incarnation_answers(pair: Pair) -> None:
    pair.send("t", incarnation=7)
    await eventually(lambda: pair.p_engine.lost, "the loss is told")
    assert "is d/8 now" in pair.p_engine.lost[0].reason
    assert not pair.d_engine.frames


async def test_an_engine_that_is_not_ready_takes_no_stream(pair: Pair) -> None:
    pair.servicer.not_ready = "the engine is starting"
    pair.send("t")
    await eventually(lambda: pair.p_engine.lost, "the loss is told")
    assert "the engine is starting" in pair.p_engine.lost[0].reason
    assert not pair.d_engine.lost


async def test_loss_is_told_once_on_each_side_and_the_next_frame_connects_again(pair: Pair) -> None:
    pair.send("t1")
    await eventually(lambda: pair.d_engine.frames, "the stream is up")
    pair.servicer.close_all()  # D's engine died
    await eventually(lambda: pair.p_engine.lost and pair.d_engine.lost, "both are told")
    pair.send("t2")
    await eventually(lambda: len(pair.d_engine.frames) == 2, "a new stream carries it")
    first, second = pair.d_engine.frames
    assert first.peer != second.peer
    assert [lost.peer for lost in pair.d_engine.lost] == [first.peer]
    pair.client.close_all()  # P's engine died
    await eventually(lambda: len(pair.d_engine.lost) == 2, "D is told")
    assert len(pair.p_engine.lost) == 2


async def test_a_newer_stream_of_a_sender_ends_the_older(pair: Pair) -> None:
    pair.send("t1")
    await eventually(lambda: pair.d_engine.frames, "the stream is up")
    newer = HandoffClient(engine := Engine())
    newer.identity = kv_pb2.WorkerIdentity(worker_id="p", incarnation=6)
    payload = worker_pb2.HandoffFrame(transfer_id="t2").SerializeToString()
    newer.send(PeerFrame(pair.peer(), payload))
    await eventually(lambda: len(pair.d_engine.frames) == 2, "the newer one is up")
    await eventually(lambda: len(pair.d_engine.lost) == 1, "the older one is over")
    await eventually(lambda: pair.p_engine.lost, "the older sender is told")
    pair.send("t3")  # it does not give up; it is refused
    await eventually(lambda: len(pair.p_engine.lost) == 2, "refused")
    assert "stale" in pair.p_engine.lost[1].reason
    assert ids(pair.d_engine) == ["t1", "t2"]
    assert not engine.lost
    await newer.close()


async def test_a_silent_sender_is_lost_within_its_time(pair: Pair) -> None:
    async with open_channel(pair.address) as channel:
        call = worker_pb2_grpc.KVHandoffStub(channel).Stream()  # type: ignore[call-arg]
        await call.write(worker_pb2.HandoffFrames(hello=P))
        await eventually(lambda: len(pair.servicer) == 1, "the stream is up")
        started_s = asyncio.get_running_loop().time()
        await eventually(lambda: pair.d_engine.lost, "it is lost")
        assert asyncio.get_running_loop().time() - started_s > 1.0
        assert "heard nothing" in pair.d_engine.lost[0].reason
        call.cancel()


@pytest.mark.parametrize("first", [worker_pb2.HandoffFrames(), None])
async def test_no_hello_no_stream(pair: Pair, first: worker_pb2.HandoffFrames | None) -> None:
    async with open_channel(pair.address) as channel:
        call = worker_pb2_grpc.KVHandoffStub(channel).Stream()  # type: ignore[call-arg]
        if first is not None:
            await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError, match="hello"):
            await call.read()
    assert not pair.d_engine.lost
