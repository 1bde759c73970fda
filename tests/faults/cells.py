"""The cells of the matrix: which there are, how one is run, and how it is judged.

rest -> state.enter -> ask -> seen in metrics? --no--> NOT REACHED
                               | yes
                               inject -> state.release -> heal -> end of the request -> serves again -> rest
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.e2e.cluster import Member
from tests.faults.asking import SHAPES, Asking, Outcome
from tests.faults.fleet import Fleet, eventually
from tests.faults.injections import BY_KIND, FAULTS, Context, Fault, ends
from tests.faults.pairwise import Cell, select
from tests.faults.states import BY_NAME, STATES, Since, State, look

REACH_TIMEOUT_S = 12.0
RELEASE_AFTER_S = 0.3
LATE_S = 2.0
"""The gateway ends a request at its deadline; a stopped one cannot before it is woken."""
HEALTHY_TIMEOUT_S = 60.0
SERVE_TIMEOUT_S = 20.0


ADDED_LATER = ("tls_bit_flips",)


@dataclass(frozen=True)
class Reference:
    """What transformers answers."""

    prompt: list[int]
    answer: list[int]
    short_prompt: list[int]
    short_answer: list[int]


@dataclass
class Result:
    cell: str
    reached: bool = False
    ended: list[str] = field(default_factory=list)
    """How its requests ended, as their clients saw it."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.problems:
            return "FAILED"
        return "ok" if self.reached else "NOT REACHED"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def is_possible(cell: Cell) -> bool:
    """Whether the combination means anything."""
    fault = BY_KIND[cell.kind]
    if cell.place not in fault.places:
        return False
    if (cell.kind == "abort") != (cell.shape == "sdk") and cell.kind in ("abort", "disconnect"):
        return False  # the SDK's word for a disconnect is a cancel
    if cell.kind == "deadline" and cell.state == "draining":
        return False  # it ends by being moved, long before
    if cell.state == "queued_gateway" and cell.place == "gateway-router":
        return False  # that link is cut already
    if cell.state == "routed" and cell.place in ("router-prefill", "router-decode"):
        return False
    has_handoff_ahead = cell.state in ("queued_gateway", "routed", "queued_prefill", "chunk", "reserved", "receiving")
    return cell.kind != "bit_flips" or has_handoff_ahead


def all_cells() -> list[Cell]:
    """A kind that is added goes to ADDED_LATER, so that the cells of before stay the same ones."""
    places = sorted({place for fault in FAULTS for place in fault.places})
    states, kinds = [state.name for state in STATES], [fault.kind for fault in FAULTS]
    first = select([states, [kind for kind in kinds if kind not in ADDED_LATER], places, SHAPES], is_possible)
    return select([states, kinds, places, SHAPES], is_possible, first)


class Runner:
    """Runs cells on one fleet, one after the other."""

    def __init__(self, fleet: Fleet, reference: Reference) -> None:
        self.fleet = fleet
        self.reference = reference

    def warm_up(self) -> None:
        """Everything that is made once is made before the first measure is taken."""
        reference = self.reference
        for shape in SHAPES:
            asked = [self.fleet.ask(reference.prompt, len(reference.answer), shape=shape) for _ in range(2)]
            for asking in asked:
                outcome = asking.wait()
                assert outcome.kind == "answer", (outcome, outcome.message)
                assert outcome.token_ids == reference.answer, f"without any fault, {shape} is not the oracle's answer"
        assert not (why := self.fleet.wait_rest()), why
        self.fleet.check_measures()
        self.fleet.note_rest()

    def run(self, cell: Cell) -> Result:
        state, fault = BY_NAME[cell.state], BY_KIND[cell.kind]
        result = Result(str(cell))
        if cell.kind == "disk_full" and not self.fleet.has_small_disk:
            result.ended.append("no right to mount a small disk here")
            return result
        started_s = time.monotonic()
        asked: list[Asking] = []
        try:
            self._run(cell, state, fault, result, asked)
        except Exception as error:  # a failed cell, and the next one is run
            result.problems.append(f"{type(error).__name__}: {error}")
        finally:
            state.release(self.fleet)
            self.fleet.untreat_all()
        result.seconds = round(time.monotonic() - started_s, 1)
        return result

    def _run(self, cell: Cell, state: State, fault: Fault, result: Result, asked: list[Asking]) -> None:
        fleet, reference = self.fleet, self.reference
        is_deadline = fault.kind == "deadline"
        before = look(fleet, state.roles)
        state.enter(fleet)
        timeout_s = state.deadline_s if is_deadline else 30.0
        for i in range(state.num_requests):
            late_s = 30.0 if i else timeout_s
            asked.append(fleet.ask(reference.prompt, len(reference.answer), shape=cell.shape, timeout_s=late_s))
        context = Context(fleet, asked[0], reference.prompt, cell.place)
        drained = self._enter_drain(before, asked) if state.drains else []
        result.reached = self._wait_seen(state, before, asked[0])
        if result.reached and is_deadline:
            result.reached = self._until_deadline(state, before, asked[0])
        elif result.reached:
            fault.inject(context)
        time.sleep(RELEASE_AFTER_S)
        state.release(fleet)
        if result.reached:
            time.sleep(max(0.0, fault.hold_s - RELEASE_AFTER_S))
            fault.heal(context)
            result.reached = fault.happened(context)
        for member, pid in drained:
            if member.pid == pid:  # else the fault was its end
                self._end_drain(member)
        for asking in asked:
            outcome = asking.wait()
            result.ended.append(outcome.told)
            right = ends(fault, cell.place, cell.shape) if result.reached else frozenset({"answer"})
            if is_deadline and not result.reached:
                right |= {"deadline_exceeded"}  # it passed in another state
            if asking is not asked[0] and fault.must_fail:
                right = frozenset({"answer"})
            if state.drains:
                right |= {"answer"} if not fault.must_fail else frozenset()
            result.problems += self.judge(outcome, right, asking)
        for other in context.others:
            result.problems += self.judge(other.wait(), ends(fault, cell.place, cell.shape), other)
        self.check_recovery(result.problems)

    def judge(self, outcome: Outcome, right: frozenset[str], asking: Asking) -> list[str]:
        """What is wrong about how a request ended."""
        answer = self.reference.answer[: asking.max_tokens]
        problems = []
        if outcome.kind not in right and outcome.code not in right:
            problems.append(f"ended as {outcome} ({outcome.message}); right: {', '.join(sorted(right))}")
        if outcome.kind in ("answer", "error") and outcome.terminals != 1:
            problems.append(f"{outcome.terminals} terminal events")
        if outcome.token_ids != answer[: len(outcome.token_ids)]:
            problems.append(f"wrong tokens: {outcome.token_ids}")
        if outcome.kind != "gone" and outcome.elapsed_s > asking.timeout_s + LATE_S:
            problems.append(
                f"ended {outcome.elapsed_s:.1f} s after it was asked, its deadline was {asking.timeout_s:g} s"
            )
        if outcome.kind == "answer" and len(outcome.token_ids) != len(answer):
            problems.append(f"{len(outcome.token_ids)} tokens, right: {len(answer)}")
        return problems

    def check_recovery(self, problems: list[str]) -> None:
        """All members are up, the fleet answers right, and nothing is held; appends what is not so."""
        fleet, reference = self.fleet, self.reference
        for name, member in fleet.members.items():
            if not fleet.is_up(member):
                problems.append(f"{name} died: {member.tail(5)}")
                fleet.start_again(member)
            elif not name.startswith("redis") and not eventually(member.healthy, HEALTHY_TIMEOUT_S):
                problems.append(f"{name} is not healthy {HEALTHY_TIMEOUT_S:g} s after the fault")
        last = Outcome()

        def serves() -> bool:
            nonlocal last
            last = fleet.ask(reference.short_prompt, len(reference.short_answer), timeout_s=10).wait()
            return last.kind == "answer"

        if not eventually(serves, SERVE_TIMEOUT_S, 0.3):
            problems.append(f"does not serve again: {last} ({last.message})")
        elif last.token_ids != reference.short_answer:
            problems.append(f"serves wrong tokens: {last.token_ids}")
        if why := fleet.wait_rest():
            problems.append(f"not at rest: {why}")
        fleet.note_rest()

    def _wait_seen(self, state: State, before: dict[str, dict[str, float]], asking: Asking) -> bool:
        """Whether metrics show the state while the request runs."""
        deadline = time.monotonic() + REACH_TIMEOUT_S
        while time.monotonic() < deadline and not asking.is_over:
            if state.is_seen(Since(before, look(self.fleet, state.roles))):
                return not asking.is_over
            time.sleep(0.02)
        return False

    def _until_deadline(self, state: State, before: dict[str, dict[str, float]], asking: Asking) -> bool:
        """Whether the state lasted until the request's time was over."""
        last_seen_s = time.monotonic()
        while not asking.is_over and time.monotonic() < last_seen_s + 10:
            if state.is_seen(Since(before, look(self.fleet, state.roles))):
                last_seen_s = time.monotonic()
            time.sleep(0.03)
        is_due = asking.is_over and asking.outcome.elapsed_s > asking.timeout_s - 0.2
        return is_due and time.monotonic() - last_seen_s < 0.5

    def _enter_drain(self, before: dict[str, dict[str, float]], asked: list[Asking]) -> list[tuple[Member, int]]:
        """SIGTERM to the decode worker that generates."""
        running = BY_NAME["running_decode"]
        before |= look(self.fleet, running.roles) if "decode" not in before else {}
        if not self._wait_seen(running, before, asked[0]):
            return []
        member = self.fleet.holder("decode")
        member.signal(signal.SIGTERM)
        return [(member, member.pid)]

    def _end_drain(self, member: Member) -> None:
        """It ends by itself; then it is started again, as an update would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGCONT)
        if not eventually(lambda: not self.fleet.is_up(member), 40):
            raise AssertionError(f"{member.name} does not end after SIGTERM")
        self.fleet.start_again(member)
