"""Metric names and values, log lines, and the status server's manners."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import EngineStats
from telemetry.http import StatusServer
from telemetry.metrics import PHASES, EngineMetrics, GatewayMetrics, RouterMetrics, WorkerMetrics

ROOT = Path(__file__).parents[2]


def samples(registry: CollectorRegistry) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_engine_metrics_mirror_the_last_statistics() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m")
    assert samples(registry) == {}
    metrics.update(
        EngineStats(
            running=2,
            total_blocks=10,
            free_blocks=3,
            cached_blocks=2,
            host_blocks=3,
            total_host_blocks=9,
            prompt_tokens_total=77,
            transfers_failed_total={"digest": 1, "lease": 2},
        )
    )
    found = samples(registry)
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:prompt_tokens_total"] == 77
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["pdserve_kv_blocks{state=used}"] == 5
    assert (found["pdserve_host_kv_blocks{state=used}"], found["pdserve_host_kv_blocks{state=total}"]) == (3, 9)
    assert found["pdserve_transfers_failed_total{reason=lease}"] == 2
    metrics.update(EngineStats(running=1))
    assert samples(registry)["vllm:num_requests_running"] == 1
    assert samples(registry)["vllm:prompt_tokens_total"] == 0  # a new engine counts from 0


def test_every_engine_statistic_is_shown() -> None:
    """A statistic that nobody can see is a number that nobody checks."""
    registry = CollectorRegistry()
    values: dict[str, object] = {}
    for position, name in enumerate(EngineStats.__struct_fields__):
        values[name] = {"why": 1001} if name == "transfers_failed_total" else 1000 + 7 * position
    EngineMetrics(registry, "m").update(EngineStats(**values))  # type: ignore[arg-type]
    shown = set(samples(registry).values())
    missing = [name for name, value in values.items() if isinstance(value, int) and value not in shown]
    assert not missing
    assert 1001 in shown


def test_all_services_metrics_can_live_in_one_registry_of_their_own() -> None:
    for kind in (WorkerMetrics, RouterMetrics, GatewayMetrics):
        kind(CollectorRegistry())
        kind(CollectorRegistry())  # nothing is global


def test_phases_are_observed_once_each() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry).observe_phases("m", {"prefill": 0.5, "rest": -0.001})
    found = samples(registry)
    for phase in PHASES:
        assert found[f"pdserve_ttft_phase_seconds_count{{phase={phase}}}"] == 1
    assert found["pdserve_ttft_phase_seconds_sum{phase=prefill}"] == 0.5
    assert found["pdserve_ttft_phase_seconds_sum{phase=rest}"] == 0


async def test_status_server() -> None:
    reason: list[str | None] = ["still loading"]
    registry = CollectorRegistry()
    RouterMetrics(registry)
    server = StatusServer(registry, lambda: reason[0])
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/live")).json() == {"status": "live"}
        not_ready = await client.get("/health")
        assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "still loading")
        reason[0] = None
        assert (await client.get("/health?verbose=1")).status_code == 200
        assert "pdserve_open_requests" in (await client.get("/metrics")).text
        assert (await client.get("/other")).status_code == 404
        assert (await client.post("/health")).status_code == 405
        assert (await client.head("/health")).content == b""
    for nonsense in (b"\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000 + b"\r\n\r\n", b"", b"\xff\xfe \x00\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(nonsense)
        writer.write_eof()
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/live")).status_code == 200
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", port)
    await server.close()
    assert await idle_reader.read() == b""
    idle_writer.close()


LOGGING = """
import logging, structlog
from telemetry import logs
logs.set_up("router", json={json})
structlog.get_logger().info("ready", port=1)
logging.getLogger("pdserve.session").warning("lost %s", "d0")
structlog.get_logger().debug("hidden")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("broken")
"""


def run_logging(json_flag: str) -> str:
    code = LOGGING.format(json=json_flag)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    return done.stderr


def test_logs_are_json_lines_from_both_kinds_of_logger() -> None:
    ready, lost, broken = (json.loads(line) for line in run_logging("None").splitlines())
    assert (ready["event"], ready["port"], ready["service"], ready["level"]) == ("ready", 1, "router", "info")
    assert (lost["event"], lost["logger"], lost["service"]) == ("lost d0", "pdserve.session", "router")
    assert "ZeroDivisionError" in broken["exception"]


def test_logs_for_people() -> None:
    text = run_logging("False")
    assert "ready" in text
    assert "ZeroDivisionError" in text
