"""The supervisor with small real children: started together, restarted, ended, and never outliving us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from pdserve.redis_server import redis_argv, redis_binary
from pdserve.up.child import Child, ChildSpec, describe_exit, last_words
from pdserve.up.errors import UpError
from pdserve.up.health import http_is_healthy, redis_is_healthy
from pdserve.up.supervisor import ChildState, Supervisor
from tests.ports import free_port

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

SLOW = "import time; print('I wait', flush=True); time.sleep(60)"


def server(name: str, tmp_path: Path) -> ChildSpec:
    port = free_port()
    argv = [sys.executable, "-c", SERVER, str(port)]
    return ChildSpec(name, argv, tmp_path / f"{name}.log", partial(http_is_healthy, "127.0.0.1", port))


def script(name: str, tmp_path: Path, code: str) -> ChildSpec:
    async def never() -> bool:
        return False

    return ChildSpec(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", never)


async def until(what: str, check: Callable[[], object]) -> None:
    for _ in range(3000):
        if check():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within 60 s: {what}")


async def test_all_start_and_all_end(tmp_path: Path) -> None:
    specs = [server(name, tmp_path) for name in ("a", "b", "c")]
    changes: list[tuple[str, ChildState]] = []
    supervisor = Supervisor(specs, lambda name, state, text: changes.append((name, state)))
    await supervisor.start(timeout_s=60)
    pids = supervisor.pids
    assert set(pids) == {"a", "b", "c"}
    assert {state for state, _ in supervisor.states.values()} == {ChildState.READY}
    assert await supervisor.stop() == 3
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert sorted(changes, key=lambda change: change[0])[:2] == [("a", ChildState.STARTING), ("a", ChildState.READY)]


async def test_a_child_that_dies_ends_the_start_with_one_line(tmp_path: Path) -> None:
    supervisor = Supervisor([server("fine", tmp_path), script("broken", tmp_path, "print('why'); raise SystemExit(3)")])
    try:
        with pytest.raises(
            UpError, match=rf"^broken exited with 3 while starting: why; its log: {tmp_path}/broken\.log$"
        ):
            await supervisor.start(timeout_s=60)
    finally:
        await supervisor.stop()
    assert (tmp_path / "broken.log").read_text() == "why\n"
    assert supervisor.pids == {}


async def test_a_program_that_is_not_there_ends_the_start_too(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    supervisor = Supervisor([ChildSpec("absent", [str(tmp_path / "none")], tmp_path / "absent.log", never)])
    with pytest.raises(UpError, match=r"absent cannot be started \(No such file"):
        await supervisor.start(timeout_s=60)
    await supervisor.stop()


async def test_a_child_that_is_never_ready_is_named(tmp_path: Path) -> None:
    supervisor = Supervisor([server("fine", tmp_path), script("slow", tmp_path, SLOW)])
    try:
        with pytest.raises(UpError, match=r"not ready within 10 s: slow \(.*slow\.log\), which says: I wait; read"):
            await supervisor.start(timeout_s=10)
    finally:
        await supervisor.stop()


async def test_later_a_dead_child_is_restarted(tmp_path: Path) -> None:
    changes: list[str] = []
    supervisor = Supervisor([server("a", tmp_path), server("b", tmp_path)])
    await supervisor.start(timeout_s=60)
    try:
        supervisor.on_change = lambda name, state, text: changes.append(f"{name} {state.value} {text}")
        first, other = supervisor.pids["a"], supervisor.pids["b"]
        os.kill(first, signal.SIGKILL)
        await until("a again", lambda: any(change.startswith("a ready") for change in changes))
        assert supervisor.pids["a"] != first
        assert supervisor.pids["b"] == other
        assert changes[0].startswith("a restarting was ended by SIGKILL; again in 0.5 s; log: ")
    finally:
        assert await supervisor.stop() == 2


async def test_one_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(tmp_path / 'grandchild')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    child = await Child.spawn(script("stubborn", tmp_path, code))
    await until("grandchild", lambda: (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text())
    grandchild = int((tmp_path / "grandchild").read_text())
    assert not await child.stop(timeout_s=0.3)
    await until("gone", lambda: not running(child.pid) and not running(grandchild))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PARENT = """
import asyncio, sys
from pathlib import Path
from pdserve.up.child import Child, ChildSpec

async def main():
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = await Child.spawn(ChildSpec("child", argv, Path(sys.argv[1]), None))
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path / "child.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert running(child_pid)
        parent.kill()
    asyncio.run(until("child gone", lambda: not running(child_pid)))


async def test_our_redis_starts_and_answers(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    spec = ChildSpec(
        "redis", redis_argv(redis_binary(), socket), tmp_path / "redis.log", partial(redis_is_healthy, socket)
    )
    assert not await redis_is_healthy(socket)
    supervisor = Supervisor([spec])
    await supervisor.start(timeout_s=60)
    assert await redis_is_healthy(socket)
    await supervisor.stop()
    assert not await redis_is_healthy(socket)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ('{"event": "stopped"}\n', ""),
        ("router: policy='x' is not known\n", "router: policy='x' is not known"),
        ('{"reason": "use --port", "event": "cannot start"}\n{"event": "stopped"}\n', "use --port"),
        ("╭─ Error ──╮\n│ Invalid value for │\n│ '--transfer'.     │\n╰────╯\n", "Invalid value for '--transfer'."),
        ("╭─ Traceback ─╮\n│ at line 5  │\n╰────────────╯\nException: no such thing\n", "Exception: no such thing"),
        ("Traceback (most recent call last):\n  File\nValueError: no\n\n", "ValueError: no"),
        ('{"reason": 5}\n[1]\n', ""),
        (
            '{"event": "a", "level": "info"}\n{"event": "no Redis", "error": "gone", "level": "warning"}\n',
            "no Redis: gone",
        ),
        ('{"event": "x", "level": "error"}\n{"event": "stopped", "level": "info"}\n', "x"),
    ],
)
def test_the_last_words_of_a_process(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == words
    assert last_words(tmp_path / "none") == ""


def test_exits_in_words() -> None:
    assert describe_exit(0) == "exited with 0"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-250) == "was ended by signal 250"
