"""What ``up`` shows while it works: a live table of the children while they start, one line per event later.

Imports rich, so ``run`` imports this only after the children have been started.
"""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pdserve.up.supervisor import ChildState

_MARKS = {ChildState.READY: "[green]✓[/]", ChildState.BACKOFF: "[yellow]↻[/]", ChildState.FAILED: "[red]✗[/]"}


class StartDisplay:
    """A context in which the children's states are shown as they change; on a plain output, a line per change."""

    def __init__(self, console: Console, states: dict[str, tuple[ChildState, str]]) -> None:
        self._console = console
        self._states = states
        self._spinners = {name: Spinner("dots") for name in states}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=10, transient=False)

    def __enter__(self) -> StartDisplay:
        if self._console.is_terminal:
            self._live.start()
        else:
            for name, (state, text) in self._states.items():
                if state is not ChildState.STARTING:
                    self.changed(name, state, text)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def changed(self, name: str, state: ChildState, text: str) -> None:
        """A child's state changed (the table reads ``states`` by itself)."""
        if not self._console.is_terminal and state is not ChildState.STARTING:
            print_change(self._console, name, state, text)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, (state, text) in self._states.items():
            mark = Text.from_markup(_MARKS[state]) if state in _MARKS else self._spinners[name]
            table.add_row(mark, name, f"{state.value} {text}".rstrip())
        return table


def print_change(console: Console, name: str, state: ChildState, text: str) -> None:
    """One line for one change."""
    console.print(f"{_MARKS.get(state, ' ')} {name} {state.value} {text}".rstrip(), highlight=False, soft_wrap=True)
