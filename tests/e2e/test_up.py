"""``pdserve up`` for real: the first answer, the drawing, restarts, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.up.plan import free_ports
from tests.e2e.cluster import wait_until

START_TIMEOUT_S = 120.0
SMALL = ("--kv-cache-bytes", str(128 << 20))


@dataclass
class Up:
    """A running ``pdserve up`` and what it printed."""

    process: subprocess.Popen[bytes]
    port: int
    output_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def wait_serving(self) -> None:
        def serving() -> bool:
            assert self.process.poll() is None, self.output
            return "Ctrl-C stops everything." in self.output

        wait_until("pdserve up serves", serving, START_TIMEOUT_S)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        """The process of a worker, by its worker id."""
        return next(p for p in psutil.Process(self.process.pid).children() if name in p.cmdline())

    def serves(self, answer: str) -> bool:
        """Whether it gives this answer: a router that has not met everybody yet refuses."""
        try:
            return self.ask() == answer
        except AssertionError:
            return False

    def ask(self) -> str:
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "In one sentence, what is a lighthouse?"}],
            "temperature": 0,
            "max_tokens": 40,
        }
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


@contextmanager
def running_up(tmp_path: Path, *flags: str) -> Iterator[Up]:
    port, grpc_port = free_ports(2)
    argv = [sys.executable, "-m", "pdserve.cli", "up", "--port", str(port), "--grpc-port", str(grpc_port)]
    argv += [*SMALL, *flags]
    output_file = tmp_path / "output"
    with output_file.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield Up(process, port, output_file)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def port_flags() -> list[str]:
    port, grpc_port = free_ports(2)
    return ["--port", str(port), "--grpc-port", str(grpc_port)]


def fail_up(*flags: str, **environment: str) -> str:
    """Run an ``up`` that cannot start; the one line that it says."""
    argv = [sys.executable, "-m", "pdserve.cli", "up", *SMALL, *flags]
    result = subprocess.run(
        argv, capture_output=True, text=True, timeout=START_TIMEOUT_S, env={**os.environ, **environment}, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.startswith("pdserve: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def drain(worker: str) -> subprocess.CompletedProcess[str]:
    """Of the cluster that runs here, whichever Redis it has."""
    argv = [sys.executable, "-m", "pdserve.cli", "drain", worker]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def wait_gone(processes: list[psutil.Process]) -> None:
    def alive() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    wait_until("no process is left", lambda: not alive())


def test_first_answer_drawing_and_ctrl_c(tmp_path: Path) -> None:
    with running_up(tmp_path) as up:
        up.wait_serving()
        output = up.output
        for child in ("redis", "prefill-0", "decode-0", "router", "gateway"):
            assert re.search(rf"{child} ready \d+\.\d s", output), output
        answer = output.split("model  ", 1)[1].split("\n\n", 1)[0]
        assert "lighthouse" in answer.lower()
        for phase in ("tokenize", "route", "prefill queue", "hand-off wait", "exposed transfer", "relay", "rest"):
            assert re.search(rf"{phase}\s.*ms\s+-?\d+\.\d%", output), output
        assert re.search(r"KV of \d{2,} tokens\s+handed off", output), (
            "the prompt went through prefill and decode apart"
        )
        assert f"curl -N {up.url}/v1/chat/completions" in output
        descendants = up.descendants()
        assert len(descendants) == 7  # five children, and the engine process of each worker
        assert up.ask() == answer.strip()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=60) == 0
        assert "Stopped 5 processes." in up.output
        wait_gone(descendants)


def test_the_phases_add_up_to_the_time_to_the_first_token(tmp_path: Path) -> None:
    with running_up(tmp_path, "--no-chat") as up:
        up.wait_serving()
        up.ask()
        response = httpx.post(
            f"{up.url}/v1/completions",
            json={"model": "smollm2-135m-instruct", "prompt": "The sea is", "max_tokens": 4},
            timeout=60,
        )
        times = httpx.get(f"{up.url}/debug/requests/{response.headers['x-request-id']}", timeout=5).json()
        assert sum(times["phases"].values()) == pytest.approx(times["ttft_s"], abs=1e-6)
        assert all(value >= 0 for name, value in times["phases"].items() if name != "rest_s")


@pytest.mark.faults
def test_a_killed_worker_comes_back_and_a_killed_up_leaves_nothing(tmp_path: Path) -> None:
    with running_up(tmp_path, "--no-chat") as up:
        up.wait_serving()
        answer = up.ask()
        old = up.child("decode-0")
        old_engine = old.children()
        old.kill()
        wait_until("decode-0 is ready again", lambda: up.output.count("decode-0 ready") == 2, START_TIMEOUT_S)
        assert "decode-0 restarting was ended by SIGKILL; again in 0.5 s; log: " in up.output
        wait_gone([old, *old_engine])
        wait_until("it serves again", lambda: up.serves(answer), 60)
        drained = drain("prefill-0")
        assert "prefill-0 is drained" in drained.stdout, drained.stderr
        wait_until("prefill-0 is ready again", lambda: up.output.count("prefill-0 ready") == 2, START_TIMEOUT_S)
        descendants = up.descendants()
        up.process.kill()
        wait_gone(descendants)


def test_aggregated_once(tmp_path: Path) -> None:
    with running_up(tmp_path, "--aggregated", "--once") as up:
        assert up.process.wait(timeout=START_TIMEOUT_S) == 0
        assert "KV of 0 tokens" in up.output
        assert "Stopped 4 processes." in up.output


def test_sigterm_while_starting(tmp_path: Path) -> None:
    with running_up(tmp_path) as up:
        wait_until("the workers run", lambda: len(up.descendants()) >= 5)
        descendants = up.descendants()
        up.process.terminate()
        assert up.process.wait(timeout=60) == 0
        wait_gone(descendants)


def test_a_child_that_dies_while_starting_is_one_line(model_dir: Path, tmp_path: Path) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text()) | {"architectures": ["NoSuchModelForCausalLM"]}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = fail_up(*port_flags(), "--model", str(tmp_path))
    named = re.search(
        r"(prefill-0|decode-0) exited with \d+ while starting: .*NoSuchModelForCausalLM.*; its log: (\S+)\n$", line
    )
    assert named, line
    assert "NoSuchModelForCausalLM" in Path(named[2]).read_text()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "is in use" in fail_up("--port", str(server.getsockname()[1]))


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "set PDSERVE_CACHE" in fail_up(*port_flags(), PDSERVE_CACHE=str(tmp_path / "file"))


def test_too_little_memory_is_one_line() -> None:
    line = fail_up(*port_flags(), "--prefill", "4", "--kv-cache-bytes", str(1 << 50))
    assert "too little memory: 5 engines" in line
