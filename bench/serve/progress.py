"""The progress bar of a run, on stderr."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.serve.records import Outcome, Record


class ProgressBar:
    """A progress bar that counts what happens to the requests; nothing where it is not wanted."""

    def __init__(self, is_shown: bool, total: int) -> None:
        self._counts = dict.fromkeys(Outcome, 0)
        self._output_tokens = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=Console(stderr=True),
            disable=not is_shown,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("requests", total=total, news="")

    def __enter__(self) -> Callable[[Record], None]:
        self._bar.start()
        return self._on_progress

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _on_progress(self, record: Record) -> None:
        self._counts[record.outcome] += 1
        self._output_tokens += record.output_tokens
        news = f"{self._output_tokens} tokens"
        for outcome in (Outcome.REFUSED, Outcome.FAILED):
            if self._counts[outcome]:
                news += f", {self._counts[outcome]} {outcome}"
        self._bar.update(self._task, advance=1, news=news)
