"""``--workers N``: N gateway processes that share the ports (SO_REUSEPORT), and this one, which only watches them.

Each is a whole gateway with sessions of its own to the routers; the kernel spreads new connections over them. They
share nothing: ``/metrics`` and ``/debug`` on the shared port are those of whichever process answers, so each has them
on a port of its own as well. A process that dies is started again; one that cannot start ends them all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType

import structlog

from pdserve.up.child import describe_exit, die_with_parent

POLL_S = 0.1
RESTART_S = 1.0
START_S = 20.0
"""A process that fails so soon after the first start is not started again: its flags or the host are wrong."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Process:
    argv: list[str]
    popen: subprocess.Popen[bytes]
    restart_at_s: float | None = None


def run_processes(workers: int, host: str, port: int, grpc_port: int, own_ports: int | None, stop_s: float) -> int:
    """Run until SIGTERM or SIGINT; the exit status. ``own_ports``: the first of ``workers`` ports, one for each.

    Raises OSError when a port cannot be had.
    """
    stopped = False

    processes: list[_Process] = []

    def stop(number: int, frame: FrameType | None) -> None:
        """A second signal is passed on, too: it ends their drain."""
        nonlocal stopped
        if stopped:
            for process in processes:
                process.popen.terminate()
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with _reserved(host, port) as shared_port, _reserved(host, grpc_port) as shared_grpc_port:
        shared = ["--port", str(shared_port), "--grpc-port", str(shared_grpc_port), "--workers", "1", "--share-ports"]
        for i in range(workers):
            own = [] if own_ports is None else ["--own-ports", str(own_ports + i)]
            argv = [sys.executable, "-m", "gateway", *sys.argv[1:], *shared, *own]
            processes.append(_Process(argv, _start(argv)))
        begin_s = time.monotonic()
        try:
            while not stopped:
                time.sleep(POLL_S)
                for process in processes:
                    if not _watch(process, may_restart=time.monotonic() - begin_s > START_S):
                        return 1
            return 0
        finally:
            _end([process.popen for process in processes], stop_s)


def _watch(process: _Process, may_restart: bool) -> bool:
    """Start it again if it has ended; False when that would not help."""
    now_s = time.monotonic()
    if process.restart_at_s is not None:
        if now_s >= process.restart_at_s:
            process.popen, process.restart_at_s = _start(process.argv), None
    elif (status := process.popen.poll()) is not None:
        if status > 0 and not may_restart:
            return False  # it has said why
        log.warning("a gateway process ended", how=describe_exit(status), restart_in_s=RESTART_S)
        process.restart_at_s = now_s + RESTART_S
    return True


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, preexec_fn=partial(die_with_parent, os.getpid()), start_new_session=True)


def _end(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(deadline_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """A port that nobody else has, and that processes of ours may share. Never listens itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as alone, socket.socket(family, socket.SOCK_STREAM) as shared:
        try:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))  # fails where another server listens, though that one might share
            bound = int(alone.getsockname()[1])
            alone.close()
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, bound))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): choose another port") from error
        yield bound
