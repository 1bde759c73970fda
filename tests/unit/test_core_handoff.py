"""Both sides of a hand-off on two cores: tokens equal the oracle's, and both pools are empty in the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest, ErrorCode, FinishReason, RequestOutput
from engine.request import RequestStatus
from tests.unit.fake_runner import VOCAB, make_core, make_message, oracle
from tests.unit.handoff_cluster import Cluster
from tests.unit.handoff_link import Link, receive_kv, send_kv
from tests.unit.leaks import assert_no_leak


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
