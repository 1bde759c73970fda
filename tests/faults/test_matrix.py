"""A part of the fault matrix that fits into continuous integration, and the selection of all of it.

The whole is ``make test-faults`` (python -m tests.faults), which also writes the table in docs/operations.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pdserve.model_store import prepare_default_model
from tests.faults.asking import SHAPES
from tests.faults.cells import Runner, all_cells, is_possible
from tests.faults.fleet import running_fleet
from tests.faults.injections import FAULTS
from tests.faults.pairwise import Cell, pairs
from tests.faults.reference import reference
from tests.faults.soak import schedule
from tests.faults.states import STATES

CELLS = (
    Cell("queued_gateway", "stop", "router", "whole"),
    Cell("routed", "kill", "decode", "stream"),
    Cell("queued_prefill", "deadline", "client", "stream"),
    Cell("queued_prefill", "abort", "client", "sdk"),
    Cell("chunk", "kill", "prefill", "stream"),
    Cell("chunk", "redis_failed_over", "redis", "sdk"),
    Cell("reserved", "cut", "kv-data", "stream"),
    Cell("reserved", "stop", "prefill_engine", "stream"),
    Cell("receiving", "bit_flips", "kv-data", "whole"),
    Cell("receiving", "partition", "prefill-decode", "stream"),
    Cell("receiving", "tls_bit_flips", "router-prefill", "stream"),
    Cell("running_decode", "restart", "decode", "stream"),
    Cell("running_decode", "kill", "router", "stream"),
    Cell("running_decode", "disk_full", "disk", "stream"),
    Cell("preempted", "disconnect", "client", "stream"),
    Cell("draining", "kill", "decode_engine", "stream"),
)
"""Every state, every place that a process or the network has, and what was once broken."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    model = prepare_default_model()
    with running_fleet(tmp_path_factory.mktemp("faults") / "fleet", str(model)) as fleet:
        runner = Runner(fleet, reference(model))
        runner.warm_up()
        yield runner


@pytest.mark.faults
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(runner: Runner, cell: Cell) -> None:
    """One end of the request at its client, the right one; nothing held anywhere; and the fleet serves on. Whether the
    state was met is a matter of luck on a busy machine: the whole matrix counts it."""
    result = runner.run(cell)
    assert not result.problems, result.problems


def test_selection_has_every_pair() -> None:
    """Of state, fault, place and shape: every pair that any possible cell has, in far fewer cells."""
    places = {place for fault in FAULTS for place in fault.places}
    everything = [
        cell
        for state in STATES
        for fault in FAULTS
        for place in places
        for shape in SHAPES
        if is_possible(cell := Cell(state.name, fault.kind, place, shape))
    ]
    chosen = all_cells()
    assert {pair for cell in everything for pair in pairs(cell)} == {pair for cell in chosen for pair in pairs(cell)}
    assert len(chosen) < len(everything) / 3
    assert {cell.kind for cell in chosen} == {fault.kind for fault in FAULTS}
    assert {cell.state for cell in chosen} == {state.name for state in STATES}


@pytest.mark.faults
def test_overload_is_refused_with_a_hint(runner: Runner) -> None:
    """Many times what can be served before the deadline: some are answered, right; the others are told at once when to
    come again, or ran out of time; the queue stays bounded, and afterwards it is as before."""
    fleet, reference = runner.fleet, runner.reference
    asked = []
    for i in range(40):
        asked.append(fleet.ask(reference.prompt, 8, shape=("stream", "whole")[i % 2], timeout_s=6))
        time.sleep(0.05)
    outcomes = [asking.wait() for asking in asked]
    problems = [
        problem
        for outcome, asking in zip(outcomes, asked, strict=True)
        for problem in runner.judge(outcome, frozenset({"answer", "overloaded", "deadline_exceeded"}), asking)
    ]
    refused = [outcome for outcome in outcomes if outcome.code == "overloaded"]
    assert {outcome.status for outcome in refused} == {429}
    assert all(int(outcome.retry_after or 0) >= 1 for outcome in refused)
    assert any(outcome.kind == "answer" for outcome in outcomes)
    assert len(refused) > len(outcomes) / 3
    runner.check_recovery(problems)
    assert not problems, problems


def test_a_seed_is_a_schedule() -> None:
    """So that a failure of ``make soak`` can be had again; and seeds differ."""
    assert schedule(7) == schedule(7)
    assert len({str(schedule(seed)).partition(": ")[2] for seed in range(100)}) == 100
    assert {planned.kind for seed in range(200) for planned in schedule(seed).faults} >= {
        "kill",
        "stop",
        "tls_bit_flips",
    }
