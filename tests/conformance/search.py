"""Searches a world of the protocol's model exhaustively: every order of what can happen, each state once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.transfer import EDGES, TransferState
from tests.conformance.model import Action, Scenario, World
from tests.conformance.model_sides import Violation, require


@dataclass
class Found:
    states: int = 0
    edges: set[tuple[TransferState, TransferState]] = field(default_factory=set)
    published: int = 0


def search(scenario: Scenario, at_each: Callable[[World], None] = lambda world: None) -> Found:
    """Every state that can be reached, once. Raises Violation with the way to it."""
    found = Found()
    seen: set[tuple[object, ...]] = set()
    ways: list[tuple[Action, ...]] = [()]
    while ways:
        way = ways.pop()
        world = replay(scenario, way)
        for action in world.actions():
            next_world = replay(scenario, way)
            try:
                next_world.do(action)
                next_world.check()
                found.edges |= next_world.edges
                require(next_world.edges <= ALLOWED, "only edges of the table are taken")
                state = next_world.fingerprint()
                if state in seen:
                    continue
                seen.add(state)
                found.published += "published" in next_world.d.ended.values()
                at_each(next_world)
                next_world.check_end()
            except Violation as violation:
                raise Violation(f"{violation}; after {[*way, action]}") from violation
            ways.append((*way, action))
    found.states = len(seen)
    return found


def replay(scenario: Scenario, way: tuple[Action, ...]) -> World:
    world = World(scenario)
    for action in way:
        world.do(action)
    return world


ALLOWED = {(before, after) for before, afters in EDGES.items() for after in afters} | {
    # One action may take two edges.
    (TransferState.HANDSHAKING, TransferState.DONE),
    (TransferState.HANDSHAKING, TransferState.TRANSFERRING),
    (TransferState.READY, TransferState.DONE),
}
