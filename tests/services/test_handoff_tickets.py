"""The decode side of a transfer, alone: who gets a ticket, who waits, and who is refused."""

from __future__ import annotations

import pytest

from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2
from tests.services.handoff_world import LEASE_S, P_PEER, P, World, layout


@pytest.fixture
def world() -> World:
    return World()


def ask(world: World, key: TransferKey, peer: str = P_PEER, **changed: object) -> None:
    values: dict[str, object] = {
        "sender": P,
        "layout": layout(),
        "prompt_tokens": 32,
        "timeout_s": 60.0,
        "backends": ("tcp",),
    }
    world.receiver.on_frame(peer, Frame(key, Open(**(values | changed))))  # type: ignore[arg-type]


KEY = TransferKey("t-r", 1)


def test_open_may_come_before_the_request(world: World) -> None:
    ask(world, KEY)
    assert world.receiver.parked == 1
    assert not world.d_said
    world.add_to_d("r", 32)
    assert [type(body) for body in world.d_said] == [Ticket]
    assert world.receiver.parked == 0


def test_open_for_nobody_is_refused_after_a_while_and_so_is_its_request(world: World) -> None:
    ask(world, KEY)
    world.pass_time(1.9)
    world.receiver.poll()
    assert not world.d_said
    world.pass_time(0.1)
    world.receiver.poll()
    assert [type(body) for body in world.d_said] == [Refused]
    world.add_to_d("r", 32)  # too late: the sender gave up
    assert "unknown transfer" in world.d_port.failed["r"]
    world.assert_at_rest()


def test_busy_holds_nothing_and_is_asked_again(world: World) -> None:
    world.d_port.room = 0
    world.add_to_d("r", 32)
    ask(world, KEY)
    assert [type(body) for body in world.d_said] == [Busy]
    assert world.receiver.leases == 0
    world.d_port.room = 1
    ask(world, KEY)
    assert isinstance(world.d_said[-1], Ticket)


def test_a_large_prompt_is_not_passed_for_ever(world: World) -> None:
    for name in ("large", "small-1", "small-2", "small-3"):
        world.add_to_d(name, 32)

    def answer(name: str) -> type:
        ask(world, TransferKey(f"t-{name}", 1))
        return type(world.d_said[-1])

    world.d_port.too_large = {"large"}
    assert answer("large") is Busy
    assert answer("small-1") is Ticket  # it may pass, for now
    world.pass_time(1.0)
    assert answer("large") is Busy
    assert answer("small-2") is Busy
    world.d_port.too_large = set()
    assert answer("small-2") is Busy  # the room is for the large one
    assert answer("large") is Ticket
    assert answer("small-2") is Ticket
    world.add_to_d("gone", 32)
    world.add_to_d("small-4", 32)
    world.d_port.too_large = {"gone"}
    assert answer("gone") is Busy
    world.pass_time(2.1)
    assert answer("small-4") is Ticket  # whoever does not ask again holds nobody up


def test_the_same_question_gets_the_same_ticket(world: World) -> None:
    world.add_to_d("r", 32)
    ask(world, KEY)
    ask(world, KEY)
    assert world.d_said[0] == world.d_said[1]
    ask(world, KEY, peer="another stream")
    assert isinstance(world.d_said[-1], Refused)
    assert world.receiver.leases == 1


def test_epochs_differ_between_reservations_and_incarnations(world: World) -> None:
    for name in ("a", "b"):
        world.add_to_d(name, 32)
        ask(world, TransferKey(f"t-{name}", 1))
    epochs = [body.epoch for body in world.d_said if isinstance(body, Ticket)]
    assert len(set(epochs)) == 2
    assert min(epochs) > 2  # the incarnation: a later one starts above all of these


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layout": layout(model_fingerprint="other")}, ["model_fingerprint", "'m'", "'other'"]),
        ({"layout": layout(head_dim=64)}, ["head_dim", "8", "64"]),
        ({"layout": layout(hash_block_tokens=32)}, ["hash_block_tokens", "16", "32"]),
        ({"layout": layout(dtype="float8")}, ["dtype", "float8"]),
        ({"prompt_tokens": 31}, ["32", "31"]),
        ({"sender": kv_pb2.WorkerIdentity(worker_id="p", incarnation=9)}, ["p/1", "p/9"]),
        ({"backends": ("pigeon",)}, ["tcp", "pigeon"]),
    ],
)
def test_what_does_not_fit_is_refused_naming_both_values(
    world: World, changed: dict[str, object], said: list[str]
) -> None:
    world.add_to_d("r", 32)
    ask(world, KEY, **changed)
    refusal = world.d_said[-1]
    assert isinstance(refusal, Refused)
    assert all(word in refusal.reason for word in said)
    assert world.d_port.failed["r"] == refusal.reason
    world.assert_at_rest()


@pytest.mark.parametrize("different", [{"block_size": 64}, {"dtype": "bfloat16"}])
def test_block_size_and_dtype_may_differ(world: World, different: dict[str, object]) -> None:
    world.add_to_d("r", 32)
    ask(world, KEY, layout=layout(**different))
    assert isinstance(world.d_said[-1], Ticket)


def test_stale_attempts_are_refused_and_newer_ones_replace(world: World) -> None:
    world.add_to_d("r/1", 32, attempt=1)
    ask(world, TransferKey("t-r", 1))
    world.add_to_d("r/2", 32, attempt=2)
    assert "attempt 2 replaces" in world.d_port.failed["r/1"]
    assert isinstance(world.d_said[-1], Abort)
    ask(world, TransferKey("t-r", 1))
    assert isinstance(world.d_said[-1], Refused)
    ask(world, TransferKey("t-r", 2))
    assert isinstance(world.d_said[-1], Ticket)
    world.add_to_d("r/late", 32, attempt=1)
    assert "r/late" in world.d_port.failed


def test_an_abort_that_comes_first_buries_the_request(world: World) -> None:
    ask(world, KEY)
    world.receiver.on_frame(P_PEER, Frame(KEY, Abort("client")))
    assert world.receiver.parked == 0
    world.add_to_d("r", 32)
    assert "gave up" in world.d_port.failed["r"]
    world.assert_at_rest()


def test_tombstones_last_one_lease(world: World) -> None:
    world.add_to_d("r", 32)
    world.receiver.request_ended("r", "client")
    assert world.receiver.tombstones == 1
    ask(world, KEY)
    assert isinstance(world.d_said[-1], Refused)
    world.pass_time(LEASE_S + 0.1)
    world.receiver.poll()
    assert world.receiver.tombstones == 0
    ask(world, KEY)
    assert world.receiver.parked == 1


def test_a_request_whose_first_token_will_end_it_reserves_nothing(world: World) -> None:
    world.d_port.room = 0
    world.add_to_d("r", 32)
    ask(world, KEY, no_kv=True)
    ticket = world.d_said[-1]
    assert isinstance(ticket, Ticket)
    assert ticket.cached_tokens == 32
    world.receiver.on_frame(P_PEER, Frame(KEY, End(0, b"token", True)))
    assert world.d_port.finished == ["r"]
    assert isinstance(world.d_said[-1], Done)
    world.assert_at_rest()
