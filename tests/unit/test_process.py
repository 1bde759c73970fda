"""A real engine process over real sockets; only the model is a fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from engine.messages import (
    AbortRequests,
    Drain,
    EngineFailed,
    EngineReady,
    FinishReason,
    FromEngine,
    PeerAlive,
    PeerFrame,
    PeerLost,
    RequestOutput,
    StepOutputs,
    ToEngine,
)
from tests.unit.fake_runner import make_message, oracle

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


class Service:
    """The service's end of the sockets, and the child."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.addresses = [f"ipc://{directory}/to", f"ipc://{directory}/from"]
        self.outbox, self.inbox = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.outbox.bind(self.addresses[0])
        self.inbox.bind(self.addresses[1])
        self.inbox.rcvtimeo = int(PATIENCE_S * 1000)
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, *fault: str, parent_pid: int | None = None) -> None:
        arguments = [*self.addresses, str(parent_pid or os.getpid()), *fault]
        command = [sys.executable, "-m", "tests.unit.fake_engine_main", *arguments]
        self.child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.outbox.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        return msgspec.msgpack.decode(self.inbox.recv(), type=FromEngine)

    def outputs_until(self, *request_ids: str) -> dict[str, list[RequestOutput]]:
        """All outputs until these requests have ended."""
        outputs: dict[str, list[RequestOutput]] = {request_id: [] for request_id in request_ids}
        missing = set(request_ids)
        while missing:
            message = self.receive()
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                outputs[output.request_id].append(output)
                if output.finish_reason is not None:
                    missing.remove(output.request_id)
        return outputs

    def frame(self) -> PeerFrame:
        while not isinstance(message := self.receive(), PeerFrame):
            assert isinstance(message, StepOutputs)
        return message

    def exit_code(self) -> int:
        assert self.child is not None
        return self.child.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait(timeout=PATIENCE_S)
        self.context.destroy(linger=0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    # Unix socket paths are short; pytest's directories may not be.
    service = Service(Path(os.path.relpath(tmp_path, ROOT)) if len(str(tmp_path)) > 80 else tmp_path)
    yield service
    service.close()


@pytest.fixture
def engine(service: Service) -> Service:
    service.start()
    assert isinstance(service.receive(), EngineReady)
    return service


def test_requests_run_and_the_stats_are_there_at_the_end(engine: Service) -> None:
    added = [make_message(f"r{i}", [i, 1, 2], 6, ignore_eos=True) for i in range(5)]
    engine.send(*added)
    outputs = engine.outputs_until(*(message.request_id for message in added))
    for message in added:
        tokens = [token for output in outputs[message.request_id] for token in output.token_ids]
        assert tokens == oracle(message, 64)[0]
    while (stats := getattr(engine.receive(), "stats", None)) is None:
        pass
    assert (stats.running, stats.generation_tokens_total, stats.leases) == (0, 30, 42)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 16


def test_the_runner_rests_once_when_nothing_is_left_to_do(engine: Service) -> None:
    """So that other engines on the host get its cores at once, and not in the middle of its work."""
    for n in range(1, 4):
        engine.send(make_message(f"r{n}", [n, 1, 2], 30, ignore_eos=True))
        engine.outputs_until(f"r{n}")
        seen: list[int] = []
        while len(seen) < 2:
            if (stats := getattr(engine.receive(), "stats", None)) is not None and not stats.running:
                seen.append(stats.tombstones)
        assert seen[-1] == n


def test_an_idle_engine_beats_and_sleeps(engine: Service) -> None:
    assert engine.child is not None
    process = psutil.Process(engine.child.pid)
    engine.receive()
    before_s = process.cpu_times().user
    for _ in range(4):
        message = engine.receive()
        assert isinstance(message, StepOutputs)
        assert message.stats is not None
        assert not message.outputs
    # Two seconds of spinning would be two seconds of CPU.
    assert process.cpu_times().user - before_s < 0.5


def test_abort_deadline_and_drain_are_answered(engine: Service) -> None:
    long = {"max_tokens": 60, "ignore_eos": True}
    engine.send(make_message("late", [1], timeout_s=0.0, **long))  # type: ignore[arg-type]
    assert engine.outputs_until("late")["late"][-1].finish_reason is FinishReason.TIMEOUT
    assert engine.child is not None
    engine.child.send_signal(signal.SIGSTOP)  # or all of it might be computed before the abort is there
    engine.send(make_message("gone", [1], **long), AbortRequests(["gone"], "stop"))  # type: ignore[arg-type]
    engine.child.send_signal(signal.SIGCONT)
    assert engine.outputs_until("gone")["gone"][-1].finish_reason is FinishReason.ABORT
    engine.send(Drain(), make_message("given back", [1]))
    [answer] = engine.outputs_until("given back")["given back"]
    assert (answer.finish_reason, answer.token_ids) == (FinishReason.ABORT, [])


def test_frames_go_through_and_a_thread_can_wake_the_loop(engine: Service) -> None:
    engine.send(PeerFrame("p1", b"abc"))
    assert engine.frame() == PeerFrame("p1", b"cba")
    engine.send(PeerAlive("p1"), PeerLost("p1", "silence"))
    assert [engine.frame().payload, engine.frame().payload] == [b"alive", b"lost: silence"]


def test_frames_go_through_while_a_step_runs(service: Service) -> None:
    service.start("lagging")
    assert isinstance(service.receive(), EngineReady)
    message = make_message("r", [1, 2, 3], 4, ignore_eos=True)
    service.send(message, PeerFrame("p1", b"abc"))  # its answer is there a while after the step is launched
    assert service.frame() == PeerFrame("p1", b"cba")
    service.send(PeerFrame("p1", b"def"))
    assert service.frame() == PeerFrame("p1", b"fed")
    service.send(make_message("gone", [4, 5], 4), AbortRequests(["gone"], "client"))
    assert service.outputs_until("gone")["gone"][-1].finish_reason is FinishReason.ABORT
    service.send(PeerLost("p1", "silence"))  # the device's step is over
    assert service.frame().payload == b"lost: silence"
    outputs = service.outputs_until("r")["r"]
    assert [token for output in outputs for token in output.token_ids] == oracle(message, 64)[0]


def test_sigterm_ends_it_well(engine: Service) -> None:
    assert engine.child is not None
    engine.child.send_signal(signal.SIGINT)  # Ctrl-C in the terminal is the service's business
    engine.child.terminate()
    assert engine.exit_code() == 0


def test_a_failed_step_says_so_in_one_line_and_ends_the_process(engine: Service) -> None:
    engine.send(make_message("poison", [13, 13]))
    while isinstance(message := engine.receive(), StepOutputs):
        pass
    assert message == EngineFailed("RuntimeError: the device is on fire")
    assert engine.exit_code() == 1


def test_a_message_that_cannot_be_read_ends_the_process(engine: Service) -> None:
    engine.outbox.send(b"\xc1")
    while isinstance(message := engine.receive(), StepOutputs):
        pass
    assert isinstance(message, EngineFailed)
    assert engine.exit_code() == 1


def test_a_failed_start_says_why(service: Service) -> None:
    service.start("no such model: give --model a directory")
    assert service.receive() == EngineFailed("ValueError: no such model: give --model a directory")
    assert service.exit_code() == 1


def test_it_does_not_start_for_a_parent_that_is_gone(service: Service) -> None:
    service.start(parent_pid=1 << 22)
    assert service.exit_code() == 1


def test_it_dies_with_its_service(service: Service) -> None:
    code = (
        "import os, subprocess, sys, time;"
        "command = [sys.executable, '-m', 'tests.unit.fake_engine_main', *sys.argv[1:], str(os.getpid())];"
        "child = subprocess.Popen(command); print(child.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, *service.addresses]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        assert isinstance(service.receive(), EngineReady)
        parent.kill()
    psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_a_thread_may_wake_it_after_its_end(tmp_path: Path) -> None:
    """Threads of the hand-off outlive the loop for a moment: what they ring must still be the engine's own file."""
    from engine.process import EngineProcess  # here only: it is what runs in the other process

    process = EngineProcess(
        to_engine=f"ipc://{tmp_path}/to", from_engine=f"ipc://{tmp_path}/from", parent_pid=os.getppid()
    )
    process._close()  # the end of ``run``, which would make this process die with its parent
    process.wakeup()
