"""Blocks reserved for KV that comes: kept when an attempt ends, taken over by the next one, or freed."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.messages import AddRequest, ErrorCode, FinishReason, ReceiveKV
from engine.request import Request
from tests.unit.fake_runner import make_core, make_message
from tests.unit.leaks import assert_no_leak, check_books

PROMPT = list(range(10))
BLOCKS = 3  # of 4 tokens: the prompt's, with room for one token more


class Ends:
    """D's end of the hand-off: keeps what ``abort`` says is tried again."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.ended: list[str] = []

    def want_kv(self, request: Request) -> None:
        pass

    def attempt_ends(self, request: Request) -> None:
        self.core.keep_reservation(request.request_id)

    def request_ended(self, request: Request) -> None:
        self.ended.append(request.request_id)


def attempt(number: int, transfer: str = "t", prompt: list[int] = PROMPT) -> AddRequest:
    handoff = ReceiveKV(transfer_id=transfer, attempt=number, peer_id=f"p{number}", peer_incarnation=1)
    return make_message(f"{transfer}/{number}", prompt, 4, handoff=handoff)


@pytest.fixture
def core() -> EngineCore:
    """The first attempt has its reservation."""
    core = make_core(num_blocks=5, max_num_seqs=2)
    core.receiver = Ends(core)
    core.add(attempt(1))
    assert core.reserve_kv("t/1") == 0
    return core


def used_blocks(core: EngineCore) -> int:
    check_books(core)
    return core.scheduler.pool.num_used


def finish(core: EngineCore, request_id: str) -> None:
    core.abort([request_id], "client")
    core.step()


def test_the_next_attempt_has_the_same_blocks(core: EngineCore) -> None:
    blocks = core.scheduler.requests["t/1"].block_table
    core.abort(["t/1"], "retry", is_retry=True)
    assert [output.finish_reason for output in core.step().outputs] == [FinishReason.ABORT]
    assert core.receiver.ended == ["t/1"]  # type: ignore[union-attr]
    assert used_blocks(core) == BLOCKS
    core.add(attempt(2))
    assert core.take_over_reservation("t/2")
    assert used_blocks(core) == BLOCKS
    assert core.reserve_kv("t/2") == 0
    assert core.scheduler.requests["t/2"].block_table == blocks
    assert core.stats().reservations_taken_over_total == 1
    finish(core, "t/2")
    assert_no_leak(core)


def test_others_do_not_get_what_is_kept(core: EngineCore) -> None:
    """Neither its blocks nor its seat: who takes it over must not wait."""
    core.add(attempt(1, "u", [20 + i for i in range(10)]))
    core.abort(["t/1"], "retry", is_retry=True)
    core.step()
    assert core.reserve_kv("u/1") is None
    core.add(make_message("v", [1], 2))
    core.add(make_message("w", [2], 2))
    assert [output.request_id for output in core.step().outputs] == ["v"]
    core.drop_reservation("t")
    assert {output.request_id for output in core.step().outputs} == {"v", "w"}
    assert used_blocks(core) <= 2
    while core.has_work():
        core.step()
    assert core.reserve_kv("u/1") == 0
    finish(core, "u/1")
    assert_no_leak(core)


def test_without_a_retry_nothing_is_kept(core: EngineCore) -> None:
    core.abort(["t/1"], "client")
    core.step()
    assert used_blocks(core) == 0
    core.add(attempt(2))
    assert not core.take_over_reservation("t/2")
    finish(core, "t/2")
    assert_no_leak(core)


def test_other_tokens_free_it(core: EngineCore) -> None:
    assert core.keep_reservation("t/1")
    core.fail_request("t/1", ErrorCode.HANDOFF_FAILED, "lost", True, peer_lost=True)
    output = core.step().outputs[0]
    assert output.peer_lost
    core.add(attempt(2, prompt=[*PROMPT, 1]))
    assert not core.take_over_reservation("t/2")
    assert used_blocks(core) == 0
    finish(core, "t/2")
    assert_no_leak(core)


def test_who_holds_nothing_keeps_nothing(core: EngineCore) -> None:
    core.release_reservation("t/1")
    assert not core.keep_reservation("t/1")
    assert not core.keep_reservation("unknown")
    finish(core, "t/1")
    assert_no_leak(core)


def test_who_has_the_same_prompt_waits_for_the_next_attempt(core: EngineCore) -> None:
    """Its KV comes: nobody computes it meanwhile."""
    core.keep_reservation("t/1")
    core.abort(["t/1"], "retry")
    core.add(attempt(2))
    assert core.take_over_reservation("t/2")
    core.add(make_message("same", PROMPT, 2))
    assert {output.request_id for output in core.step().outputs} == {"t/1"}
    assert not core.scheduler.running
    finish(core, "t/2")
    while core.has_work():
        core.step()
    assert_no_leak(core)
