"""``pdserve trace``: one request's phases, and which process did what when, from the gateway's record of it; without an
id, a list of the last requests to choose from.

The record holds durations of several clocks, so where a process's bar begins is inferred from the order of things: a
phase begins where the one before it ends. The exact picture, each span on its process's own clock, is the
OpenTelemetry trace whose id is shown below the drawing, if the services were started with ``--otlp-endpoint``.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from pdserve.chat_client import ChatClient, ChatError
from pdserve.up.timing import RequestTimes, bar, draw, ms

LISTED = 20
_COLOURS = {"gateway": "cyan", "router": "blue", "prefill": "green", "decode": "magenta"}


@dataclass(frozen=True, slots=True)
class Bar:
    """What one process did, in seconds since the gateway received the request."""

    role: str
    process: str
    what: str
    begin_s: float
    duration_s: float
    note: str = ""


def trace(url: str, request_id: str) -> int:
    """Print it; the exit status."""
    try:
        record = asyncio.run(_record(url, request_id))
    except ChatError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    console = Console(highlight=False)
    console.print(f"[bold]{record['request_id']}[/]  {record['endpoint']}  {record['outcome']}")
    if record["phases"]:
        console.print(draw(RequestTimes.from_json(record)))
    console.print(draw_processes(record), soft_wrap=True)
    return 0


def list_recent(url: str, slowest: bool) -> int:
    """Print the last requests, newest or slowest to their first token first; the exit status."""
    try:
        recent = asyncio.run(_recent(url))
    except ChatError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    if slowest:
        recent.sort(key=lambda record: -_waited_s(record))
    console = Console(highlight=False)
    console.print(draw_list(recent[:LISTED]), soft_wrap=True)
    if len(recent) > LISTED:
        console.print(f"{LISTED} of the {len(recent)} requests that the gateway remembers")
    return 0


def _waited_s(record: dict[str, Any]) -> float:
    """For the first token, or for none."""
    return float(next((record[name] for name in ("ttft_s", "e2e_s", "age_s") if record[name] is not None), 0.0))


def draw_list(records: list[dict[str, Any]]) -> Text:
    """One line a request."""
    if not records:
        return Text("The gateway remembers no request.")
    text = Text(
        f"{'first token':>12}{'whole':>12}{'in':>8}{'cached':>8}{'out':>7}  {'ended':<18}{'began':>9}  x-request-id\n"
    )
    lines = [
        f"{_ms(record['ttft_s']):>12}{_ms(record['e2e_s']):>12}{record['prompt_tokens']:>8}{record['cached_tokens']:>8}"
        f"{record['output_tokens']:>7}  {record['outcome']:<18}{record['age_s']:>7.0f} s  {record['request_id']}"
        for record in records
    ]
    return text.append("\n".join(lines))


def _ms(duration_s: float | None) -> str:
    return "-" if duration_s is None else ms(duration_s)


async def _recent(url: str) -> list[dict[str, Any]]:
    async with ChatClient(url) as client:
        return await client.recent()


async def _record(url: str, request_id: str) -> dict[str, Any]:
    async with ChatClient(url) as client:
        return await client.times(request_id)


def bars_of(record: dict[str, Any]) -> list[Bar]:
    """In the order in which they begin, each process's after the one that it waited for."""
    e2e_s = float(record["e2e_s"] or 0.0)
    bars = [Bar("gateway", "gateway", "request", 0.0, e2e_s, f"{record['output_tokens']} tokens out")]
    phases: dict[str, float] = record["phases"]
    at_s = phases.get("tokenize_s", 0.0)
    if at_s:
        bars.append(Bar("gateway", "gateway", "tokenize", 0.0, at_s, f"{record['prompt_tokens']} tokens in"))
    attempts: list[dict[str, Any]] = record["attempts"]
    router = record["router"] or "router"
    for number, attempt in enumerate(attempts, 1):
        is_last = number == len(attempts)
        begin_s = at_s + attempt["start_s"]
        workers = " and ".join(name for name in (attempt["prefill_worker"], attempt["decode_worker"]) if name)
        ends_s = e2e_s if is_last and not attempt["duration_s"] else begin_s + attempt["duration_s"]
        note = f"{workers}: {attempt['failure']}" if attempt["failure"] else workers
        bars.append(Bar("router", router, f"attempt {number}", begin_s, max(ends_s - begin_s, 0.0), note))
    if phases and attempts:
        bars += _worker_bars(record, phases, attempts[-1], at_s + phases["route_s"], e2e_s)
    return bars


def _worker_bars(
    record: dict[str, Any], phases: dict[str, float], attempt: dict[str, Any], at_s: float, e2e_s: float
) -> list[Bar]:
    """``at_s``: when the workers got the request."""
    decode = attempt["decode_worker"]
    prefill = attempt["prefill_worker"]
    role, process = ("prefill", prefill) if prefill else ("decode", decode)
    bars = []
    for name, what in (("prefill_queue_s", "queue"), ("handoff_wait_s", "hand-off wait"), ("prefill_s", "prefill")):
        if phases[name] > 0:
            note = f"{record['cached_tokens']} tokens cached" if what == "prefill" else ""
            bars.append(Bar(role, process, what, at_s, phases[name], note))
        at_s += phases[name]
    ttft_s = float(record["ttft_s"] or 0.0)
    if (transfer := record["transfer"]) is not None:
        end_s = min(at_s + phases["transfer_s"], ttft_s)
        note = f"{transfer['lane']}, {_size(transfer['bytes'])}"
        if transfer["seconds"] > 0:
            note += f", {transfer['bytes'] / transfer['seconds'] / 1e9:.2f} GB/s"
        note += f", {transfer['cached_tokens']} tokens cached"
        bars.append(Bar("decode", decode, "transfer", max(end_s - transfer["seconds"], 0.0), transfer["seconds"], note))
    bars.append(Bar("decode", decode, "decode", ttft_s, max(e2e_s - ttft_s, 0.0)))
    return bars


def draw_processes(record: dict[str, Any]) -> Text:
    """The drawing, for a rich console; the width of the bars is the request's whole time."""
    bars = bars_of(record)
    width = max(len(item.process) for item in bars)
    text = Text(f"\nProcesses: {ms(bars[0].duration_s)} in all\n")
    for item in bars:
        cells = bar(item.begin_s, item.duration_s, bars[0].duration_s)
        text.append(f"{item.process:<{width}}  {item.what:<13} ")
        text.append(cells, style=_COLOURS[item.role]).append(f" {ms(item.duration_s):>10}\n")
        if item.note:
            text.append(f"{'':<{width}}    {item.note}\n", style="dim")
    if record["resumes"]:
        text.append(f"resumed {record['resumes']} times by the gateway\n")
    return text.append(f"OpenTelemetry trace {record['trace_id']}" if record["trace_id"] else "not traced")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"
