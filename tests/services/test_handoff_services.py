"""A prefill and a decode service with a real (tiny) model: a prompt goes through both, and comes out as from one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Member
from tests.holding import Held, is_in_a_handoff
from tests.ports import free_port
from tests.services.processes import eventually
from tests.services.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, write_tiny_model
from tests.services.worker_cluster import Router, assert_at_rest, prompt_of, read, routing, start_worker

CHUNK = 4
"""Small, so that a long prompt takes a while although the model is tiny."""
CELL_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Member, Member]]:
    """Block sizes differ; D's pool is small enough that many requests at once do not fit."""
    logs = tmp_path_factory.mktemp("logs")
    prefill = start_worker(
        "prefill_service", "p-0", model, logs, "--block-size", "32", "--max-num-batched-tokens", str(CHUNK)
    )
    decode = start_worker("decode_service", "d-0", model, logs, "--block-size", "16", "--num-blocks", "300")
    try:
        for member in (prefill, decode):
            member.wait_healthy()
        yield prefill, decode
    finally:
        codes = [member.terminate() for member in (prefill, decode)]
    assert codes == [0, 0]


@pytest.fixture
async def router(workers: tuple[Member, Member]) -> AsyncIterator[Router]:
    async with routing(*workers) as router:
        yield router
    assert_at_rest(*workers)


async def settled(member: Member) -> dict[str, float]:
    """Its counters, once the engine has reported, as it does twice a second."""
    await asyncio.sleep(1.2)
    return member.metrics()


async def grows(member: Member, before: dict[str, float], **expected: float) -> None:
    """Its counters are so much higher than before, once the engine has reported."""
    grown: dict[str, float] = {}

    def have_grown() -> bool:
        now = member.metrics()
        grown.update({name: now[f"pdserve_{name}_total"] - before[f"pdserve_{name}_total"] for name in expected})
        return grown == expected

    try:
        await eventually(have_grown, f"{member.name} counts {expected}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it counts {grown}") from None


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100, 321])
async def test_apart_equals_aggregated(router: Router, workers: tuple[Member, Member], length: int) -> None:
    prompt = prompt_of(length, seed=length)
    before = await settled(workers[1])
    p, d = await router.apart(prompt, max_tokens=24)
    assert (p.reason, p.token_ids) == ("LENGTH", [])
    assert (d.reason, len(d.token_ids)) == ("LENGTH", 24)
    assert (await router.aggregated(prompt, max_tokens=24, cache_salt="another cache")).token_ids == d.token_ids
    await grows(workers[1], before, transfers_done=1, transfer_bytes=length * LAYERS * CELL_BYTES)
    assert d.first is not None
    assert d.first.sent_kv_tokens == length
    phases = d.first.phases
    assert phases.prefill_s > 0
    assert phases.worker_s >= phases.prefill_s + phases.prefill_queue_s


async def test_a_long_prompt_streams_in_pieces(router: Router, workers: tuple[Member, Member]) -> None:
    before = [await settled(member) for member in workers]
    await router.apart(prompt_of(10 * CHUNK, seed=77))
    await grows(workers[0], before[0], prefill_chunks=10)
    await grows(workers[1], before[1], transfer_segments=10, segments_before_last_chunk=1)


async def test_many_at_once_all_get_through(router: Router) -> None:
    """More than D's pool holds: it says BUSY, P keeps them queued, and each gets its own tokens."""
    prompts = [prompt_of(200 + n, seed=1000 + n) for n in range(32)]
    answers = await asyncio.gather(*(router.apart(prompt, max_tokens=12) for prompt in prompts))
    assert [d.reason for _, d in answers] == ["LENGTH"] * len(prompts)
    for prompt, (_, d) in list(zip(prompts, answers, strict=True))[::5]:
        alone = await router.aggregated(prompt, max_tokens=12, cache_salt="alone")
        assert alone.token_ids == d.token_ids


async def test_seeded_sampling_draws_the_same_tokens(router: Router) -> None:
    prompt = prompt_of(60, seed=5)
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 11, "max_tokens": 30}
    _, d = await router.apart(prompt, **sampling)
    assert (await router.aggregated(prompt, **sampling)).token_ids == d.token_ids
    _, other = await router.apart(prompt, **{**sampling, "seed": 12})
    assert other.token_ids != d.token_ids


async def test_logprobs_come_with_every_token(router: Router) -> None:
    prompt = prompt_of(40, seed=6)
    _, d = await router.apart(prompt, logprobs=3)
    aggregated = await router.aggregated(prompt, logprobs=3)
    assert len(d.logprobs) == len(d.token_ids)
    assert [list(item.top_token_ids) for item in d.logprobs] == [
        list(item.top_token_ids) for item in aggregated.logprobs
    ]


async def test_what_d_has_is_neither_sent_nor_computed_again(router: Router) -> None:
    """The second turn of a chat: D has the first one's KV, its own answer included; P has the prompt's."""
    first = prompt_of(100, seed=8)
    _, one = await router.apart(first, max_tokens=30)
    second = first + one.token_ids + prompt_of(20, seed=9)
    _, two = await router.apart(second, max_tokens=10)
    assert two.first is not None
    assert two.first.cached_tokens == 96  # P's blocks of 32
    assert two.first.sent_kv_tokens == 150 - 128  # D's blocks of 16
    assert (await router.aggregated(second, max_tokens=10, cache_salt="alone")).token_ids == two.token_ids


async def test_resuming_continues_the_output(router: Router) -> None:
    prompt = prompt_of(50, seed=10)
    _, whole = await router.apart(prompt, max_tokens=20)
    _, rest = await router.apart(prompt, max_tokens=20, output_so_far=whole.token_ids[:7])
    assert rest.token_ids == whole.token_ids[7:]


async def test_first_tokens_that_end_the_request(router: Router, workers: tuple[Member, Member]) -> None:
    prompt = prompt_of(70, seed=12)
    _, one = await router.apart(prompt, max_tokens=1)
    assert (one.reason, len(one.token_ids)) == ("LENGTH", 1)
    before = await settled(workers[1])
    p, stopped = await router.apart(prompt, max_tokens=20, stop_token_ids=one.token_ids)
    assert stopped.token_ids in ([], one.token_ids)
    assert (p.reason, stopped.reason) == ("STOP", "STOP")
    assert stopped.finish is not None
    assert stopped.finish.stop_token_id == one.token_ids[0]
    await grows(workers[1], before, transfers_done=1)


# ---- one side is missing, or goes


async def test_d_never_hears_of_it(router: Router) -> None:
    to_p, _ = router.sides(router.request(prompt_of(40, seed=20)))
    answer = await asyncio.wait_for(read(router.prefill.open(to_p)), 30)
    assert answer.code == "ERROR_CODE_HANDOFF_FAILED"
    assert answer.finish is not None
    assert answer.finish.failure.retryable
    assert "unknown transfer" in answer.finish.failure.message


async def test_p_never_hears_of_it(router: Router) -> None:
    _, to_d = router.sides(router.request(prompt_of(40, seed=21), timeout_s=1.0))
    answer = await asyncio.wait_for(read(router.decode.open(to_d)), 30)
    assert answer.reason == "TIMEOUT"


async def test_d_comes_late(router: Router) -> None:
    to_p, to_d = router.sides(router.request(prompt_of(40, seed=22)))
    prefill = router.prefill.open(to_p)
    await asyncio.sleep(0.5)  # its question is parked
    decode = router.decode.open(to_d)
    assert (await read(decode)).reason == "LENGTH"
    await read(prefill)


@asynccontextmanager
async def in_a_handoff(workers: tuple[Member, Member]) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """P's engine stands still, until the test has opened a request, and calls what it gets: then in the middle of the
    hand-off, to the end of the block."""
    held, is_under_way = Held(workers[:1]), is_in_a_handoff(workers[1])
    try:
        yield lambda: asyncio.to_thread(held.run_until, "a hand-off is under way", is_under_way)
    finally:
        held.let_go()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_abort_of_one_side_ends_the_other(router: Router, workers: tuple[Member, Member], side: str) -> None:
    async with in_a_handoff(workers) as is_reached:
        prefill, decode = router.open(prompt_of(4600, seed=20 + len(side)), max_tokens=4)
        await is_reached()
        (prefill if side == "prefill" else decode).abort("client")
    other = await asyncio.wait_for(read(decode if side == "prefill" else prefill), 9)  # a lease has 10 s
    assert other.code == "ERROR_CODE_HANDOFF_FAILED"


async def test_abort_before_p_has_asked_ends_it_when_it_asks(router: Router, workers: tuple[Member, Member]) -> None:
    held = Held(workers[:1])
    try:
        prefill, decode = router.open(prompt_of(4600, seed=29), max_tokens=4)
        name = "pdserve_requests_waiting_for_kv"
        await eventually(lambda: workers[1].metrics()[name] == 1, "D has it")
        decode.abort("client")
        await eventually(lambda: workers[1].metrics()[name] == 0, "D has ended it")
    finally:
        held.let_go()
    assert (await asyncio.wait_for(read(prefill), 9)).code == "ERROR_CODE_HANDOFF_FAILED"


async def test_a_retry_is_a_new_attempt(router: Router, workers: tuple[Member, Member]) -> None:
    prompt = prompt_of(4600, seed=30)
    request = router.request(prompt, max_tokens=6)
    to_p, to_d = router.sides(request)
    async with in_a_handoff(workers) as is_reached:
        decode, prefill = router.decode.open(to_d), router.prefill.open(to_p)
        await is_reached()
        prefill.abort("retry")
    assert (await read(decode)).code == "ERROR_CODE_HANDOFF_FAILED"
    again_p, again_d = router.sides(request, attempt=2)
    decode, prefill = router.decode.open(again_d), router.prefill.open(again_p)
    answer = await read(decode)
    assert answer.reason == "LENGTH"
    assert answer.token_ids == (await router.aggregated(prompt, max_tokens=6, cache_salt="alone")).token_ids
    stale_p, _ = router.sides(request, attempt=1)
    stale_p.request_id += "-late"
    late = await read(router.prefill.open(stale_p))
    assert late.finish is not None
    assert "stale attempt" in late.finish.failure.message


async def test_deadlines_end_both_sides(router: Router) -> None:
    p, d = await asyncio.wait_for(router.apart(prompt_of(7000, seed=31), timeout_s=0.3), 30)
    reasons = {p.reason, d.reason}
    assert "TIMEOUT" in reasons
    assert reasons <= {"TIMEOUT", "ERROR"}


async def test_requests_that_can_never_run_are_refused_at_once(router: Router) -> None:
    p, d = await router.apart(prompt_of(6000, seed=32))  # D's pool has 4800 tokens
    assert d.code == "ERROR_CODE_PROMPT_TOO_LARGE"
    assert p.code == "ERROR_CODE_HANDOFF_FAILED"
    wrong = router.request([])
    assert (await read(router.decode.open(wrong))).code == "ERROR_CODE_INVALID_REQUEST"
    unfit = router.sides(router.request(prompt_of(5)))[0]
    answer = await read(router.decode.open(unfit))  # a sender's request to a decode worker
    assert answer.code == "ERROR_CODE_INVALID_REQUEST"


async def test_a_new_engine_takes_kv_at_the_same_port(
    tmp_path: Path, model: Path, workers: tuple[Member, Member]
) -> None:
    """As firewalls want it: the port is the one that was asked for, before and after the engine was killed."""
    prefill, _ = workers
    port = free_port()
    flags = ("--num-blocks", "300", "--transfer", "tcp", "--data-port", str(port))
    decode = start_worker("decode_service", "d-port", model, tmp_path, *flags)
    try:
        decode.wait_healthy()
        for n in range(2):
            prompt = prompt_of(100, seed=500 + n)
            async with routing(prefill, decode) as router:
                _, d = await router.apart(prompt, max_tokens=8)
                assert d.reason == "LENGTH"
                assert d.token_ids == (await router.aggregated(prompt, max_tokens=8, cache_salt="alone")).token_ids
            engine = psutil.Process(decode.engine_pid())
            assert port in {connection.laddr.port for connection in engine.net_connections("tcp")}
            if n == 0:
                engine.kill()
                engine.wait(10)
                await eventually(lambda: decode.metrics()["pdserve_engine_restarts_total"] == 1, "it is noticed")
                await asyncio.to_thread(decode.wait_healthy)
    finally:
        assert decode.terminate() == 0
