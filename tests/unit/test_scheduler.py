"""Single rules of the scheduler, each by a load that shows it."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.messages import FinishReason, RequestOutput
from engine.request import RequestStatus
from tests.unit.fake_runner import FakeRunner, make_core, make_message, next_token, oracle
from tests.unit.handoff_link import Link, receive_kv
from tests.unit.leaks import assert_no_leak, check_books


def batches(core: EngineCore) -> list[list[tuple[str, int, int]]]:
    assert isinstance(core.runner, FakeRunner)
    return core.runner.batches


def run(core: EngineCore, max_steps: int = 1000) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not core.has_work():
            break
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        check_books(core)
    return outputs


def test_a_prompt_is_computed_in_chunks_under_the_budget_beside_decodes() -> None:
    core = make_core(max_num_batched_tokens=6, num_blocks=32)
    core.add(make_message("decoding", range(4), 12, ignore_eos=True))
    core.step()
    core.add(make_message("long", range(20, 36), 2, ignore_eos=True))
    outputs = run(core)
    assert batches(core)[:6] == [
        [("decoding", 0, 4)],
        [("decoding", 4, 1), ("long", 0, 5)],
        [("decoding", 5, 1), ("long", 5, 5)],
        [("decoding", 6, 1), ("long", 10, 5)],
        [("decoding", 7, 1), ("long", 15, 1)],
        [("decoding", 8, 1), ("long", 16, 1)],
    ]
    # 1 + 4: a chunk of one token is a chunk.
    assert core.stats().prefill_chunks_total == 5
    assert core.stats().max_batch_requests == 2
    assert len(outputs["long"]) == 2
    assert_no_leak(core)


def test_priority_goes_before_arrival() -> None:
    core = make_core(max_num_seqs=1)
    for request_id, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        core.add(make_message(request_id, [1, 2], 1, priority=priority))
    assert list(run(core)) == ["urgent", "first", "second", "late"]
    assert_no_leak(core)


def test_more_seats_than_budget_starve_nobody() -> None:
    core = make_core(max_num_seqs=8, max_num_batched_tokens=2, num_blocks=64)
    for index in range(5):
        core.add(make_message(f"r{index}", [index], 10, ignore_eos=True))
    outputs = run(core)
    assert all(sum(len(output.token_ids) for output in news) == 10 for news in outputs.values())
    assert core.stats().max_batch_requests == 2
    assert_no_leak(core)


def test_a_prefix_is_computed_once_by_requests_that_arrive_together() -> None:
    core = make_core(num_blocks=64, max_num_batched_tokens=16)
    added = [make_message(f"r{index}", [*range(40), index], 3, ignore_eos=True) for index in range(8)]
    for message in added:
        core.add(message)
    outputs = run(core)
    for message in added:
        tokens = [token for output in outputs[message.request_id] for token in output.token_ids]
        assert tokens == oracle(message, 64)[0]
    prefill = [tokens for batch in batches(core) for _, start, tokens in batch if start < 41]
    assert sum(prefill) == 41 + 7
    assert [outputs[f"r{index}"][0].cached_tokens for index in range(8)] == [0] + [40] * 7
    stats = core.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (8 * 41, 7 * 40)
    assert_no_leak(core)


def test_those_held_for_a_prefix_go_on_when_its_claimant_ends() -> None:
    core = make_core(num_blocks=64)
    Link(make_core(), core)
    core.add(make_message("receiving", range(40), 3, handoff=receive_kv()))
    assert core.reserve_kv("receiving") == 0
    for request_id in ("held", "gone"):
        core.add(make_message(request_id, range(41), 3, ignore_eos=True))
    core.step()
    assert len(core.scheduler.inflight) == 2
    assert not core.has_work()
    core.abort(["gone"], "client")
    core.release_reservation("receiving")
    outputs = run(core)
    assert outputs["held"][-1].finish_reason is FinishReason.LENGTH
    core.abort(["receiving"], "client")
    core.step()
    assert_no_leak(core)


def test_held_requests_let_others_pass() -> None:
    core = make_core(num_blocks=64, max_num_batched_tokens=16)
    core.add(make_message("first", range(40), 1))
    core.add(make_message("held", range(41), 1))
    core.add(make_message("other", [9, 9, 9], 1))
    core.step()
    core.step()
    core.step()
    assert [request_id for request_id, _, _ in batches(core)[2]] == ["first", "other"]
    run(core)
    assert_no_leak(core)


def test_the_last_prompt_token_is_always_computed() -> None:
    core = make_core()
    core.add(make_message("a", range(8), 1))
    run(core)
    core.add(make_message("b", range(8), 1))
    outputs = run(core)
    assert outputs["b"][0].cached_tokens == 4
    assert outputs["b"][0].token_ids == [next_token(range(8))]
    assert_no_leak(core)


def test_tenants_do_not_share_and_the_output_is_shared_too() -> None:
    core = make_core()
    core.add(make_message("a", range(8), 9, ignore_eos=True, cache_salt="one"))
    turn = [token for output in run(core)["a"] for token in output.token_ids]
    core.add(make_message("b", [*range(8), *turn, 1], 1, cache_salt="two"))
    core.add(make_message("c", [*range(8), *turn, 1], 1, cache_salt="one"))
    outputs = run(core)
    assert (outputs["b"][0].cached_tokens, outputs["c"][0].cached_tokens) == (0, 16)
    assert_no_leak(core)


def test_without_a_prefix_cache_nothing_is_cached() -> None:
    core = make_core(enable_prefix_caching=False)
    for request_id in "ab":
        core.add(make_message(request_id, range(20), 2))
        assert run(core)[request_id][0].cached_tokens == 0
    assert core.stats().cached_blocks == 0
    assert_no_leak(core)


def test_the_newest_of_the_lowest_priority_is_preempted_and_resumes_first() -> None:
    core = make_core(num_blocks=6, max_num_batched_tokens=32)
    core.add(make_message("old", [1] * 7, 12, ignore_eos=True))
    core.add(make_message("urgent", [2] * 7, 12, ignore_eos=True, priority=-1))
    core.step()
    core.add(make_message("waiting", [3] * 3, 1))
    while not core.stats().preemptions_total and core.has_work():
        core.step()
    [preempted] = core.scheduler.preempted
    assert preempted.request_id == "old"
    assert (preempted.status, preempted.block_table) == (RequestStatus.PREEMPTED, [])
    num_batches = len(batches(core))
    run(core)
    order = list(dict.fromkeys(request_id for batch in batches(core)[num_batches:] for request_id, _, _ in batch))
    assert order.index("old") < order.index("waiting")
    assert_no_leak(core)


def test_a_request_that_cannot_get_blocks_now_does_not_spin() -> None:
    core = make_core(num_blocks=4, max_num_batched_tokens=32)
    core.add(make_message("r", range(7), 1))
    taken = core.scheduler.pool.allocate(3)
    assert core.has_work()
    core.step()
    assert not core.has_work(), "nothing can run until something changes"
    core.add(make_message("s", range(20, 23), 1))
    assert core.has_work()
    core.abort(["r"], "client")
    while core.has_work():
        core.step()
    core.scheduler.pool.free(taken)
    assert_no_leak(core)


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_min_tokens_keeps_a_stop_token_from_ending_a_request(min_tokens: int) -> None:
    core = make_core()
    message = make_message("r", [1, 2, 3], 20, min_tokens=min_tokens, stop_token_ids=list(range(50)))
    core.add(message)
    outputs = run(core)["r"]
    assert len(outputs) == min_tokens + 1
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token_id == outputs[-1].token_ids[0]
    assert_no_leak(core)


def test_update_drops_what_ended_while_the_step_ran() -> None:
    core = make_core()
    for request_id in ("gone", "here"):
        core.add(make_message(request_id, [1, 2], 3, ignore_eos=True))
    batch = core.scheduler.schedule(0.0)
    sampled = core.runner.run(batch)
    core.abort(["gone"], "client")
    outputs = core.scheduler.update(batch, sampled, 0.0)
    assert [output.request_id for output in outputs] == ["here"]
    run(core)
    assert_no_leak(core)
