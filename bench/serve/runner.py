"""Sends the requests of one run at their moments, with a limit on how many are open, and gathers their records."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.serve.endpoint import Endpoint
from bench.serve.records import Record, Samples
from bench.serve.workload import Dataset

_SPARE_FILES = 64


@dataclass(slots=True)
class Run:
    """What one run gave."""

    records: list[Record] = field(default_factory=list)
    itls: Samples = field(default_factory=Samples)
    duration_s: float = 0.0
    peak_open: int = 0
    client_cpu_s: float = 0.0
    """Of this process: when it nears the duration, the client was the bottleneck."""


async def run_load(
    endpoint: Endpoint,
    dataset: Dataset,
    arrivals: Iterator[float] | None,
    *,
    max_concurrency: int | None,
    on_progress: Callable[[Record], None],
) -> Run:
    """Send every request of ``dataset``; at the moments of ``arrivals``, or (None) at its own. Raises EndpointError."""
    run = Run()
    limit = min(max_concurrency or 1 << 30, _max_open_files() - _SPARE_FILES)
    slots = asyncio.Semaphore(limit)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    num_open = 0

    async def send(body: bytes, record: Record) -> None:
        nonlocal num_open
        num_open += 1
        run.peak_open = max(run.peak_open, num_open)
        try:
            await endpoint.send(body, record, start_s, run.itls)
        finally:
            num_open -= 1
            slots.release()
        on_progress(record)

    async with asyncio.TaskGroup() as tasks:
        for index in range(len(dataset)):
            request = dataset.request(index)
            body = endpoint.encode(request)  # before its moment, so that it is not late by this
            scheduled_s = next(arrivals) if arrivals is not None else request.arrival_s or 0.0
            if (wait_s := start_s + scheduled_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await slots.acquire()
            record = Record(index, scheduled_s)
            run.records.append(record)
            tasks.create_task(send(body, record))
            await asyncio.sleep(0)  # let it be sent before the next one is made
    run.duration_s = time.perf_counter() - start_s
    run.client_cpu_s = time.process_time() - cpu_s
    return run


def _max_open_files() -> int:
    """As many as this process may have, after asking for all it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
