"""Workers that refuse, fail, die or stop: retried or migrated within bounds, no token lost, repeated or changed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from pdserve.v1 import inference_pb2 as pb
from tests.services.fake_worker import Behaviour, FakeWorker
from tests.services.processes import RedisProcess, eventually, worker_process
from tests.services.test_router import Answer, Fleet, collect, expected, fleet, running_fleet, valkey

__all__ = ["fleet", "valkey"]  # fixtures


WAITS = Behaviour(waits_for_kv=True)
"""A decode worker that says nothing before its prefill worker has done its part."""


def failing(code: str, **settings: object) -> Behaviour:
    return Behaviour(fail_code=code, **settings)  # type: ignore[arg-type]


async def test_a_failed_prefill_is_retried_on_another(fleet: Fleet) -> None:
    bad = await fleet.add("p-bad", "prefill", behaviour=failing("ERROR_CODE_INTERNAL"))
    good = await fleet.add("p-good", "prefill")
    d = await fleet.add("d0", "decode", behaviour=WAITS)
    for n in range(1, 5):
        assert (await fleet.ask()).tokens == expected(8)
        assert len(good.opened) == n
    assert len(bad.opened) == 4  # longest ago chosen, each time
    assert [request.handoff.attempt for request in d.opened] == [1, 2] * 4
    assert [reason for _, reason in d.aborted] == ["retry"] * 4
    first, second = d.opened[:2]
    assert first.handoff.transfer_id == second.handoff.transfer_id
    assert first.request_id != second.request_id


async def test_a_failed_decode_is_retried_on_another_and_its_prefill_aborted(fleet: Fleet) -> None:
    p = await fleet.add("p0", "prefill", behaviour=Behaviour(silent=True))
    await fleet.add("d-bad", "decode", behaviour=failing("ERROR_CODE_HANDOFF_FAILED", first_token_s=0.05))
    good = await fleet.add("d-good", "decode")
    answers = [await fleet.ask() for _ in range(2)]
    assert [answer.tokens for answer in answers] == [expected(8)] * 2
    assert ("retry" in [reason for _, reason in p.aborted]) == bool(fleet.workers["d-bad"].opened)
    assert fleet.workers["d-bad"].opened
    assert len(good.opened) == 2
    for handle in list(fleet.router.workers.known["p0"].session._open.values()):  # silent ones never end by themselves
        handle.abort("client")


async def test_with_one_pair_a_failed_handoff_is_tried_again_on_it(fleet: Fleet) -> None:
    p = await fleet.add("p0", "prefill", behaviour=failing("ERROR_CODE_HANDOFF_FAILED"))
    await fleet.add("d0", "decode", behaviour=WAITS)

    def mend(event: dict[str, object]) -> None:
        if event["event"] == "open" and len(p.opened) == 2:
            p.behaviour = Behaviour()

    p.on_event = mend
    assert (await fleet.ask()).tokens == expected(8)
    assert len(p.opened) == 2


async def test_after_two_failed_handoffs_the_decode_worker_prefills_by_itself(fleet: Fleet) -> None:
    """The network between them may be what fails, and everybody else is well."""
    for name in ("p0", "p1"):
        await fleet.add(name, "prefill", behaviour=failing("ERROR_CODE_HANDOFF_FAILED"))
    decodes = [await fleet.add(name, "decode", behaviour=WAITS) for name in ("d0", "d1")]
    assert (await fleet.ask()).tokens == expected(8)
    opened = [request for decode in decodes for request in decode.opened]
    assert sorted(request.HasField("handoff") for request in opened) == [False, True, True]


async def test_attempts_are_bounded(fleet: Fleet) -> None:
    d = await fleet.add("d0", "decode", behaviour=failing("ERROR_CODE_INTERNAL"))
    answer = await fleet.ask()
    assert answer.code == "ERROR_CODE_INTERNAL"
    assert answer.finish.failure.message == "as told"
    assert len(d.opened) == 3


async def test_what_is_not_retryable_goes_up_at_once(fleet: Fleet) -> None:
    behaviour = failing("ERROR_CODE_CONTEXT_LENGTH_EXCEEDED", fail_retryable=False)
    await fleet.add("p0", "prefill", behaviour=behaviour)
    d = await fleet.add("d0", "decode", behaviour=Behaviour(silent=True))
    answer = await fleet.ask()
    assert answer.code == "ERROR_CODE_CONTEXT_LENGTH_EXCEEDED"
    assert len(d.opened) == 1
    await eventually(lambda: d.aborted, "the other side is told")


async def test_a_full_worker_is_passed_over_and_full_workers_are_said_so(fleet: Fleet) -> None:
    full = failing("ERROR_CODE_OVERLOADED")
    await fleet.add("p0", "prefill", behaviour=full)
    p1 = await fleet.add("p1", "prefill")
    d = await fleet.add("d0", "decode", behaviour=WAITS)
    for _ in range(2):
        assert (await fleet.ask()).tokens == expected(8)
    p1.behaviour = full
    d.opened.clear()
    answer = await fleet.ask()
    assert answer.code == "ERROR_CODE_OVERLOADED"
    assert answer.finish.failure.retry_after_s == 0.5
    assert all(request.HasField("handoff") for request in d.opened)  # not pushed onto the decode worker


@pytest.mark.parametrize("tokens", [1, 3])
async def test_a_stream_goes_on_elsewhere_without_a_token_lost_or_repeated(fleet: Fleet, tokens: int) -> None:
    await fleet.add("p0", "prefill")
    behaviour = failing("ERROR_CODE_INTERNAL", fail_after_tokens=tokens)
    bad = await fleet.add("d-bad", "decode", behaviour=behaviour)
    good = await fleet.add("d-good", "decode")
    answers = [await fleet.ask(10) for _ in range(2)]
    assert bad.opened
    for answer in answers:
        assert answer.tokens == expected(10)
        assert [output.HasField("phases") for output in answer.outputs].count(True) == 1
    resumed = next(request for request in good.opened if request.output_so_far)
    assert list(resumed.output_so_far) == expected(tokens)
    assert resumed.handoff.attempt == 2


async def test_a_worker_that_fails_after_the_last_token_has_answered(fleet: Fleet) -> None:
    await fleet.add("d0", "decode", behaviour=failing("ERROR_CODE_INTERNAL", fail_after_tokens=4, last_word=False))
    answer = await fleet.ask(4)
    assert answer.tokens == expected(4)
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH
    assert len(fleet.workers["d0"].opened) == 1


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_decode_worker_dies_or_stops_in_the_middle_of_an_answer(fleet: Fleet, number: signal.Signals) -> None:
    await fleet.add("p0", "prefill")
    flags = ("--token-interval-s", "0.01")
    async with (
        worker_process("d0", "decode", *flags, redis_url=fleet.redis_url) as d0,
        worker_process("d1", "decode", *flags, redis_url=fleet.redis_url) as d1,
    ):
        await eventually(lambda: sum(w.usable for w in fleet.router.workers.with_role("decode")) == 2, "both are met")
        handles = [fleet.open(300) for _ in range(4)]
        so_far = [Answer() for _ in handles]
        answers = [asyncio.create_task(collect(*pair)) for pair in zip(handles, so_far, strict=True)]
        await eventually(lambda: len(d0.opened()) == len(d1.opened()) == 2, "each has two")
        await eventually(lambda: all(answer.tokens for answer in so_far), "all have begun")
        d0.signal(number)
        for answer in await asyncio.gather(*answers):
            assert answer.finish.reason == pb.FINISH_REASON_LENGTH
            assert answer.tokens == expected(300)
        assert len(d1.opened()) == 4
        assert sum(event["output_so_far"] != 0 for event in d1.opened()) == 2
        if number == signal.SIGSTOP:
            d0.signal(signal.SIGCONT)
            known = fleet.router.workers.known
            await eventually(lambda: "d0" in known and known["d0"].usable, "the woken one is taken back")
            for answer in await asyncio.gather(*(fleet.ask(3) for _ in range(4))):
                assert answer.tokens == expected(3)
            await eventually(lambda: len(d0.opened()) == 4, "it had its share")


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_worker_dies_or_stops_before_the_first_token(fleet: Fleet, number: signal.Signals) -> None:
    """The decode worker would wait; the router hears of the prefill worker and takes another one."""
    async with worker_process("p-bad", "prefill", "--silent", redis_url=fleet.redis_url) as bad:
        await eventually(lambda: any(w.usable for w in fleet.router.workers.with_role("prefill")), "it is met")
        d = await fleet.add("d0", "decode", behaviour=Behaviour(silent=True))
        asking = asyncio.create_task(fleet.ask())
        await eventually(lambda: d.opened and bad.opened(), "both have it")
        good = await fleet.add("p-good", "prefill")
        d.behaviour = Behaviour()
        bad.signal(number)
        assert (await asking).tokens == expected(8)
        assert d.aborted == [(d.opened[0].request_id, "retry")]
        assert len(good.opened) == 1


async def test_a_worker_that_gives_a_request_back_is_retried(fleet: Fleet) -> None:
    """An abort that nobody here asked for: the worker is leaving."""
    d0 = await fleet.add("d0", "decode", behaviour=Behaviour(token_interval_s=0.01))
    d1 = await fleet.add("d1", "decode", behaviour=Behaviour(token_interval_s=0.01))
    handle = fleet.open(50)
    asking = asyncio.create_task(collect(handle))
    await eventually(lambda: d0.opened or d1.opened, "one has it")
    leaving = d0 if d0.opened else d1
    await asyncio.sleep(0.1)
    (session, request_id), task = next(iter(leaving.tasks.items()))
    task.cancel()
    finish = pb.Finish(reason=pb.FINISH_REASON_ABORT)
    session.send([pb.Output(request_id=request_id, finish=finish)])
    assert (await asking).tokens == expected(50)


async def test_redis_gone_and_back(fleet: Fleet, valkey: RedisProcess) -> None:
    """Known workers stay and requests go on; with an empty Redis the workers register again."""
    await fleet.add("p0", "prefill")
    await fleet.add("d0", "decode")
    valkey.kill()
    await asyncio.sleep(0.3)
    assert (await fleet.ask()).tokens == expected(8)
    valkey.start()
    await fleet.add("d1", "decode")
    valkey.flush()
    await asyncio.sleep(0.1)
    assert (await fleet.ask()).tokens == expected(8)


async def test_a_restart_is_a_new_incarnation_wherever_it_listens(fleet: Fleet) -> None:
    await fleet.add("p0", "prefill")
    for _ in range(2):
        before = fleet.workers.get("d0")
        worker = FakeWorker("d0", "decode", fleet.redis_url)
        if before is not None:
            await before.stop()
        await worker.start()
        fleet.workers["d0"] = worker
        await fleet.until_usable(worker)
        assert (await fleet.ask()).tokens == expected(8)
        assert fleet.workers["p0"].opened[-1].handoff.peer == worker.identity


async def test_the_older_incarnation_loses_its_requests_while_it_still_runs(fleet: Fleet) -> None:
    """Two processes with one worker id: the newer registration is the worker, the older one is not heard any more."""
    old = await fleet.add("d0", "decode", behaviour=Behaviour(token_interval_s=0.01))
    so_far = Answer()
    asking = asyncio.create_task(collect(fleet.open(1000), so_far))
    await eventually(lambda: so_far.tokens, "the older one says it")
    new = FakeWorker("d0", "decode", fleet.redis_url)
    await new.start()
    fleet.workers["d0-new"] = new
    await fleet.until_usable(new)
    assert (await asking).tokens == expected(1000)
    assert new.opened[0].output_so_far
    assert old.lost == [[old.opened[0].request_id]]


async def test_a_worker_that_left_is_forgotten(fleet: Fleet, valkey: RedisProcess) -> None:
    worker = await fleet.add("d0", "decode")
    await worker.stop()
    del fleet.workers["d0"]
    await eventually(lambda: not fleet.router.workers.known, "lost and not registered any more")


async def test_no_answer_is_lost_when_the_router_leaves(valkey: RedisProcess, tmp_path: Path) -> None:
    """What runs ends with an error that the gateway may retry elsewhere, when it cannot finish in time."""
    async with running_fleet(valkey) as fleet:
        d = await fleet.add("d0", "decode", behaviour=Behaviour(silent=True))
        handle = fleet.open()
        await eventually(lambda: d.opened, "the worker has it")
        await fleet.router._sessions.close()
        answer = await collect(handle)
        assert answer.code == "ERROR_CODE_WORKER_LOST"
        assert answer.finish.failure.retryable
        await eventually(lambda: d.aborted, "the worker is told")
