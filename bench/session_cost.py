"""What streaming costs where no model runs: CPU of the router for a token, of the gateway for a streamed chunk.

    python -m bench.session_cost router  [--streams 256 --rate 20000 --seconds 10]
    python -m bench.session_cost gateway [--streams 256 --rate 4000 --seconds 10] [--workers 2]

The measured process is the real one, alone on a core; around it, on the others, are processes that cost as little as
can be, because they must not be what limits:

    router    fake gateway (one session) ==> [router] ==> emitter (a prefill and a decode worker without engines)
    gateway   raw HTTP clients, SSE      ==> [gateway] ==> emitter (a router without workers)

The emitter gives every stream one token a step, ``rate / streams`` steps a second, in one frame a step: an open loop,
so a process that cannot keep up shows as a rate that was not reached. Reported is the CPU time of the process, all its
threads, over the tokens that arrived meanwhile: where it is under 1 s / rate, one core carries the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import psutil
import uvloop

from pdserve.channel import serve
from pdserve.identity import new_identity
from pdserve.model_store import prepare_default_model
from pdserve.redis_server import redis_argv, redis_binary
from pdserve.session import Session
from pdserve.session_server import ServerSession, SessionServer
from pdserve.v1 import inference_pb2 as pb
from registry import WorkerRecord, WorkerRegistry

START_TIMEOUT_S = 60.0
SETTLE_S = 1.0
PROMPT = list(range(100, 164))
WORDS = [1000 + i for i in range(97)]
"""Token ids to emit: ordinary words of the default model."""


# ---- the emitter: whatever is opened here gets a token a step


class Emitter:
    """Handler of SessionServers. A prefill worker's request ends at once, everything else streams."""

    def __init__(self, steps_per_s: float) -> None:
        self._step_s = 1 / steps_per_s
        self._open: dict[ServerSession, dict[str, int]] = {}
        """Tokens left."""

    def open(self, session: ServerSession, request: pb.GenerateRequest) -> None:
        if request.handoff.side == pb.Handoff.SIDE_SEND:
            session.send([pb.Output(request_id=request.request_id, finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))])
        else:
            self._open.setdefault(session, {})[request.request_id] = request.sampling.max_tokens

    def abort(self, session: ServerSession, request_id: str, reason: str) -> None:
        self._open.get(session, {}).pop(request_id, None)

    def session_lost(self, session: ServerSession, request_ids: list[str]) -> None:
        self._open.pop(session, None)

    async def run(self) -> None:
        """Steps for ever, at their times: a late step is followed by the next at once."""
        next_s = time.monotonic()
        step = 0
        while True:
            next_s = max(next_s + self._step_s, time.monotonic() - 0.2)
            await asyncio.sleep(next_s - time.monotonic())
            step += 1
            token_ids = [WORDS[step % len(WORDS)]]
            for session, requests in self._open.items():
                session.send(list(self._outputs(requests, token_ids)))

    def _outputs(self, requests: dict[str, int], token_ids: list[int]) -> Iterator[pb.Output]:
        for request_id, left in list(requests.items()):
            output = pb.Output(request_id=request_id, token_ids=token_ids)
            if left == 1:
                del requests[request_id]
                output.finish.reason = pb.FINISH_REASON_LENGTH
            else:
                requests[request_id] = left - 1
            yield output


async def emit(roles: list[str], redis_url: str, steps_per_s: float) -> None:
    """A process of its own: says its ports on stdout, runs until stdin is closed."""
    emitter = Emitter(steps_per_s)
    ports = {}
    records = []
    servers = []  # kept: a collected server stops
    for role in roles:
        identity = new_identity(role, f"{role}-0")
        sessions = SessionServer(identity, emitter, load=lambda: pb.Load(total_blocks=10**6, free_blocks=10**6))
        server, ports[role] = await serve([sessions], "127.0.0.1", 0)
        servers.append(server)
        identity.address = f"127.0.0.1:{ports[role]}"
        records.append(
            WorkerRecord(
                worker_id=identity.worker_id,
                role=role,
                address=identity.address,
                incarnation=identity.incarnation,
                fingerprint="none",
                model="none",
                max_model_len=1 << 20,
                pool_tokens=1 << 30,
                hash_block_tokens=16,
            )
        )
    if redis_url:
        registry = WorkerRegistry(redis_url)
        for record in records:
            await registry.heartbeat(record, 3600.0)
        await registry.close()
    print(json.dumps(ports), flush=True)
    steps = asyncio.create_task(emitter.run())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    steps.cancel()


# ---- the measurement


@dataclass
class Count:
    """What arrived, counted by whoever reads it."""

    tokens: int = 0
    done: int = 0


async def measure(pids: list[int], count: Count, seconds: float) -> dict[str, float]:
    """CPU time of the processes and tokens that arrived in the same time."""
    await asyncio.sleep(SETTLE_S)
    processes = [psutil.Process(pid) for pid in pids]
    cpu_s, tokens, begin_s = _cpu_s(processes), count.tokens, time.monotonic()
    await asyncio.sleep(seconds)
    cpu_s, tokens, wall_s = _cpu_s(processes) - cpu_s, count.tokens - tokens, time.monotonic() - begin_s
    return {
        "tokens_per_s": tokens / wall_s,
        "cores_used": cpu_s / wall_s,
        "cpu_us_per_token": 1e6 * cpu_s / max(tokens, 1),
        "tokens_per_s_of_a_core": tokens / cpu_s,
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure_router(arguments: argparse.Namespace) -> dict[str, float]:
    """A fake gateway's session, whose requests only count."""
    steps_per_s = arguments.rate / arguments.streams
    with tempfile.TemporaryDirectory(prefix="pdserve") as folder, contextlib.ExitStack() as stack:
        url = f"unix://{folder}/redis.sock"
        stack.enter_context(_child(redis_argv(redis_binary(), Path(folder) / "redis.sock"), stdout=subprocess.DEVNULL))
        await _until((Path(folder) / "redis.sock").exists)
        stack.enter_context(_emitter("prefill,decode", url, steps_per_s))
        port, metrics_port = _free_port(), _free_port()
        flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--redis", url, "--policy", "least_loaded"]
        flags += ["--local-prefill-tokens", "0"]
        router = stack.enter_context(
            _child([sys.executable, "-m", "router", *flags, "--min-prefill-workers", "1", "--log-level", "error"])
        )
        _alone_on_a_core([router.pid])
        await _until(lambda: _is_healthy(metrics_port))
        session = await Session.connect(f"127.0.0.1:{port}", new_identity("gateway", "bench"))
        count = Count()
        max_tokens = int(steps_per_s * (arguments.seconds + SETTLE_S) * 4)
        readers = [asyncio.create_task(_count(session, f"q{i}", max_tokens, count)) for i in range(arguments.streams)]
        await _until(lambda: count.tokens >= arguments.streams)
        result = await measure([router.pid], count, arguments.seconds)
        assert not count.done, "a stream ended before its time: the log says why"
        for reader in readers:
            reader.cancel()
        await session.close()
        return result


async def _count(session: Session, request_id: str, max_tokens: int, count: Count) -> None:
    request = pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=pb.SamplingParams(max_tokens=max_tokens),
        timeout_s=600,
    )
    async for output in session.open(request, max_buffered_outputs=1 << 16):
        count.tokens += len(output.token_ids)
    count.done += 1


async def measure_gateway(arguments: argparse.Namespace) -> dict[str, float]:
    """Raw sockets that count SSE events: an event is a chunk is a token here."""
    steps_per_s = arguments.rate / arguments.streams
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(_emitter("router", "", steps_per_s))
        port = _free_port()
        flags = ["--model", str(prepare_default_model()), "--served-model-name", "m", "--port", str(port)]
        flags += ["--router", f"127.0.0.1:{ports['router']}"]
        if arguments.workers > 1:
            flags += ["--workers", str(arguments.workers)]
        gateway = stack.enter_context(_child([sys.executable, "-m", "gateway", *flags], stderr=subprocess.DEVNULL))
        await _until(lambda: _is_healthy(port))
        pids = [gateway.pid, *(child.pid for child in psutil.Process(gateway.pid).children())]
        if arguments.workers == 1:
            _alone_on_a_core(pids)
        count = Count()
        max_tokens = int(steps_per_s * (arguments.seconds + SETTLE_S) * 4)
        loop = asyncio.get_running_loop()
        body = orjson.dumps(
            {"model": "m", "prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        transports = []
        for _ in range(arguments.streams):
            transport, _ = await loop.create_connection(lambda: EventCounter(count), "127.0.0.1", port)
            transport.write(head + body)
            transports.append(transport)
        await _until(lambda: count.tokens >= arguments.streams)
        result = await measure(pids, count, arguments.seconds)
        assert not count.done, "a stream ended before its time"
        for transport in transports:
            transport.abort()
        return result


class EventCounter(asyncio.Protocol):
    """Counts the events of one response and keeps nothing."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def data_received(self, data: bytes) -> None:
        self._count.tokens += data.count(b"data: {")

    def connection_lost(self, error: Exception | None) -> None:
        self._count.done += 1


# ---- processes


@contextlib.contextmanager
def _child(command: list[str], **options: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _emitter(roles: str, redis_url: str, steps_per_s: float) -> Iterator[dict[str, int]]:
    command = [sys.executable, "-m", "bench.session_cost", "emit", "--roles", roles, "--redis", redis_url]
    command += ["--steps-per-s", str(steps_per_s)]
    with _child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


def _alone_on_a_core(pids: list[int]) -> None:
    """The measured process on the first core, this one and the emitter on the others, if there are others."""
    cores = psutil.Process().cpu_affinity() or []
    if len(cores) < 2:
        return
    measured = [psutil.Process(pid) for pid in pids]
    own = psutil.Process()
    for process in [own, *own.children()]:
        process.cpu_affinity(cores[1:])
    for process in measured:
        for thread in process.threads():  # those that run already have their own
            os.sched_setaffinity(thread.id, cores[:1])
        process.cpu_affinity(cores[:1])


def _is_healthy(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    return False


async def _until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not check():  # noqa: ASYNC110  # what it waits for is in other processes
            await asyncio.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, rate in (("router", 20_000.0), ("gateway", 4_000.0)):
        part = parts.add_parser(name)
        part.add_argument("--streams", type=int, default=256)
        part.add_argument("--rate", type=float, default=rate, help="tokens/s of all streams together")
        part.add_argument("--seconds", type=float, default=10.0)
        part.add_argument("--workers", type=int, default=1, help="gateway processes")
    part = parts.add_parser("emit", help="the other side; started by the two above")
    part.add_argument("--roles", required=True)
    part.add_argument("--redis", default="")
    part.add_argument("--steps-per-s", type=float, required=True)
    arguments = parser.parse_args()
    if arguments.part == "emit":
        uvloop.run(emit(arguments.roles.split(","), arguments.redis, arguments.steps_per_s))
        return 0
    measured = measure_router if arguments.part == "router" else measure_gateway
    result = uvloop.run(measured(arguments))
    print(json.dumps({"part": arguments.part, "streams": arguments.streams, "rate": arguments.rate, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
