"""``bench serve`` against a cluster on this host: starts one with ``pdserve up``, measures, ends it.

python -m bench.local_serve [--up-flags "--prefill 2"] [flags of bench serve ...]
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
DEFAULT_LOAD = "--num-prompts 32 --random-input-len 128 --random-output-len 32 --max-concurrency 4"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up-flags", default="", help="more flags of `pdserve up`, in one string")
    arguments, load = parser.parse_known_args()
    with local_cluster(shlex.split(arguments.up_flags)) as url:
        command = [sys.executable, "-m", "bench.serve", "--base-url", url, *(load or shlex.split(DEFAULT_LOAD))]
        return subprocess.run(command, check=False).returncode


@contextlib.contextmanager
def local_cluster(up_flags: list[str]) -> Iterator[str]:
    """The URL of a cluster that is ready. Raises RuntimeError when it does not become so."""
    port, grpc_port = _free_ports(2)
    command = [sys.executable, "-m", "pdserve.cli", "up", "--no-chat", "--port", str(port), "--grpc-port"]
    up = subprocess.Popen([*command, str(grpc_port), *up_flags], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(up, url)
        yield url
    finally:
        up.terminate()
        try:
            up.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()


def _wait_ready(up: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while up.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("the cluster does not start: try `pdserve up` by itself")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


if __name__ == "__main__":
    sys.exit(main())
