"""Requests between sessions and the engine: each ends exactly once, whoever goes first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from engine.messages import AbortRequests, AddRequest, EngineStats, FinishReason, RequestOutput, StepOutputs, Timings
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import kv_pb2
from telemetry.metrics import WorkerMetrics
from worker.service import WorkerService


@dataclass(eq=False)
class FakeSession:
    name: str
    sent: list[list[pb.Output]] = field(default_factory=list)

    @property
    def peer(self) -> kv_pb2.WorkerIdentity:
        return kv_pb2.WorkerIdentity(worker_id=self.name, incarnation=1)

    def send(self, outputs: list[pb.Output]) -> None:
        self.sent.append(list(outputs))

    @property
    def finishes(self) -> dict[str, list[pb.Finish]]:
        found: dict[str, list[pb.Finish]] = defaultdict(list)
        for outputs in self.sent:
            for output in outputs:
                if output.HasField("finish"):
                    found[output.request_id].append(output.finish)
        return found


class Rig:
    def __init__(self) -> None:
        self.engine_up = True
        self.to_engine: list[AddRequest | AbortRequests] = []
        self.registry = CollectorRegistry()
        self.service = WorkerService(self.take, WorkerMetrics(self.registry))

    def take(self, message: AddRequest | AbortRequests) -> bool:
        if self.engine_up:
            self.to_engine.append(message)
        return self.engine_up

    def open(self, session: FakeSession, request_id: str, **changed: object) -> str:
        """Returns the engine's id."""
        values: dict[str, object] = {
            "prompt_token_ids": [1],
            "timeout_s": 5.0,
            "sampling": pb.SamplingParams(max_tokens=4),
        }
        request = pb.GenerateRequest(request_id=request_id, **(values | changed))  # type: ignore[arg-type]
        self.service.open(session, request)  # type: ignore[arg-type]
        last = self.to_engine[-1] if self.to_engine else None
        return last.request_id if isinstance(last, AddRequest) else ""


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_one_frame_per_session_and_step(rig: Rig) -> None:
    a, b = FakeSession("a"), FakeSession("b")
    ids = [rig.open(session, request_id) for session in (a, b) for request_id in ("x", "y")]
    assert len(set(ids)) == 4  # the same names on two sessions are two requests
    rig.service.take(StepOutputs([RequestOutput(request_id=name, token_ids=[n]) for n, name in enumerate(ids)]))
    assert [[(o.request_id, list(o.token_ids)) for o in frame] for frame in a.sent] == [[("x", [0]), ("y", [1])]]
    assert [[(o.request_id, list(o.token_ids)) for o in frame] for frame in b.sent] == [[("x", [2]), ("y", [3])]]


def test_the_first_tokens_carry_the_worker_s_time(rig: Rig) -> None:
    session = FakeSession("a")
    name = rig.open(session, "x")
    rig.service.take(StepOutputs([RequestOutput(request_id=name, token_ids=[5], timings=Timings(prefill_s=0.5))]))
    rig.service.take(StepOutputs([RequestOutput(request_id=name, token_ids=[6])]))
    first, second = session.sent[0][0], session.sent[1][0]
    assert first.phases.worker_s > 0
    assert first.phases.prefill_s == 0.5
    assert not second.HasField("phases")


def test_a_request_is_forgotten_when_it_ended(rig: Rig) -> None:
    session = FakeSession("a")
    name = rig.open(session, "x")
    end = RequestOutput(request_id=name, token_ids=[5], finish_reason=FinishReason.STOP)
    rig.service.take(StepOutputs([end]))
    rig.service.take(StepOutputs([end]))
    assert len(session.finishes["x"]) == 1
    assert rig.service.num_open == 0
    assert rig.registry.get_sample_value("vllm:request_success_total", {"finished_reason": "stop"}) == 1


def test_abort_reaches_the_engine_and_nothing_comes_back(rig: Rig) -> None:
    session = FakeSession("a")
    name = rig.open(session, "x")
    rig.service.abort(session, "x", "client")  # type: ignore[arg-type]
    assert rig.to_engine[-1] == AbortRequests([name], "client")
    rig.service.take(StepOutputs([RequestOutput(request_id=name, finish_reason=FinishReason.ABORT)]))
    assert not session.sent
    rig.service.abort(session, "x", "client")  # type: ignore[arg-type]  # again: the engine need not know
    assert len(rig.to_engine) == 2


def test_a_lost_session_aborts_its_requests_only(rig: Rig) -> None:
    a, b = FakeSession("a"), FakeSession("b")
    names = [rig.open(a, "x"), rig.open(a, "y")]
    rig.open(b, "x")
    rig.service.session_lost(a, ["x", "y"])  # type: ignore[arg-type]
    assert rig.to_engine[-1] == AbortRequests(names, "session lost")
    assert rig.service.num_open == 1


def test_a_lost_engine_ends_everything_as_retryable(rig: Rig) -> None:
    session = FakeSession("a")
    rig.open(session, "x")
    rig.open(session, "y")
    rig.service.engine_lost("it exploded")
    assert set(session.finishes) == {"x", "y"}
    for finish in (finishes[0] for finishes in session.finishes.values()):
        assert finish.failure.code == pb.ERROR_CODE_WORKER_LOST
        assert finish.failure.retryable
        assert "it exploded" in finish.failure.message
    assert rig.service.num_open == 0
    assert rig.service.load().total_blocks == 0


def test_while_the_engine_starts_requests_are_sent_elsewhere(rig: Rig) -> None:
    rig.engine_up = False
    session = FakeSession("a")
    rig.open(session, "x")
    (finish,) = session.finishes["x"]
    assert finish.failure.code == pb.ERROR_CODE_WORKER_LOST
    assert finish.failure.retryable


def test_an_impossible_request_is_answered(rig: Rig) -> None:
    session = FakeSession("a")
    rig.open(session, "x", prompt_token_ids=[])
    (finish,) = session.finishes["x"]
    assert finish.failure.code == pb.ERROR_CODE_INVALID_REQUEST
    assert not finish.failure.retryable
    assert not rig.to_engine


def test_load_is_the_engine_s_last_word(rig: Rig) -> None:
    stats = EngineStats(
        running=2, waiting=1, waiting_for_kv=3, queued_tokens=7, free_blocks=4, cached_blocks=5, total_blocks=20
    )
    rig.service.take(StepOutputs(stats=stats))
    assert rig.service.load() == pb.Load(running=2, waiting=4, queued_tokens=7, free_blocks=9, total_blocks=20)
