"""The service's side of an engine process: its lives, its deaths, and what the sessions hear of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engine.messages import AddRequest, EngineReady, PeerFrame, SamplingParams, StepOutputs
from tests.services.fake_engine import EXIT, GARBAGE, HANG, NEVER_ENDS
from tests.services.processes import eventually
from worker.engine_client import EngineClient, EngineLost
from worker.engine_supervisor import EngineSupervisor
from worker.launch import EngineLaunch


def launch(model: str = "ok") -> EngineLaunch:
    return EngineLaunch(
        engine_options={"model": model},
        to_engine="",
        from_engine="",
        parent_pid=0,
        role="decode",
        worker_id="w",
        incarnation=10,
        address="127.0.0.1:1",
        host="127.0.0.1",
        advertised_host="127.0.0.1",
    )


def add(first_token: int, max_tokens: int = 3) -> AddRequest:
    return AddRequest(
        request_id="r", prompt_token_ids=[first_token], sampling=SamplingParams(max_tokens=max_tokens), timeout_s=60
    )


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = EngineClient("tests.services.fake_engine", launch(), silence_s=1.0)
    assert (await client.start()).num_blocks == 8
    yield client
    directory = client.directory
    await client.stop()
    assert not directory.exists()
    assert client.pid is not None
    assert not psutil.pid_exists(client.pid)


async def outputs(client: EngineClient, count: int) -> list[int]:
    tokens: list[int] = []
    async for message in client.messages():
        if isinstance(message, StepOutputs):
            tokens += [token for output in message.outputs for token in output.token_ids]
        if len(tokens) >= count:
            break
    return tokens


async def test_requests_and_frames_go_back_and_forth(client: EngineClient) -> None:
    assert client.send(add(1))
    assert await outputs(client, 3) == [1, 2, 3]
    assert client.send(PeerFrame("peer", b"payload"))
    async for message in client.messages():
        if isinstance(message, PeerFrame):
            assert message == PeerFrame("peer", b"payload")
            break


@pytest.mark.parametrize(
    ("fault", "said"),
    [(EXIT, "status 3"), (HANG, "silent"), (GARBAGE, "cannot be read")],
    ids=["exit", "hang", "garbage"],
)
async def test_a_lost_engine_is_noticed(client: EngineClient, fault: int, said: str) -> None:
    client.send(add(fault))
    with pytest.raises(EngineLost, match=said):
        await outputs(client, 1)


async def test_a_killed_engine_is_noticed_at_once(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="status -9"):
        await asyncio.wait_for(outputs(client, 1), 0.9)  # before the silence would tell


async def test_an_engine_that_cannot_start_says_why() -> None:
    client = EngineClient("tests.services.fake_engine", launch("broken"))
    with pytest.raises(EngineLost, match="use another --model"):
        await client.start()
    await client.stop()


async def test_an_engine_that_never_gets_ready_is_given_up() -> None:
    client = EngineClient("tests.services.fake_engine", launch("mute"))
    with pytest.raises(EngineLost, match="not ready within"):
        await client.start(timeout_s=1.5)
    await client.stop()


async def test_a_module_that_does_not_exist() -> None:
    client = EngineClient("tests.services.no_such_engine", launch())
    with pytest.raises(EngineLost, match="status 1"):
        await client.start()
    await client.stop()


class Listener:
    def __init__(self) -> None:
        self.incarnations: list[int] = []
        self.ready = 0
        self.said: list[StepOutputs | PeerFrame] = []
        self.lost: list[str] = []

    def new_incarnation(self, launch: EngineLaunch) -> None:
        self.incarnations.append(launch.incarnation)

    def engine_ready(self, ready: EngineReady) -> None:
        self.ready += 1

    def engine_said(self, message: StepOutputs | PeerFrame) -> None:
        self.said.append(message)

    def engine_lost(self, reason: str) -> None:
        self.lost.append(reason)


async def test_a_lost_engine_comes_back_as_a_newer_incarnation() -> None:
    others = set(psutil.Process().children())
    listener = Listener()
    supervisor = EngineSupervisor("tests.services.fake_engine", listener, silence_s=5.0)
    assert not supervisor.send(add(1))
    task = asyncio.create_task(supervisor.run(launch()))
    await eventually(lambda: listener.ready == 1, "the engine is ready")
    assert supervisor.send(add(EXIT))
    await eventually(lambda: listener.lost, "its death is told")
    await eventually(lambda: listener.ready == 2, "the next one is ready")
    assert listener.incarnations[0] == 10 < listener.incarnations[1]
    assert supervisor.send(add(NEVER_ENDS))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert supervisor.ready is None
    assert set(psutil.Process().children()) <= others


async def test_a_first_start_that_fails_ends_it() -> None:
    others = set(psutil.Process().children())
    listener = Listener()
    supervisor = EngineSupervisor("tests.services.fake_engine", listener, silence_s=5.0)
    with pytest.raises(EngineLost, match="use another --model"):
        await supervisor.run(launch("broken"))
    assert not listener.lost
    assert set(psutil.Process().children()) <= others


def test_nothing_outlives_a_killed_service(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from tests.services.test_worker_engine import launch\n"
        "from worker.engine_client import EngineClient\n"
        "async def main():\n"
        "    client = EngineClient('tests.services.fake_engine', launch())\n"
        "    await client.start()\n"
        "    print(client.pid, client.directory, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True
    ) as service:
        assert service.stdout is not None
        pid = int(service.stdout.readline().split()[0])
        service.kill()
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the engine lives on"
        time.sleep(0.05)
    assert not list(tmp_path.iterdir()), "a file of its sockets is left"
