"""When a decode worker is asked to prefill: by what each would need, with rates that the test sets."""

from __future__ import annotations

from pdserve.v1 import inference_pb2 as pb
from router.policies.base import Choice, Pool, PromptInfo
from router.policies.load import WorkerLoad
from router.policies.shared_prefill import SharedPrefill

PROMPT = PromptInfo(1000, 64)


class Worker:
    """A prefill worker computes 10,000 tokens a second; a decode worker says of itself what it would."""

    def __init__(self, worker_id: str, report: pb.Load | None = None, queued: int = 0) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad(pool_tokens=100_000)
        self.stalled_s = 0.0
        if worker_id.startswith("p"):
            self.load.prefill.observe(10_000, 1.0)
        self.load.report(report or pb.Load())
        self.load.add(1, queued, queued)

    @property
    def prefill_s_per_token(self) -> float:
        return self.load.prefill.seconds_per_token

    def likely_wait_s(self, now_s: float) -> float:
        return self.stalled_s


def offer(rate: float = 5_000, queued: int = 0, used: float = 0.0) -> pb.Load:
    free = round(100 * (1 - used))
    return pb.Load(
        shares_prefill=True, prefill_tokens_per_s=rate, queued_tokens=queued, free_blocks=free, total_blocks=100
    )


def helpers(shared: SharedPrefill, prefill: Worker, *decodes: Worker, prompt: PromptInfo = PROMPT) -> list[str]:
    pools = [Pool([prefill], list(decodes))]
    found = shared.sooner(prompt, Choice(prefill, decodes[0]), pools, 0.0)
    return [worker.worker_id for pool in found for worker in pool.decodes]


def test_a_decode_worker_helps_when_it_is_sooner_by_a_margin() -> None:
    # By the decode worker 0.2 s; by the prefill worker 0.1 s, and 0.1 s for each thousand tokens before it.
    d = Worker("d0", offer())
    assert helpers(SharedPrefill(), Worker("p0"), d) == []
    assert helpers(SharedPrefill(), Worker("p0", queued=1000), d) == []  # as soon
    assert helpers(SharedPrefill(), Worker("p0", queued=1300), d) == []  # by less than 15 %
    assert helpers(SharedPrefill(), Worker("p0", queued=1500), d) == ["d0"]


def test_a_prompt_that_would_keep_it_busy_for_long_stays_with_the_prefill_worker_unless_that_takes_far_longer() -> None:
    # By the decode worker 0.9 and 1.2 s; by the prefill worker 0.45 and 0.6 s, and what waits there.
    d, short, long = Worker("d0", offer()), PromptInfo(4500, 64), PromptInfo(6000, 64)
    assert helpers(SharedPrefill(), Worker("p0", queued=15_000), d, prompt=short) == ["d0"]
    assert helpers(SharedPrefill(), Worker("p0", queued=15_000), d, prompt=long) == []
    assert helpers(SharedPrefill(), Worker("p0", queued=45_000), d, prompt=long) == ["d0"]
    # What it has cached it need not compute: 0.8 s are left.
    cached = PromptInfo(6000, 64, cached_tokens={"d0": 2000})
    assert helpers(SharedPrefill(), Worker("p0", queued=15_000), d, prompt=cached) == ["d0"]


def test_its_own_queue_and_what_it_has_cached_count() -> None:
    p = Worker("p0", queued=3000)
    assert helpers(SharedPrefill(), p, Worker("d0", offer(queued=2000))) == []
    queue = Worker("d0", offer(queued=1000))
    assert helpers(SharedPrefill(), p, queue) == []
    assert helpers(SharedPrefill(), p, queue, prompt=PromptInfo(1000, 64, cached_tokens={"d0": 900})) == ["d0"]
    # And what the prefill worker has: then only its queue is left, 0.22 s.
    d = Worker("d0", offer())
    busy, cached = Worker("p0", queued=2200), PromptInfo(1000, 64, cached_tokens={"p0": 1000})
    assert helpers(SharedPrefill(), busy, d) == ["d0"]
    assert helpers(SharedPrefill(), busy, d, prompt=cached) == []


def test_a_conversation_that_the_prefill_worker_knows_leaves_it_for_more_only() -> None:
    """Both have its first 200 tokens: 0.16 s by the decode worker, 0.08 s and the queue by the other."""
    d, known = Worker("d0", offer()), {"p0": 200, "d0": 200}
    for queued, expected in ((1700, []), (1800, ["d0"])):
        prompt = PromptInfo(1000, 64, cached_tokens=known)
        assert helpers(SharedPrefill(), Worker("p0", queued=queued), d, prompt=prompt) == expected
    new = PromptInfo(800, 64)
    assert helpers(SharedPrefill(), Worker("p0", queued=1300), d, prompt=new) == ["d0"]


def test_no_margin_is_needed_where_the_decode_worker_has_what_the_prefill_worker_lacks() -> None:
    """It computed the conversation so far by itself."""
    idle = Worker("p0")
    d = Worker("d0", offer())
    assert helpers(SharedPrefill(), idle, d, prompt=PromptInfo(1000, 64, cached_tokens={"d0": 600})) == ["d0"]
    assert helpers(SharedPrefill(), idle, d, prompt=PromptInfo(1000, 64, cached_tokens={"d0": 400})) == []
    both = {"d0": 600, "p0": 600}  # as after a hand-off
    assert helpers(SharedPrefill(), idle, d, prompt=PromptInfo(1000, 64, cached_tokens=both)) == []


def test_a_burst_goes_to_both_as_they_are_fast() -> None:
    """Nobody reports in between; the prefill worker is twice as fast."""
    shared, p, d = SharedPrefill(), Worker("p0"), Worker("d0", offer())
    to_decode = 0
    for _ in range(90):
        target = d if helpers(shared, p, d) else p
        to_decode += target is d
        target.load.add(1, 1000, 1000)
    assert 22 <= to_decode <= 30


def test_who_does_not_offer_or_has_no_room_is_not_asked() -> None:
    p = Worker("p0", queued=50_000)
    assert helpers(SharedPrefill(), p, Worker("d0")) == []
    assert helpers(SharedPrefill(), p, Worker("d0", offer(used=0.895))) == []
    assert helpers(SharedPrefill(), p, Worker("d0", offer(used=0.5)), Worker("d1"), Worker("d2", offer())) == [
        "d0",
        "d2",
    ]


def test_a_decode_worker_that_was_not_tried_yet_is_guessed_half_as_fast() -> None:
    d = Worker("d0", offer(rate=0))
    assert helpers(SharedPrefill(), Worker("p0", queued=1300), d) == []
    assert helpers(SharedPrefill(), Worker("p0", queued=1500), d) == ["d0"]


def test_a_prefill_worker_that_stalls_is_waited_for_no_longer() -> None:
    p, d = Worker("p0", queued=100), Worker("d0", offer())
    assert helpers(SharedPrefill(), p, d) == []
    p.stalled_s = 1.0
    assert helpers(SharedPrefill(), p, d) == ["d0"]
    d.stalled_s = 1.0
    assert helpers(SharedPrefill(), p, d) == []


def test_nothing_is_decided_while_the_prefill_workers_pace_is_unknown() -> None:
    p = Worker("p0", queued=50_000)
    p.load.prefill = type(p.load.prefill)()
    assert helpers(SharedPrefill(), p, Worker("d0", offer())) == []


def test_instead_of_refusing_whoever_begins_in_time_will_do() -> None:
    p = Worker("p0", queued=50_000)
    soon, late, no_offer = Worker("d0", offer(queued=1000)), Worker("d1", offer(queued=20_000)), Worker("d2")
    found = SharedPrefill().within(PROMPT, [Pool([p], [soon, late, no_offer])], limit_s=1.0, now_s=0.0)
    assert [worker.worker_id for pool in found for worker in pool.decodes] == ["d0"]
    assert not SharedPrefill().within(
        PROMPT, [Pool((), [soon])], limit_s=1.0, now_s=0.0
    )  # that one is full, and no helper


def test_a_large_fleet_costs_no_more_than_a_sample() -> None:
    p = Worker("p0", queued=50_000)
    decodes = [Worker(f"d{i}", offer()) for i in range(500)]
    assert 30 <= len(helpers(SharedPrefill(seed=1), p, *decodes)) <= 33
