"""The gateway as its own process: starts fast without torch, says where it listens, explains why it cannot start."""

from __future__ import annotations

import json
import signal
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

ROOT = Path(__file__).parents[2]


@contextmanager
def gateway(*flags: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "gateway", *flags]
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
        assert process.wait(10) in (0, -signal.SIGTERM)


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
        assert process.wait(10) == 1


def test_a_taken_port(model_dir: Path) -> None:
    flags = ("--model", str(model_dir), "--router", "127.0.0.1:9")
    with gateway(*flags, "--port", "0") as first:
        port = log_line(first, "ready")["port"]
        with gateway(*flags, "--port", str(port)) as second:
            assert str(port) in log_line(second, "cannot start")["reason"]


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
