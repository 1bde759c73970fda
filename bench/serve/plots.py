"""Pictures of runs as PNG. matplotlib is loaded only when one is drawn (``pip install 'pdserve[bench]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.serve.metrics import Summary
from bench.serve.records import Outcome, Record
from bench.serve.runner import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MAX_TIMELINE_REQUESTS = 400
_PREFILL, _DECODE, _REFUSED, _FAILED = "#d98c3f", "#4477aa", "#999999", "#cc3311"


def draw_run(run: Run, title: str, path: Path) -> None:
    """TTFT and ITL distributions, and a timeline: each request's wait for its first token, then its stream."""
    figure, axes = _figure(1, 3, title)
    good = [record for record in run.records if record.outcome is Outcome.OK]
    _cdf(axes[0], [record.ttft_s for record in good], "TTFT (ms)")
    _cdf(axes[1], run.itls.values, "ITL (ms)")
    _timeline(axes[2], run.records)
    figure.savefig(path, dpi=120)


def draw_rates(rates: Sequence[float], summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Over the request rate: what was asked, answered and good; and the latencies' medians and tails."""
    figure, axes = _figure(1, 3, title)
    axes[0].plot(rates, rates, "--", color=_REFUSED, label="offered")
    axes[0].plot(rates, [summary.request_throughput for summary in summaries], "o-", color=_DECODE, label="answered")
    if all(summary.request_goodput is not None for summary in summaries):
        goodput = [summary.request_goodput or 0.0 for summary in summaries]
        axes[0].plot(rates, goodput, "o-", color=_PREFILL, label="goodput")
    axes[0].set_ylabel("requests/s")
    for axis, name in ((axes[1], "ttft"), (axes[2], "itl")):
        axis.plot(rates, [getattr(summary, name).median for summary in summaries], "o-", color=_DECODE, label="median")
        axis.plot(rates, [getattr(summary, name).p99 for summary in summaries], "o-", color=_PREFILL, label="P99")
        axis.set_ylabel(f"{name.upper()} (ms)")
        axis.set_yscale("log")
        _plain_numbers(axis.yaxis)
    for axis in axes:
        axis.set_xlabel("request rate (1/s)")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _figure(rows: int, columns: int, title: str) -> tuple[Any, Sequence[Axes]]:
    # Not pyplot, which keeps every figure in a global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(rows, columns)
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, list(axes)


def _plain_numbers(axis: Axis) -> None:
    """10 and not 10^1; between the decades none, which would overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _cdf(axis: Axes, seconds: Sequence[float], label: str) -> None:
    axis.set_xlabel(label)
    axis.set_ylabel("share of values")
    if not len(seconds):
        return
    values = np.sort(np.asarray(seconds, float)) * 1e3
    if len(values) > 10_000:
        values = np.quantile(values, np.linspace(0, 1, 10_000))
    axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=_DECODE)
    axis.set_ylim(0, 1.02)
    for share in (50, 99):
        axis.axvline(float(np.percentile(values, share)), color=_PREFILL, linestyle=":", linewidth=1)
    if values[0] > 0 and values[-1] > 20 * values[0]:
        axis.set_xscale("log")
        _plain_numbers(axis.xaxis)


def _timeline(axis: Axes, records: Sequence[Record]) -> None:
    shown = sorted(records, key=lambda record: record.sent_s)
    if len(shown) > MAX_TIMELINE_REQUESTS:
        shown = [shown[i] for i in np.linspace(0, len(shown) - 1, MAX_TIMELINE_REQUESTS).astype(int)]
    for color, label, outcome in ((_REFUSED, "refused", Outcome.REFUSED), (_FAILED, "failed", Outcome.FAILED)):
        places = [(record.sent_s, row) for row, record in enumerate(shown) if record.outcome is outcome]
        if places:
            axis.scatter([x for x, _ in places], [y for _, y in places], color=color, s=6, label=label)
    good = [(row, record) for row, record in enumerate(shown) if record.outcome is Outcome.OK]
    if good:
        rows = [row for row, _ in good]
        starts = [record.sent_s for _, record in good]
        firsts = [record.sent_s + record.ttft_s for _, record in good]
        axis.hlines(rows, starts, firsts, color=_PREFILL, linewidth=1.5, label="to the first token (queue, prefill)")
        axis.hlines(rows, firsts, [record.last_s for _, record in good], color=_DECODE, linewidth=1.5, label="decode")
    axis.set_xlabel("seconds")
    axis.set_ylabel("requests")
    if shown:
        axis.legend(frameon=False, fontsize=7, loc="upper left")
