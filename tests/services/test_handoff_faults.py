"""Services and engines that die, stop, or do not fit: the other side ends what they shared, and serves again."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.identity import new_identity
from pdserve.session import Session
from tests.e2e.cluster import Member, wait_until
from tests.holding import Held, is_in_a_handoff
from tests.services.processes import eventually
from tests.services.tiny_model import write_tiny_model
from tests.services.worker_cluster import Answer, Router, assert_at_rest, prompt_of, read, routing, start_worker

pytestmark = pytest.mark.faults

LONG = 4000
SEEN_WITHIN_S = 9.0
"""After that a lease would end it, too, which is not what is to be seen."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, Member]]:
    logs = tmp_path_factory.mktemp("logs")
    members = {
        "prefill": start_worker("prefill_service", "p-0", model, logs, "--max-num-batched-tokens", "4"),
        "decode": start_worker("decode_service", "d-0", model, logs),
    }
    try:
        for member in members.values():
            member.wait_healthy()
        yield members
    finally:
        for member in members.values():
            member.terminate()


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_service_process_never_loads_torch(workers: dict[str, Member]) -> None:
    for member in workers.values():
        assert "libtorch" not in libraries(member.pid)
        assert "libtorch" in libraries(member.engine_pid())


def mapped_staging(decode: Member) -> list[str]:
    """Memory of senders that its engine has mapped. Its own is a memfd, too, and writable."""
    lines = libraries(decode.engine_pid()).splitlines()
    return [line for line in lines if "memfd:pdserve-staging" in line and line.split()[1].startswith("r-")]


async def in_flight(
    workers: dict[str, Member],
    router: Router,
    fault: Callable[[], None],
    seed: int,
    *,
    within_s: float = SEEN_WITHIN_S,
    lets_go: bool = True,
) -> tuple[Answer, Answer]:
    """A long hand-off, the fault in the middle of it, and how both sides ended. ``lets_go``: P goes on after it."""
    held, is_under_way = Held([workers["prefill"]]), is_in_a_handoff(workers["decode"])
    try:
        prefill, decode = router.open(prompt_of(LONG, seed=seed), max_tokens=4)
        await asyncio.to_thread(held.run_until, "a hand-off is under way", is_under_way)
        fault()
    except BaseException:
        held.let_go()
        raise
    if lets_go:
        held.let_go()
    return await asyncio.wait_for(asyncio.gather(read(prefill), read(decode)), within_s)


async def serves(workers: dict[str, Member], seed: int) -> None:
    """Both are there (again), and a hand-off goes through."""
    for member in workers.values():
        wait_until(f"{member.name} is healthy", member.healthy, 30)
    async with routing(workers["prefill"], workers["decode"]) as router:
        _, answer = await router.apart(prompt_of(300, seed=seed))
        assert answer.reason == "LENGTH"
    assert_at_rest(*workers.values())


@pytest.mark.parametrize("what", ["service", "engine"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_killed_in_the_middle_of_a_transfer(workers: dict[str, Member], victim: str, what: str) -> None:
    member, engine = workers[victim], workers[victim].engine_pid()
    pid = member.pid if what == "service" else engine
    async with routing(workers["prefill"], workers["decode"]) as router:
        session = getattr(router, victim)
        before = session.peer.incarnation

        def kill() -> None:
            assert mapped_staging(workers["decode"]), "the two meet over shared memory"
            os.kill(pid, signal.SIGKILL)

        p, d = await in_flight(workers, router, kill, seed=len(victim + what))
        lost, survivor = (p, d) if victim == "prefill" else (d, p)
        assert lost.code == "ERROR_CODE_WORKER_LOST"
        assert survivor.code == "ERROR_CODE_HANDOFF_FAILED"
        for answer in (p, d):
            assert answer.finish is not None
            assert answer.finish.failure.retryable
        other = workers["decode" if victim == "prefill" else "prefill"]
        assert_at_rest(other)
        if victim == "prefill":
            wait_until("its staging is mapped no more", lambda: not mapped_staging(other))
        if what == "service":
            wait_until("its engine is gone, too", lambda: not psutil.pid_exists(engine))
            assert member.process is not None
            member.process.wait(10)
            member.start()
        await eventually(
            lambda: session.alive and not session.draining and session.peer.incarnation > before,
            "it is back as a newer incarnation",
        )
    await serves(workers, seed=100 + len(victim + what))


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_stopped_and_woken(workers: dict[str, Member], victim: str) -> None:
    pids = [workers[victim].pid, workers[victim].engine_pid()]

    def stop() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    try:
        async with routing(workers["prefill"], workers["decode"]) as router:
            lets_go = victim != "prefill"
            p, d = await in_flight(workers, router, stop, seed=200 + len(victim), lets_go=lets_go)
            survivor = d if victim == "prefill" else p
            assert survivor.code == "ERROR_CODE_HANDOFF_FAILED"
            assert_at_rest(workers["decode" if victim == "prefill" else "prefill"])
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert_at_rest(workers[victim])
    await serves(workers, seed=300 + len(victim))


async def test_terminated_in_the_middle_of_a_transfer(workers: dict[str, Member]) -> None:
    """SIGTERM: what is under way is finished, exit code 0, nothing is left behind."""
    for victim in ("prefill", "decode"):
        member = workers[victim]
        engine = member.engine_pid()
        async with routing(workers["prefill"], workers["decode"]) as router:
            end = functools.partial(member.signal, signal.SIGTERM)
            p, d = await in_flight(workers, router, end, seed=400 + len(victim), within_s=60)
            assert (p.reason, d.reason) == ("LENGTH", "LENGTH")
            assert len(d.token_ids) == 4
        assert member.process is not None
        assert await asyncio.to_thread(member.process.wait, 60) == 0
        assert not psutil.pid_exists(engine)
        member.start()
        member.wait_healthy()
    await serves(workers, seed=500)


async def test_different_models_are_refused_before_any_byte_moves(workers: dict[str, Member], tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    stranger = start_worker("decode_service", "d-other", other, tmp_path)
    try:
        stranger.wait_healthy()
        async with routing(workers["prefill"], stranger) as router:
            p, d = await asyncio.wait_for(router.apart(prompt_of(50)), SEEN_WITHIN_S)
        for answer in (p, d):
            assert answer.code == "ERROR_CODE_HANDOFF_FAILED"
            assert answer.finish is not None
            assert (
                len(
                    set(
                        re.findall(r"model_fingerprint: ours '(\w+)', theirs '(\w+)'", answer.finish.failure.message)[0]
                    )
                )
                == 2
            )
        assert stranger.metrics()["pdserve_transfer_bytes_total"] == 0
        assert_at_rest(workers["prefill"], stranger)
    finally:
        assert stranger.terminate() == 0


async def test_dtypes_may_differ(workers: dict[str, Member], model: Path, tmp_path: Path) -> None:
    half = start_worker("decode_service", "d-bf16", model, tmp_path, "--dtype", "bfloat16", "--block-size", "64")
    try:
        half.wait_healthy()
        async with routing(workers["prefill"], half) as router:
            prompts = [prompt_of(150 + n, seed=600 + n) for n in range(12)]
            one = [(await router.apart(prompt, max_tokens=8, logprobs=1))[1] for prompt in prompts]
            many = await asyncio.gather(
                *(router.apart(prompt, max_tokens=8, cache_salt="together") for prompt in prompts)
            )
            assert [d.token_ids for _, d in many] == [d.token_ids for d in one], "as right under load as alone"
            agreed = 0
            for prompt, apart in zip(prompts, one, strict=True):
                assert (apart.reason, len(apart.token_ids)) == ("LENGTH", 8)
                forced = {"max_tokens": 8, "logprobs": 1, "cache_salt": "its own"}
                for n in (1, 7):  # what a bfloat16 engine thinks of the same token, with KV that is all its own
                    own = await router.aggregated(prompt, output_so_far=apart.token_ids[:n], **forced)
                    if own.token_ids[0] == apart.token_ids[n]:
                        agreed += 1
                        assert own.logprobs[0].logprob == pytest.approx(apart.logprobs[n].logprob, abs=0.15)
            assert agreed > len(prompts), "most of the two of each; with wrong KV none would"
        assert_at_rest(workers["prefill"], half)
    finally:
        assert half.terminate() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block-size", "24"], "use --block-size"),
        (["--dtype", "int3"], "dtype"),
        (["--max-model-len", "99999"], "use --max-model-len 8192"),
        (["--model", "/nowhere/to/be/found"], "/nowhere/to/be/found"),
        (["--host", "0.0.0.0"], "--advertised-host"),
        (["--worker-id", "two words"], "without spaces"),
        (["--redis", "localhost:6379"], "use redis://"),
    ],
)
def test_a_setting_that_is_wrong_ends_it_with_one_line(
    model: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    member = start_worker("prefill_service", "p-wrong", model, tmp_path, *flags)
    assert member.process is not None
    assert member.process.wait(60) != 0
    log = member.log.read_text()
    assert said in " ".join(log.replace("\u2502", " ").split()), log


def test_a_port_in_use(workers: dict[str, Member], model: Path, tmp_path: Path) -> None:
    member = start_worker("decode_service", "d-port", model, tmp_path, "--port", str(workers["decode"].port))
    assert member.process is not None
    assert member.process.wait(60) == 1
    assert "--port" in member.log.read_text()


@pytest.mark.parametrize("transfer", ["tcp", "shm"])
def test_a_data_port_that_cannot_be(model: Path, tmp_path: Path, transfer: str) -> None:
    """In use, or without the backend that it is for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--transfer", transfer, "--data-port", port)
        member = start_worker("decode_service", "d-data-port", model, tmp_path, *flags)
        assert member.process is not None
        assert member.process.wait(60) != 0
    log = " ".join(member.log.read_text().replace("\u2502", " ").split())
    assert ("use another --data-port" if transfer == "tcp" else "leave it out") in log, log


async def test_sessions_hear_of_a_worker_that_starts(model: Path, tmp_path: Path) -> None:
    """Draining until its engine is ready, so that a router does not send to it yet."""
    member = start_worker("decode_service", "d-slow", model, tmp_path)
    try:
        session = None
        while session is None:
            try:
                session = await Session.connect(f"127.0.0.1:{member.port}", new_identity("router", "r"))
            except (ConnectionError, TimeoutError):
                await asyncio.sleep(0.05)
        assert session.draining or member.healthy()
        member.wait_healthy()
        await eventually(lambda: not session.draining, "it takes requests")
        await session.close()
    finally:
        assert member.terminate() == 0
