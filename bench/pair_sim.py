"""One prefill and one decode worker under load, in simulated time: what an ITL budget and the router's choice give.

    python -m bench.pair_sim --loads 2048:256:16 --budgets-ms 0,12,14,16 [--seeds 8]

Real: ``ItlBudget``, ``SharedPrefill``, what the router counts of each worker's load, reports twice a second. Simulated:
how long a step takes, as measured for Llama-3.1-8B's shape on an H200 (``bench.gpu_mixed``, docs/performance.md), with
some scatter; the hand-off, as a constant. A budget of 0: the decode worker does not help.

    arrival -> router -> P: queue, steps of whole prompts where they are large -> hand-off -> D: decodes
                      -> D: queue, a step's prompt tokens beside its decodes   ------------>
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import typer

from bench.router_sim.view import View
from bench.router_sim.worker import Report
from bench.serve.arrivals import arrivals_s
from engine.cuda_graphs import token_buckets
from engine.itl_budget import ItlBudget, StepLoad
from router.policies.base import Choice, Pool, PromptInfo
from router.policies.shared_prefill import SharedPrefill

STEP_TOKENS = 4096
POOL_TOKENS = 700_000
REPORT_S = 0.5
HANDOFF_S = 0.008
"""Of a prompt, beside its prefill: ticket, last layers' KV, relay."""
ROWS_MS = {
    16: 4.3, 32: 4.4, 48: 4.5, 64: 4.6, 80: 4.7, 96: 4.9, 112: 5.0, 128: 5.1, 160: 5.6, 192: 6.6, 256: 7.6, 320: 9.3,
    384: 10.2, 512: 14.0, 640: 16.5, 768: 20.5, 896: 24.0, 1024: 27.0, 1280: 34.8, 1536: 40.0, 1792: 45.0, 2048: 47.0,
}  # fmt: skip
"""Of a mixed step with so many rows, without the decodes' KV. Not measured: 768, 1024, and from 1536 on."""
DECODES_MS = 4.2
PREFILL_MS_A_TOKEN = 0.0228
KV_MS_A_TOKEN = 3.4e-5
PAIR_MS = 4 * 4096 * 32 / 600e9
LAUNCH_MS = 5.7
"""The host launches a mixed step in pieces."""
SERVICE_MS = 0.4
SCATTER = 0.03
UNPACK_MS = 0.7
STALL_SHARE, STALL_MS = 0.005, 5.0


@dataclass(slots=True)
class Flight:
    """A request."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    done: int = 0
    drawn: int = 0
    last_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    is_helped: bool = False


class Pair:
    """The two workers, and the router before them."""

    def __init__(self, budget_ms: float, seed: int) -> None:
        sizes = token_buckets(2048)
        self.budget = ItlBudget(budget_ms / 1e3, STEP_TOKENS, sizes) if budget_ms else None
        self._sizes = sizes
        self._rng = random.Random(seed)
        self._shared = SharedPrefill(seed)
        self._p, self._d = View("p", POOL_TOKENS), View("d", POOL_TOKENS)
        self._p.load.prefill.observe(2048, 2048 * PREFILL_MS_A_TOKEN / 1e3)
        self._pools = [Pool([self._p], [self._d])]
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._queue_p: list[Flight] = []
        self._queue_d: list[Flight] = []
        self._decodes: list[Flight] = []
        self._is_busy = {"p": False, "d": False}
        self._unpacks = 0
        self._left = 0
        self.steps: list[tuple[StepLoad, float]] = []
        """Of D: what each computed, and its ms."""

    def run(self, flights: Sequence[Flight]) -> None:
        self._left = len(flights)
        for flight in flights:
            self._at(flight.arrival_s, lambda flight=flight: self._arrive(flight))  # type: ignore[misc]
        self._at(0.0, self._report)
        while self._agenda:
            self._now_s, _, what = heapq.heappop(self._agenda)
            what()

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), what))

    # --- the router ---

    def _arrive(self, flight: Flight) -> None:
        self._left -= 1
        info = PromptInfo(flight.prompt_tokens, flight.output_tokens, "")
        found = self._shared.sooner(info, Choice(self._p, self._d), self._pools, self._now_s) if self.budget else []
        flight.is_helped = bool(found)
        view, queue = (self._d, self._queue_d) if found else (self._p, self._queue_p)
        if not view.load.own_queued_tokens:
            view.pace.began(self._now_s)
        view.load.add(1, flight.prompt_tokens, flight.prompt_tokens)
        if not found:
            self._d.load.add(1, 0, flight.prompt_tokens)
        queue.append(flight)
        self._wake("d" if found else "p")

    def _report(self) -> None:
        used = sum(flight.prompt_tokens + flight.drawn for flight in self._decodes)
        offers, rate = (self.budget.has_room, self.budget.tokens_per_s) if self.budget else (False, 0.0)
        for view, queue, free in ((self._p, self._queue_p, POOL_TOKENS), (self._d, self._queue_d, POOL_TOKENS - used)):
            queued = sum(flight.prompt_tokens - flight.done for flight in queue)
            running = len(self._decodes) if view is self._d else 0
            shares = offers and view is self._d
            view.load.report(Report(running, len(queue), queued, max(0, free), POOL_TOKENS, shares, rate))
        if self._left:
            self._at(self._now_s + REPORT_S, self._report)

    def _computed(self, view: View, flight: Flight, requests: int) -> None:
        view.load.add(-requests, -flight.prompt_tokens, -flight.prompt_tokens * requests)
        view.pace.computed(flight.prompt_tokens, self._now_s)

    # --- the workers ---

    def _wake(self, name: str) -> None:
        if not self._is_busy[name]:
            self._step_p() if name == "p" else self._step_d()

    def _step_p(self) -> None:
        self._is_busy["p"] = bool(self._queue_p)
        if not self._queue_p:
            return
        part: list[tuple[Flight, int]] = []
        left = STEP_TOKENS
        for flight in self._queue_p:
            part.append((flight, min(left, flight.prompt_tokens - flight.done)))
            left -= part[-1][1]
            if not left or (2 * left <= STEP_TOKENS and flight.done + part[-1][1] == flight.prompt_tokens):
                break
        ms = DECODES_MS * 0.1 + PREFILL_MS_A_TOKEN * (STEP_TOKENS - left) + PAIR_MS * _pairs(part)
        self._at(self._now_s + ms / 1e3, lambda: self._end_p(part))

    def _end_p(self, part: Sequence[tuple[Flight, int]]) -> None:
        for flight, tokens in part:
            flight.done += tokens
            if flight.done == flight.prompt_tokens:
                self._queue_p.remove(flight)
                self._computed(self._p, flight, 1)
                self._at(self._now_s + HANDOFF_S, lambda flight=flight: self._handed_over(flight))  # type: ignore[misc]
        self._step_p()

    def _handed_over(self, flight: Flight) -> None:
        self._unpacks += 1
        self._decodes.append(flight)
        self._draw(flight)
        self._wake("d")

    def _step_d(self) -> None:
        self._is_busy["d"] = bool(self._decodes or self._queue_d)
        if not self._is_busy["d"]:
            return
        decodes = list(self._decodes)
        kv_tokens = sum(flight.prompt_tokens + flight.drawn for flight in decodes)
        left = STEP_TOKENS - len(decodes)
        if self._queue_d and decodes and self.budget is not None:
            first = self._queue_d[0]
            waited_s = self._now_s - first.arrival_s
            left = min(left, self.budget.prefill_tokens(len(decodes), kv_tokens, first.done, waited_s))
        part: list[tuple[Flight, int]] = []
        for flight in self._queue_d if left else ():
            part.append((flight, min(left, flight.prompt_tokens - flight.done)))
            left -= part[-1][1]
            if not left:
                break
        load = StepLoad(len(decodes), kv_tokens, sum(tokens for _, tokens in part), int(_pairs(part)))
        ms = self._step_ms(load)
        self._unpacks = 0
        self._at(self._now_s + ms / 1e3, lambda: self._end_d(decodes, part, load, ms))

    def _step_ms(self, load: StepLoad) -> float:
        rows = load.decodes + load.prefill_tokens
        if not load.prefill_tokens:
            ms = DECODES_MS
        elif rows <= self._sizes[-1]:
            ms = ROWS_MS[next(size for size in self._sizes if size >= rows)] + 0.2
        else:
            ms = PREFILL_MS_A_TOKEN * rows
        ms += KV_MS_A_TOKEN * load.kv_tokens + PAIR_MS * load.prefill_pairs
        ms = (max(ms, LAUNCH_MS) if load.prefill_tokens else ms) + SERVICE_MS
        ms *= 1 + abs(self._rng.gauss(0, SCATTER))
        stall_ms = STALL_MS * self._rng.random() if self._rng.random() < STALL_SHARE else 0.0
        return ms + (UNPACK_MS if self._unpacks else 0.0) + stall_ms

    def _end_d(self, decodes: Sequence[Flight], part: Sequence[tuple[Flight, int]], load: StepLoad, ms: float) -> None:
        self.steps.append((load, ms))
        if self.budget is not None:
            self.budget.step_took(load, ms / 1e3)
        for flight in decodes:
            self._draw(flight)
        for flight, tokens in part:
            flight.done += tokens
            if flight.done == flight.prompt_tokens:
                self._queue_d.remove(flight)
                self._computed(self._d, flight, 0)
                self._decodes.append(flight)
                self._draw(flight)
        self._step_d()

    def _draw(self, flight: Flight) -> None:
        if flight.drawn:
            flight.itl_s.append(self._now_s - flight.last_s)
        else:
            flight.ttft_s = self._now_s - flight.arrival_s
        flight.last_s = self._now_s
        flight.drawn += 1
        if flight.drawn == flight.output_tokens:
            self._decodes.remove(flight)
            self._d.load.add(-1, 0, -flight.prompt_tokens)


def _pairs(part: Sequence[tuple[Flight, int]]) -> float:
    return sum(tokens * (flight.done + tokens / 2) for flight, tokens in part)


def main(
    loads: Annotated[str, typer.Option(help="INPUT:OUTPUT:RATE, separated by commas; Poisson.")] = "2048:256:16",
    budgets_ms: Annotated[str, typer.Option(help="ITL budgets; 0: the decode worker does not help.")] = "0,14",
    requests: Annotated[int, typer.Option(help="Of each run.")] = 320,
    seeds: Annotated[int, typer.Option(help="Runs of each; figures are means over them, and the range of p99.")] = 8,
) -> None:
    """TTFT and ITL of one prefill and one decode worker."""
    print("| load | budget ms | TTFT p50 / p90 / p99 (range) ms | ITL p50 / p99 ms | left to D | mixed steps, tokens |")
    print("| --- " * 6 + "|")
    for load, budget_ms in itertools.product(loads.split(","), map(float, budgets_ms.split(","))):
        inputs, outputs, rate = load.split(":")
        ttft, itl, helped, mixed, tokens = [], [], [], [], []
        for seed in range(1000, 1000 + seeds):
            times = itertools.islice(arrivals_s(float(rate), 1.0, seed), requests)
            flights = [Flight(time_s, int(inputs), int(outputs)) for time_s in times]
            pair = Pair(budget_ms, seed)
            pair.run(flights)
            ttft.append(np.percentile([1e3 * flight.ttft_s for flight in flights], (50, 90, 99)))
            itl.append(np.percentile([1e3 * gap_s for flight in flights for gap_s in flight.itl_s], (50, 99)))
            helped.append(np.mean([flight.is_helped for flight in flights]))
            sizes = [step.prefill_tokens for step, _ in pair.steps if step.decodes and step.prefill_tokens]
            mixed.append(len(sizes) / len(pair.steps))
            tokens.append(float(np.mean(sizes)) if sizes else 0.0)
        p50, p90, p99 = np.mean(ttft, axis=0)
        lowest, highest = min(run[2] for run in ttft), max(run[2] for run in ttft)
        cells = [
            load,
            f"{budget_ms:g}",
            f"{p50:.0f} / {p90:.0f} / {p99:.0f} ({lowest:.0f}-{highest:.0f})",
            " / ".join(f"{value:.1f}" for value in np.mean(itl, axis=0)),
            f"{np.mean(helped):.0%}",
            f"{np.mean(mixed):.0%}, {np.mean(tokens):.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
