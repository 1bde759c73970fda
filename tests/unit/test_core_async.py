"""Steps launched ahead of their predecessors' results: outputs equal the oracle's, and no block is reused too early."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest, FinishReason
from engine.request import Request
from tests.unit import handoff_cluster, test_core_handoff
from tests.unit.fake_async_runner import FakeAsyncRunner, batches_of, make_async_core
from tests.unit.fake_runner import make_core, make_message, oracle
from tests.unit.handoff_link import Clock, send_kv
from tests.unit.leaks import assert_no_leak, check_books
from tests.unit.test_scheduler_random import SHAPES, Client, is_refused, messages


def run_to_end(core: EngineCore, client: Client) -> int:
    steps = 0
    while core.has_work():
        client.step()
        steps += 1
        assert steps < 5000, "no progress"
    return steps


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_outputs_equal_the_oracle(data: st.DataObject) -> None:
    core = make_async_core(**data.draw(SHAPES))
    client = Client(core)
    added: dict[str, AddRequest] = {}
    aborted: set[str] = set()
    for index in range(data.draw(st.integers(1, 8))):
        message = data.draw(messages(index))
        core.add(message)
        added[message.request_id] = message
        for _ in range(data.draw(st.integers(0, 4))):
            client.step()
            check_books(core)
        if data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.sampled_from(sorted(added)))
            aborted.add(victim)
            core.abort([victim, "unknown"], "client")
            check_books(core)
    run_to_end(core, client)
    assert_no_leak(core)
    assert set(client.ends) == set(added)
    for request_id, message in added.items():
        end, tokens = client.ends[request_id], client.tokens[request_id]
        if is_refused(message, core):
            assert end.finish_reason is FinishReason.ERROR
        elif len(message.output_token_ids) >= message.sampling.max_tokens:
            assert (end.finish_reason, tokens) == (FinishReason.LENGTH, [])
        else:
            expected, reason = oracle(message, core.limits.max_model_len)
            if end.finish_reason is FinishReason.ABORT:
                assert request_id in aborted
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, end.finish_reason) == (expected, reason)
    assert core.stats().generation_tokens_total == sum(map(len, client.tokens.values()))


@pytest.mark.parametrize("num_blocks", [8, 11, 48])
def test_preemption_waits_for_the_step_in_flight(num_blocks: int) -> None:
    core = make_async_core(num_blocks=num_blocks, max_num_batched_tokens=8)
    client = Client(core)
    added = [make_message(f"r{i}", [i, i + 1, i + 2], 20, ignore_eos=True) for i in range(8)]
    for message in added:
        core.add(message)
    run_to_end(core, client)
    assert {m.request_id: oracle(m, 64)[0] for m in added} == client.tokens
    assert (core.stats().preemptions_total > 0) == (num_blocks < 48)
    assert_no_leak(core)


def test_the_next_step_is_launched_before_the_result_is_read() -> None:
    core = make_async_core()
    core.add(make_message("a", [1, 2, 3], 4, ignore_eos=True))
    assert core.step().outputs == []
    assert len(batches_of(core)) == 1
    (output,) = core.step().outputs
    assert len(output.token_ids) == 1
    assert [batch[0][1:] for batch in batches_of(core)] == [(0, 3), (3, 1)]


def test_the_last_token_by_length_is_not_computed_in_vain() -> None:
    core = make_async_core()
    core.add(make_message("a", [1, 2, 3], 5, ignore_eos=True))
    run_to_end(core, Client(core))
    assert len(batches_of(core)) == 5


def test_what_was_computed_past_a_stop_is_neither_emitted_nor_billed() -> None:
    expected, _ = oracle(make_message("a", [1, 2, 3], 20, ignore_eos=True), 64)
    at = next(i for i in range(2, 20) if expected[i] not in expected[:i])
    core = make_async_core()
    client = Client(core)
    core.add(make_message("a", [1, 2, 3], 20, ignore_eos=True, stop_token_ids=[expected[at]]))
    run_to_end(core, client)
    assert client.tokens["a"] == expected[: at + 1]
    assert core.stats().generation_tokens_total == at + 1
    assert len(batches_of(core)) == at + 2
    assert_no_leak(core)


def test_blocks_of_an_aborted_request_are_kept_until_its_step_is_over() -> None:
    core = make_async_core(num_blocks=4, enable_prefix_caching=False)
    core.add(make_message("a", list(range(12)), 2, ignore_eos=True))
    core.step()
    core.abort(["a"], "client")
    assert core.stats().free_blocks == 1
    core.step()
    assert core.stats().free_blocks == 4
    assert not core.has_work()


def test_a_penalty_on_history_takes_the_steps_one_by_one() -> None:
    core = make_async_core()
    client = Client(core)
    core.add(make_message("a", [1, 2, 3], 6, ignore_eos=True, presence_penalty=0.5))
    while core.has_work():
        client.step()
        request = core.scheduler.requests.get("a")
        assert request is None or request.num_pending_tokens <= 1
    assert len(client.tokens["a"]) == 6


def test_the_configuration_turns_it_off() -> None:
    core = make_async_core(async_scheduling=False)
    client = Client(core)
    core.add(make_message("a", [1, 2, 3], 6, ignore_eos=True))
    core.step()
    assert len(client.core.scheduler.requests["a"].output_token_ids) == 1
    synchronous = make_core()
    assert synchronous.config.async_scheduling


def test_random_hand_offs_between_engines_that_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_cluster, "make_core", make_async_core)
    test_core_handoff.test_random_loads_aborts_and_delays()


class BusyCluster(handoff_cluster.Cluster):
    """Whose hand-offs go on while a step is waited for: tickets, segments, ends and failures come in the middle."""

    def __init__(self, *shapes: dict[str, object]) -> None:
        super().__init__(*shapes)
        rng = random.Random(7)

        def deliver() -> bool:
            self.link.deliver(rng.randint(0, 2))
            self.delivered += 1
            return rng.random() < 0.8  # whether it says that a message came

        self.delivered = 0
        for core in (self.p, self.d):
            assert isinstance(core.runner, FakeAsyncRunner)
            core.runner.is_done = lambda: rng.random() < 0.3
            core.while_waiting = deliver


def test_random_hand_offs_that_go_on_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_cluster, "make_core", make_async_core)
    monkeypatch.setattr(test_core_handoff, "Cluster", BusyCluster)
    test_core_handoff.test_random_loads_aborts_and_delays()


def test_a_step_that_is_over_is_not_waited_for() -> None:
    core = make_async_core()
    naps = 0

    def nap() -> bool:
        nonlocal naps
        naps += 1
        return False

    core.while_waiting = nap
    core.add(make_message("a", [1, 2, 3], 4, ignore_eos=True))
    run_to_end(core, Client(core))
    assert not naps
    assert isinstance(core.runner, FakeAsyncRunner)
    core.runner.is_done = lambda: naps % 3 == 0
    naps = 1
    core.add(make_message("b", [1, 2, 3], 4, ignore_eos=True))
    run_to_end(core, Client(core))
    assert naps == 3


def test_what_comes_while_a_step_runs_is_launched_before_it_is_over() -> None:
    core = make_async_core()
    assert isinstance(core.runner, FakeAsyncRunner)
    naps: list[int] = []

    def nap() -> bool:
        naps.append(len(batches_of(core)))
        if len(naps) == 2:
            core.add(make_message("b", [7, 8, 9, 10], 1, ignore_eos=True))
        return len(naps) == 2

    core.while_waiting = nap
    core.runner.is_done = lambda: len(naps) >= 4
    client = Client(core)
    core.add(make_message("a", [1, 2, 3], 1, ignore_eos=True))
    client.step()
    client.step()
    assert naps == [1, 1, 2, 2]
    assert [batch[0] for batch in batches_of(core)] == [("a", 0, 3), ("b", 0, 4)]
    run_to_end(core, client)
    assert_no_leak(core)


def test_a_ticket_is_asked_for_while_a_step_runs() -> None:
    asked: list[str] = []
    core = make_async_core()

    class Sender:
        def want_ticket(self, request: Request) -> None:
            asked.append(request.request_id)

    def nap() -> bool:
        core.add(make_message("b", [7, 8, 9, 10], 4, handoff=send_kv()))
        return True

    core.sender = Sender()  # type: ignore[assignment]
    core.while_waiting = nap
    core.add(make_message("a", [1, 2, 3], 4, ignore_eos=True))
    core.step()
    assert not asked
    assert isinstance(core.runner, FakeAsyncRunner)
    core.runner.is_done = lambda: "b" in core.scheduler.requests
    core.step()
    assert asked == ["b"]


def test_who_comes_while_a_step_is_settled_has_not_waited_for_less_than_nothing() -> None:
    core = make_async_core(clock=Clock())
    assert isinstance(core.runner, FakeAsyncRunner)

    def nap() -> bool:
        core.add(make_message("b", [7, 8, 9], 2, ignore_eos=True))
        return True

    core.while_waiting = nap
    core.runner.is_done = lambda: "b" in core.scheduler.requests
    core.add(make_message("a", [1, 2, 3], 3, ignore_eos=True, presence_penalty=0.5))
    outputs = [output for _ in range(4) for output in core.step().outputs]
    first = next(output.timings for output in outputs if output.request_id == "b")
    assert first is not None
    assert first.prefill_queue_s >= 0


def test_a_step_that_hangs_is_an_error_though_messages_go_on_coming() -> None:
    """Each answer to them would be a sign of life, and no request would end."""
    clock = Clock()
    core = make_async_core(clock=clock)
    assert isinstance(core.runner, FakeAsyncRunner)
    naps = 0

    def nap() -> bool:
        nonlocal naps
        naps += 1
        assert naps < 100, "it is waited for without end"
        clock.now_s += 1.0
        return True

    core.while_waiting = nap
    core.runner.is_done = lambda: False
    core.add(make_message("a", [1, 2, 3], 4, ignore_eos=True))
    core.step()
    with pytest.raises(TimeoutError, match="restart"):
        core.step()


def test_a_process_that_was_stopped_does_not_take_its_step_for_one_that_hangs() -> None:
    """Stopped for a minute just after it had asked, it finds the step over."""
    clock = Clock()
    core = make_async_core(clock=clock)
    assert isinstance(core.runner, FakeAsyncRunner)
    asked = 0

    def is_done() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            clock.now_s += 60.0
        return asked > 1

    core.while_waiting = lambda: False
    core.runner.is_done = is_done
    client = Client(core)
    core.add(make_message("a", [1, 2, 3], 2, ignore_eos=True))
    run_to_end(core, client)
    assert asked > 1
    assert_no_leak(core)
