"""A part of the fault matrix that fits into continuous integration, and the selection of all of it.

The whole is ``make test-faults`` (python -m tests.faults), which also writes the table in docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.model_store import prepare_default_model
from tests.faults.asking import SHAPES
from tests.faults.cells import Runner, all_cells, is_possible
from tests.faults.fleet import running_fleet
from tests.faults.injections import FAULTS
from tests.faults.pairwise import Cell, pairs
from tests.faults.reference import reference
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
