"""What an operator sees of real requests: phases that add up in /metrics, one trace over all processes, its drawing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from telemetry.metrics import PHASES
from tests.deploy.queries import all_metrics
from tests.e2e.client import complete_all
from tests.e2e.cluster import Cluster, running, wait_until
from tests.e2e.trace_collector import Collector, SpanSeen

WORKER_FLAGS = ("--dtype", "float32", "--num-threads", "1")
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT_TOKENS = 40


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    collector.start()
    yield collector
    collector.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir, collector) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running(tmp_path_factory.mktemp("obs"), str(model_dir), worker_flags=WORKER_FLAGS) as cluster:
            yield cluster


def prompt(first: int) -> list[int]:
    return [first + i % 7 for i in range(PROMPT_TOKENS)]


def test_the_phases_add_up_to_the_time_to_the_first_token(cluster) -> None:
    before = cluster["gateway"].metrics()
    prompts = [prompt(100 + 50 * (i % 6)) for i in range(8)]
    complete_all(cluster.url, prompts, concurrency=4, max_tokens=4, ignore_eos=True)
    after = cluster["gateway"].metrics()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    ttft = "vllm:time_to_first_token_seconds"
    assert grown(f"{ttft}_count") == 8
    for phase in PHASES:
        assert grown(f"pdserve_ttft_phase_seconds_count{{phase={phase}}}") == 8
    total_s = sum(grown(f"pdserve_ttft_phase_seconds_sum{{phase={phase}}}") for phase in PHASES)
    assert total_s == pytest.approx(grown(f"{ttft}_sum"), rel=1e-6)
    assert grown("pdserve_ttft_phase_seconds_sum{phase=prefill}") > 0

    decode = cluster["decode-0"].metrics()
    [lane] = {key.partition("lane=")[2].rstrip("}") for key in decode if "kv_transfer_seconds_count{" in key}
    assert decode[f"pdserve_kv_transfer_seconds_count{{lane={lane}}}"] == 8
    assert decode["pdserve_kv_transfer_size_bytes_sum"] == decode["pdserve_transfer_bytes_total"] > 0
    assert decode["pdserve_kv_transfer_seconds_sum"] == pytest.approx(decode["pdserve_transfer_seconds_total"])
    assert decode["pdserve_kv_transfer_gigabytes_per_second_count"] == 8
    assert {f"pdserve_kv_blocks{{state={state}}}" for state in ("free", "cached", "used", "total")} <= decode.keys()


def test_prefix_hits_are_told_by_source(cluster) -> None:
    before = cluster["gateway"].metrics()
    complete_all(cluster.url, [prompt(900)] * 2, concurrency=1, max_tokens=2, ignore_eos=True)
    after = cluster["gateway"].metrics()
    for source in ("prefill", "decode"):
        name = f"pdserve_prefix_hit_tokens_total{{source={source}}}"
        assert after[name] - before.get(name, 0.0) == 32  # all full blocks of 16, the second time


def ask(cluster: Cluster, request_id: str, **headers: str) -> None:
    body = {"model": "test-model", "prompt": prompt(300 + len(request_id)), "max_tokens": 6, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": request_id, **headers}, timeout=60
    )
    assert answer.status_code == 200


def test_one_trace_over_all_processes(cluster, collector) -> None:
    ask(cluster, "traced", traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01")
    expected = {
        ("gateway", "request"),
        ("gateway", "tokenize"),
        ("router", "route"),
        ("router", "choose"),
        ("router", "attempt 1"),
        ("prefill", "prefill worker"),
        ("prefill", "queue"),
        ("prefill", "hand-off wait"),
        ("prefill", "prefill"),
        ("decode", "decode worker"),
        ("decode", "transfer"),
        ("decode", "decode"),
    }

    def seen() -> set[tuple[str, str]]:
        return {(span.service, span.name) for span in collector.of(CLIENT_TRACE)}

    wait_until("all spans have come", lambda: seen() >= expected)
    spans = collector.of(CLIENT_TRACE)
    assert seen() == expected
    assert len(spans) == len(expected)
    assert not any(span.error for span in spans)
    by_name = {span.name: span for span in spans}
    assert parent_of(by_name["request"], spans) == CLIENT_SPAN
    assert parent_of(by_name["route"], spans) == "request"
    assert parent_of(by_name["attempt 1"], spans) == "route"
    for name in ("prefill worker", "decode worker"):
        assert parent_of(by_name[name], spans) == "attempt 1"
    assert parent_of(by_name["prefill"], spans) == "prefill worker"
    assert parent_of(by_name["transfer"], spans) == "decode worker"
    whole = by_name["request"]
    for span in spans:  # one host: one wall clock
        assert span.start_s >= whole.start_s - 0.05
        assert span.duration_s <= whole.duration_s + 0.05 or span.name == "prefill worker"


def parent_of(span: SpanSeen, spans: list[SpanSeen]) -> str:
    return next((other.name for other in spans if other.span_id == span.parent_id), span.parent_id)


def test_a_trace_that_the_client_does_not_keep_is_not_kept(cluster, collector) -> None:
    ask(cluster, "unsampled", traceparent=f"00-{'ab' * 16}-{CLIENT_SPAN}-00")
    ask(cluster, "own-trace", traceparent="rubbish")
    own = httpx.get(f"{cluster.url}/debug/requests/own-trace", timeout=5).json()["trace_id"]
    wait_until("its spans have come", lambda: len(collector.of(own)) == 12)
    assert collector.of("ab" * 16) == []


def test_pdserve_trace_draws_it(cluster) -> None:
    ask(cluster, "drawn")
    record = httpx.get(f"{cluster.url}/debug/requests/drawn", timeout=5).json()
    assert [(a["prefill_worker"], a["decode_worker"], a["failure"]) for a in record["attempts"]] == [
        ("prefill-0", "decode-0", "")
    ]
    assert record["transfer"]["bytes"] > 0
    command = [sys.executable, "-m", "pdserve.cli", "trace", "drawn", "--url", cluster.url]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for text in ("Time to the first token", "prefill-0", "decode-0", record["transfer"]["lane"], record["trace_id"]):
        assert text in drawn
    unknown = subprocess.run([*command[:4], "nobody", *command[5:]], capture_output=True, text=True, timeout=60)
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr


def test_what_alerts_and_the_dashboard_look_at_is_exported(cluster) -> None:
    """By some process of a running cluster; a counter that has not counted yet by its name only."""
    complete_all(cluster.url, [prompt(90)], concurrency=1, max_tokens=2)
    exported: set[str] = set()
    for member in [cluster["gateway"], cluster["router"], *cluster.workers]:
        text = httpx.get(f"http://127.0.0.1:{member.health_port}/metrics", timeout=5).text
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
            exported |= {name, *(f"{name}_{part}" for part in ("bucket", "sum", "count") if kind == "histogram")}
    assert len(all_metrics()) > 40
    assert all_metrics() <= exported, sorted(all_metrics() - exported)
