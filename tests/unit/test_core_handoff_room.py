"""Who gets room for a hand-off, and when: what P asks for, what D reserves, and who waits for whom."""

from __future__ import annotations

import pytest

from engine.messages import ErrorCode, FinishReason
from engine.request import RequestStatus
from tests.unit.fake_runner import FakeRunner, make_message, oracle
from tests.unit.handoff_cluster import Cluster
from tests.unit.handoff_link import receive_kv, send_kv


def test_d_is_busy_for_a_prefix_that_it_is_just_receiving() -> None:
    cluster = Cluster()
    core = cluster.d
    for request_id in ("first", "second", "other"):
        core.add(make_message(request_id, [*range(8), len(request_id)], 4, handoff=receive_kv()))
    core.add(make_message("unlike", [9] * 9, 4, handoff=receive_kv()))
    assert core.reserve_kv("first") == 0
    assert core.reserve_kv("second") is None
    assert core.reserve_kv("unlike") == 0
    core.release_reservation("first")
    assert core.reserve_kv("second") == 0, "the first one gave up"
    core.abort(["first", "second", "other", "unlike"], "test")
    cluster.link.wire.clear()
    cluster.run()


def test_p_asks_only_for_what_fits_and_holds_nothing_meanwhile() -> None:
    cluster = Cluster({"num_blocks": 8}, {"num_blocks": 64})
    for index in range(4):
        cluster.p.add(make_message(f"r{index}", [index] * 12, 2, handoff=send_kv(f"d{index}")))
    cluster.step("p")
    assert cluster.p.scheduler.desk.num_ahead == 2, "6 of 8 blocks are pledged: a third prompt would not fit"
    assert cluster.p.scheduler.pool.num_used == 0
    cluster.p.add(make_message("local", [9] * 8, 1))
    cluster.step("p")
    assert cluster.p.stats().running == 0, "a ticket that is being asked for goes before a later request"
    cluster.link.wire.clear()
    cluster.p.abort([f"r{index}" for index in range(4)], "test")
    cluster.run()
    assert cluster.end("p", "local").finish_reason is FinishReason.LENGTH


def test_a_granted_request_runs_before_a_more_urgent_one_that_has_to_wait_for_it() -> None:
    cluster = Cluster({"num_blocks": 8})
    cluster.add("granted", range(30), 1, priority=5)
    cluster.step("p")
    cluster.link.deliver()
    cluster.p.add(make_message("urgent", [9] * 8, 1, priority=-5))
    cluster.run()
    assert len(cluster.tokens("granted")) == 1
    assert cluster.end("p", "urgent").finish_reason is FinishReason.LENGTH


def test_busy_defers_one_request_and_blocks_no_other() -> None:
    cluster = Cluster({"num_blocks": 64}, {"num_blocks": 8})
    cluster.add("large", [1] * 20, 4, ignore_eos=True)
    cluster.add("larger", [2] * 24, 4, ignore_eos=True)
    small = cluster.add("small", [3] * 4, 4, ignore_eos=True)
    for _ in range(3):
        cluster.step("p")
        cluster.link.deliver()
    assert cluster.link.busy > 0
    assert cluster.d.scheduler.requests["larger"].block_table == []
    assert cluster.p.scheduler.requests["larger"].block_table == []
    for _ in range(8):
        cluster.step("p")
        cluster.link.deliver()
        cluster.step("d")
    assert cluster.tokens("small") == oracle(small, 64)[0]
    assert cluster.end("d", "small").finish_reason is FinishReason.LENGTH
    cluster.run()
    assert len(cluster.tokens("larger")) == 4


def test_a_stuck_receiver_cannot_take_the_pool() -> None:
    cluster = Cluster({"num_blocks": 16, "max_num_batched_tokens": 64})
    lengths = [16] + [8] * 9
    stuck = [
        make_message(f"s{i}", [i] * length, 2, handoff=send_kv("stuck"), timeout_s=5.0)
        for i, length in enumerate(lengths)
    ]
    for message in stuck:
        cluster.p.add(message)
    # Its tickets come, its blocks are never released.
    for _ in range(10):
        cluster.step("p")
        for request in list(cluster.p.scheduler.requests.values()):
            cluster.p.grant_ticket(request.request_id, 0)
        cluster.link.wire.clear()
    assert cluster.p.stats().holding_kv == 3, "half of the 16 blocks: 4 + 2 + 2"
    assert not cluster.p.has_work()
    # As one of its requests ends, those ask that fit in its place, and no more.
    cluster.p.abort(["s0"], "client")
    cluster.step("p")
    assert cluster.p.scheduler.desk.num_ahead == 2
    cluster.link.wire.clear()
    message = cluster.add("r", range(9), 3, ignore_eos=True)
    for _ in range(6):
        cluster.step("p")
        cluster.link.deliver()
        cluster.step("d")
    assert cluster.tokens("r") == oracle(message, 64)[0]
    # Freeing needs no peer: the deadline does it.
    cluster.clock.now_s += 6.0
    cluster.run()
    assert {cluster.end("p", m.request_id).finish_reason for m in stuck[1:]} == {FinishReason.TIMEOUT}


def test_parked_requests_are_not_forgotten_when_the_next_in_line_ends() -> None:
    cluster = Cluster({"num_blocks": 8})
    for index in range(4):
        cluster.p.add(make_message(f"r{index}", [index] * 16, 1, handoff=send_kv()))
    cluster.step("p")
    assert cluster.p.scheduler.desk.num_ahead == 1, "the others are parked"
    cluster.p.abort(["r0"], "client")
    cluster.p.abort(["r1"], "client")
    cluster.step("p")
    assert cluster.p.scheduler.desk.num_ahead == 1
    cluster.link.wire.clear()
    cluster.p.abort(["r2", "r3"], "client")
    cluster.run()


def test_a_receiver_that_does_not_answer_makes_the_others_wait_for_a_moment_only() -> None:
    cluster = Cluster({"num_blocks": 64, "max_num_batched_tokens": 16})
    cluster.p.add(make_message("mute", range(40), 2, handoff=send_kv("mute"), timeout_s=50.0))
    cluster.step("p")
    cluster.link.wire.clear()
    message = cluster.add("r", range(9), 3, ignore_eos=True)
    cluster.step("p")
    assert not cluster.link.wire, "two steps of work lie ahead"
    due_s = cluster.p.next_deadline_s()
    assert due_s == pytest.approx(cluster.clock.now_s + 0.5, abs=0.05)
    cluster.clock.now_s = due_s
    for _ in range(8):
        cluster.step("p")
        cluster.link.deliver()
        cluster.step("d")
    assert cluster.tokens("r") == oracle(message, 64)[0]
    # An answer that comes late is still one.
    cluster.p.grant_ticket("mute", 0)
    for _ in range(4):
        cluster.step("p")
    assert cluster.p.scheduler.requests["mute"].status is RequestStatus.HOLDING_KV
    cluster.link.wire.clear()
    cluster.p.release_kv("mute", None)
    cluster.run()


def test_d_leaves_room_for_those_that_run() -> None:
    cluster = Cluster(d={"num_blocks": 8})
    core = cluster.d
    core.add(make_message("running", range(15), 16, ignore_eos=True))
    cluster.step("d")
    assert core.scheduler.pool.num_used == 4
    core.add(make_message("three", [9] * 11, 4, handoff=receive_kv()))
    core.add(make_message("four", [9] * 15, 4, handoff=receive_kv()))
    assert core.reserve_kv("four") is None, "4 blocks are left, one is for the running request"
    assert core.reserve_kv("three") == 0
    core.release_reservation("three")
    assert core.scheduler.pool.num_used == 4
    core.abort(["running", "three", "four"], "test")
    cluster.link.wire.clear()
    cluster.run()


def test_a_reservation_has_room_for_the_next_token_and_counts_what_it_pins() -> None:
    cluster = Cluster(d={"num_blocks": 5, "max_num_batched_tokens": 64})
    core = cluster.d
    core.add(make_message("cached", range(15), 1))
    cluster.step("d")
    assert core.stats().cached_blocks == 3
    core.add(make_message("large", [*range(12), 1], 2, handoff=receive_kv()))
    core.add(make_message("small", range(8), 2, handoff=receive_kv()))
    assert core.reserve_kv("small") == 8
    assert len(core.scheduler.requests["small"].block_table) == 3
    assert core.reserve_kv("large") is None, "its third cached block is not to be had twice"
    core.release_reservation("small")
    assert core.reserve_kv("large") == 12
    core.abort(["large", "small"], "test")
    cluster.link.wire.clear()
    cluster.run()


def test_reservations_take_no_seat_that_is_not_there_and_no_turn_of_others() -> None:
    cluster = Cluster(d={"max_num_seqs": 8, "max_num_batched_tokens": 2})
    core = cluster.d
    core.add(make_message("older", [3], 2, ignore_eos=True))
    for index in range(3):
        core.add(make_message(f"r{index}", [index], 2, handoff=receive_kv()))
    two_seats = "two tokens a step are two seats, and an older request has one of them"
    assert [core.reserve_kv(f"r{index}") for index in range(3)] == [0, None, None], two_seats
    cluster.step("d")
    assert [core.reserve_kv(f"r{index}") for index in (1, 2)] == [None, None], two_seats
    core.abort(["r0", "r1", "r2"], "test")
    cluster.link.wire.clear()
    cluster.run()


def test_nothing_is_reserved_while_a_preempted_request_waits_to_resume() -> None:
    cluster = Cluster(d={"num_blocks": 7})
    core = cluster.d
    for index in range(2):
        core.add(make_message(f"r{index}", [index] * 7, 16, ignore_eos=True))
    while not core.stats().preemptions_total:
        cluster.step("d")
    core.abort(["r0"], "client")
    core.add(make_message("new", [9], 2, handoff=receive_kv()))
    assert core.reserve_kv("new") is None
    cluster.step("d")
    assert core.reserve_kv("new") == 0
    core.abort(["new"], "client")
    cluster.link.wire.clear()
    cluster.run()


def test_a_released_reservation_waits_for_another_attempt() -> None:
    cluster = Cluster()
    message = cluster.add("r", range(12), 4, ignore_eos=True)
    cluster.step("p")
    cluster.link.deliver()
    cluster.step("p")
    cluster.link.wire.clear()
    cluster.p.release_kv("r", (ErrorCode.HANDOFF_FAILED, "lease expired", True))
    [end] = cluster.p.step().outputs
    assert (end.error_code, end.retryable) == (ErrorCode.HANDOFF_FAILED, True)
    cluster.link.close("r")
    cluster.d.release_reservation("r")
    assert cluster.d.stats().waiting_for_kv == 1
    assert cluster.d.scheduler.pool.num_used == 0
    # The second attempt comes from P again.
    cluster.link.wanted["r"] = cluster.d.scheduler.requests["r"]
    cluster.p.add(make_message("r", range(12), 4, ignore_eos=True, handoff=send_kv()))
    cluster.run()
    assert cluster.tokens("r") == oracle(message, 64)[0]


def test_a_large_step_of_p_ends_with_the_prompts_that_it_completes() -> None:
    """Two prompts of half a step each: together they would both be done when the second one is."""
    cluster = Cluster({"max_num_batched_tokens": 16, "num_blocks": 64}, {"num_blocks": 64})
    for token, (name, length) in enumerate([("a", 8), ("b", 8), ("c", 3), ("d", 4), ("e", 8), ("f", 30), ("g", 2)]):
        cluster.add(name, [token] * length, 4)
    cluster.run()
    assert isinstance(cluster.p.runner, FakeRunner)
    steps = ["".join(name for name, _, _ in batch) for batch in cluster.p.runner.batches]
    # Small ones fill half of a step or more; a long one fills whole ones.
    assert steps == ["a", "b", "cde", "f", "f", "g"]
