"""Both sides of a hand-off on two cores: tokens equal the oracle's, and both pools are empty in the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest, ErrorCode, FinishReason, RequestOutput
from engine.request import RequestStatus
from tests.unit.fake_runner import VOCAB, make_core, make_message, oracle
from tests.unit.handoff_link import Clock, Link, receive_kv, send_kv
from tests.unit.leaks import assert_no_leak, check_books


class Cluster:
    """P, D, the link between them, and what came out."""

    def __init__(self, p: dict[str, int] | None = None, d: dict[str, int] | None = None) -> None:
        self.clock = Clock()
        self.p = make_core(clock=self.clock, **(p or {}))  # type: ignore[arg-type]
        self.d = make_core(clock=self.clock, **(d or {}))  # type: ignore[arg-type]
        self.link = Link(self.p, self.d)
        self.outputs: dict[str, dict[str, list[RequestOutput]]] = {"p": {}, "d": {}}

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> AddRequest:
        """To D and to P; the message returned is the plain one, for the oracle."""
        self.d.add(make_message(request_id, prompt, max_tokens, handoff=receive_kv(), **fields))  # type: ignore[arg-type]
        self.p.add(make_message(request_id, prompt, max_tokens, handoff=send_kv(), **fields))  # type: ignore[arg-type]
        return make_message(request_id, prompt, max_tokens, **fields)  # type: ignore[arg-type]

    def step(self, name: str) -> None:
        core: EngineCore = getattr(self, name)
        self.clock.now_s += 0.004
        for output in core.step().outputs:
            outputs = self.outputs[name].setdefault(output.request_id, [])
            assert not outputs or outputs[-1].finish_reason is None, "an output after the last one"
            outputs.append(output)
            if name == "p" and output.finish_reason is FinishReason.ERROR:
                # The router would try again elsewhere, and in the end tell D.
                self.d.fail_request(output.request_id, ErrorCode.HANDOFF_FAILED, "P failed", True)
                self.link.close(output.request_id)
        check_books(core)

    def run(self, max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            if not (self.p.scheduler.requests or self.d.scheduler.requests or self.link.wire):
                break
            self.step("p")
            self.link.deliver()
            self.step("d")
        self.step("p")
        self.step("d")
        assert_no_leak(self.p)
        assert_no_leak(self.d)
        assert not self.link.wanted
        assert not self.link.received

    def tokens(self, request_id: str) -> list[int]:
        assert not any(output.token_ids for output in self.outputs["p"].get(request_id, []))
        return [token for output in self.outputs["d"][request_id] for token in output.token_ids]

    def end(self, name: str, request_id: str) -> RequestOutput:
        return self.outputs[name][request_id][-1]


def test_the_first_token_comes_from_p_and_the_rest_from_d() -> None:
    cluster = Cluster()
    message = cluster.add("r", range(11), 6, ignore_eos=True)
    cluster.run()
    assert cluster.tokens("r") == oracle(message, 64)[0]
    first = cluster.outputs["d"]["r"][0]
    assert first.timings is not None
    assert first.timings.prefill_s > 0
    assert first.cached_tokens == 0
    p_end = cluster.end("p", "r")
    assert (p_end.finish_reason, p_end.cached_tokens) == (FinishReason.LENGTH, 0)
    assert p_end.timings is not None
    assert cluster.d.stats().prefill_chunks_total == 0
    assert cluster.link.sent_tokens == 11 * 3


def test_what_d_has_cached_is_not_sent_and_what_p_has_cached_is() -> None:
    cluster = Cluster()
    cluster.add("a", range(20), 2, ignore_eos=True)
    cluster.run()
    cluster.link.sent_tokens = 0
    # The same prompt and one block more: both sides have 20 tokens; D lacks the rest.
    message = cluster.add("b", range(24), 2, ignore_eos=True)
    cluster.run()
    assert cluster.tokens("b") == oracle(message, 64)[0]
    assert cluster.link.sent_tokens == 4 * 3
    assert cluster.outputs["d"]["b"][0].cached_tokens == 20
    # A D that has nothing gets P's cached part, too.
    empty = Cluster()
    empty.p, empty.link = cluster.p, Link(cluster.p, empty.d)
    message = empty.add("c", range(24), 2, ignore_eos=True)
    empty.clock = cluster.clock
    empty.run()
    assert empty.tokens("c") == oracle(message, 64)[0]
    assert empty.link.sent_tokens == 24 * 3
    assert empty.outputs["d"]["c"][0].cached_tokens == 20


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"stop_token_ids": list(range(VOCAB))}])
def test_a_request_that_ends_with_token_0_ends_on_both_sides(fields: dict[str, object]) -> None:
    cluster = Cluster()
    message = cluster.add("r", range(9), **fields)  # type: ignore[arg-type]
    cluster.run()
    expected, reason = oracle(message, 64)
    assert (cluster.tokens("r"), cluster.end("d", "r").finish_reason) == (expected, reason)
    assert cluster.end("p", "r").finish_reason is reason
    assert cluster.end("p", "r").stop_token_id == cluster.end("d", "r").stop_token_id
    # Nothing unverified was published.
    assert cluster.d.stats().cached_blocks == 0


def test_siblings_share_their_prefix_in_flight_on_both_sides() -> None:
    cluster = Cluster({"num_blocks": 64}, {"num_blocks": 64})
    added = [cluster.add(f"r{i}", [*range(40), i], 4, ignore_eos=True) for i in range(8)]
    cluster.run()
    for message in added:
        assert cluster.tokens(message.request_id) == oracle(message, 64)[0]
    # The prefix once, then eight last tokens.
    assert cluster.link.sent_tokens == (40 + 8) * 3
    assert cluster.p.stats().prefix_cache_hits_total == 7 * 40


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


def test_a_resumed_request_is_handed_off_at_its_output_position() -> None:
    cluster = Cluster()
    whole = oracle(make_message("x", range(10), 9, ignore_eos=True), 64)[0]
    message = cluster.add("r", range(10), 9, output=whole[:4], ignore_eos=True)
    cluster.run()
    assert cluster.tokens("r") == whole[4:] == oracle(message, 64)[0]
    assert cluster.link.sent_tokens == 14 * 3


def test_preempted_on_d_it_goes_on_without_p() -> None:
    cluster = Cluster({"num_blocks": 64}, {"num_blocks": 9})
    added = [cluster.add(f"r{i}", [i] * 9, 16, ignore_eos=True) for i in range(4)]
    cluster.run()
    for message in added:
        assert cluster.tokens(message.request_id) == oracle(message, 64)[0]
    assert cluster.d.stats().preemptions_total > 0
    assert cluster.d.stats().prefill_chunks_total > 0
    assert cluster.p.stats().preemptions_total == 0


def test_a_sender_is_never_preempted() -> None:
    cluster = Cluster({"num_blocks": 9, "max_num_batched_tokens": 2})
    core = cluster.p
    core.add(make_message("local", range(7), 20, ignore_eos=True))
    cluster.step("p")
    cluster.step("p")
    cluster.add("sent", [9] * 20, 2)
    while core.scheduler.requests["sent"].status is not RequestStatus.HOLDING_KV:
        cluster.step("p")
        cluster.link.deliver(1)
    assert core.stats().preemptions_total == 1
    assert core.scheduler.requests["local"].status is RequestStatus.PREEMPTED
    cluster.run()
    assert len([t for output in cluster.outputs["p"]["local"] for t in output.token_ids]) == 20


def test_misuse_by_the_receiver_is_an_error() -> None:
    cluster = Cluster()
    core = cluster.d
    core.add(make_message("r", range(9), 4, handoff=receive_kv()))
    with pytest.raises(KeyError, match="with a reservation"):
        core.write_kv("r", 0, 4, 0, 1, [0] * 4, None)
    with pytest.raises(KeyError, match="not waiting"):
        core.reserve_kv("unknown")
    assert core.reserve_kv("r") == 0
    with pytest.raises(ValueError, match="outside of its unpublished blocks"):
        core.write_kv("r", 8, 10, 0, 1, [0, 0], None)
    core.add(make_message("cached", range(20, 25), 1))
    cluster.step("d")
    core.add(make_message("hit", range(20, 29), 4, handoff=receive_kv()))
    assert core.reserve_kv("hit") == 4
    with pytest.raises(ValueError, match=r"\(4 to 9\)"):
        core.write_kv("hit", 3, 5, 0, 1, [0, 0], None)
    core.abort(["r", "hit"], "client")
    with pytest.raises(KeyError):
        core.kv_ready("r", RequestOutput(request_id="r", token_ids=[1]))
    cluster.link.wire.clear()
    cluster.run()


def test_a_worker_without_that_side_refuses_the_hand_off() -> None:
    for handoff, word in ((send_kv(), "prefill worker"), (receive_kv(), "decode worker")):
        core = make_core()
        core.add(make_message("r", [1], handoff=handoff))
        [output] = core.step().outputs
        assert output.error_code is ErrorCode.INVALID_REQUEST
        assert word in output.error_message
        assert_no_leak(core)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_loads_aborts_and_delays(data: st.DataObject) -> None:
    shapes = st.fixed_dictionaries(
        {
            "num_blocks": st.integers(4, 24),
            "block_size": st.sampled_from([2, 4, 8]),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.integers(1, 24),
            "num_host_blocks": st.sampled_from([0, 3, 40]),
        }
    )
    cluster = Cluster(data.draw(shapes), data.draw(shapes))
    added: dict[str, AddRequest] = {}
    aborted: set[str] = set()
    on_p: set[str] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(
            st.sampled_from(["add", "p", "d", "p", "d", "deliver", "deliver", "abort", "plain", "plain_p"])
        )
        if action in ("add", "plain", "plain_p"):
            prompt = list(range(data.draw(st.integers(0, 20)))) + data.draw(
                st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
            )
            fields = {"priority": data.draw(st.integers(0, 1)), "ignore_eos": data.draw(st.booleans())}
            request_id, max_tokens = f"r{len(added)}", data.draw(st.integers(1, 12))
            if action == "add":
                added[request_id] = cluster.add(request_id, prompt, max_tokens, **fields)
            else:
                added[request_id] = make_message(request_id, prompt, max_tokens, **fields)  # type: ignore[arg-type]
                (cluster.p if action == "plain_p" else cluster.d).add(added[request_id])
                on_p |= {request_id} if action == "plain_p" else set()
        elif action == "deliver":
            cluster.link.deliver(data.draw(st.integers(1, 5)))
        elif action == "abort" and added:
            victim = data.draw(st.sampled_from(sorted(added)))
            aborted.add(victim)
            data.draw(st.sampled_from([cluster.p, cluster.d])).abort([victim], "client")
        elif action in ("p", "d"):
            cluster.step(action)
    cluster.run()
    for request_id, message in added.items():
        where = "p" if request_id in on_p else "d"
        end = cluster.end(where, request_id)
        expected, reason = oracle(message, 64)
        tokens = [token for output in cluster.outputs[where][request_id] for token in output.token_ids]
        assert where == "p" or not any(output.token_ids for output in cluster.outputs["p"].get(request_id, []))
        if end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (tokens, end.finish_reason) == (expected, reason)
            continue
        assert tokens == expected[: len(tokens)]
        if end.finish_reason is FinishReason.ABORT:
            assert request_id in aborted
        elif end.error_code is ErrorCode.HANDOFF_FAILED:
            p_end = cluster.end("p", request_id)
            assert request_id in aborted or p_end.error_code is ErrorCode.PROMPT_TOO_LARGE
        else:
            assert end.error_code is ErrorCode.PROMPT_TOO_LARGE


def test_a_draining_side_completes_what_is_under_way() -> None:
    """Whichever side drains: a hand-off that has begun ends well, one that has not is handed back."""
    for side in ("p", "d"):
        cluster = Cluster(p={"max_num_batched_tokens": 4}, d={})
        under_way = cluster.add("under way", [1, 2, 3, 4, 5, 6, 7, 8, 9], ignore_eos=True)
        for _ in range(2):
            cluster.step("p")
            cluster.link.deliver()
            cluster.step("d")
        assert "under way" in cluster.d.scheduler.reservations.reserved
        core: EngineCore = getattr(cluster, side)
        core.drain()
        to_add = send_kv() if side == "p" else receive_kv()
        core.add(make_message("late", [1, 2], 8, handoff=to_add))
        cluster.run()
        tokens = [token for output in cluster.outputs["d"]["under way"] for token in output.token_ids]
        assert tokens == oracle(under_way, cluster.d.runner.max_model_len)[0]
        [late] = cluster.outputs[side]["late"]
        assert (late.finish_reason, late.token_ids) == (FinishReason.ABORT, [])
