"""The matrix' results as a table in docs/operations.md, between two markers. No dates: it changes when results do."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.faults.cells import Result
from tests.faults.injections import FAULTS
from tests.faults.states import STATES

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"
MARKS = {"ok": "ok", "NOT REACHED": "not reached", "FAILED": "FAILED"}


def write_table(results: list[Result]) -> None:
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(f"{head}{BEGIN}\n{render(results)}\n{END}{tail}")


def render(results: list[Result]) -> str:
    """A row for each fault and place, a column for each state; ``-``: the pair is covered by other cells."""
    latest = {result.cell: result for result in results}
    rows: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for result in latest.values():
        state, kind, place, _ = result.cell.split("/")
        rows[kind, place][state].append(result.verdict)
    verdicts = [result.verdict for result in latest.values()]
    counted = ", ".join(f"{verdicts.count(v)} {text}" for v, text in MARKS.items())
    lines = [
        f"{len(latest)} cells: {counted}.",
        "",
        "| fault | place | " + " | ".join(state.name.replace("_", " ") for state in STATES) + " |",
        "| --- | --- |" + " --- |" * len(STATES),
    ]
    for fault in FAULTS:
        for place in fault.places:
            cells = rows.get((fault.kind, place))
            if cells is not None:
                marks = [_mark(cells.get(state.name, [])) for state in STATES]
                lines.append(f"| {fault.kind.replace('_', ' ')} | {place.replace('_', ' ')} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _mark(verdicts: list[str]) -> str:
    """The worst of them."""
    for verdict in ("FAILED", "NOT REACHED", "ok"):
        if verdict in verdicts:
            return MARKS[verdict]
    return "-"
