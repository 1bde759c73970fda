"""The states of a request: how one is entered and made to last from outside, and how metrics show it.

    queued_gateway -> routed -> queued_prefill -> chunk -> running_decode -> (preempted) -> ...
                                          reserved -> receiving ^                draining (SIGTERM)

What lasts less than a millisecond by nature (a sealed segment that nobody has read, a Done on its way) cannot be met
from outside: tests/conformance/test_protocol_model.py goes through those, exhaustively.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.fleet import Fleet, Links, cont, metrics

Seen = dict[str, dict[str, float]]
"""By role: metrics, summed over its members."""

TRICKLE_BYTES_PER_S = 150_000.0
"""The first segment of a hand-off then takes seconds."""
SLOW_BYTES_PER_S = 4_000_000.0
"""The whole of it does."""


def look(fleet: Fleet, roles: tuple[str, ...]) -> Seen:
    """What metrics show now; members that do not answer count nothing."""
    seen: Seen = {}
    for role in roles:
        total: dict[str, float] = {}
        for member in fleet.named(role):
            with contextlib.suppress(OSError, http.client.HTTPException):
                for name, value in metrics(member).items():
                    total[name] = total.get(name, 0.0) + value
        seen[role] = total
    return seen


class Since:
    """Metrics now, beside those before the request."""

    def __init__(self, before: Seen, now: Seen) -> None:
        self._before, self._now = before, now

    def now(self, role: str, name: str) -> float:
        return self._now[role].get(name, 0.0)

    def more(self, role: str, name: str) -> float:
        """By how much a counter grew."""
        return self._now[role].get(name, 0.0) - self._before[role].get(name, 0.0)


@dataclass(frozen=True)
class State:
    name: str
    text: str
    roles: tuple[str, ...]
    is_seen: Callable[[Since], bool]
    links: Callable[[Fleet], Links] = lambda fleet: {}
    """Treatments that make it last."""
    stops_decode_engines: bool = False
    num_requests: int = 1
    drains: bool = False
    """Entered by SIGTERM, from ``running_decode``."""
    deadline_s: float = 4.0
    """A deadline that passes in this state."""

    def enter(self, fleet: Fleet) -> None:
        """Before the request."""
        fleet.treat("state", self.links(fleet))
        if self.stops_decode_engines:
            for pid in decode_engines(fleet):
                os.kill(pid, signal.SIGSTOP)

    def release(self, fleet: Fleet) -> None:
        """The request may go on."""
        fleet.untreat("state")
        if self.stops_decode_engines:
            cont(decode_engines(fleet))


def decode_engines(fleet: Fleet) -> list[int]:
    return [pid for member in fleet.named("decode") if fleet.is_up(member) for pid in fleet.pids(member)[1:]]


def _cut(*links: str) -> Links:
    return {link: {"cut": True} for link in links}


def _rate(fleet: Fleet, bytes_per_s: float) -> Links:
    return {link: {"bytes_per_s": bytes_per_s} for link in fleet.links("prefill", "decode", data=True)}


OPEN = "pdserve_open_requests"
WAITING = "vllm:num_requests_waiting"
DRAINING = "pdserve_workers{role=decode,state=draining}"
RUNNING = "vllm:num_requests_running"

STATES = (
    State(
        "queued_gateway",
        "the gateway has it and reaches no router",
        ("gateway", "router"),
        lambda m: m.now("gateway", OPEN) >= 1 and m.now("router", OPEN) == 0,
        links=lambda fleet: _cut(*fleet.links("gateway", "router")),
    ),
    State(
        "routed",
        "a router has it and reaches no worker",
        ("router", "prefill", "decode"),
        lambda m: m.now("router", OPEN) >= 1 and m.now("prefill", OPEN) + m.now("decode", OPEN) == 0,
        links=lambda fleet: _cut(*fleet.links("router", "prefill"), *fleet.links("router", "decode")),
    ),
    State(
        "queued_prefill",
        "the prefill worker has it and waits for a ticket; the decode engines are stopped",
        ("prefill",),
        lambda m: m.now("prefill", WAITING) >= 1,
        stops_decode_engines=True,
    ),
    State(
        "chunk",
        "some chunks of the prompt are computed, others are not",
        ("prefill", "decode"),
        lambda m: m.more("prefill", "pdserve_prefill_chunks_total") >= 2 and m.now("prefill", RUNNING) >= 1,
        links=lambda fleet: _rate(fleet, 2 * SLOW_BYTES_PER_S),
        deadline_s=1.2,
    ),
    State(
        "reserved",
        "the decode worker has reserved blocks, and no segment has come",
        ("decode",),
        lambda m: m.now("decode", "pdserve_leases") >= 1 and m.more("decode", "pdserve_transfer_segments_total") == 0,
        links=lambda fleet: _rate(fleet, TRICKLE_BYTES_PER_S),
    ),
    State(
        "receiving",
        "some segments have come, others have not",
        ("decode",),
        lambda m: (
            m.now("decode", "pdserve_leases") >= 1
            and m.more("decode", "pdserve_transfer_segments_total") >= 1
            and m.more("decode", "pdserve_transfers_done_total") == 0
        ),
        links=lambda fleet: _rate(fleet, SLOW_BYTES_PER_S),
    ),
    State(
        "running_decode",
        "the decode worker generates",
        ("decode",),
        lambda m: m.now("decode", RUNNING) >= 1 and m.more("decode", "vllm:generation_tokens_total") >= 3,
        deadline_s=2.5,
    ),
    State(
        "preempted",
        "two requests outgrow the decode worker's pool, and one has given its blocks back",
        ("decode",),
        lambda m: m.more("decode", "vllm:num_preemptions_total") >= 1 and m.now("decode", WAITING) >= 1,
        links=lambda fleet: _cut(*(link for link in fleet.links("router", "decode") if link.endswith("decode-1"))),
        num_requests=2,
        deadline_s=4.0,
    ),
    State(
        "draining",
        "its decode worker got SIGTERM while it generates, and a router knows",
        ("gateway", "router", "decode"),
        lambda m: m.now("gateway", OPEN) >= 1 and m.now("router", DRAINING) >= 1,
        drains=True,
        deadline_s=4.0,
    ),
)
BY_NAME = {state.name: state for state in STATES}
