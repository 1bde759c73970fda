"""kill -9 of every part during requests: an answer or a typed error in time, no leak, and it serves again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e.client import complete
from tests.e2e.cluster import Cluster, Member, left_in_shm, running, wait_until

pytestmark = pytest.mark.faults

DEADLINE_S = 30.0
UNHURRIED_S = 120.0
"""Where every answer must be whole."""
PROMPT_TEXT = "The ship left the harbour at dawn and nobody waved. " * 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir) -> Iterator[Cluster]:
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "64")
    with running(tmp_path_factory.mktemp("faults"), str(model_dir), worker_flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompt(oracle) -> list[int]:
    return oracle.chat_ids(PROMPT_TEXT)


def request(cluster: Cluster, prompt: list[int], n: int, deadline_s: float = DEADLINE_S) -> httpx.Response:
    """One request with its own prefix, so that it is really prefilled and handed over."""
    body = {"model": "test-model", "prompt": [prompt[0], 100 + n, *prompt[1:]], "temperature": 0, "max_tokens": 150}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"x-request-timeout-s": str(deadline_s)}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=deadline_s + 15)


def assert_answered(response: httpx.Response) -> None:
    """The whole answer, or a typed error that says what happened; nothing in between."""
    if response.status_code == 200:
        assert len(response.json()["choices"][0]["token_ids"]) == 150
        return
    assert response.status_code in (429, 500, 502, 503, 504), response.text
    error = response.json()["error"]
    assert error["code"]
    assert error["message"]


class Footprint:
    """What a surviving process holds that its metrics cannot show: open files, threads, shared memory."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.counts = {member.name: self._counts(member) for member in members}
        self.shm = set(os.listdir("/dev/shm"))

    def _counts(self, member: Member) -> tuple[int, int]:
        process = psutil.Process(member.pid)
        everything = [process, *process.children(recursive=True)]
        return sum(p.num_fds() for p in everything), sum(p.num_threads() for p in everything)

    def assert_same(self, slack: int = 6) -> None:
        """Back to what it was, but for a few kept-alive connections (``slack``)."""
        for member in self.members:
            before = self.counts[member.name]

            def settled(member: Member = member, before: tuple[int, int] = before) -> bool:
                now = self._counts(member)
                return all(n <= b + slack for n, b in zip(now, before, strict=True))

            wait_until(f"{member.name} back to {before} fds and threads, now {self._counts(member)}", settled)
        ours = {p.pid for member in self.members for p in psutil.Process(member.pid).children(recursive=True)}
        ours |= {member.pid for member in self.members}
        wait_until("nothing is left in /dev/shm", lambda: not left_in_shm(self.shm, ours))


def wait_ready(cluster: Cluster, prompt: list[int]) -> None:
    """It serves again, without a restart of the others."""

    def serves() -> bool:
        try:
            return request(cluster, prompt, 3).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until("the cluster serves again", serves, 60)


def run_with_fault(
    cluster: Cluster,
    prompt: list[int],
    fault,
    concurrency: int = 4,
    delay_s: float = 0.4,
    deadline_s: float = DEADLINE_S,
) -> list[httpx.Response]:
    """Requests in flight, then the fault; every one of them must come back."""
    with ThreadPoolExecutor(concurrency) as pool:
        futures: list[Future[httpx.Response]] = [
            pool.submit(request, cluster, prompt, 1000 + time.time_ns() % 20_000 + i, deadline_s)
            for i in range(concurrency)
        ]
        time.sleep(delay_s)
        fault()
        return [future.result(timeout=deadline_s + 20) for future in futures]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router"])
def test_process_killed(cluster: Cluster, prompt: list[int], victim: str) -> None:
    complete(cluster.url, prompt, max_tokens=4)
    survivors = Footprint([m for m in cluster.members.values() if m.name not in (victim, "redis")])
    responses = run_with_fault(cluster, prompt, cluster[victim].kill, delay_s=0.6)
    for response in responses:
        assert_answered(response)
    cluster[victim].start()
    cluster[victim].wait_healthy()
    wait_ready(cluster, prompt)
    cluster.assert_no_leak()
    survivors.assert_same()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_engine_killed(cluster: Cluster, prompt: list[int], victim: str) -> None:
    """The service starts a new engine by itself, as a new incarnation."""
    before = cluster[victim].engine_pid()
    responses = run_with_fault(cluster, prompt, lambda: os.kill(before, signal.SIGKILL))
    for response in responses:
        assert_answered(response)
    wait_ready(cluster, prompt)
    children = psutil.Process(cluster[victim].pid).children
    wait_until("another engine runs", lambda: [child.pid for child in children() if child.pid != before] != [])
    cluster.assert_no_leak()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_worker_stopped_and_woken(cluster: Cluster, prompt: list[int], victim: str) -> None:
    """SIGSTOP of a worker and its engine: seen within seconds; woken, it frees what it held and serves."""
    pids = [cluster[victim].pid, cluster[victim].engine_pid()]

    def stop() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def wake() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(8, wake)
    timer.start()
    try:
        for response in run_with_fault(cluster, prompt, stop):
            assert_answered(response)
    finally:
        timer.join()
    wait_ready(cluster, prompt)
    cluster.assert_no_leak()


def test_redis_killed(cluster: Cluster, prompt: list[int]) -> None:
    """Redis is advisory: requests go on without it, new ones too, and the workers register again when it is back."""
    responses = run_with_fault(cluster, prompt, cluster["redis"].kill, deadline_s=UNHURRIED_S)
    assert [response.status_code for response in responses] == [200] * len(responses)
    assert request(cluster, prompt, 5, UNHURRIED_S).status_code == 200
    (cluster.directory / "redis.sock").unlink(missing_ok=True)
    cluster["redis"].start()
    wait_ready(cluster, prompt)
    # A router that starts now learns the workers from the new, empty Redis: they have registered again.
    cluster["router"].kill()
    cluster["router"].start()
    cluster["router"].wait_healthy()
    wait_ready(cluster, prompt)
    cluster.assert_no_leak()


def test_client_gone(cluster: Cluster, prompt: list[int]) -> None:
    """A client that disconnects in the middle of a stream frees everything everywhere."""
    body = {"model": "test-model", "prompt": [7, *prompt], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=30) as response:
        for n, _ in enumerate(response.iter_lines()):
            if n > 4:
                break
    cluster.assert_no_leak()


def test_deadline(cluster: Cluster, prompt: list[int]) -> None:
    """A request that cannot make its deadline ends with a typed error, and frees everything."""
    body = {"model": "test-model", "prompt": [8, *prompt], "max_tokens": 2000, "ignore_eos": True}
    response = httpx.post(
        f"{cluster.url}/v1/completions", json=body, headers={"x-request-timeout-s": "1.5"}, timeout=30
    )
    assert response.status_code == 504, response.text
    assert response.json()["error"]["code"]
    cluster.assert_no_leak()
