"""A router between a gateway's session and fake workers: where requests go, and how each of them ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.identity import new_identity
from pdserve.session import Handle, Session
from pdserve.v1 import inference_pb2 as pb
from router.app import Router
from router.config import RouterConfig
from tests.services.fake_worker import Behaviour, FakeWorker, token_at
from tests.services.processes import RedisProcess, eventually, running_redis

PROMPT = [5, 6, 7]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    outputs: list[pb.Output] = field(default_factory=list)

    @property
    def finish(self) -> pb.Finish:
        assert [output.HasField("finish") for output in self.outputs].count(True) == 1
        return self.outputs[-1].finish

    @property
    def code(self) -> str:
        return pb.ErrorCode.Name(self.finish.failure.code)


async def collect(handle: Handle, answer: Answer | None = None) -> Answer:
    """``answer`` shows what has come so far."""
    answer = answer or Answer()
    async with asyncio.timeout(60):
        async for output in handle:
            answer.outputs.append(output)
            answer.tokens.extend(output.token_ids)
    return answer


def expected(max_tokens: int, prompt: list[int] = PROMPT, start: int = 0) -> list[int]:
    return [token_at(prompt, position) for position in range(start, max_tokens)]


class Fleet:
    """A router with its workers, and a gateway's session to it."""

    def __init__(self, redis_url: str, router: Router, gateway: Session) -> None:
        self.redis_url = redis_url
        self.router = router
        self.gateway = gateway
        self.workers: dict[str, FakeWorker] = {}
        self._handed_over: set[tuple[str, int]] = set()
        self._sent = 0

    async def add(self, worker_id: str, role: str, **settings: object) -> FakeWorker:
        worker = FakeWorker(worker_id, role, self.redis_url, handed_over=self._handed_over, **settings)  # type: ignore[arg-type]
        await worker.start()
        self.workers[worker_id] = worker
        await self.until_usable(worker)
        return worker

    async def until_usable(self, worker: FakeWorker) -> None:
        def usable() -> bool:
            known = self.router.workers.known.get(worker.worker_id)
            return known is not None and known.usable and known.identity.incarnation == worker.identity.incarnation

        await eventually(usable, f"{worker.worker_id} is met")

    def open(
        self,
        max_tokens: int = 8,
        *,
        prompt: list[int] = PROMPT,
        timeout_s: float = 30,
        group: str = "",
        output_so_far: list[int] | None = None,
    ) -> Handle:
        self._sent += 1
        return self.gateway.open(
            pb.GenerateRequest(
                request_id=f"q{self._sent}",
                prompt_token_ids=prompt,
                sampling=pb.SamplingParams(max_tokens=max_tokens),
                timeout_s=timeout_s,
                group=group,
                output_so_far=output_so_far or [],
            )
        )

    async def ask(self, max_tokens: int = 8, **settings: object) -> Answer:
        return await collect(self.open(max_tokens, **settings))  # type: ignore[arg-type]

    def at_rest(self) -> bool:
        """Nothing is open or counted anywhere."""
        workers = self.router.workers.known.values()
        return not any(worker.tasks for worker in self.workers.values()) and all(
            worker.load.is_at_rest and worker.session.num_open == 0 for worker in workers
        )


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisProcess]:
    with running_redis(tmp_path) as server:
        yield server


@asynccontextmanager
async def running_fleet(valkey: RedisProcess, **settings: object) -> AsyncIterator[Fleet]:
    settings.setdefault("policy", "round_robin")  # where the tests say which worker comes next
    settings.setdefault("local_prefill_tokens", 0)  # short prompts are handed off, too
    config = RouterConfig(redis_url=valkey.url, poll_interval_s=0.05, drain_timeout_s=0.1, **settings)  # type: ignore[arg-type]
    router = Router(config)
    await router.start()
    gateway = await Session.connect(f"127.0.0.1:{router.port}", new_identity("gateway", "g0"))
    fleet = Fleet(valkey.url, router, gateway)
    try:
        yield fleet
        await eventually(fleet.at_rest, "nothing is left behind")
        assert gateway.num_open == 0
    finally:
        await gateway.close()
        await router.stop()
        await asyncio.gather(*(worker.stop() for worker in fleet.workers.values()))


@pytest.fixture
async def fleet(valkey: RedisProcess) -> AsyncIterator[Fleet]:
    async with running_fleet(valkey) as fleet:
        yield fleet


async def test_both_workers_get_the_request_and_the_decode_worker_answers(fleet: Fleet) -> None:
    p = await fleet.add("p0", "prefill")
    d = await fleet.add("d0", "decode")
    answer = await fleet.ask(8)
    assert answer.tokens == expected(8)
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH
    assert {output.request_id for output in answer.outputs} == {"q1"}
    first, *rest = answer.outputs
    assert first.cached_tokens == 3
    assert first.phases.prefill_s == 0.25
    assert 0 <= first.phases.route_s <= first.phases.router_s
    assert not any(output.HasField("phases") for output in rest)
    (to_p,), (to_d,) = p.opened, d.opened
    assert to_p.handoff.side == pb.Handoff.SIDE_SEND
    assert to_d.handoff.side == pb.Handoff.SIDE_RECEIVE
    assert to_p.handoff.peer == d.identity
    assert to_d.handoff.peer == p.identity
    assert to_p.handoff.transfer_id == to_d.handoff.transfer_id
    assert to_p.handoff.attempt == to_d.handoff.attempt == 1
    assert to_p.request_id == to_d.request_id
    assert 0 < to_d.timeout_s <= 30


async def test_gateways_hear_the_load_of_the_workers_that_answer(fleet: Fleet) -> None:
    assert fleet.gateway.load.total_blocks == 0  # nobody could serve
    await fleet.add("p0", "prefill")
    await fleet.add("d0", "decode")
    await fleet.add("d1", "decode")
    await eventually(lambda: fleet.gateway.load.total_blocks == 200, "the sum arrives with a heartbeat")


async def test_many_at_once(fleet: Fleet) -> None:
    """256 requests: each its own tokens, one stream per pair of processes."""
    p = await fleet.add("p0", "prefill")
    d = await fleet.add("d0", "decode")
    answers = await asyncio.gather(*(fleet.ask(20, prompt=[i + 1]) for i in range(256)))
    assert [answer.tokens for answer in answers] == [expected(20, [i + 1]) for i in range(256)]
    assert len(p.sessions.sessions) == len(d.sessions.sessions) == 1


async def test_only_aggregated_workers_get_plain_requests(fleet: Fleet) -> None:
    worker = await fleet.add("a0", "aggregated")
    assert (await fleet.ask()).tokens == expected(8)
    assert not worker.opened[0].HasField("handoff")


async def test_without_a_prefill_worker_the_decode_worker_does_it_all(fleet: Fleet) -> None:
    worker = await fleet.add("d0", "decode")
    assert (await fleet.ask()).tokens == expected(8)
    assert not worker.opened[0].HasField("handoff")


async def test_short_prompts_skip_the_prefill_worker(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, local_prefill_tokens=4) as fleet:
        p = await fleet.add("p0", "prefill")
        await fleet.add("d0", "decode")
        assert (await fleet.ask(prompt=[1, 2, 3])).tokens == expected(8, [1, 2, 3])
        assert not p.opened
        assert (await fleet.ask(prompt=[1, 2, 3, 4])).tokens == expected(8, [1, 2, 3, 4])
        assert len(p.opened) == 1


async def test_only_equal_fingerprints_are_paired(fleet: Fleet) -> None:
    for model in ("a", "b"):
        await fleet.add(f"p-{model}", "prefill", fingerprint=model)
        await fleet.add(f"d-{model}", "decode", fingerprint=model)
    await fleet.add("p-alone", "prefill", fingerprint="c")
    await asyncio.gather(*(fleet.ask() for _ in range(20)))
    for model in ("a", "b"):
        assert len(fleet.workers[f"p-{model}"].opened) == 10
        assert all(r.handoff.peer.worker_id == f"d-{model}" for r in fleet.workers[f"p-{model}"].opened)
    assert not fleet.workers["p-alone"].opened


async def test_a_group_stays_on_one_pair(fleet: Fleet) -> None:
    for i in range(3):
        await fleet.add(f"p{i}", "prefill")
        await fleet.add(f"d{i}", "decode")
    await asyncio.gather(*(fleet.ask(group="siblings") for _ in range(6)), *(fleet.ask() for _ in range(6)))
    opened = {w.worker_id: sum(r.group == "siblings" for r in w.opened) for w in fleet.workers.values()}
    assert sorted(opened.values()) == [0, 0, 0, 0, 6, 6]


async def test_a_prompt_larger_than_every_pool_is_refused_at_once(fleet: Fleet) -> None:
    await fleet.add("p0", "prefill")
    await fleet.add("d0", "decode", pool_tokens=100)
    answer = await fleet.ask(prompt=[1] * 100)
    assert answer.code == "ERROR_CODE_PROMPT_TOO_LARGE"
    assert not answer.finish.failure.retryable
    assert (await fleet.ask(prompt=[1] * 99)).finish.reason == pb.FINISH_REASON_LENGTH


async def test_a_prompt_larger_than_the_prefill_pools_goes_without(fleet: Fleet) -> None:
    p = await fleet.add("p0", "prefill", pool_tokens=50)
    await fleet.add("d0", "decode")
    assert (await fleet.ask(prompt=[1] * 60)).tokens == expected(8, [1] * 60)
    assert not p.opened


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda r: r.ClearField("prompt_token_ids"), "prompt_token_ids"),
        (lambda r: setattr(r, "timeout_s", 0), "timeout_s"),
        (lambda r: setattr(r, "timeout_s", float("inf")), "timeout_s"),
        (lambda r: setattr(r.sampling, "max_tokens", 0), "max_tokens"),
    ],
)
async def test_impossible_requests_get_an_error(
    fleet: Fleet, change: Callable[[pb.GenerateRequest], None], word: str
) -> None:
    request = pb.GenerateRequest(
        request_id="q", prompt_token_ids=PROMPT, sampling=pb.SamplingParams(max_tokens=1), timeout_s=5
    )
    change(request)
    answer = await collect(fleet.gateway.open(request))
    assert answer.code == "ERROR_CODE_INVALID_REQUEST"
    assert word in answer.finish.failure.message


async def test_no_workers_is_said_after_a_bounded_wait(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, no_worker_wait_s=0.2) as fleet:
        answer = await fleet.ask()
        assert answer.code == "ERROR_CODE_NO_WORKERS"
        assert answer.finish.failure.retryable
        assert answer.finish.failure.retry_after_s > 0


async def test_a_worker_that_comes_in_time_is_used(fleet: Fleet) -> None:
    asking = asyncio.create_task(fleet.ask())
    await asyncio.sleep(0.2)
    await fleet.add("a0", "aggregated")
    assert (await asking).tokens == expected(8)


async def test_too_many_open_requests_are_refused_with_a_hint(valkey: RedisProcess) -> None:
    async with running_fleet(valkey, max_open_requests=2) as fleet:
        await fleet.add("a0", "aggregated", behaviour=Behaviour(silent=True))
        held = [fleet.open(), fleet.open()]
        answer = await fleet.ask()
        assert answer.code == "ERROR_CODE_OVERLOADED"
        assert answer.finish.failure.retry_after_s > 0
        for handle in held:
            handle.abort("client")
        fleet.workers["a0"].behaviour = Behaviour()
        await eventually(fleet.at_rest, "the aborted ones are gone")
        assert (await fleet.ask()).tokens == expected(8)


async def test_the_deadline_holds_even_if_workers_are_silent(fleet: Fleet) -> None:
    p = await fleet.add("p0", "prefill", behaviour=Behaviour(silent=True))
    d = await fleet.add("d0", "decode", behaviour=Behaviour(silent=True))
    answer = await fleet.ask(timeout_s=0.3)
    assert answer.finish.reason == pb.FINISH_REASON_TIMEOUT
    assert answer.code == "ERROR_CODE_DEADLINE_EXCEEDED"
    for worker in (p, d):
        await eventually(lambda w=worker: [reason for _, reason in w.aborted] == ["deadline"], "workers are told")


@pytest.mark.parametrize("reason", ["stop", "client", "slow_consumer"])
async def test_an_abort_reaches_both_workers(fleet: Fleet, reason: str) -> None:
    p = await fleet.add("p0", "prefill", behaviour=Behaviour(silent=True))
    d = await fleet.add("d0", "decode", behaviour=Behaviour(silent=True))
    handle = fleet.open()
    await eventually(lambda: p.opened and d.opened, "the workers have it")
    handle.abort(reason)
    for worker in (p, d):
        await eventually(lambda w=worker: [reason for _, reason in w.aborted] == [reason], "workers are told")


async def test_an_abort_in_the_same_frame_as_the_request(fleet: Fleet) -> None:
    await fleet.add("a0", "aggregated", behaviour=Behaviour(silent=True))
    for _ in range(20):
        fleet.open().abort("client")
    await eventually(fleet.at_rest, "all are gone")
    fleet.workers["a0"].behaviour = Behaviour()
    assert (await fleet.ask()).tokens == expected(8)


async def test_a_lost_gateway_ends_its_requests_on_the_workers(fleet: Fleet) -> None:
    p = await fleet.add("p0", "prefill", behaviour=Behaviour(silent=True))
    d = await fleet.add("d0", "decode", behaviour=Behaviour(silent=True))
    other = await Session.connect(f"127.0.0.1:{fleet.router.port}", new_identity("gateway", "g1"))
    request = pb.GenerateRequest(
        request_id="x", prompt_token_ids=PROMPT, sampling=pb.SamplingParams(max_tokens=5), timeout_s=30
    )
    other.open(request)
    await eventually(lambda: p.opened and d.opened, "the workers have it")
    await other.close()
    for worker in (p, d):
        await eventually(lambda w=worker: [reason for _, reason in w.aborted] == ["client"], "workers are told")


async def test_two_gateways_may_use_the_same_request_id(fleet: Fleet) -> None:
    await fleet.add("p0", "prefill")
    await fleet.add("d0", "decode", behaviour=Behaviour(token_interval_s=0.005))
    other = await Session.connect(f"127.0.0.1:{fleet.router.port}", new_identity("gateway", "g1"))
    answers = []
    for session, prompt in ((fleet.gateway, [1]), (other, [2])):
        request = pb.GenerateRequest(
            request_id="same", prompt_token_ids=prompt, sampling=pb.SamplingParams(max_tokens=20), timeout_s=30
        )
        answers.append(collect(session.open(request)))
    first, second = await asyncio.gather(*answers)
    assert first.tokens == expected(20, [1])
    assert second.tokens == expected(20, [2])
    await other.close()


async def test_a_resumed_request_goes_on_at_its_position(fleet: Fleet) -> None:
    """The gateway fails over with what the client has: the workers get it, and only the rest comes back."""
    p = await fleet.add("p0", "prefill")
    d = await fleet.add("d0", "decode")
    answer = await fleet.ask(10, output_so_far=expected(4))
    assert answer.tokens == expected(10, start=4)
    assert list(p.opened[0].output_so_far) == list(d.opened[0].output_so_far) == expected(4)
