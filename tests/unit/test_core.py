"""What the core answers: refusals, aborts, deadlines, drain, statistics. One terminal output for each request."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.messages import AddRequest, ErrorCode, FinishReason, RequestOutput
from tests.unit.fake_runner import make_core, make_message, oracle
from tests.unit.handoff_link import Clock, Link, receive_kv, send_kv
from tests.unit.leaks import assert_no_leak


def drain_outputs(core: EngineCore) -> list[RequestOutput]:
    outputs = core.step().outputs
    while core.has_work():
        outputs += core.step().outputs
    return outputs


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (make_message("r", []), ErrorCode.INVALID_REQUEST, "at least one token"),
        (make_message("r", [1], 0), ErrorCode.INVALID_REQUEST, "max_tokens=0"),
        (make_message("r", [1, 50]), ErrorCode.INVALID_REQUEST, "0 to 49"),
        (make_message("r", [1], output=[-1]), ErrorCode.INVALID_REQUEST, "vocabulary"),
        (make_message("r", [1] * 60, 41), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "length of 100 tokens"),
        (make_message("r", [1] * 64, 1), ErrorCode.PROMPT_TOO_LARGE, "need KV for 65 tokens"),
        (make_message("r", [1] * 40, 26), ErrorCode.PROMPT_TOO_LARGE, "pool holds 64"),
        (make_message("r", [1] * 65, 1, handoff=send_kv()), ErrorCode.PROMPT_TOO_LARGE, "--kv-cache-bytes"),
    ],
)
def test_what_can_never_run_is_refused_at_once(message: AddRequest, code: ErrorCode, words: str) -> None:
    core = make_core(max_model_len=100)
    core.add(message)
    [output] = core.step().outputs
    assert (output.request_id, output.finish_reason, output.error_code) == ("r", FinishReason.ERROR, code)
    assert words in output.error_message
    assert not output.retryable
    assert_no_leak(core)


def test_what_just_fits_runs() -> None:
    core = make_core(max_model_len=65)
    core.add(make_message("r", [1] * 40, 25, ignore_eos=True))
    outputs = drain_outputs(core)
    assert len(outputs) == 25
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert_no_leak(core)


def test_a_full_queue_is_overload_and_can_be_retried() -> None:
    core = make_core(max_waiting_requests=3, max_num_seqs=2)
    for index in range(7):
        core.add(make_message(f"r{index}", [1, 2], 4, ignore_eos=True))
    refused = core.step().outputs
    assert {output.request_id for output in refused if output.error_code} == {"r3", "r4", "r5", "r6"}
    assert all(output.retryable for output in refused if output.error_code)
    assert all(output.error_code is ErrorCode.OVERLOADED for output in refused if output.error_code)
    core.add(make_message("next", [1, 2], 4))
    drain_outputs(core)
    assert_no_leak(core)


def test_an_id_used_twice_ends_once() -> None:
    core = make_core()
    core.add(make_message("r", [1, 2], 4, ignore_eos=True))
    core.step()
    core.add(make_message("r", [3, 4], 4))
    [output] = drain_outputs(core)
    assert (output.error_code, output.finish_reason) == (ErrorCode.INVALID_REQUEST, FinishReason.ERROR)
    assert_no_leak(core)


def test_the_callers_message_is_not_changed() -> None:
    core = make_core()
    message = make_message("r", [1, 2], 5, output=[4], ignore_eos=True)
    core.add(message)
    drain_outputs(core)
    assert message == make_message("r", [1, 2], 5, output=[4], ignore_eos=True)


def test_a_resumed_request_goes_on_where_it_was_and_counts_what_it_had() -> None:
    core = make_core()
    whole = oracle(make_message("w", [1, 2], 9, ignore_eos=True), 64)[0]
    core.add(make_message("r", [1, 2], 9, output=whole[:5], ignore_eos=True))
    outputs = drain_outputs(core)
    assert [token for output in outputs for token in output.token_ids] == whole[5:]
    core.add(make_message("full", [1, 2], 9, output=whole, ignore_eos=True))
    [output] = drain_outputs(core)
    assert (output.finish_reason, output.token_ids) == (FinishReason.LENGTH, [])
    assert_no_leak(core)


def test_a_draining_engine_finishes_what_has_begun_and_hands_back_the_rest() -> None:
    core = make_core(max_num_seqs=2)
    for name in ("runs", "runs, too", "waits"):
        core.add(make_message(name, [1, 2], 4, ignore_eos=True))
    core.step()
    core.drain()
    core.add(make_message("comes", [1, 2], 4))
    outputs = drain_outputs(core)
    finished = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert finished == {
        "runs": FinishReason.LENGTH,
        "runs, too": FinishReason.LENGTH,
        "waits": FinishReason.ABORT,
        "comes": FinishReason.ABORT,
    }
    assert not [o for o in outputs if o.token_ids and o.request_id in ("waits", "comes")]
    assert_no_leak(core)


def test_deadlines_end_requests_in_every_state() -> None:
    clock = Clock()
    p, d = make_core(clock=clock, num_blocks=12), make_core(clock=clock, num_blocks=6, max_num_seqs=2)
    link = Link(p, d)
    soon = {"timeout_s": 10.0, "ignore_eos": True}
    # P: holding, running, asking, queued behind the pledges.
    p.add(make_message("holding", [1] * 8, handoff=send_kv("d1"), **soon))
    p.step()
    p.grant_ticket("holding", 0)
    p.step()
    p.add(make_message("running", [2] * 20, handoff=send_kv("d2"), **soon))
    p.step()
    p.grant_ticket("running", 0)
    p.step()
    p.add(make_message("asking", [3] * 4, handoff=send_kv("d3"), **soon))
    p.step()
    p.add(make_message("deferred", [4] * 4, handoff=send_kv("d4"), **soon))
    p.step()
    p.defer_ticket("deferred", 100.0)
    p.add(make_message("queued", [5] * 20, handoff=send_kv("d5"), **soon))
    p.add(make_message("parked", [6] * 20, handoff=send_kv("d2"), **soon))
    p.step()
    # D: waiting for KV with and without a reservation, running, preempted, waiting.
    d.add(make_message("decoding", [7] * 7, 10, **soon))
    d.step()
    for request_id in ("reserved", "unreserved"):
        d.add(make_message(request_id, [8] * 3, handoff=receive_kv(), **soon))
    assert d.reserve_kv("reserved") == 0
    d.add(make_message("waiting", [9] * 3, **soon))
    d.step()
    # The receiver's end of the link ends with its requests.
    link.wire.clear()
    clock.now_s += 10.0
    ended = {output.request_id: output.finish_reason for output in p.step().outputs + d.step().outputs}
    everyone = ["holding", "running", "asking", "deferred", "queued", "parked"]
    everyone += ["decoding", "reserved", "unreserved", "waiting"]
    assert ended == dict.fromkeys(everyone, FinishReason.TIMEOUT)
    assert not link.wanted
    assert_no_leak(p)
    assert_no_leak(d)


def test_requests_that_ended_early_leave_no_deadline_behind() -> None:
    core = make_core()
    for index in range(1000):
        core.add(make_message(f"r{index}", [1], timeout_s=600.0))
        core.abort([f"r{index}"], "client")
    assert len(core.scheduler._deadlines._heap) < 100
    core.step()
    assert_no_leak(core)


def test_an_id_that_is_used_again_has_the_later_requests_deadline_only() -> None:
    clock = Clock()
    core = make_core(clock=clock)
    for timeout_s in (5.0, 10.0, 10.0):
        core.abort(["again"], "client")
        core.add(make_message("again", [1], 50, ignore_eos=True, timeout_s=timeout_s))
    core.step()
    clock.now_s += 6.0
    assert not [output for output in core.step().outputs if output.finish_reason is FinishReason.TIMEOUT]
    clock.now_s += 6.0
    ends = [output for output in core.step().outputs if output.finish_reason is not None]
    assert [output.finish_reason for output in ends] == [FinishReason.TIMEOUT]
    assert_no_leak(core)


def test_the_next_deadline_is_the_requests_or_the_retrys() -> None:
    clock = Clock()
    p = make_core(clock=clock)
    Link(p, make_core(clock=clock))
    assert p.next_deadline_s() is None
    p.add(make_message("r", [1] * 8, handoff=send_kv(), timeout_s=10.0))
    assert p.next_deadline_s() == pytest.approx(1010.0, abs=0.1)
    p.step()
    assert p.next_deadline_s() == pytest.approx(1000.5, abs=0.1), "when the answer is overdue"
    p.defer_ticket("r", 2.0)
    clock.now_s += 0.5
    p.step()
    assert p.next_deadline_s() == pytest.approx(1002.0, abs=0.1)
    assert not p.has_work(), "it sleeps until the retry"
    clock.now_s += 1.5
    p.step()
    assert p.scheduler.desk.num_ahead == 1
    p.abort(["r"], "client")
    p.step()
    assert_no_leak(p)


def test_the_phases_of_the_first_token_add_up() -> None:
    clock = Clock()
    p = make_core(clock=clock)
    link = Link(p, make_core(clock=clock))
    added_s = clock.now_s
    p.add(make_message("r", [1] * 20, handoff=send_kv()))
    clock.now_s += 1.0
    p.step()
    clock.now_s += 2.0
    p.defer_ticket("r", 0.0)
    p.step()
    p.grant_ticket("r", 0)
    clock.now_s += 4.0
    p.step()
    clock.now_s += 8.0
    p.step()
    request = p.scheduler.holding["r"]
    assert request.first_output is not None
    timings = request.first_output.timings
    assert timings is not None
    assert timings.handoff_wait_s == pytest.approx(2.0, abs=0.1)
    assert timings.prefill_queue_s == pytest.approx(5.0, abs=0.1), (
        "before asking, and from the grant to the first chunk"
    )
    assert timings.prefill_s == pytest.approx(8.0, abs=0.1)
    phases = timings.handoff_wait_s + timings.prefill_queue_s + timings.prefill_s
    assert phases == pytest.approx(clock.now_s - added_s, abs=0.01)
    link.wire.clear()
    p.release_kv("r", None)
    p.step()
    assert_no_leak(p)


def test_stats_count_what_happened() -> None:
    core = make_core(num_blocks=9, max_num_batched_tokens=8, max_num_seqs=2)
    for index in range(3):
        core.add(make_message(f"r{index}", [index] * 10, 3, ignore_eos=True))
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens) == (1, 2, 2 + 10 + 10)
    assert (stats.total_blocks, stats.free_blocks, stats.cached_blocks) == (9, 6, 0)
    outputs = drain_outputs(core)
    stats = core.stats()
    assert stats.generation_tokens_total == sum(len(output.token_ids) for output in outputs) == 9
    assert stats.prompt_tokens_total == 30
    assert (stats.running, stats.waiting, stats.queued_tokens, stats.max_batch_requests) == (0, 0, 0, 2)
    assert stats.steps_total == len(core.runner.batches)  # type: ignore[attr-defined]
    assert_no_leak(core)
