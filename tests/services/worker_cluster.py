"""Real prefill and decode services as processes, and a stand-in for the router that dispatches to a pair of them."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.identity import new_identity
from pdserve.session import Handle, Session
from pdserve.v1 import inference_pb2 as pb
from tests.e2e.cluster import Member, leaks, wait_until
from tests.ports import free_port
from tests.services.processes import RedisProcess
from tests.services.tiny_model import VOCAB


@functools.cache
def redis_url() -> str:
    """Of a Valkey for all workers of a test run, which ends with it: a worker that is not registered is not ready."""
    folder = Path(tempfile.mkdtemp(prefix="pdserve-workers-"))
    redis = RedisProcess(folder)
    redis.start()
    atexit.register(shutil.rmtree, folder)
    atexit.register(redis.kill)  # before the folder goes
    return redis.url


def start_worker(module: str, worker_id: str, model: Path, log_dir: Path, *flags: str) -> Member:
    """Not waited for: ``wait_healthy`` does that."""
    port, metrics_port = free_port(), free_port()
    argv = [sys.executable, "-m", module, "--model", str(model), "--worker-id", worker_id, "--port", str(port)]
    argv += ["--metrics-port", str(metrics_port), "--redis", redis_url(), "--num-threads", "1"]
    member = Member(worker_id, [*argv, *flags], log_dir / f"{worker_id}.log", metrics_port, port)
    member.start()
    return member


def assert_at_rest(*members: Member) -> None:
    """Nothing is held: no blocks, leases, staging or waiting requests."""
    for member in members:
        wait_until(f"{member.name} at rest: {leaks(member)}", lambda member=member: not leaks(member))  # type: ignore[misc]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(3, VOCAB) for _ in range(length)]


@dataclass
class Answer:
    """What one side said about a request."""

    token_ids: list[int] = field(default_factory=list)
    finish: pb.Finish | None = None
    first: pb.Output | None = None
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)

    @property
    def code(self) -> str:
        return pb.ErrorCode.Name(self.finish.failure.code) if self.finish is not None else ""

    @property
    def reason(self) -> str:
        return pb.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_") if self.finish else ""


async def read(handle: Handle) -> Answer:
    answer = Answer()
    async for output in handle:
        if output.token_ids and answer.first is None:
            answer.first = output
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs
        if output.HasField("finish"):
            answer.finish = output.finish
    return answer


class Router:
    """Sessions to a prefill and a decode worker; chooses nothing, retries nothing."""

    def __init__(self, prefill: Session, decode: Session) -> None:
        self.prefill = prefill
        self.decode = decode
        self._name = f"{random.getrandbits(64):x}"  # transfer ids are unique in the fleet, for ever
        self._count = 0

    def request(self, prompt: list[int], **changed: object) -> pb.GenerateRequest:
        self._count += 1
        sampling = {"max_tokens": 8, "top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": True}
        values: dict[str, object] = {"timeout_s": 60.0}
        for name, value in changed.items():
            (values if name in ("timeout_s", "output_so_far", "cache_salt") else sampling)[name] = value
        return pb.GenerateRequest(
            request_id=f"{self._name}-{self._count}",
            prompt_token_ids=prompt,
            sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
            **values,  # type: ignore[arg-type]
        )

    def sides(self, request: pb.GenerateRequest, attempt: int = 1) -> tuple[pb.GenerateRequest, pb.GenerateRequest]:
        """The same request for P and for D."""
        out = []
        for side, peer in (
            (pb.Handoff.SIDE_SEND, self.decode.peer),
            (pb.Handoff.SIDE_RECEIVE, self.prefill.peer),
        ):
            copy = pb.GenerateRequest()
            copy.CopyFrom(request)
            copy.request_id = f"{request.request_id}/{attempt}"
            transfer = f"transfer of {request.request_id}"
            copy.handoff.CopyFrom(pb.Handoff(side=side, transfer_id=transfer, attempt=attempt, peer=peer))
            out.append(copy)
        return out[0], out[1]

    def open(self, prompt: list[int], **changed: object) -> tuple[Handle, Handle]:
        """(P's handle, D's handle)"""
        to_p, to_d = self.sides(self.request(prompt, **changed))
        decode = self.decode.open(to_d)
        return self.prefill.open(to_p), decode

    async def apart(self, prompt: list[int], **changed: object) -> tuple[Answer, Answer]:
        """(P's answer, D's answer)"""
        prefill, decode = self.open(prompt, **changed)
        return await read(prefill), await read(decode)

    async def aggregated(self, prompt: list[int], **changed: object) -> Answer:
        return await read(self.decode.open(self.request(prompt, **changed)))


@asynccontextmanager
async def routing(prefill: Member, decode: Member) -> AsyncIterator[Router]:
    me = new_identity("router", f"router-{random.random()}")
    p = await Session.connect(f"127.0.0.1:{prefill.port}", me)
    d = await Session.connect(f"127.0.0.1:{decode.port}", me)
    try:
        yield Router(p, d)
    finally:
        await p.close()
        await d.close()
