"""The protocol, searched exhaustively for small sizes: every order of events, with every fault at every point.

What is searched are the real state machines (model.py). That the search would find a bug is shown by planting some.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import structlog

from kv_transfer.receive_transfer import ReceiveTransfer
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transfer import EDGES, TransferKey, TransferState
from tests.conformance.model import Scenario, Violation, World, require
from tests.conformance.search import search

NETWORK = frozenset({"lose", "repeat", "reorder", "break"})
SIDES = frozenset({"abort", "stop"})
TWO_FOR_ONE = Scenario(requests=("r/1", "s/1"), room=1, faults=1, kinds=frozenset({"stop"}))
RESTARTS = Scenario(requests=("r/1", "r/2"), faults=1, kinds=frozenset({"restart"}))
P_DIES = Scenario(requests=("r/1", "r/2"), room=1, second_sender=True, faults=1, kinds=frozenset({"die"}))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


def everybody_is_served(world: World) -> None:
    """Whatever came before, if nothing fails any more every request ends well. So nobody waits for ever for another."""
    world.run_fairly()
    for name in world.scenario.requests:
        require(world.d.ended.get(name) in ("published", "finished"), f"{name} is served: {world.d.ended}")
        require(world.p.ended.get(name) == "done", f"{name} ends on P: {world.p.ended}")


def test_without_faults_everybody_is_served_from_every_state() -> None:
    assert search(Scenario(), everybody_is_served).states > 20
    assert search(Scenario(finished=True), everybody_is_served).states > 10


def test_two_requests_for_room_for_one_never_wait_for_each_other() -> None:
    """BUSY: who waits for a ticket holds neither blocks nor staging, so who has one can always end."""
    assert search(Scenario(requests=("r/1", "s/1"), room=1), everybody_is_served).states > 500


def test_when_p_dies_another_goes_on_with_the_same_reservation() -> None:
    """Wherever P dies, the request is served by the other one, with nobody else's KV: D's engine checks each segment
    that is written. Segments and frames of the first attempt come at any time."""
    took_over = 0

    def served_by_either(world: World) -> None:
        nonlocal took_over
        world.run_fairly()
        ended = world.d.ended
        require("published" in (ended.get("r/1"), ended.get("r/2")), f"r is served: {ended}")
        took_over += world.d.num_taken_over > 0

    found = search(P_DIES, served_by_either)
    assert found.states > 500
    assert took_over > 100


@pytest.mark.parametrize(
    ("scenario", "states"),
    [
        (Scenario(faults=3, kinds=NETWORK), 500),
        (Scenario(faults=2, kinds=NETWORK | SIDES), 2000),
        (Scenario(faults=2, kinds=NETWORK | SIDES, finished=True), 1000),
        pytest.param(
            Scenario(requests=("r/1", "s/1"), room=1, faults=1, kinds=frozenset({"stop"})), 2000, marks=pytest.mark.slow
        ),
        (Scenario(requests=("r/1", "r/2"), faults=1, kinds=NETWORK | SIDES), 2000),
        pytest.param(
            Scenario(requests=("r/1", "r/2"), faults=1, kinds=frozenset({"restart"})), 5000, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: f"{'-'.join(sorted(value.kinds))}-{value.faults}" if isinstance(value, Scenario) else None,
)
def test_the_laws_hold_in_every_state(scenario: Scenario, states: int) -> None:
    found = search(scenario)
    assert found.states >= states  # else the search has lost its reach
    assert found.published > 0 or scenario.finished


def test_every_edge_of_the_table_is_taken() -> None:
    taken: set[tuple[TransferState, TransferState]] = set()
    for finished in (False, True):
        taken |= search(Scenario(faults=1, kinds=NETWORK | SIDES, finished=finished)).edges
    assert taken >= {(before, after) for before, afters in EDGES.items() for after in afters}


# ---- would it find a bug?


def take_any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.segment_intake.key_of", lambda header: TransferKey(header.transfer_id, 2))
    monkeypatch.setattr(ReceiveTransfer, "owns", lambda self, header, sender: self.is_open)


def lease_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiver, "_deadline", lambda self, transfer: float("inf"))


def sender_lease_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_deadline", lambda self, transfer: float("inf"))


def pack_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_drop_pending", staticmethod(lambda transfer: None))


def publish_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(self: Receiver, transfer: ReceiveTransfer) -> None:
        if transfer.end is not None:
            transfer.end = type(transfer.end)(len(transfer.parts), transfer.end.first_output, False)
            transfer.cells = transfer.cells_needed(self._layout)
            real(self, transfer)

    real = Receiver._complete
    monkeypatch.setattr(Receiver, "_complete", complete)


def grant_before_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold and wait: P takes its blocks, then asks for D's."""

    def ask(self: Sender, request_id: str, *arguments: object, **named: object) -> None:
        real(self, request_id, *arguments, **named)  # type: ignore[arg-type]
        self._port.ticket_granted(request_id, 0)

    real = Sender.want_ticket
    monkeypatch.setattr(Sender, "want_ticket", ask)


@pytest.mark.parametrize(
    ("plant", "scenario", "law"),
    [
        (take_any_attempt, Scenario(requests=("r/1", "r/2"), faults=1, kinds=frozenset({"abort"})), "laws 3 and 6"),
        (lease_forever, Scenario(faults=1, kinds=frozenset({"lose"})), "law 2: D's lease"),
        (sender_lease_forever, Scenario(faults=1, kinds=frozenset({"lose"})), "law 2: P's lease"),
        (pack_after_the_end, Scenario(faults=1, kinds=frozenset({"abort"})), "law 2: nothing is packed"),
        (publish_what_is_there, Scenario(), "law 3: every layer"),
        (grant_before_the_ticket, Scenario(), "hold-and-wait"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, law: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=law):
        search(scenario)
