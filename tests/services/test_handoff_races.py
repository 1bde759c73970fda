"""Many hand-offs through one pair of real services, some of which end at an arbitrary moment: whoever goes on gets its
own tokens, each ends once, and nothing is left. Aborts, deadlines and refusals; a hundred in a row; a pause before one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.e2e.cluster import Member
from tests.services.processes import eventually
from tests.services.tiny_model import VOCAB, write_tiny_model
from tests.services.worker_cluster import Answer, Router, assert_at_rest, prompt_of, read, routing, start_worker

LEASE_S = 10.0
"""Of hand-offs, and longer than whatever else may take a silent peer for a lost one."""
ENDS_S = 30.0
MANY = 24


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Member, Member]]:
    """Chunks of a few tokens, so that hand-offs take a while; D's pool holds few requests, so that what one gives up
    another one gets at once."""
    model, logs = write_tiny_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("logs")
    prefill = start_worker("prefill_service", "p-races", model, logs, "--max-num-batched-tokens", "16")
    decode = start_worker("decode_service", "d-races", model, logs, "--block-size", "16", "--num-blocks", "64")
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


async def alone(router: Router, prompt: list[int], max_tokens: int) -> list[int]:
    """What one engine says that does both, and has nothing else to do."""
    return (await router.aggregated(prompt, max_tokens=max_tokens, cache_salt=f"alone {random.random()}")).token_ids


async def takes(router: Router, *prompts: list[int]) -> float:
    """Seconds on this machine, all at once and undisturbed."""
    begin_s = time.monotonic()
    await asyncio.gather(*(router.apart(prompt, max_tokens=8) for prompt in prompts))
    return time.monotonic() - begin_s


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_aborted_at_any_moment(router: Router, side: str) -> None:
    """From the frame of the request itself on; a neighbour wants the memory that each of them gives up."""
    takes_s = await takes(router, *(prompt_of(300, seed=2000 + n) for n in range(MANY)))
    moments = [takes_s * n / MANY for n in range(MANY)]
    neighbours = [prompt_of(120, seed=3000 + n) for n in range(MANY)]

    async def ends_early(n: int, after_s: float) -> tuple[Answer, Answer]:
        prefill, decode = router.open(prompt_of(300, seed=4000 + n), max_tokens=16)
        if after_s:
            await asyncio.sleep(after_s)
        for name, handle in (("prefill", prefill), ("decode", decode)):
            if side in (name, "both"):
                handle.abort("client")
        return await read(prefill), await read(decode)

    early = [asyncio.create_task(ends_early(n, after_s)) for n, after_s in enumerate(moments)]
    whole = [asyncio.create_task(router.apart(prompt, max_tokens=8)) for prompt in neighbours]
    async with asyncio.timeout(ENDS_S):
        for prompt, (_, d) in zip(neighbours, await asyncio.gather(*whole), strict=True):
            assert d.token_ids == await alone(router, prompt, 8)
        ended = await asyncio.gather(*early)
    if side == "prefill":  # D hears of it from P: it ends with an error, or had all that it needed
        for _, d in ended:
            assert d.reason == "LENGTH" or (d.code, d.token_ids) == ("ERROR_CODE_HANDOFF_FAILED", [])


async def test_a_deadline_at_any_moment(router: Router) -> None:
    """Also in the one in which the last KV arrives: both sides end, once, and no token is wrong."""
    prompts = [prompt_of(200, seed=5000 + n) for n in range(MANY)]
    expected = [await alone(router, prompt, 6) for prompt in prompts]
    takes_s = await takes(router, prompt_of(200, seed=5999))
    for n, prompt in enumerate(prompts):
        async with asyncio.timeout(ENDS_S):
            p, d = await router.apart(prompt, max_tokens=6, timeout_s=takes_s * (0.2 + n / MANY))
        assert p.reason in ("LENGTH", "TIMEOUT", "ERROR")
        assert d.reason in ("LENGTH", "TIMEOUT", "ERROR")
        assert d.token_ids == expected[n][: len(d.token_ids)]
        assert d.reason != "LENGTH" or len(d.token_ids) == 6


async def test_what_p_refuses_d_says_nothing_of(router: Router) -> None:
    """D could run it, and waits for KV that never comes: until the router, which hears of it from P, ends it, or else
    until its deadline, as here."""
    to_p, to_d = router.sides(router.request(prompt_of(40, seed=6000), timeout_s=1.5))
    to_p.prompt_token_ids[3] = VOCAB + 7
    decode, prefill = router.decode.open(to_d), router.prefill.open(to_p)
    async with asyncio.timeout(ENDS_S):
        p, d = await read(prefill), await read(decode)
    assert (p.code, p.token_ids) == ("ERROR_CODE_INVALID_REQUEST", [])
    assert (d.reason, d.token_ids) == ("TIMEOUT", [])


async def test_the_last_of_many_is_as_the_first(router: Router, workers: tuple[Member, Member]) -> None:
    """Output must not decay, and no transfer fail, when the pool, the staging and the ids have gone round often."""
    prompt = prompt_of(150, seed=7000)
    first = await alone(router, prompt, 8)
    await asyncio.sleep(1.2)  # the engine tells of what was before, too: it reports twice a second
    before = workers[1].metrics()
    for n in range(30):
        four = (router.apart(prompt, max_tokens=8, cache_salt=f"{n}.{i}") for i in range(4))
        for _, d in await asyncio.gather(*four):
            assert d.token_ids == first

    def grown(name: str) -> float:  # what has never happened has no count
        return workers[1].metrics().get(name, 0.0) - before.get(name, 0.0)

    await eventually(lambda: grown("pdserve_transfers_done_total") == 120, "the engine has told of all of them")
    assert grown("pdserve_transfers_failed_total") == 0


async def test_the_first_after_a_pause(router: Router, workers: tuple[Member, Member]) -> None:
    """Nobody was taken for dead meanwhile: the same sessions, engines and streams serve it, at the first attempt."""
    await router.apart(prompt_of(60, seed=8000))
    engines = [member.engine_pid() for member in workers]
    await asyncio.sleep(LEASE_S + 2)
    assert router.prefill.alive
    assert router.decode.alive
    prompt = prompt_of(60, seed=8001)
    async with asyncio.timeout(ENDS_S):
        _, d = await router.apart(prompt)
    assert d.token_ids == await alone(router, prompt, 8)
    assert [member.engine_pid() for member in workers] == engines
