"""The gateway as its own process: starts fast without torch, says where it listens, explains why it cannot start."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pdserve.model_store import prepare_default_model
from tests.ports import free_ports_in_a_row

ROOT = Path(__file__).parents[2]


@contextmanager
def gateway(*flags: str, setting: str = "") -> Iterator[subprocess.Popen[str]]:
    """``setting``: what is done to its modules before it starts."""
    start = f"{setting}; import typer; from gateway.__main__ import main; typer.run(main)"
    argv = [sys.executable, *(("-c", start) if setting else ("-m", "gateway")), *flags]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


def log_line(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    assert process.stderr is not None
    for line in process.stderr:
        entry: dict[str, Any] = json.loads(line)
        if entry["event"] == event:
            return entry
    raise AssertionError(f"it ended without saying {event!r}")


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare_default_model()


def test_a_gateway_process(model_dir: Path) -> None:
    flags = ("--model", str(model_dir), "--served-model-name", "small", "--port", "0", "--router", "127.0.0.1:9")
    with gateway(*flags) as process:
        ready = log_line(process, "ready")
        url = f"http://127.0.0.1:{ready['port']}"
        assert httpx.get(f"{url}/live").status_code == 200
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "small"
        mapped = [mapping.path for mapping in psutil.Process(process.pid).memory_maps()]
        assert not any("torch" in path for path in mapped)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_more_clients_than_the_soft_limit_of_open_files(model_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # inherited
    try:
        started = gateway("--model", str(model_dir), "--port", "0", "--router", "127.0.0.1:9")
        with started as process, contextlib.ExitStack() as idle:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            port = log_line(process, "ready")["port"]
            for _ in range(400):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            assert httpx.get(f"http://127.0.0.1:{port}/live", timeout=30).status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "{dir}", "--router", "nowhere"), "HOST:PORT"),
        (("--model", "{dir}", "--router", ","), "no router given"),
        (("--model", "{dir}", "--router", "127.0.0.1:9", "--max-model-len", "99999999"), "use at most"),
        (("--model", "{empty}", "--router", "127.0.0.1:9"), "config.json"),
        (("--model", "{dir}", "--router", "127.0.0.1:9", "--host", "203.0.113.1"), "choose another"),
    ],
)
def test_it_says_why_it_cannot_start(model_dir: Path, tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    filled = [flag.format(dir=model_dir, empty=tmp_path) for flag in flags]
    with gateway(*filled) as process:
        assert words in log_line(process, "cannot start")["reason"]
        assert process.wait(60) == 1


def test_a_taken_port(model_dir: Path) -> None:
    flags = ("--model", str(model_dir), "--router", "127.0.0.1:9")
    with gateway(*flags, "--port", "0") as first:
        port = log_line(first, "ready")["port"]
        with gateway(*flags, "--port", str(port)) as second:
            assert str(port) in log_line(second, "cannot start")["reason"]


IMPATIENT = "from gateway import http, server; http.BODY_TIMEOUT_S = server.KEEP_ALIVE_S = server.SILENT_S = 3"


def test_clients_that_say_nothing_or_half_of_it(model_dir: Path) -> None:
    """None of them keeps its connection; one that goes on asking does."""
    flags = ("--model", str(model_dir), "--port", "0", "--router", "127.0.0.1:9")
    with gateway(*flags, setting=IMPATIENT) as process, contextlib.ExitStack() as stack:
        port = log_line(process, "ready")["port"]
        silent, half, kept, slow = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(4)
        )
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        kept.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nGET /li")
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        asking = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)))
        asking.connect()
        connection = asking.sock
        for _ in range(20):
            asking.request("GET", "/live")
            assert asking.getresponse().read()
            time.sleep(0.2)
        assert asking.sock is connection
        assert (to_its_end(silent), to_its_end(half)) == (b"", b"")
        assert to_its_end(kept).startswith(b"HTTP/1.1 200")
        assert b"request_timeout" in to_its_end(slow)


def to_its_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1000), b""))


def test_a_stopped_gateway_lets_streams_end(model_dir: Path) -> None:
    """SIGTERM: it takes no new connections, and leaves soon when nothing runs."""
    with gateway("--model", str(model_dir), "--port", "0", "--router", "127.0.0.1:9") as process:
        url = f"http://127.0.0.1:{log_line(process, 'ready')['port']}"
        with httpx.Client(base_url=url) as http:
            http.get("/live")
            process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            process.wait(15)
            assert time.monotonic() - started < 12


def test_workers_share_the_ports_and_have_their_own(model_dir: Path) -> None:
    own = free_ports_in_a_row(2)
    flags = ("--model", str(model_dir), "--router", "127.0.0.1:9", "--port", "0", "--grpc-port", "0")
    with gateway(*flags, "--workers", "2", "--own-ports", str(own)) as parent:
        ready = [log_line(parent, "ready") for _ in range(2)]
        assert len({entry["port"] for entry in ready}) == len({entry["grpc_port"] for entry in ready}) == 1
        assert {entry["own_port"] for entry in ready} == {own, own + 1}
        url = f"http://127.0.0.1:{ready[0]['port']}"
        for _ in range(32):  # a connection each: with two processes, one of them alone is all but impossible
            assert httpx.get(f"{url}/live").status_code == 200
        answered = [live_answers(own + i) for i in range(2)]
        assert sum(answered) == 32
        assert min(answered) > 0
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        children[0].kill()
        entry = log_line(parent, "a gateway process ended")
        assert entry["how"] == "was ended by SIGKILL"
        log_line(parent, "ready")
        assert len(psutil.Process(parent.pid).children()) == 2
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 0
        assert not any(child.is_running() for child in children)


def live_answers(port: int) -> int:
    """How often a process has answered /live."""
    for line in httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines():
        if line.startswith('pdserve_http_requests_total{endpoint="/live"'):
            return int(float(line.rpartition(" ")[2]))
    return 0


def test_workers_that_cannot_start_end_together(model_dir: Path) -> None:
    port = free_ports_in_a_row(2) + 1
    with socket.create_server(("127.0.0.1", port)):
        flags = ("--router", "127.0.0.1:9", "--port", "0", "--workers", "2", "--own-ports", str(port - 1))
        with gateway("--model", str(model_dir), *flags) as parent:
            assert str(port) in log_line(parent, "cannot start")["reason"]
            assert parent.wait(60) == 1
