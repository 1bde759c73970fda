"""What the services of a cluster on this host counted meanwhile: the router's choices, the decode worker's steps.

Owns how services are found (children of this process that have a metrics port) and read; not what their metrics mean,
which is ``telemetry.metrics``' business. Only what changed is told: counters as what was added, gauges as they are now.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0
Metrics = dict[str, dict[str, float]]
"""Service (its worker's name, or ``router``) -> sample, with what labels tell apart -> value."""
_SAME_EVERYWHERE = ("model_name", "le")


def read_metrics() -> Metrics:
    """Of every service below this process. Raises httpx.HTTPError."""
    found: Metrics = {}
    for name, port in _services():
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S).text
        samples = found.setdefault(name, {})
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(value for key, value in sample.labels.items() if key not in _SAME_EVERYWHERE)
                if not sample.name.endswith(("_bucket", "_created")):
                    samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def changed(before: Metrics, after: Metrics, wanted: tuple[str, ...]) -> Metrics:
    """Samples whose names begin with one of ``wanted``: totals, sums and counts since ``before``, others as now."""

    def difference(service: str, name: str, value: float) -> float:
        is_counter = name.partition("{")[0].endswith(("_total", "_sum", "_count"))
        return value - before.get(service, {}).get(name, 0.0) if is_counter else value

    told = {
        service: {
            name: round(difference(service, name, value), 4)
            for name, value in samples.items()
            if name.startswith(wanted)
        }
        for service, samples in after.items()
    }
    return {service: {name: value for name, value in found.items() if value} for service, found in told.items()}


def _services() -> Iterator[tuple[str, int]]:
    """Name and metrics port."""
    parents = dict(_processes())
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor != os.getpid():
            continue
        argv: list[str] = []
        with contextlib.suppress(OSError):  # it has ended
            argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--metrics-port" in argv:
            name = argv[argv.index("--worker-id") + 1] if "--worker-id" in argv else "router"
            yield name, int(argv[argv.index("--metrics-port") + 1])


def _processes() -> Iterator[tuple[int, int]]:
    """Each one's id, and its parent's."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
