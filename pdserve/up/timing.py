"""Draws where the time to the first token went, from what ``GET /debug/requests/{id}`` of the gateway says.

Each phase is a bar that begins where the one before it ends, so the row of bars is the time to the first token.
``rest`` is what no process accounted for; it is computed by the gateway and shown with the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

# In the order in which a request goes through them; what each is, for the reader of the drawing.
PHASES: dict[str, str] = {
    "tokenize_s": "tokenize",
    "route_s": "route",
    "prefill_queue_s": "prefill queue",
    "handoff_wait_s": "hand-off wait",
    "prefill_s": "prefill",
    "transfer_s": "exposed transfer",
    "relay_s": "relay",
    "rest_s": "rest",
}
_COLOURS = ("cyan", "blue", "yellow", "magenta", "green", "red", "bright_blue", "bright_black")
_BAR_CELLS = 36
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request's times. Phases in the order of ``PHASES``."""

    phases: dict[str, float]
    ttft_s: float
    e2e_s: float
    output_tokens: int
    cached_tokens: int
    sent_kv_tokens: int

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> RequestTimes:
        """From the gateway's answer."""
        return cls(
            phases={name: float(body["phases"].get(name) or 0.0) for name in PHASES},
            ttft_s=float(body["ttft_s"] or 0.0),
            e2e_s=float(body["e2e_s"] or 0.0),
            output_tokens=int(body["output_tokens"] or 0),
            cached_tokens=int(body["cached_tokens"] or 0),
            sent_kv_tokens=int(body["sent_kv_tokens"] or 0),
        )

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second after the first one."""
        decode_s = self.e2e_s - self.ttft_s
        return (self.output_tokens - 1) / decode_s if decode_s > 0 and self.output_tokens > 1 else 0.0


def draw(times: RequestTimes) -> Group:
    """The drawing, for a rich console, and the numbers that are not phases below it."""
    table = Table(box=None, padding=(0, 1), show_header=False, title_justify="left")
    table.title = f"Time to the first token: {ms(times.ttft_s)}"
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    begin_s = 0.0
    for (name, label), colour in zip(PHASES.items(), _COLOURS, strict=True):
        duration_s = times.phases[name]
        cells = bar(begin_s, duration_s, times.ttft_s)
        table.add_row(label, Text(cells, style=colour), ms(duration_s), f"{_share(duration_s, times.ttft_s):.1%}")
        begin_s += max(duration_s, 0.0)
    return Group(table, Text(summary(times)))


def bar(begin_s: float, duration_s: float, whole_s: float) -> str:
    """A bar of ``_BAR_CELLS`` cells in which ``duration_s`` is filled from ``begin_s`` on; at least a sliver if > 0."""
    start = min(int(_share(begin_s, whole_s) * _BAR_CELLS), _BAR_CELLS - 1)
    eighths = max(round(8 * _share(duration_s, whole_s) * _BAR_CELLS), 1 if duration_s > 0 else 0)
    eighths = min(eighths, 8 * (_BAR_CELLS - start))
    filled = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return (" " * start + filled).ljust(_BAR_CELLS)


def summary(times: RequestTimes) -> str:
    """The numbers that are not phases, in one line."""
    return (
        f"{times.output_tokens} tokens in {times.e2e_s:.2f} s, {times.tokens_per_s:.1f} tokens/s after the first; "
        f"KV of {times.sent_kv_tokens} tokens handed off, {times.cached_tokens} cached"
    )


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0


def ms(duration_s: float) -> str:
    """Milliseconds, to be read."""
    return f"{1000 * duration_s:.1f} ms"
