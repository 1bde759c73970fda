"""From each benchmark's raw JSON to lines of one table: what we reach beside what others do, the limit and the target.

Owns which figures count and which goal each has; the goals are in ``goals``, the running of benchmarks in ``targets``.
Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.goals import (
    APART_ITL_P99_MS,
    APART_SHARE_STEADY,
    APART_TTFT_P50_RATIO,
    CPU_APART_RATE,
    CPU_APART_TTFT,
    CPU_SHARED_PREFIX_S,
    CPU_START_S,
    CPU_TOKENS_PER_S,
    CPU_TPOT_MS,
    CPU_TRANSFER,
    CPU_TTFT_MS,
    EXPOSED,
    ITL_CUT,
    LINK_SHARE,
    LINK_SHARE_FROM,
    NCCL_GB_PER_S,
    NO_GOAL,
    START,
    TTFT_RATIO,
    VLLM_SERVED,
    Goal,
    is_met,
)


@dataclass(frozen=True, slots=True)
class Line:
    work: str
    unit: str
    ours: float
    goal: Goal = NO_GOAL

    def cells(self) -> list[str]:
        met = {None: "", True: "met", False: "missed"}[is_met(self.unit, self.ours, self.goal.target)]
        figures = (self.ours, *self.goal)
        return [self.work, *("-" if figure is None else f"{figure:.4g}" for figure in figures), self.unit, met]


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = [["work", "ours", "peer", "limit", "target", "unit", ""], ["---", *["---:"] * 4, "---", "---"]]
    rows += [line.cells() for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- GPUs


def kernels(raw: dict[str, Any]) -> list[Line]:
    return [
        Line(row["work"], "us", row["us"], Goal(row["peer_us"], row["limit_us"] or None, row["target_us"]))
        for row in raw["rows"]
    ]


def gpu_engine(raw: list[dict[str, Any]]) -> list[Line]:
    return [Line(row["work"], row["unit"], row["ours"], Goal(*row["goal"])) for row in raw]


def gpu_transfer(raw: list[dict[str, Any]]) -> list[Line]:
    """Packed segments until they are in the receiver's blocks, against a plain copy in the same run."""
    copies = {(rate["lane"], rate["size"]): rate["gb_per_s"] for rate in raw if rate["what"] == "plain copy"}
    lines = []
    for rate in raw:
        if rate["what"] != "moved":
            continue
        place, size = rate["lane"].partition(", ")[2], rate["size"]
        limit = copies.get((place, size))
        goal = Goal(None, limit, None)
        if place == "two GPUs":
            has_target = limit is not None and size in LINK_SHARE_FROM
            goal = Goal(NCCL_GB_PER_S.get(size), limit, LINK_SHARE * limit if limit and has_target else None)
        lines.append(Line(f"{rate['lane']}, {size}", "GB/s", rate["gb_per_s"], goal))
    return lines


def gpu_handoff(raw: list[dict[str, Any]]) -> list[Line]:
    return [
        Line(
            f"hand-off of {figure['tokens']} tokens, {figure['lane']}, exposed part of TTFT",
            "%",
            100 * figure["exposed_ms"] / figure["ttft_ms"],
            EXPOSED.get(figure["tokens"], NO_GOAL),
        )
        for figure in raw
    ]


def gpu_serve(raw: dict[str, Any]) -> list[Line]:
    """Apart against vLLM on one GPU at half of the rate, and against as many aggregated workers of ours."""
    gpus, rows = raw["gpus"], raw["rows"]
    lines = [Line(f"{name}: ready", "s", seconds, START) for name, seconds in raw["ready_s"].items()]
    for row in rows:
        lines += _served(row, gpus)
    together = {row["load"]: row for row in rows if row["cluster"] == "aggregated"}
    for row in rows:
        if row["cluster"] == "aggregated" or row["load"] not in together:
            continue
        base, work = together[row["load"]], f"{row['cluster']}, {row['load']}"
        cut, ratio = (ITL_CUT, TTFT_RATIO) if gpus == 2 else (NO_GOAL, NO_GOAL)
        lines.append(Line(f"{work}: p99 ITL, aggregated / apart", "x", base["itl_p99"] / row["itl_p99"], cut))
        ttft = row["ttft_p50"] / base["ttft_p50"]
        lines.append(Line(f"{work}: median TTFT, apart / aggregated", "x TTFT", ttft, ratio))
    return lines


def _served(row: dict[str, Any], gpus: int) -> list[Line]:
    work = f"{row['cluster']}, {row['load']}"
    goals = [NO_GOAL] * 4
    found = re.fullmatch(r"(\d+ -> \d+), ([\d.]+)/s", row["load"])
    if found and (peer := VLLM_SERVED.get(f"{found[1]}, {float(found[2]) / gpus:g}/s")):
        is_pair = gpus == 2 and row["cluster"].startswith("apart")
        steady = APART_SHARE_STEADY if row["load"] == "2048 -> 256, 16/s" else None
        targets = (APART_TTFT_P50_RATIO * peer.ttft_p50, peer.ttft_p99, APART_ITL_P99_MS, steady)
        goals = [Goal(figure, None, target if is_pair else None) for figure, target in zip(peer, targets, strict=True)]
    names = {"ttft_p50": "ms", "ttft_p99": "ms", "itl_p99": "ms", "share_steady": "share"}
    texts = ("median TTFT", "p99 TTFT", "p99 ITL", "TTFT <= 2 s, p99 ITL <= 25 ms")
    return [
        Line(f"{work}: {text}", unit, row[name], goal)
        for (name, unit), text, goal in zip(names.items(), texts, goals, strict=True)
    ]


# ---- the CPU


def cpu_service(raw: dict[str, float]) -> list[Line]:
    return [
        Line("bf16, 1 stream through the gateway: TTFT", "ms", raw["ttft_ms"], CPU_TTFT_MS),
        Line("bf16, 1 stream through the gateway: TPOT", "ms", raw["tpot_ms"], CPU_TPOT_MS),
        Line("bf16, 16 streams through the gateway", "tok/s", raw["tokens_per_s"], CPU_TOKENS_PER_S["bfloat16", 16]),
        *(
            Line(f"16 requests that share 1,500 tokens, {kind}", "s", raw[f"shared_{kind}_s"], goal)
            for kind, goal in CPU_SHARED_PREFIX_S.items()
        ),
        Line("start to the first answer", "s", raw["start_s"], CPU_START_S),
    ]


def cpu_engines(raw: list[dict[str, Any]]) -> list[Line]:
    """Ours without a server; the others of the same run have a line of their own."""
    lines = []
    for row in raw:
        if "error" not in row:
            goal = CPU_TOKENS_PER_S.get((row["weights"], row["streams"]), NO_GOAL)
            work = f"{row['engine']}, {row['weights']}, {row['streams']} streams"
            lines.append(
                Line(work, "tok/s", row["output_tokens_per_s"], goal if row["engine"] == "pdserve" else NO_GOAL)
            )
    return lines


def cpu_transfer(raw: dict[str, dict[str, float]]) -> list[Line]:
    """The limit is a copy by one process, in the same run."""
    copies = raw["memcpy, one process"]
    return [
        Line(f"{lane}, bytes only, {size}", "GB/s", raw[f"{lane}, bytes only"][size], goal._replace(limit=copies[size]))
        for lane, goals in CPU_TRANSFER.items()
        if f"{lane}, bytes only" in raw
        for size, goal in goals.items()
    ]


def cpu_apart(raw: dict[str, dict[str, Any]]) -> list[Line]:
    base = raw["aggregated"]
    lines = []
    for lane, figures in raw.items():
        if lane != "aggregated":
            rate, ttft = figures["tokens_per_s"] / base["tokens_per_s"], figures["ttft_s"] / base["ttft_s"]
            lines.append(Line(f"apart, {lane}: tok/s at 16 streams, of aggregated", "x", rate, CPU_APART_RATE))
            lines.append(Line(f"apart, {lane}: TTFT at 1 stream, of aggregated", "x TTFT", ttft, CPU_APART_TTFT))
    return lines
